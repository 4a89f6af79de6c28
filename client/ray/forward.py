"""An ASGI application that passes every request to a server on a unix socket, and its response back, as bytes.

Owns the connections to that server, which are kept alive, and the headers that belong to one connection alone. Reads no
body, and sends nothing twice: a request without a response gets 503, which the proxy in front repeats on another node.

A response is held until it is complete, up to 256 KiB: until its first byte has gone out, the proxy can still repeat
the request. Larger bodies, of requests and of responses, are passed on as they come.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

from vecd.client.http import BadResponse, ResponseReader, ServerResponse

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

HELD_BYTES = 1 << 18
_OF_ONE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
_WRITTEN_ANEW = (b"date", b"x-request-id")
"""Headers of a response that Ray Serve writes itself; the id is that of the request, which vecd takes over."""
_CONNECT_TIMEOUT_S = 5.0
_REQUEST_TARGET = b"%s %s HTTP/1.1\r\n"


class Forwarder:
    """The application. It answers from the event loop that first calls it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[_Connection] = []

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": f"{message['type']}.complete"})
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        try:
            connection = await self._take()
        except OSError as error:
            await _refuse(send, error)
            return
        try:
            is_reusable = await _exchange(connection, scope, receive, send)
        except BaseException:  # the caller has gone, too
            connection.close()
            raise
        if is_reusable and connection.keeps_alive:
            self._idle.append(connection)
        else:
            connection.close()

    async def _take(self) -> "_Connection":
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            return _Connection(await asyncio.open_unix_connection(self._path, limit=HELD_BYTES))


async def _exchange(connection: "_Connection", scope: Message, receive: Receive, send: Send) -> bool:
    """Pass one request and its response. Whether the connection can serve another."""
    body, is_more = b"", True
    while is_more and len(body) < HELD_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return False
        body += message.get("body", b"")
        is_more = message.get("more_body", False)
    path = scope.get("raw_path") or scope["path"].encode()
    query = scope.get("query_string", b"")
    target = path + b"?" + query if query else path
    rest, has_begun = None, False
    try:
        connection.begin(scope["method"].encode(), target, scope["headers"], body, is_more=is_more)
        rest = asyncio.create_task(_send_rest(connection, receive)) if is_more else None
        response = await connection.head()
        start = {
            "type": "http.response.start",
            "status": response.status,
            "headers": _passed_on(response.headers, *_WRITTEN_ANEW),
        }
        held = b""
        async for part in connection.parts():
            held += part
            if not has_begun and len(held) > HELD_BYTES:
                has_begun = True
                await send(start)
            if has_begun:
                await send({"type": "http.response.body", "body": held, "more_body": True})
                held = b""
        if not has_begun:
            await send(start)
        await send({"type": "http.response.body", "body": held})
        return rest is None or rest.done()
    except (OSError, BadResponse, RuntimeError) as error:  # uvloop's RuntimeError: the transport is closed
        if has_begun:
            raise  # the caller must not take what it has for the whole
        await _refuse(send, error)
        return False
    finally:
        if rest is not None:
            rest.cancel()


async def _send_rest(connection: "_Connection", receive: Receive) -> None:
    is_more = True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            connection.close()
            return
        is_more = message.get("more_body", False)
        await connection.write_part(message.get("body", b""), is_last=not is_more)


async def _refuse(send: Send, error: Exception) -> None:
    why = f"this node's server gave no response: {error or type(error).__name__}"
    body = json.dumps({"error": {"message": why, "type": "server_error", "param": None, "code": "node_unavailable"}})
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})


def _passed_on(headers: Iterable[tuple[bytes, bytes]], *also_left_out: bytes) -> Headers:
    """The headers that are not of one connection, which includes those that `connection` names."""
    headers = list(headers)
    named = {
        token.strip().lower() for name, value in headers if name.lower() == b"connection" for token in value.split(b",")
    }
    left_out = _OF_ONE_CONNECTION | named | set(also_left_out)
    return [(name, value) for name, value in headers if name.lower() not in left_out]


class _Connection:
    """One request at a time."""

    def __init__(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self._reader, self._writer = streams
        self._response = ResponseReader()
        self._is_chunked = False

    @property
    def is_open(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    @property
    def keeps_alive(self) -> bool:
        return self._response.keeps_alive and self.is_open

    def begin(self, method: bytes, target: bytes, headers: Headers, body: bytes, *, is_more: bool = False) -> None:
        """Send a request; with `is_more`, the rest of its body comes through `write_part`."""
        self._response.begin(is_streamed=True, has_body=method != b"HEAD")
        # The body has come as a whole or is cut anew, and nothing here waits for a leave to send it.
        passed_on = _passed_on(headers, b"expect")
        has_length = any(name == b"content-length" for name, _ in passed_on)
        self._is_chunked = is_more and not has_length
        if self._is_chunked:
            passed_on.append((b"transfer-encoding", b"chunked"))
        elif body and not has_length:
            passed_on.append((b"content-length", b"%d" % len(body)))
        head = _REQUEST_TARGET % (method, target) + b"".join(b"%s: %s\r\n" % header for header in passed_on) + b"\r\n"
        self._writer.write(head + self._framed(body))

    async def write_part(self, part: bytes, *, is_last: bool) -> None:
        with suppress(OSError):  # the server does not read on: its response says why
            await self._writer.drain()
            if self.is_open:
                end = b"0\r\n\r\n" if is_last and self._is_chunked else b""
                self._writer.write(self._framed(part) + end)

    def _framed(self, part: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(part), part) if part and self._is_chunked else part

    async def head(self) -> ServerResponse:
        """Without the body. Raises OSError or BadResponse."""
        while (response := self._response.response) is None:
            await self._receive()
        return response

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises as `head`."""
        while True:
            if part := self._response.take():
                yield part
            elif self._response.is_complete:
                return
            else:
                await self._receive()

    async def _receive(self) -> None:
        buffer = self._response.buffer()
        if data := await self._reader.read(len(buffer)):
            buffer[: len(data)] = data
            self._response.received(len(data))
        else:
            self._response.ended()

    def close(self) -> None:
        self._writer.transport.abort()
