"""What comes back is read into the memory where it belongs, however the bytes are cut."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from vecd.client import aio, blocking
from vecd.client.connection import BadResponse, ConnectionClosed
from vecd.client.exchanges import SILENCE_S, Send
from vecd.client.http1 import ResponseHead, ResponseReader

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
    assert bytes(reader.body or b"") == b"hello"
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
    with pytest.raises(BadResponse, match="its head is longer than 1 MiB"):
        feed(ResponseReader(lambda head: None), b"HTTP/1.1 200 OK\r\nX: " + b"x" * (2 << 20), 10_000)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
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
    assert (bytes(reader.body or b""), reader.is_complete, reader.keeps_alive) == (b"hello", True, False)


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: Close\r\n"])
def test_a_connection_that_will_be_closed_is_not_kept(head: bytes) -> None:
    reader = ResponseReader(lambda head: None)
    feed(reader, head + b"Content-Length: 0\r\n\r\n", 10_000)
    assert not reader.keeps_alive


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
PAUSE_S = 0.7 * SILENCE_S


def new_reader() -> ResponseReader:
    return ResponseReader(lambda head: None)


class SlowSocket:
    """Gives a byte of the answer after each pause."""

    def __init__(self) -> None:
        self.now, self.limit_s, self.rest = 0.0, 0.0, ANSWER

    def settimeout(self, seconds: float) -> None:
        self.limit_s = seconds

    def sendall(self, data: bytes) -> None:
        pass

    def recv_into(self, buffer: memoryview) -> int:
        self.now += min(PAUSE_S, self.limit_s)
        if self.limit_s < PAUSE_S:
            raise TimeoutError
        buffer[:1], self.rest = self.rest[:1], self.rest[1:]
        return 1


def test_each_byte_renews_the_limit_of_a_blocking_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(timeout_s: float) -> Any:
        sock: Any = SlowSocket()
        monkeypatch.setattr(blocking, "time", SimpleNamespace(monotonic=lambda: sock.now))
        blocking._Connection(sock).exchange(Send(b"", new_reader(), timeout_s), timeout_s)
        return sock

    slow = exchange(math.inf)
    assert (slow.rest, slow.limit_s) == (b"", SILENCE_S)
    with pytest.raises(TimeoutError):
        exchange(2.5 * PAUSE_S)


class NoTransport:
    def write(self, data: bytes) -> None:
        pass


def test_each_byte_renews_the_limit_of_coroutines(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: now)
        connection = aio._Connection()
        transport: Any = NoTransport()
        connection.connection_made(transport)

        async def step() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        task = asyncio.create_task(connection.exchange(b"", new_reader()))
        await step()
        for index in range(len(ANSWER)):
            now += PAUSE_S
            await step()
            connection.get_buffer(-1)[:1] = ANSWER[index : index + 1]
            connection.buffer_updated(1)
        await step()
        assert task.done()
        await task

        silent = asyncio.create_task(connection.exchange(b"", new_reader()))
        await step()
        now += SILENCE_S + 1
        await step()
        assert isinstance(silent.exception(), TimeoutError)

    asyncio.run(main())
