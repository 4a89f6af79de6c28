"""A `vecd.gateway.http.listeners.Server` with a tiny app, on real sockets in the test's own process, and raw clients of
it."""

import asyncio
import gc
import os
import socket
import struct
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.certificates import Certificate
from vecd.gateway.dialects import openai
from vecd.gateway.errors import ApiError, BadRequest, InvalidApiKey
from vecd.gateway.http.connection import Timeouts
from vecd.gateway.http.listeners import Server
from vecd.gateway.http.tls import ServerTls
from vecd.gateway.request import HttpRequest, Limits, Response

DEADLINE_S = 20.0
"""For everything that a test waits for."""
QUOTE = "it quotes a text"
FOREVER = Timeouts(head_s=1e6, handshake_s=1e6, body_s=1e6, idle_s=1e6, write_s=1e6, linger_s=1e6, sweep_s=0.01)


class Large:
    """What a handler has in hand."""


class TinyApp:
    """Answers by path. `/wait` is held until `release` is set."""

    def __init__(self) -> None:
        self.handled: list[str] = []
        self.checked: list[str] = []
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.release = asyncio.Event()
        self.can_render = True
        self.tidied_up = False
        self.large: weakref.ref[Large] | None = None

    def check_head(self, request: HttpRequest) -> Response | None:
        self.checked.append(request.path)
        if request.path == "/secret":
            raise InvalidApiKey("no key")
        if request.path == "/broken-check":
            raise RuntimeError(QUOTE)
        return Response(200, b"early") if request.path == "/early" else None

    async def handle(self, request: HttpRequest) -> Response:
        self.handled.append(request.path)
        match request.path:
            case "/len":
                return Response(200, b"%d" % len(request.body))
            case "/wait":
                await self._wait()
            case "/refused":
                raise BadRequest("as asked")
            case "/fails":
                raise RuntimeError(QUOTE)
            case "/refuses-what-is-large":
                large = Large()
                self.large = weakref.ref(large)
                try:
                    raise KeyError(large)
                except KeyError:
                    raise BadRequest("as asked") from None
            case "/cancels":
                raise asyncio.CancelledError
            case "/who":
                return Response(200, f"{request.client} {request.is_admin}".encode())
            case "/unsendable":
                return Response(200, headers={"x": "a\r\nb"})
            case "/stubborn":
                with suppress(asyncio.CancelledError):
                    await self._wait()
            case "/slow-to-stop":
                await self._wait_and_tidy_up()
            case "/large":
                return Response(200, b"x" * 30_000_000)
            case "/made":
                assert request.timeline.take_room is not None
                if (has_room := request.timeline.take_room(30_000_000, 1_000_000)) is not None:
                    await has_room
                return Response(200, b"x" * 30_000_000)
            case "/pieces":
                return Response(
                    200, [b"%d," % (i % 10) * 5000 if i % 2 else memoryview(bytes(5000)) for i in range(3000)]
                )
        return Response(200, request.body or request.path.encode())

    async def _wait(self) -> None:
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _wait_and_tidy_up(self) -> None:
        try:
            await self._wait()
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            self.tidied_up = True

    def render_error(self, error: ApiError, request: HttpRequest | None) -> Response:
        if not self.can_render:
            raise RuntimeError("cannot even render")
        response = openai.render_error(error)
        response.headers |= {**error.headers, "x-path": f"{request and request.path}"}
        return response

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        response.headers["x-added"] = request.path if request is not None else "-"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """A raw client. Every read has a deadline."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        text = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = text[:-4].split("\r\n")
        assert status_line.startswith("HTTP/1.1 ")
        return int(status_line.split()[1]), dict(line.split(": ", 1) for line in lines)

    async def answer(self) -> Answer:
        status, headers = await self.head()
        return Answer(status, headers, await self._reader.readexactly(int(headers["content-length"])))

    async def ask(self, data: bytes) -> Answer:
        self.send(data)
        return await self.answer()

    async def rest(self) -> bytes:
        """All that comes before the server closes."""
        return await self._reader.read()

    def close(self) -> None:
        self.writer.close()

    def shut_down(self) -> None:
        """The sending half, on the socket itself: over TLS, asyncio can only close both."""
        with socket.socket(fileno=os.dup(self.writer.get_extra_info("socket").fileno())) as sock:
            sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@dataclass
class Listening:
    """Where clients connect, and how."""

    sock: socket.socket
    certificate: Certificate | None = None

    @property
    def address(self) -> Any:
        return self.sock.getsockname()

    @property
    def tls(self) -> ServerTls | None:
        return ServerTls(self.certificate.cert, self.certificate.key) if self.certificate is not None else None

    async def connect(self, **options: Any) -> Client:
        if self.sock.family == socket.AF_UNIX:
            return Client(*await asyncio.open_unix_connection(self.address))
        context = self.certificate.client_context() if self.certificate is not None else None
        return Client(*await asyncio.open_connection(*self.address[:2], ssl=context, **options))


@dataclass
class ModelInfo:
    app: TinyApp
    server: Server
    listening: Listening
    admin: Listening | None = None
    clients: list[Client] = field(default_factory=list)

    def address(self) -> Any:
        return self.listening.address

    async def connect(self, **options: Any) -> Client:
        client = await self.listening.connect(**options)
        self.clients.append(client)
        return client

    async def connect_admin(self) -> Client:
        assert self.admin is not None
        client = await self.admin.connect()
        self.clients.append(client)
        return client


def listening(path: Path | None = None) -> Listening:
    sock = socket.socket(socket.AF_INET if path is None else socket.AF_UNIX)
    sock.bind(("127.0.0.1", 0) if path is None else str(path))
    sock.listen(100)
    return Listening(sock)


@asynccontextmanager
async def serving(
    sock: Listening | None = None,
    *,
    timeouts: Timeouts = FOREVER,
    max_connections: int = 100,
    max_connections_per_address: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    admin: Listening | None = None,
    tls: ServerTls | None = None,
    max_arriving_bytes: int | None = None,
    max_unsent_bytes: int | None = None,
    **options: Any,
) -> AsyncIterator[ModelInfo]:
    app = TinyApp()
    limits = Limits(
        max_body_bytes=1_000_000,
        max_connections=max_connections,
        max_connections_per_address=max_connections_per_address,
    )
    server = Server(app, limits, timeouts=timeouts, clock=clock, **options)
    server.arriving.max_bytes = max_arriving_bytes or server.arriving.max_bytes
    server.unsent.max_bytes = max_unsent_bytes or server.unsent.max_bytes
    model_info = ModelInfo(app, server, sock or listening(), admin)
    await server.start(model_info.listening.sock, tls=tls or model_info.listening.tls)
    if admin is not None:
        await server.start(admin.sock, is_admin=True)
    try:
        yield model_info
    finally:
        await server.drain(0)
        for client in model_info.clients:
            client.writer.transport.abort()
    assert server.num_connections == 0
    assert server.num_requests_in_flight == 0
    assert server.arriving.num_bytes == 0
    assert server.unsent.num_bytes == 0


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def get(path: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    lines = (f"{method} {path} HTTP/{version}", "Host: localhost", *headers, "")
    return "".join(f"{line}\r\n" for line in lines).encode()


def post(path: str, *headers: str, body: bytes, version: str = "1.1") -> bytes:
    return get(path, f"Content-Length: {len(body)}", *headers, method="POST", version=version) + body


def only(**timeouts: float) -> Timeouts:
    """Timeouts that never come but for those given."""
    return Timeouts(**{**{name: 1e6 for name in Timeouts.__dataclass_fields__ if name != "sweep_s"}, **timeouts})


@contextmanager
def no_collector() -> Iterator[None]:
    """What is freed in here is freed at once, and not some day."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
