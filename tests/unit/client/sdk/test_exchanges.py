"""What is repeated, when, and what ends a call. A test plays the server and the clock: nothing is sent, and no second
passes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vecd.client.connection import BadResponse, ConnectionClosed, TlsMismatch
from vecd.client.sdk import errors
from vecd.client.sdk.client import Client
from vecd.client.sdk.exchanges import ClientCall, Pause, Piece, Send

A, B = "a" * 32, "b" * 32


class Played:
    """A call whose requests meet `outcomes`, one after the other; the last one for ever."""

    def __init__(self, client: Client, why_gone: Callable[[], str | None] = lambda: None) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        self.requests: list[bytes] = []
        self.call = ClientCall(client, why_gone, clock=lambda: self.now, spread=lambda: 1.0)

    def run(self, *outcomes: bytes | Exception, takes_s: float = 0.0, piece: Piece | None = None) -> Any:
        piece = piece or Piece("/v1/embeddings", b"{}")
        attempts = self.call.attempts(piece)
        rest = list(outcomes)
        step = next(attempts)
        try:
            while True:
                if isinstance(step, Pause):
                    self.pauses.append(round(step.seconds, 6))
                    self.now += step.seconds
                    step = next(attempts)
                    continue
                self.requests.append(step.request)
                self.now += takes_s
                outcome = rest.pop(0) if len(rest) > 1 else rest[0]
                if isinstance(outcome, Exception):
                    step = attempts.throw(outcome)
                    continue
                step.reader.buffer()[: len(outcome)] = outcome
                assert step.reader.received(len(outcome))
                step = next(attempts)
        except StopIteration:
            return piece.answer


def answer(status: int, body: bytes = b'{"ok":1}', **headers: str) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *lines])
    return head.encode() + b"\r\n\r\n" + body


def client(**arguments: Any) -> Client:
    return Client("http://h:1", **arguments)


@pytest.mark.parametrize(
    "failure",
    [ConnectionRefusedError(), ConnectionResetError(), ConnectionClosed(), FileNotFoundError(), TimeoutError(),
     answer(502), answer(504), answer(429), answer(503)],
)  # fmt: skip
def test_what_may_pass_is_repeated_later_each_time(failure: bytes | Exception) -> None:
    played = Played(client())
    assert played.run(*[failure] * 4, answer(200)) == {"ok": 1}
    assert played.pauses == [0.1, 0.2, 0.4, 0.8]


def test_it_is_repeated_any_number_of_times() -> None:
    played = Played(client(retry_for=1e6))
    assert played.run(*[ConnectionRefusedError()] * 1100, answer(200)) == {"ok": 1}
    assert played.pauses[-1] == 10


def test_the_server_says_when_to_come_back() -> None:
    played = Played(client())
    played.run(
        answer(429, Retry_After="7"), answer(503, retry_after_ms="250"), answer(503, Retry_After="x"), answer(200)
    )
    assert played.pauses == [7, 0.25, 0.4]


def test_repeats_end_after_retry_for() -> None:
    played = Played(client(retry_for=3))
    with pytest.raises(errors.Overloaded, match="full") as raised:
        played.run(answer(429, b'{"error":{"message":"full","code":"server_overloaded"}}', x_request_id="r1"))
    assert sum(played.pauses) == pytest.approx(3)
    assert (raised.value.status, raised.value.code, raised.value.request_id) == (429, "server_overloaded", "r1")
    with pytest.raises(errors.ServerUnavailable, match="http://h:1"):
        Played(client(retry_for=0)).run(ConnectionRefusedError())


def test_a_wait_that_is_too_long_is_not_begun() -> None:
    played = Played(client(retry_for=3))
    with pytest.raises(errors.Overloaded) as raised:
        played.run(answer(429, Retry_After="30"))
    assert (played.pauses, raised.value.retry_after) == ([], 30)


def test_retry_for_begins_with_the_failure_and_anew_with_each_success_of_the_call() -> None:
    played = Played(client(retry_for=3))
    assert played.run(TimeoutError(), answer(200), takes_s=300) == {"ok": 1}
    played.now += 100
    assert played.run(ConnectionResetError(), answer(200)) == {"ok": 1}


def test_a_server_error_is_repeated_a_few_times_only() -> None:
    for failure in (answer(500, b"broken"), BadResponse("not HTTP")):
        played = Played(client())
        with pytest.raises(errors.ServerError):
            played.run(failure)
        assert len(played.requests) == 3
    assert Played(client()).run(answer(500), BadResponse("no"), answer(200)) == {"ok": 1}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, errors.BadRequest), (401, errors.AuthenticationError), (403, errors.PermissionDenied),
     (404, errors.NotFound), (412, errors.IdentityMismatch), (413, errors.BadRequest), (422, errors.BadRequest),
     (424, errors.BadRequest), (301, errors.ServerError), (501, errors.ServerError)],
)  # fmt: skip
def test_what_is_wrong_stays_wrong(status: int, kind: type[Exception]) -> None:
    played = Played(client())
    with pytest.raises(kind):
        played.run(answer(status), answer(200))
    assert len(played.requests) == 1


def test_a_tls_that_is_not_trusted_is_no_passing_trouble() -> None:
    played = Played(client())
    with pytest.raises(errors.ServerUnavailable, match="not trusted"):
        played.run(TlsMismatch("its certificate is not trusted"))
    assert len(played.requests) == 1


def test_the_timeout_is_of_the_whole_call() -> None:
    played = Played(client(timeout=10))
    with pytest.raises(errors.Timeout, match=r"longer than 10 s; the last failure: .*refused"):
        played.run(ConnectionRefusedError(111, "refused"), takes_s=4)
    assert played.now == pytest.approx(1010, abs=4)
    assert [b"x-vecd-timeout-ms: 10000\r\n" in request for request in played.requests][:2] == [True, False]
    with pytest.raises(errors.Timeout):
        played.run(answer(200))
    with pytest.raises(errors.Timeout):
        Played(client(timeout=10)).run(answer(429, Retry_After="11"))


def test_without_a_timeout_an_answer_may_take_any_time() -> None:
    step = next(ClientCall(client()).attempts(Piece("/x", b"{}")))
    assert isinstance(step, Send)
    assert step.timeout_s == math.inf


def test_a_server_that_has_ended_is_not_waited_for() -> None:
    played = Played(client(), lambda: "it has ended with 3")
    with pytest.raises(errors.ServerUnavailable, match="it has ended with 3"):
        played.run(ConnectionRefusedError())


def test_an_error_says_which_inputs_the_request_had() -> None:
    with pytest.raises(errors.BadRequest, match=r"too long \(inputs 5 to 9\)") as raised:
        Played(client()).run(
            answer(400, b'{"error":{"message":"too long","param":"input","type":"t"}}'),
            piece=Piece("/x", b"", " (inputs 5 to 9)"),
        )
    assert (raised.value.param, raised.value.code) == ("input", "t")


# --- identity -------------------------------------------------------------------------------------------------


def of(identity: str) -> bytes:
    return answer(200, x_vecd_identity=identity)


def demanded(requests: Sequence[bytes]) -> list[str]:
    found = []
    for request in requests:
        lines = dict(line.split(": ", 1) for line in request.decode().split("\r\n")[1:-2])
        found.append(lines.get("if-vecd-identity", ""))
    return found


def test_one_call_has_one_identity() -> None:
    played = Played(client())
    played.run(of(f"{A};dtype=float32"))
    played.run(of(f"{A};dtype=float32"))
    with pytest.raises(errors.IdentityMismatch, match="two models"):
        played.run(of(f"{B};dtype=float32"))
    with pytest.raises(errors.IdentityMismatch, match="two models"):
        played.run(of(f"{A};dtype=bfloat16"))
    with pytest.raises(errors.IdentityMismatch, match="without an identity"):
        played.run(answer(200))
    assert demanded(played.requests) == ["", *[f"{A};dtype=float32"] * 4]


def test_an_answer_without_an_identity_is_of_another_model() -> None:
    """Also where it is the first: what was not known then may have changed since."""
    played = Played(client())
    for _ in range(2):
        assert played.run(answer(200)) == {"ok": 1}
    with pytest.raises(errors.IdentityMismatch, match=f"one without an identity and {A}"):
        played.run(of(A))


def test_calls_may_have_different_ones() -> None:
    one = client()
    assert one.identity is None
    for identity in (A, B):
        Played(one).run(of(f"{identity};dtype=int8"))
        assert one.identity == f"{identity};dtype=int8"


@pytest.mark.parametrize("identity", [A, f"{A};dtype=int8"])
def test_an_identity_is_demanded_of_each_request(identity: str) -> None:
    one = client(identity=identity)
    played = Played(one)
    played.run(answer(503), of(f"{A};dtype=int8"))
    assert demanded(played.requests) == [identity] * 2
    for other in (of(f"{B};dtype=int8"), answer(200)):  # a server that does not know the header answers all the same
        with pytest.raises(errors.IdentityMismatch, match="was demanded"):
            Played(one).run(other)


def test_no_identity_is_demanded_of_what_has_no_results() -> None:
    assert Played(client(identity=A)).run(answer(200), piece=Piece("/info")) == {"ok": 1}


def test_a_demanded_format_is_part_of_it() -> None:
    with pytest.raises(errors.IdentityMismatch):
        Played(client(identity=f"{A};dtype=int8")).run(of(f"{A};dtype=float32"))
    Played(client(identity=A)).run(of(f"{A};dtype=float32"))


def test_the_first_answer_may_say_what_is_demanded() -> None:
    one = client(identity="first")
    first, second = Played(one), Played(one)
    first.run(of(f"{A};dtype=int8"))
    with pytest.raises(errors.IdentityMismatch, match="was demanded"):
        second.run(of(f"{B};dtype=int8"))
    assert demanded([*first.requests, *second.requests]) == ["", f"{A};dtype=int8"]
    assert one.identity == f"{A};dtype=int8"
