"""`vecd.gateway.http.reader` under bytes that nobody has thought of: good requests, damaged, in any pieces.

Short as a test; with VECD_SOAK set, some three minutes of other examples each time.
"""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vecd.gateway.errors import ApiError
from vecd.gateway.http.reader import ReadState, RequestReader
from vecd.gateway.request import HttpRequest, Limits

IS_SOAK = "VECD_SOAK" in os.environ
LIMITS = Limits(max_body_bytes=200, max_target_bytes=60, max_head_bytes=300, max_headers=8)
fuzzing = settings(
    deadline=None,
    derandomize=not IS_SOAK,
    max_examples=20_000 if IS_SOAK else 300,
    suppress_health_check=[HealthCheck.too_slow],
)


pytestmark = [pytest.mark.timeout(1800)] if IS_SOAK else []


# --- what is sent ---------------------------------------------------------------------------------------------------

HEADERS = [
    b"Host: x", b"host:x:80", b"Host: [::1]", b"Host:", b"Host: a b", b"Accept: a", b"A:", b"A: \t b \t",
    b"Connection: close", b"Connection: keep-alive", b"Connection: Upgrade", b"Upgrade: h2c", b"Expect: 100-continue",
    b"Content-Encoding: gzip", b"Content-Encoding: br", b"Content-Length: 0", b"Content-Length: 5",
    b"Content-Length: 005", b"Content-Length: 200", b"Content-Length: 201", b"Content-Length: -1",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: Chunked", b"Transfer-Encoding: gzip, chunked",
    b"X-Request-Id: mine", b"X: " + b"x" * 100, b" folded", b"no colon", b": no name", b"X\0: y",
]  # fmt: skip
LINES = [
    b"GET / HTTP/1.1", b"POST /a?b HTTP/1.1", b"HEAD http://x/a HTTP/1.1", b"OPTIONS * HTTP/1.1", b"POST / HTTP/1.0",
    b"GET /%41%2 HTTP/1.1", b"GET / HTTP/2.0", b"GET /", b"CONNECT x:1 HTTP/1.1", b"GET /" + b"a" * 70 + b" HTTP/1.1",
    b"", b"PRI * HTTP/2.0",
]  # fmt: skip
BODIES = [
    b"", b"hello", b"\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"5\r\nhello\r\n0\r\nA: b\r\n\r\n", b"0\r\n\r\n",
    b"x" * 200, b"5;a=b\r\nhello\r\n00\r\n\r\n", b"c8\r\n" + b"x" * 200 + b"\r\n0\r\n\r\n",
    b"c9\r\n" + b"x" * 201, b"5\r\nhell", b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n", b"g\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n",
]  # fmt: skip
LINE_ENDS = st.sampled_from([b"\r\n"] * 30 + [b"\n", b"\r", b"\r\r\n", b""])


@st.composite
def _heads(draw: st.DrawFn) -> bytes:
    lines = [draw(st.sampled_from(LINES[:4] * 5 + LINES)), *draw(st.lists(st.sampled_from(HEADERS), max_size=9))]
    if draw(st.integers(0, 9)):
        lines.insert(1, b"Host: x")
    return b"".join(line + draw(LINE_ENDS) for line in lines) + draw(LINE_ENDS)


REQUESTS = st.one_of(
    st.builds(lambda head, body: head + body, _heads(), st.sampled_from(BODIES)),
    st.sampled_from(
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        ]
    ),
    st.binary(max_size=30),
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Some requests, one behind the other, and some bytes of them changed."""
    data = b"".join(draw(st.lists(REQUESTS, min_size=1, max_size=4)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 3)) :]
    return data


def pieces_of(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


PIECE_SIZES = st.lists(st.integers(1, 200), max_size=50)


# --- what comes of it -----------------------------------------------------------------------------------------------


def read(pieces: list[bytes]) -> tuple[list[object], ReadState]:
    """What a connection learns, in order, and where it stands at the end."""
    reader = RequestReader(LIMITS)
    learned: list[object] = []
    head: HttpRequest | None = None
    try:
        for piece in pieces:
            reader.feed(piece)
            assert reader.num_body_bytes <= LIMITS.max_body_bytes
            while (request := reader.next_request()) is not None:
                check(request)
                if reader.state is ReadState.BODY:
                    assert head is None, "told once"
                    head = request
                else:
                    assert head is None or head is request
                    head = None
                    learned.append(request)
            assert (reader.state is ReadState.BODY) == (head is not None)
    except ApiError as error:
        learned.append(error)
        assert reader.next_request() is None
        assert reader.state is ReadState.CLOSED
    assert reader.num_waiting_bytes <= sum(map(len, pieces))
    return [check_refusal(item) if isinstance(item, ApiError) else item for item in learned], reader.state


def check_refusal(error: ApiError) -> str:
    """Of a head with two faults, the one that is named depends on which llhttp hears of first."""
    assert 400 <= error.status < 600
    assert len(error.message) < 300
    return "refused"


def check(request: HttpRequest) -> None:
    assert len(request.body) <= LIMITS.max_body_bytes
    assert len(request.headers) <= LIMITS.max_headers
    assert sum(len(name) + len(value) for name, value in request.headers.items()) <= LIMITS.max_head_bytes
    assert len(request.path) + len(request.query) <= LIMITS.max_target_bytes
    assert request.http_minor == 0 or "host" in request.headers
    assert not ("content-length" in request.headers and "transfer-encoding" in request.headers)
    assert not any("\r" in value or "\n" in value or "\0" in value for value in request.headers.values())


@given(data=streams(), sizes=PIECE_SIZES, following=st.sampled_from([b"", b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"]))
@fuzzing
def test_what_is_learned_depends_neither_on_how_the_bytes_came_nor_on_what_follows(data, sizes, following):
    learned, state = whole = read([data])
    assert read(pieces_of(data, sizes)) == whole
    assert read([data[at : at + 1] for at in range(len(data))]) == whole
    more, _ = read([data, following])
    assert more[: len(learned)] == learned
    if state is ReadState.CLOSED:
        assert more == learned
    elif state is ReadState.IDLE and following:
        (request,) = more[len(learned) :]
        assert isinstance(request, HttpRequest)
        assert request.path == "/next"
