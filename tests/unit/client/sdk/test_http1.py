"""What comes back is read into the memory where it belongs, however the bytes are cut."""

import pytest

from vecd.client.connection import BadResponse, ConnectionClosed
from vecd.client.sdk.http1 import ResponseHead, ResponseReader

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Vecd-Model: m\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nTrailer: t\r\n\r\n"


def feed(reader: ResponseReader, data: bytes, step: int) -> None:
    while data:
        buffer = reader.buffer()
        piece = data[: min(step, len(buffer))]
        buffer[: len(piece)] = piece
        data = data[len(piece) :]
        assert reader.received(len(piece)) == (not data)


@pytest.mark.parametrize("step", [1, 2, 7, 40, 10_000])
@pytest.mark.parametrize(
    "data", [OK, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + OK], ids=["length", "chunked", "interim"]
)
def test_a_body_is_read_however_it_is_cut(data: bytes, step: int) -> None:
    reader = ResponseReader(lambda head: None)
    feed(reader, data, step)
    assert reader.body == b"hello"
    assert reader.head is not None
    assert reader.head.status == 200
    assert reader.keeps_alive


@pytest.mark.parametrize("step", [1, 60, 10_000])
def test_a_body_is_received_into_the_memory_of_the_caller(step: int) -> None:
    memory = bytearray(7)
    heads: list[ResponseHead] = []

    def place(head: ResponseHead) -> memoryview:
        heads.append(head)
        return memoryview(memory)[1:6]

    reader = ResponseReader(place)
    feed(reader, OK, step)
    assert (bytes(memory), reader.body) == (b"\0hello\0", None)
    assert heads == [ResponseHead(200, {"content-length": "5", "x-vecd-model": "m"}, 5)]


def test_a_long_head_has_room() -> None:
    reader = ResponseReader(lambda head: None)
    feed(reader, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: " + b"x" * 50_000 + b"\r\n\r\n", 10_000)
    assert reader.head is not None
    assert len(reader.head.headers["x"]) == 50_000


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n",
        "HTTP/1.1 \u00b200 OK\r\n\r\n".encode("latin-1"),  # a superscript two is a digit, and no number
        "HTTP/1.1 200 OK\r\nContent-Length: \u00b2\r\n\r\n".encode("latin-1"),
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"1" * 5000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    with pytest.raises(BadResponse):
        feed(ResponseReader(lambda head: None), data, 10_000)


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(BadResponse, match="5 bytes where 4"):
        feed(ResponseReader(lambda head: memoryview(bytearray(4))), OK, 10_000)


@pytest.mark.parametrize("data", [b"", OK[:20], OK[:-1], CHUNKED[:-4]])
def test_an_end_in_the_middle_is_no_answer(data: bytes) -> None:
    reader = ResponseReader(lambda head: None)
    for byte in data:
        reader.buffer()[0] = byte
        assert not reader.received(1)
    with pytest.raises(ConnectionClosed):
        reader.ended()
    assert reader.has_bytes == bool(data)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    reader = ResponseReader(lambda head: None)
    for piece in (b"HTTP/1.1 200 OK\r\n\r\nhe", b"llo"):
        reader.buffer()[: len(piece)] = piece
        assert not reader.received(len(piece))
    reader.ended()
    assert (reader.body, reader.is_complete, reader.keeps_alive) == (b"hello", True, False)


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: Close\r\n"])
def test_a_connection_that_will_be_closed_is_not_kept(head: bytes) -> None:
    reader = ResponseReader(lambda head: None)
    feed(reader, head + b"Content-Length: 0\r\n\r\n", 10_000)
    assert not reader.keeps_alive
