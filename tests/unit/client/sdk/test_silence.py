"""A connection is broken after 300 s without a byte, however long the answer takes. The tests play socket and clock."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from vecd.client.sdk import aio
from vecd.client.sdk import client as blocking
from vecd.client.sdk.exchanges import SILENCE_S, Send
from vecd.client.sdk.http1 import ResponseReader

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
