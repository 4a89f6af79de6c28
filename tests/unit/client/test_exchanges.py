"""What is repeated, when, and what ends a call. A test plays the server and the clock: nothing is sent, and no second
passes."""

import json
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vecd
from vecd.client import exchanges
from vecd.client.blocking import Client
from vecd.client.exchanges import ClientCall, Piece, RequestLimits, Send, cut
from vecd.client.http import BadResponse, ConnectionClosed, ResponseReader
from vecd.client.sockets import TlsMismatch

A, B = "a" * 32, "b" * 32


class Played:
    """A call whose requests meet `outcomes`, one after the other; the last one for ever."""

    def __init__(self, client: Client, why_gone: Callable[[], str | None] = lambda: None) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        self.requests: list[bytes] = []
        client.why_gone = why_gone  # type: ignore[method-assign]
        self.call = ClientCall(client, clock=lambda: self.now, spread=lambda: 1.0)

    def run(self, *outcomes: bytes | Exception, takes_s: float = 0.0, piece: Piece | None = None) -> Any:
        piece = piece or Piece("/v1/embeddings", b"{}")
        rest = list(outcomes)
        for step in self.call.attempts(piece):
            if not isinstance(step, Send):
                self.pauses.append(round(step, 6))
                self.now += step
                continue
            self.requests.append(step.request)
            self.now += takes_s
            outcome = rest.pop(0) if len(rest) > 1 else rest[0]
            if isinstance(outcome, bytes):
                (reader := ResponseReader()).begin(step.place)
                reader.buffer()[: len(outcome)] = outcome
                assert reader.received(len(outcome))
            step.outcome = reader.response if isinstance(outcome, bytes) else outcome
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


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_call_goes_on_without_what_it_may_lack(status: int) -> None:
    assert Played(client()).run(answer(status), piece=Piece("/info", may_lack=True)) is None
    with pytest.raises(vecd.ServerError):
        Played(client()).run(answer(500), piece=Piece("/info", may_lack=True))


def test_it_is_repeated_any_number_of_times_and_as_the_server_says() -> None:
    played = Played(client(retry_for=1e6))
    assert played.run(*[ConnectionRefusedError()] * 1100, answer(200)) == {"ok": 1}
    assert played.pauses[-1] == 10
    played = Played(client())
    told = (answer(429, Retry_After="7"), answer(503, retry_after_ms="250"), answer(503, Retry_After="x"))
    played.run(*told, answer(200))
    assert played.pauses == [7, 0.25, 0.4]


def test_repeats_end_after_retry_for() -> None:
    played = Played(client(retry_for=3))
    with pytest.raises(exchanges.Overloaded, match="full") as raised:
        played.run(answer(429, b'{"error":{"message":"full","code":"server_overloaded"}}', x_request_id="r1"))
    assert sum(played.pauses) == pytest.approx(3)
    assert (raised.value.status, raised.value.code, raised.value.request_id) == (429, "server_overloaded", "r1")
    played = Played(client(retry_for=3))
    with pytest.raises(exchanges.Overloaded) as raised:
        played.run(answer(429, Retry_After="30"))
    assert (played.pauses, raised.value.retry_after) == ([], 30), "a wait that is too long is not begun"
    with pytest.raises(exchanges.ServerUnavailable, match="http://h:1"):
        Played(client(retry_for=0)).run(ConnectionRefusedError())


def test_retry_for_begins_with_the_failure_and_anew_with_each_success_of_the_call() -> None:
    played = Played(client(retry_for=3))
    assert played.run(TimeoutError(), answer(200), takes_s=300) == {"ok": 1}
    played.now += 100
    assert played.run(ConnectionResetError(), answer(200)) == {"ok": 1}


def test_a_server_error_is_repeated_a_few_times_only() -> None:
    for failure in (answer(500, b"broken"), BadResponse("not HTTP")):
        played = Played(client())
        with pytest.raises(exchanges.ServerError):
            played.run(failure)
        assert len(played.requests) == 3
    assert Played(client()).run(answer(500), BadResponse("no"), answer(200)) == {"ok": 1}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, exchanges.BadRequest), (401, exchanges.AuthenticationError), (403, exchanges.PermissionDenied),
     (404, exchanges.NotFound), (412, exchanges.IdentityMismatch), (413, exchanges.BadRequest), (422,
     exchanges.BadRequest), (301, exchanges.ServerError), (501, exchanges.ServerError)],
)  # fmt: skip
def test_what_is_wrong_stays_wrong(status: int, kind: type[Exception]) -> None:
    played = Played(client())
    with pytest.raises(kind):
        played.run(answer(status), answer(200))
    assert len(played.requests) == 1


def test_the_timeout_is_of_the_whole_call() -> None:
    played = Played(client(timeout=10))
    with pytest.raises(exchanges.Timeout, match=r"longer than 10 s; the last failure: .*refused"):
        played.run(ConnectionRefusedError(111, "refused"), takes_s=4)
    assert played.now == pytest.approx(1010, abs=4)
    assert [b"x-vecd-timeout-ms: 10000\r\n" in request for request in played.requests][:2] == [True, False]
    with pytest.raises(exchanges.Timeout):
        played.run(answer(200))
    with pytest.raises(exchanges.Timeout):
        Played(client(timeout=10)).run(answer(429, Retry_After="11"))
    step = next(ClientCall(client()).attempts(Piece("/x", b"{}")))
    assert isinstance(step, Send)
    assert step.timeout_s == math.inf


@pytest.mark.parametrize(
    ("failure", "why_gone", "said"),
    [
        (TlsMismatch("its certificate is not trusted"), None, "not trusted"),
        (ConnectionRefusedError(), "it has ended with 3", "it has ended with 3"),
    ],
)
def test_what_does_not_pass_is_not_waited_for(failure: Exception, why_gone: str | None, said: str) -> None:
    played = Played(client(), lambda: why_gone)
    with pytest.raises(exchanges.ServerUnavailable, match=said):
        played.run(failure)
    assert len(played.requests) == 1


def test_an_error_says_which_inputs_the_request_had() -> None:
    with pytest.raises(exchanges.BadRequest, match=r"too long \(inputs 5 to 9\)") as raised:
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
    """None is one, too: what was not known at first may have changed since."""
    played = Played(client())
    for _ in range(2):
        played.run(of(f"{A};dtype=float32"))
    for other, said in (
        (of(f"{B};dtype=float32"), "two models"),
        (of(f"{A};dtype=bfloat16"), "two models"),
        (answer(200), "without an identity"),
    ):
        with pytest.raises(exchanges.IdentityMismatch, match=said):
            played.run(other)
    assert demanded(played.requests) == ["", *[f"{A};dtype=float32"] * 4]
    played = Played(client())
    for _ in range(2):
        assert played.run(answer(200)) == {"ok": 1}
    with pytest.raises(exchanges.IdentityMismatch, match=f"one without an identity and {A}"):
        played.run(of(A))


def test_calls_may_have_different_ones() -> None:
    one = client()
    assert one.identity is None
    for identity in (A, B):
        Played(one).run(of(f"{identity};dtype=int8"))
        assert one.identity == f"{identity};dtype=int8"


@pytest.mark.parametrize("identity", [A, f"{A};dtype=int8"])
def test_an_identity_is_demanded_of_each_request(identity: str) -> None:
    """But of /info, which has no results. A server that does not know the header answers all the same."""
    one = client(identity=identity)
    played = Played(one)
    played.run(answer(503), of(f"{A};dtype=int8"))
    assert demanded(played.requests) == [identity] * 2
    assert Played(one).run(answer(200), piece=Piece("/info")) == {"ok": 1}
    others = [of(f"{B};dtype=int8"), answer(200), *([of(f"{A};dtype=float32")] if ";" in identity else [])]
    for other in others:
        with pytest.raises(exchanges.IdentityMismatch, match="was demanded"):
            Played(one).run(other)


def test_the_first_answer_may_say_what_is_demanded() -> None:
    one = client(identity="first")
    first, second = Played(one), Played(one)
    first.run(of(f"{A};dtype=int8"))
    with pytest.raises(exchanges.IdentityMismatch, match="was demanded"):
        second.run(of(f"{B};dtype=int8"))
    assert demanded([*first.requests, *second.requests]) == ["", f"{A};dtype=int8"]
    assert one.identity == f"{A};dtype=int8"


FIELDS = {"model": "m", "absent": None, "dimensions": 3}


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=40),
    st.integers(1, 10),
    st.integers(60, 300),
)
def test_all_inputs_are_sent_once_and_within_the_limits(texts: list[str], max_inputs: int, max_bytes: int) -> None:
    parts = list(cut("/x", FIELDS, "input", texts, RequestLimits(max_inputs, max_bytes)))
    bodies = [json.loads(part.body or b"") for part in parts]
    assert [text for body in bodies for text in body["input"]] == texts
    assert [part.start for part in parts] == [0, *(part.end for part in parts)][: len(parts)]
    for part, body in zip(parts, bodies, strict=True):
        assert body == {"model": "m", "dimensions": 3, "input": texts[part.start : part.end]}
        assert len(body["input"]) <= max_inputs
        assert len(part.body or b"") <= max_bytes or len(body["input"]) == 1


@pytest.mark.parametrize(
    ("fields", "inputs", "body"),
    [
        ({"model": None}, ["a"], b'{"input":["a"]}'),
        ({}, [np.array([1, 2], np.int32), [np.int64(3)]], b'{"input":[[1,2],[3]]}'),
        ({}, ["a", "\ud800"], b'{"input":["a","\\ud800"]}'),  # half of a pair is for the server to refuse
    ],
)
def test_a_body(fields: dict[str, Any], inputs: list[Any], body: bytes) -> None:
    [part] = cut("/x", fields, "input", inputs, RequestLimits())
    assert (part.body, part.where) == (body, "")


def test_a_part_says_which_inputs_it_has() -> None:
    assert [part.where for part in cut("/x", {}, "input", ["a"] * 3, RequestLimits(2))] == [
        " (inputs 0 to 1 of the call are counted from 0 here)",
        " (inputs 2 to 2 of the call are counted from 0 here)",
    ]
    with pytest.raises(TypeError, match="cannot be sent"):
        list(cut("/x", {}, "input", [object()], RequestLimits()))


def request_of(client: vecd.Client, path: str = "/x") -> str:
    return client.render(Piece(path, b"{}")).decode()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VECD_URL", "VECD_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_the_environment_has_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vecd.Client().url == "http://127.0.0.1:8000"
    assert "Authorization" not in request_of(vecd.Client())
    monkeypatch.setenv("VECD_URL", "unix:/run/sock")
    monkeypatch.setenv("VECD_API_KEY", "k1")
    assert vecd.Client().url == "unix:/run/sock"
    assert "Authorization: Bearer k1\r\n" in request_of(vecd.Client())
    request = request_of(vecd.Client("http://h:1", api_key="k2", model="m"))
    assert "Authorization: Bearer k2\r\n" in request
    assert "x-vecd-model: m\r\n" in request


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"url": "unix:"}, "names no socket"),
        ({"timeout": 0}, "timeout: must be above 0"),
        ({"retry_for": -1}, "retry_for"),
        ({"api_key": "a\nb"}, "API key"),
        ({"ca": "/nothing.pem", "url": "https://h"}, "nothing.pem"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        vecd.Client(**arguments)


@pytest.mark.parametrize("kind", [vecd.Client, vecd.AsyncClient])
@pytest.mark.parametrize("url", ["http://user:secret@h", "https://secret@h/v1", "http://user:secret@h\u2100"])
def test_an_address_with_a_password_is_refused_and_not_quoted(kind: Any, url: str) -> None:
    with pytest.raises(ValueError, match="api_key=") as raised:
        kind(url)
    assert "secret" not in str(raised.value)
    assert kind("http://h:1/m/a@b").url == "http://h:1/m/a@b"  # no user


@pytest.mark.parametrize("kind", [vecd.Client, vecd.AsyncClient])
def test_a_client_is_pickled_as_its_arguments(kind: Any) -> None:
    client = kind("http://h:1/m/x", api_key="k", model="m", identity="first", timeout=3, retry_for=4, connections=5)
    copy = pickle.loads(pickle.dumps(client))
    assert type(copy) is kind
    assert copy.render(Piece("/x")) == client.render(Piece("/x"))
    assert (copy.timeout, copy.retry_for, copy.connections) == (3, 4, 5)
    error = vecd.BadRequest("m", status=400, code="c", param="p", request_id="r")
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), vars(copied)) == (vecd.BadRequest, "m", vars(error))
