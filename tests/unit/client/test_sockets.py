"""The deadlines of both kinds of connection, without a socket, and the names of failures."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from vecd.base.target import Target
from vecd.client import sockets
from vecd.client.http import BadResponse, ConnectionClosed, ServerResponse
from vecd.client.sockets import AsyncConnection, BlockingConnection, NotConnected, name_failure

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
SILENCE_S = 300.0
PAUSE_S = 0.7 * SILENCE_S


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
    def exchange(until: float) -> Any:
        sock: Any = SlowSocket()
        monkeypatch.setattr(sockets, "socket", SimpleNamespace(socket=lambda *_: sock, AF_UNIX=1, SOCK_STREAM=1))
        sock.connect = lambda path: None
        monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: sock.now))
        target = Target("", 0, "/s")
        assert BlockingConnection(target, 1).exchange(b"", until, None, SILENCE_S).body == b"hello"
        return sock

    slow = exchange(math.inf)
    assert (slow.rest, slow.limit_s) == (b"", SILENCE_S)
    with pytest.raises(TimeoutError):
        exchange(2.5 * PAUSE_S)


class Played:
    """A connection of asyncio whose bytes and clock are the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.now, self.is_aborted = loop.time(), False
        monkeypatch.setattr(loop, "time", lambda: self.now)
        self.connection = AsyncConnection()
        transport: Any = SimpleNamespace(write=lambda data: None, abort=self.abort)
        self.connection.connection_made(transport)

    def abort(self) -> None:
        self.is_aborted = True

    def begin(self, timeout_s: float = math.inf) -> "asyncio.Task[ServerResponse]":
        return asyncio.create_task(self.connection.exchange(b"", timeout_s, silence_s=SILENCE_S))

    async def receive(self, data: bytes, pause_s: float = 0.0) -> None:
        self.now += pause_s
        for _ in range(5):
            await asyncio.sleep(0)
        if data:
            self.connection.get_buffer(-1)[: len(data)] = data
            self.connection.buffer_updated(len(data))
            await asyncio.sleep(0)


def test_each_byte_renews_the_limit_of_coroutines(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        played = Played(monkeypatch)
        for _ in range(2):
            task = played.begin()
            await played.receive(b"")
            for byte in ANSWER:
                await played.receive(bytes([byte]), PAUSE_S)
            assert (await task).body == b"hello"
        for timeout_s, passes_s in ((math.inf, SILENCE_S + 1), (2.5 * PAUSE_S, 2.6 * PAUSE_S)):
            played = Played(monkeypatch)
            silent = played.begin(timeout_s)
            await played.receive(b"")
            await played.receive(b"", passes_s)
            with pytest.raises(TimeoutError):
                await silent
            assert played.is_aborted

    asyncio.run(main())


def test_a_response_without_a_request_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        played = Played(monkeypatch)
        await played.receive(ANSWER[:1])
        assert (played.connection.is_open, played.is_aborted) == (False, True)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError(), "timeout"),
        (NotConnected(), "timeout"),
        (BadResponse(), "bad answer"),
        (ConnectionRefusedError(111, "x"), "connection refused"),
        (ConnectionClosed(), "connection closed"),
        (FileNotFoundError(2, "x"), "connection error ENOENT"),
    ],
)
def test_failures_have_names(error: Exception, kind: str) -> None:
    assert name_failure(error) == kind
