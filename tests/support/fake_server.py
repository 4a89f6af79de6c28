"""A server that answers whatever a test tells it to, so that a load generator meets every kind of answer."""

import asyncio
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson
import pytest

DEADLINE_S = 20.0
TOKENS_PER_TEXT = 12

Reply: TypeAlias = int | bytes | None
"""A status, with the body that belongs to it; raw bytes, after which the server closes if they say so; or silence."""
ReplyTo: TypeAlias = Callable[[int], Reply]
"""The reply to the n-th request, from 0."""


class FakeServer:
    """Runs in a thread of its own. What it has seen is read from outside."""

    def __init__(self, reply_to: ReplyTo, unix_path: Path | None) -> None:
        self.url = ""
        self.heads: list[bytes] = []
        self.bodies: list[dict[str, Any]] = []
        self.num_connections = 0
        self._reply_to = reply_to
        self._unix_path = unix_path
        self._is_up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def start(self) -> None:
        self._thread.start()
        assert self._is_up.wait(DEADLINE_S)

    def stop(self) -> None:
        """Close the listening socket and every connection. May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._loop.close()

    def stop_soon(self) -> None:
        """The same, from within `reply_to`."""
        self._stopping.set()

    async def _serve(self) -> None:
        if self._unix_path is not None:
            server = await asyncio.start_unix_server(self._talk, self._unix_path)
            self.url = f"unix:{self._unix_path}"
        else:
            server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._is_up.set()
        await self._stopping.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                await self._read_request(reader)
                reply = self._render(self._reply_to(len(self.bodies) - 1))
                writer.write(reply)
                if b"Connection: close" in reply:
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client, or the test, has had enough
        finally:
            writer.close()

    async def _read_request(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
        body = await reader.readexactly(int(length[16:]))
        self.heads.append(head)
        self.bodies.append(orjson.loads(body))

    def _render(self, reply: Reply) -> bytes:
        if isinstance(reply, int):
            body = self._embeddings() if reply == 200 else b'{"error":{"message":"no luck"}}'
            tokens = b"x-vecd-tokens: %d\r\n" % (TOKENS_PER_TEXT * self._num_texts()) if self._is_bare() else b""
            return b"HTTP/1.1 %d Whatever\r\n%bContent-Length: %d\r\n\r\n%b" % (reply, tokens, len(body), body)
        return reply or b""

    def _num_texts(self) -> int:
        texts = self.bodies[-1]["input"]
        return 1 if isinstance(texts, str) else len(texts)

    def _is_bare(self) -> bool:
        """Whether vectors are asked for without JSON around them."""
        return b"Accept: application/x-npy" in self.heads[-1] or self.bodies[-1].get("encoding_format") == "bytes"

    def _embeddings(self) -> bytes:
        num_texts = self._num_texts()
        if self._is_bare():
            rows = np.ones((num_texts, 3), "<f4")
            if "encoding_format" in self.bodies[-1]:
                return rows.tobytes()
            np.save(file := io.BytesIO(), rows)
            return file.getvalue()
        num_tokens = TOKENS_PER_TEXT * num_texts
        data = [{"object": "embedding", "index": index, "embedding": "AACAPw=="} for index in range(num_texts)]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return orjson.dumps({"object": "list", "data": data, "model": "fake", "usage": usage})


@pytest.fixture
def start_server() -> Iterator[Callable[..., FakeServer]]:
    """Start servers that are stopped when the test ends: `start_server(reply_to, unix_path=None)`."""
    servers: list[FakeServer] = []

    def start(reply_to: ReplyTo = lambda _: 200, unix_path: Path | None = None) -> FakeServer:
        servers.append(FakeServer(reply_to, unix_path))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def dead_url(start_server: Callable[..., FakeServer]) -> str:
    """Of a server that was there once."""
    server = start_server()
    server.stop()
    return server.url
