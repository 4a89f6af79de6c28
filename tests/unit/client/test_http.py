"""A request as bytes, and a response that is read into the memory where it belongs, however the bytes are cut."""

import pytest

from vecd.base.target import Target
from vecd.client import http
from vecd.client.http import BadResponse, ConnectionClosed, Place, ResponseReader, ServerResponse, render_request

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Vecd-Model: m\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nTrailer: t\r\n\r\n"
HEADERS = [(b"content-length", b"5"), (b"x-vecd-model", b"m")]


def new(place: Place | None = None, *, is_streamed: bool = False, has_body: bool = True) -> ResponseReader:
    reader = ResponseReader()
    reader.begin(place, is_streamed=is_streamed, has_body=has_body)
    return reader


def feed(reader: ResponseReader, data: bytes, step: int = 10_000) -> ServerResponse | None:
    while data:
        buffer = reader.buffer()
        piece = data[: min(step, len(buffer))]
        buffer[: len(piece)] = piece
        data = data[len(piece) :]
        assert reader.received(len(piece)) == (not data)
    return reader.response


@pytest.mark.parametrize("step", [1, 2, 7, 40, 10_000])
@pytest.mark.parametrize(
    "data", [OK, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + OK], ids=["length", "chunked", "interim"]
)
def test_bodies_are_read_one_after_the_other_however_they_are_cut(data: bytes, step: int) -> None:
    reader = ResponseReader()
    for _ in range(3):
        reader.begin()
        response = feed(reader, data, step)
        assert response is not None
        assert (response.status, response.body, response.text(b"x-vecd-model")) == (
            200,
            b"hello",
            None if data is CHUNKED else "m",
        )
        assert reader.keeps_alive


@pytest.mark.parametrize("step", [1, 60, 10_000])
@pytest.mark.parametrize(("data", "headers"), [(OK, HEADERS), (CHUNKED, [(b"transfer-encoding", b"chunked")])])
def test_a_body_is_received_into_the_memory_of_the_caller(
    data: bytes, headers: list[tuple[bytes, bytes]], step: int
) -> None:
    memory = bytearray(7)
    reader = ResponseReader()
    for _ in range(2):
        memory[:] = bytes(7)
        reader.begin(lambda response, length: memoryview(memory)[1 : 1 + length])
        assert feed(reader, data, step) == ServerResponse(200, b"", headers)
        assert bytes(memory) == b"\0hello\0"


@pytest.mark.parametrize("data", [OK, CHUNKED])
def test_a_streamed_body_is_taken_in_pieces(data: bytes) -> None:
    reader, taken = new(is_streamed=True), []
    for byte in data:
        reader.buffer()[0] = byte
        reader.received(1)
        taken.append(reader.take())
    assert [piece for piece in taken if piece] == [b"h", b"e", b"l", b"l", b"o"]
    assert reader.is_complete
    head = new(is_streamed=True, has_body=False)
    feed(head, OK[:-5])
    assert (head.is_complete, head.keeps_alive) == (True, False)


def test_a_head_and_a_body_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    response = feed(new(), b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: " + b"x" * 50_000 + b"\r\n\r\n")
    assert response is not None
    assert len(response.text(b"x") or "") == 50_000
    with pytest.raises(BadResponse, match="its head is longer than 1 MiB"):
        feed(new(), b"HTTP/1.1 200 OK\r\nX: " + b"x" * (2 << 20))
    monkeypatch.setattr(http, "_MAX_BODY_BYTES", 1000)
    reader, head = new(), b"HTTP/1.1 200 OK\r\n\r\n"
    reader.buffer()[: len(head)] = head
    reader.received(len(head))
    with pytest.raises(BadResponse, match="longer than"):
        feed(reader, b"x" * 2000)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhello",
        OK + OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n",
        "HTTP/1.1 \u00b200 OK\r\n\r\n".encode("latin-1"),  # a superscript two is a digit, and no number
        "HTTP/1.1 200 OK\r\nContent-Length: \u00b2\r\n\r\n".encode("latin-1"),
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"1" * 5000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_response_is_refused(data: bytes) -> None:
    with pytest.raises(BadResponse):
        feed(new(), data)


@pytest.mark.parametrize("step", [1, 10_000])
def test_a_body_of_another_length_than_its_place_is_refused(step: int) -> None:
    with pytest.raises(BadResponse, match="5 bytes where 4"):
        feed(new(lambda response, length: memoryview(bytearray(4))), OK, step)


@pytest.mark.parametrize("data", [b"", OK[:20], OK[:-1], CHUNKED[:-4]])
def test_an_end_in_the_middle_is_no_response(data: bytes) -> None:
    reader = new()
    for byte in data:
        reader.buffer()[0] = byte
        assert not reader.received(1)
    with pytest.raises(ConnectionClosed):
        reader.ended()
    assert reader.has_bytes == bool(data)


def test_a_response_without_a_length_ends_with_its_connection() -> None:
    reader = new()
    for piece in (b"HTTP/1.1 200 OK\r\n\r\nhe", b"llo"):
        reader.buffer()[: len(piece)] = piece
        assert not reader.received(len(piece))
    reader.ended()
    assert (reader.response, reader.is_complete, reader.keeps_alive) == (ServerResponse(200, b"hello"), True, False)


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: Close\r\n"])
def test_a_connection_that_will_be_closed_is_not_kept(head: bytes) -> None:
    reader = new()
    feed(reader, head + b"Content-Length: 0\r\n\r\n")
    assert not reader.keeps_alive


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({b"x-vecd-tokens": b"7", b"x-vecd-dimensions": b"384"}, (7, 384, None)),
        ({b"x-vecd-tokens": b"many", b"x-compute-tokens": b"5", b"retry-after": b"3"}, (5, None, 3)),
        ({b"x-vecd-tokens": b"1" * 19, b"retry-after": b"3", b"retry-after-ms": b"250"}, (None, None, 0.25)),
        ({b"x-vecd-dimensions": b"\xb2", b"retry-after": b"-1"}, (None, None, None)),
    ],
)
def test_numbers_of_headers(headers: dict[bytes, bytes], found: tuple[float | None, ...]) -> None:
    response = ServerResponse(200, b"", list(headers.items()))
    assert (response.num_tokens, response.num_dimensions, response.retry_after_s) == found


# --- requests -------------------------------------------------------------------------------------------------

TARGET = Target("h", 1, None)


@pytest.mark.parametrize(("path", "api_key"), [("v1", None), ("/a b", None), ("/a\r\nX: y", None), ("/", "k\n")])
def test_what_cannot_be_sent_is_refused(path: str, api_key: str | None) -> None:
    with pytest.raises(ValueError, match=r".+"):
        render_request(TARGET, path, b"", api_key=api_key)


@pytest.mark.parametrize("value", ["", "a\r\nb: c", "ü"])
def test_headers_that_cannot_be_sent_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="x-vecd-priority"):
        render_request(TARGET, "/", b"", api_key=None, headers={"x-vecd-priority": value})


def test_a_request_carries_its_prefix_key_length_and_further_headers() -> None:
    headers = {"x-vecd-priority": "bulk", "x-vecd-timeout-ms": "50"}
    request = render_request(TARGET, "/", b"", api_key=None, accept="application/x-npy", headers=headers)
    assert b"\r\nx-vecd-priority: bulk\r\nx-vecd-timeout-ms: 50\r\n\r\n" in request
    assert b"\r\nAccept: application/x-npy\r\n" in request
    request = render_request(TARGET._replace(prefix="/m/a"), "/v1/embeddings", b'{"a":1}', api_key="s3cret")
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /m/a/v1/embeddings HTTP/1.1\r\nHost: h:1\r\n")
    assert b"Authorization: Bearer s3cret" in head
    assert b"Content-Length: 7" in head
    assert body == b'{"a":1}'
