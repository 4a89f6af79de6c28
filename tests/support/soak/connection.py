"""One HTTP/1.1 connection that takes nothing on trust: an answer that nobody asked for is counted.

Owns the socket and the parsing. Never sends anything twice. Used by `traffic`.
"""

import asyncio
from dataclasses import dataclass

import httptools

ANSWER_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Closed(Exception):
    """Raised when the server closes a connection before the whole answer has come."""


class Connection(asyncio.Protocol):
    """One request at a time; counts answers that were not asked for."""

    def __init__(self) -> None:
        self.is_open = False
        self.num_unasked = 0
        self._waiting: asyncio.Future[Answer] | None = None
        self._start_answer()

    def _start_answer(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._is_complete = self._keeps_alive = False

    async def exchange(self, request: bytes) -> Answer:
        """Raises Closed, TimeoutError."""
        if not self.is_open:
            raise Closed
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._waiting
        finally:
            self._waiting = None

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Closed())

    def data_received(self, data: bytes) -> None:
        if self._waiting is None or self._waiting.done():
            self.num_unasked += 1
            return
        self._parser.feed_data(data)
        if self._is_complete:
            answer = Answer(self._parser.get_status_code(), self._headers, b"".join(self._body))
            self.is_open = self._keeps_alive
            self._waiting.set_result(answer)
            self._start_answer()

    # --- called by the parser ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True


async def connect(url: str) -> Connection:
    """Raises OSError, TimeoutError."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        _, connection = await asyncio.get_running_loop().create_connection(Connection, host, int(port))
    return connection
