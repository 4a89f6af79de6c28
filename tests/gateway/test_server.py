"""`gateway.server` on real sockets, and its `Connection` on a transport that only records."""

import asyncio
import gc
import logging
import socket
import struct
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.errors import ApiError, BadRequest, InvalidApiKey, render_openai_error
from gateway.http1 import HttpRequest, Limits, Response, _Message
from gateway.server import Connection, Server, Timeouts

DEADLINE_S = 20.0
"""For everything that a test waits for."""
QUOTE = "it quotes a text"
FOREVER = Timeouts(head_s=1e6, body_s=1e6, idle_s=1e6, write_s=1e6, linger_s=1e6, sweep_s=0.01)


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
            case "/unsendable":
                return Response(200, headers={"x": "a\r\nb"})
            case "/stubborn":
                with suppress(asyncio.CancelledError):
                    await self._wait()
            case "/slow-to-stop":
                await self._wait_and_tidy_up()
            case "/large":
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

    def render_error(self, error: ApiError, path: str | None) -> Response:
        if not self.can_render:
            raise RuntimeError("cannot even render")
        return Response(error.status, render_openai_error(error), headers={**error.headers(), "x-path": str(path)})


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

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@dataclass
class Served:
    app: TinyApp
    server: Server
    sock: socket.socket
    clients: list[Client] = field(default_factory=list)

    def address(self) -> Any:
        return self.sock.getsockname()

    async def connect(self) -> Client:
        if self.sock.family == socket.AF_UNIX:
            client = Client(*await asyncio.open_unix_connection(self.address()))
        else:
            client = Client(*await asyncio.open_connection(*self.address()))
        self.clients.append(client)
        return client


def listening(path: Path | None = None) -> socket.socket:
    sock = socket.socket(socket.AF_INET if path is None else socket.AF_UNIX)
    sock.bind(("127.0.0.1", 0) if path is None else str(path))
    sock.listen(16)
    return sock


@asynccontextmanager
async def serving(
    sock: socket.socket | None = None,
    *,
    limits: Limits | None = None,
    timeouts: Timeouts = FOREVER,
    max_connections: int = 100,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Served]:
    app = TinyApp()
    limits = limits or Limits(max_body_bytes=1_000_000)
    server = Server(app, limits=limits, timeouts=timeouts, max_connections=max_connections, clock=clock)
    served = Served(app, server, sock or listening())
    await server.start(served.sock)
    try:
        yield served
    finally:
        await server.drain(0)
        for client in served.clients:
            client.writer.transport.abort()
    assert server.num_connections == 0
    assert server.num_requests_in_flight == 0


def run(test: Coroutine[Any, Any, None]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(within_deadline())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def get(path: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    return "".join(f"{line}\r\n" for line in (f"{method} {path} HTTP/{version}", "Host: x", *headers, "")).encode()


def post(path: str, *headers: str, body: bytes, version: str = "1.1") -> bytes:
    return get(path, f"Content-Length: {len(body)}", *headers, method="POST", version=version) + body


@pytest.fixture(params=["tcp", "unix"])
def sock(request: pytest.FixtureRequest, tmp_path: Path) -> socket.socket:
    return listening(None if request.param == "tcp" else tmp_path / "s")


# --- one request after the other ----------------------------------------------------------------------------------


def test_a_connection_takes_one_request_after_the_other(sock):
    async def test() -> None:
        async with serving(sock) as served:
            client = await served.connect()
            for number in range(3):
                answer = await client.ask(post("/echo", "X-Request-Id: mine", body=b"text %d" % number))
                assert (answer.status, answer.body) == (200, b"text %d" % number)
                assert answer.headers["x-request-id"] == "mine"
                assert "connection" not in answer.headers
            assert served.server.num_connections == 1

    run(test())


def test_a_request_may_come_byte_by_byte_and_in_chunks():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            data = get("/echo", "Transfer-Encoding: chunked", method="POST") + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
            for byte in data:
                client.send(bytes([byte]))
                await asyncio.sleep(0)
            assert (await client.answer()).body == b"hello"

    run(test())


def test_pipelined_requests_are_answered_in_order_one_at_a_time():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(get("/wait") + post("/echo", body=b"2") + get("/3"))
            await served.app.started.wait()
            await (await served.connect()).ask(get("/other"))
            assert served.app.handled == ["/wait", "/other"]
            assert served.server.num_requests_in_flight == 1
            served.app.release.set()
            assert [(await client.answer()).body for _ in range(3)] == [b"/wait", b"2", b"/3"]

    run(test())


def test_http_1_0():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            answer = await client.ask(get("/a", "Connection: keep-alive", version="1.0"))
            assert answer.headers["connection"] == "keep-alive"
            answer = await client.ask(get("/b", version="1.0"))
            assert answer.headers["connection"] == "close"
            assert await client.rest() == b""

    run(test())


def test_connection_close_is_heeded():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            answer = await client.ask(get("/a", "Connection: close") + get("/b"))
            assert answer.headers["connection"] == "close"
            assert await client.rest() == b""
            assert served.app.handled == ["/a"]

    run(test())


def test_head_has_no_body():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(get("/12345", method="HEAD") + get("/next"))
            _, headers = await client.head()
            assert headers["content-length"] == "6"
            assert (await client.answer()).body == b"/next"

    run(test())


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_large_answer_in_pieces_arrives_whole(sock, method):
    async def test() -> None:
        async with serving(sock) as served:
            client = await served.connect()
            client.send(get("/pieces", method=method) + get("/next"))
            if method == "HEAD":
                assert (await client.head())[1]["content-length"] == "22500000"
            else:
                body = (await client.answer()).body
                assert body == b"".join(bytes(5000) + b"%d," % (i % 10) * 5000 for i in range(1, 3000, 2))
            assert (await client.answer()).body == b"/next"

    run(test())


def test_a_large_answer_arrives_whole():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(get("/large") + get("/next"))
            assert (await client.answer()).body == b"x" * 30_000_000
            assert (await client.answer()).body == b"/next"

    run(test())


# --- the body is outstanding ---------------------------------------------------------------------------------------


def test_expect_100_continue():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(post("/echo", "Expect: 100-continue", body=b"hello")[:-5])
            assert await client.head() == (100, {})
            assert served.app.checked == ["/echo"]
            assert (await client.ask(b"hello")).body == b"hello"

    run(test())


def test_no_interim_answer_to_http_1_0_nor_unasked():
    async def test() -> None:
        async with serving() as served:
            for data in (
                post("/echo", "Expect: 100-continue", body=b"hello", version="1.0"),
                post("/echo", body=b"hello"),
                post("/echo", "Expect: 100-continue", body=b""),
            ):
                client = await served.connect()
                client.send(data[:-5])
                await asyncio.sleep(0)
                client.send(data[-5:])
                assert (await client.answer()).status == 200

    run(test())


@pytest.mark.parametrize("expect", [(), ("Expect: 100-continue",)])
@pytest.mark.parametrize(("path", "status"), [("/secret", 401), ("/early", 200), ("/broken-check", 500)])
def test_the_head_alone_can_be_answered(path, status, expect, caplog):
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            answer = await client.ask(post(path, *expect, "X-Request-Id: mine", body=b"hello")[:-5])
            assert answer.status == status
            assert answer.headers["connection"] == "close"
            assert answer.headers["x-request-id"] == "mine"
            assert await client.rest() == b""
            assert served.app.handled == []

    run(test())
    assert "quotes" not in caplog.text


def test_a_request_that_comes_in_one_piece_is_left_to_the_handler():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            assert (await client.ask(post("/secret", body=b"hello"))).body == b"hello"
            assert served.app.checked == []

    run(test())


# --- errors --------------------------------------------------------------------------------------------------------


def test_an_api_error_is_rendered_and_the_connection_lives():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            answer = await client.ask(get("/refused"))
            assert answer.status == 400
            assert answer.headers["x-path"] == "/refused"
            assert b"as asked" in answer.body
            assert (await client.ask(get("/next"))).status == 200

    run(test())


@pytest.mark.parametrize("path", ["/fails", "/cancels", "/unsendable"])
def test_anything_unexpected_is_a_500_logged_once_without_its_message(path, caplog):
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            answer = await client.ask(post(path, "X-Request-Id: id-7", body=b"a body"))
            assert answer.status == 500
            assert b"internal_error" in answer.body
            assert b"quotes" not in answer.body
            assert b"Traceback" not in answer.body
            assert (await client.ask(get("/next"))).status == 200

    run(test())
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "id-7" in record.getMessage()
    assert "server.py" in record.getMessage()
    assert "a body" not in caplog.text
    assert "quotes" not in caplog.text


@contextmanager
def no_collector() -> Iterator[None]:
    """What is freed in here is freed at once, and not some day."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_what_a_refused_request_had_in_hand_is_freed_at_once():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(get("/refuses-what-is-large"))
            assert (await client.answer()).status == 400
            assert served.app.large is not None
            assert served.app.large() is None

    with no_collector():
        run(test())


def test_a_body_that_was_broken_off_is_freed_at_once():
    def num_messages() -> int:
        return sum(type(thing) is _Message for thing in gc.get_objects())

    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 900000\r\n\r\n" + b"x" * 300_000)
            await until(lambda: "/x" in served.app.checked)
            assert num_messages() == 1
            client.writer.transport.abort()
            await until(lambda: served.server.num_connections == 0)
            assert num_messages() == 0

    with no_collector():
        run(test())


def test_nobody_is_left_waiting_when_not_even_an_error_can_be_rendered():
    async def test() -> None:
        async with serving() as served:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
            served.app.can_render = False
            for data in (get("/fails"), b"garbage\r\n\r\n", post("/secret", body=b"hello")[:-5]):
                client = await served.connect()
                client.send(data)
                with suppress(ConnectionResetError):
                    assert await client.rest() == b""

    run(test())


def test_a_protocol_error_is_answered_after_the_requests_before_it():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(get("/wait") + get("/2") + b"garbage\r\n\r\n" + get("/never"))
            await served.app.started.wait()
            served.app.release.set()
            assert (await client.answer()).body == b"/wait"
            assert (await client.answer()).body == b"/2"
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (400, "close")
            assert answer.headers["x-path"] == "None"
            assert await client.rest() == b""
            assert served.app.handled == ["/wait", "/2"]

    run(test())


def test_a_client_that_sends_too_much_still_reads_why(sock):
    async def test() -> None:
        async with serving(sock) as served:
            client = await served.connect()
            client.send(get("/a", "Content-Length: 20000000", method="POST") + b"x" * 20_000_000)
            await client.writer.drain()
            answer = await client.answer()
            assert (answer.status, answer.headers["x-path"]) == (413, "/a")
            assert await client.rest() == b""
            assert served.app.checked == []

    run(test())


def test_a_refused_head_request_has_no_body():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(get("/", "Content-Encoding: gzip", method="HEAD"))
            status, headers = await client.head()
            assert status == 415
            assert int(headers["content-length"]) > 0
            assert await client.rest() == b""

    run(test())


# --- clients that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_cancels_its_request(sock, how, caplog):
    async def test() -> None:
        async with serving(sock) as served:
            client = await served.connect()
            client.send(get("/wait"))
            await served.app.started.wait()
            if how == "close":
                client.close()
            else:
                client.reset()
            await served.app.cancelled.wait()
            await until(lambda: served.server.num_connections == 0)
            assert served.server.num_requests_in_flight == 0

    run(test())
    assert caplog.records == []


def test_a_client_that_leaves_with_requests_waiting_cancels_all():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(get("/wait") + get("/2") * 5)
            await served.app.started.wait()
            client.reset()
            await served.app.cancelled.wait()
            await until(lambda: served.server.num_connections == 0)
            assert served.app.handled == ["/wait"]

    run(test())


def test_a_client_that_only_shut_down_its_half_is_answered(sock):
    async def test() -> None:
        async with serving(sock) as served:
            client = await served.connect()
            client.send(get("/wait") + get("/2"))
            client.writer.write_eof()
            await served.app.started.wait()
            for _ in range(10):
                served.server.sweep()
                await asyncio.sleep(0.001)
            served.app.release.set()
            while (first := await client.head())[0] == 100:
                pass
            assert first[0] == 200
            everything = await client.rest()
            assert everything.startswith(b"/waitHTTP/1.1 200 OK\r\n")
            assert everything.endswith(b"\r\n\r\n/2")
            assert b"connection: close" in everything
            await until(lambda: served.server.num_connections == 0)

    run(test())


def test_an_http_1_0_client_that_shut_down_its_half_gets_nothing_but_the_answer():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(get("/wait", version="1.0"))
            client.writer.write_eof()
            await served.app.started.wait()
            for _ in range(10):
                served.server.sweep()
                await asyncio.sleep(0.001)
            served.app.release.set()
            assert (await client.answer()).status == 200
            assert await client.rest() == b""

    run(test())


def test_requests_behind_a_large_answer_survive_a_shut_down():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(get("/large") + get("/2"))
            await until(lambda: served.app.handled == ["/large"])
            client.writer.write_eof()
            assert len((await client.answer()).body) == 30_000_000
            assert (await client.answer()).body == b"/2"
            assert await client.rest() == b""

    run(test())


def test_half_a_request_and_a_shut_down_is_no_request():
    async def test() -> None:
        async with serving() as served:
            for path in ("/a", "/wait"):
                client = await served.connect()
                client.send(get(path, "Connection: keep-alive", version="1.0") + get("/b")[:-5])
                client.writer.write_eof()
                if path == "/wait":
                    await served.app.started.wait()
                    served.app.release.set()
                assert (await client.answer()).body == path.encode()
                assert await client.rest() == b""
            await until(lambda: served.server.num_connections == 0)
            assert served.app.handled == ["/a", "/wait"]

    run(test())


# --- limits of time and number --------------------------------------------------------------------------------------


def only(**timeouts: float) -> Timeouts:
    """Timeouts that never come but for those given."""
    return Timeouts(**{"head_s": 1e6, "body_s": 1e6, "idle_s": 1e6, "write_s": 1e6, "linger_s": 1e6, **timeouts})


SOON = {"sweep_s": 0.01}


@pytest.mark.parametrize(
    ("data", "timeouts", "what", "path"),
    [
        (b"G", only(head_s=0.05, **SOON), b"head", "None"),
        (get("/a")[:-2], only(head_s=0.05, **SOON), b"head", "None"),
        (get("/first") + get("/a")[:-2], only(head_s=0.05, **SOON), b"head", "None"),
        (post("/a", body=b"hello")[:-1], only(body_s=0.05, **SOON), b"body", "/a"),
    ],
)
def test_a_request_that_is_not_complete_in_time(data, timeouts, what, path):
    async def test() -> None:
        async with serving(timeouts=timeouts) as served:
            client = await served.connect()
            client.send(data)
            if data.startswith(b"GET /first"):
                assert (await client.answer()).status == 200
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (408, "close")
            assert what in answer.body
            assert answer.headers["x-path"] == path
            assert await client.rest() == b""

    run(test())


def test_dripping_bytes_does_not_extend_the_deadline():
    async def test() -> None:
        async with serving(timeouts=only(head_s=0.05, **SOON)) as served:
            client = await served.connect()
            client.send(b"GET / HTTP/1.1\r\nX: ")
            answered = asyncio.ensure_future(client.answer())
            while not answered.done():
                client.send(b"a")
                await asyncio.sleep(0.005)
            assert (await answered).status == 408

    run(test())


@pytest.mark.parametrize("data", [b"", b"\r\n", get("/a")])
def test_an_idle_connection_is_closed_without_a_word(data):
    async def test() -> None:
        async with serving(timeouts=only(idle_s=0.05, **SOON)) as served:
            client = await served.connect()
            client.send(data)
            if data == get("/a"):
                assert (await client.answer()).status == 200
            assert await client.rest() == b""

    run(test())


def test_a_slow_handler_has_no_deadline_here():
    async def test() -> None:
        clock = Clock()
        async with serving(timeouts=only(head_s=1, body_s=1, idle_s=1, linger_s=1), clock=clock) as served:
            client = await served.connect()
            client.send(get("/wait"))
            await served.app.started.wait()
            clock.now += 1000
            served.server.sweep()
            served.app.release.set()
            assert (await client.answer()).status == 200

    run(test())


@pytest.mark.parametrize("path", ["/large", "/pieces"])
def test_a_client_that_does_not_read_is_cut_off(path):
    async def test() -> None:
        async with serving(timeouts=only(write_s=0.05, **SOON)) as served:
            sock = socket.create_connection(served.address())
            with sock:
                sock.send(get(path))
                await until(lambda: served.app.handled == [path])
                await until(lambda: served.server.num_connections == 0)

    run(test())


def test_too_many_connections_are_told_so(caplog):
    async def test() -> None:
        async with serving(max_connections=2) as served:
            first, second = await served.connect(), await served.connect()
            assert (await first.ask(get("/a"))).status == 200
            assert (await second.ask(get("/a"))).status == 200
            third = await served.connect()
            answer = await third.ask(get("/a"))
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert answer.headers["retry-after"] == "1"
            assert b"2" in answer.body
            assert await third.rest() == b""
            assert served.server.num_connections == 2
            served.server.sweep()
            served.server.sweep()
            second.close()
            await until(lambda: served.server.num_connections == 1)
            assert (await (await served.connect()).ask(get("/b"))).status == 200

    run(test())
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "1 connections refused" in record.getMessage()


def test_one_connection_too_many_is_told_so_though_it_says_nothing():
    async def test() -> None:
        async with serving(max_connections=0, timeouts=only(linger_s=0.05, **SOON)) as served:
            assert (await (await served.connect()).answer()).status == 503

    run(test())


# --- drain ----------------------------------------------------------------------------------------------------------


def test_drain_answers_what_is_in_flight_and_closes_what_is_idle(sock):
    async def test() -> None:
        async with serving(sock) as served:
            idle, busy = [await served.connect() for _ in range(2)]
            assert (await idle.ask(get("/a"))).status == 200
            busy.send(get("/wait") + get("/2"))
            await served.app.started.wait()
            address = served.address()
            drained = asyncio.ensure_future(served.server.drain(DEADLINE_S, grace_s=0.02))
            assert await idle.rest() == b""
            assert not drained.done()
            with pytest.raises(OSError):  # noqa: PT011
                await connect_to(address)
            served.app.release.set()
            assert "connection" not in (await busy.answer()).headers
            answer = await busy.answer()
            assert (answer.body, answer.headers["connection"]) == (b"/2", "close")
            assert await busy.rest() == b""
            busy.close()
            assert await drained is True

    run(test())


async def connect_to(address: Any) -> None:
    if isinstance(address, str):
        await asyncio.open_unix_connection(address)
    else:
        await asyncio.open_connection(*address)


def test_drain_serves_all_who_come_in_its_grace():
    async def test() -> None:
        async with serving() as served:
            idle = await served.connect()
            assert (await idle.ask(get("/a"))).status == 200
            drained = asyncio.ensure_future(served.server.drain(DEADLINE_S, grace_s=1))
            await until(lambda: served.server.is_draining)
            late = await served.connect()
            for client in (idle, late):
                assert (await client.ask(get("/b"))).headers["connection"] == "close"
                assert await client.rest() == b""
                client.close()
            assert await drained is True

    run(test())


def test_drain_answers_what_was_on_its_way():
    """On an idle connection and in the listener's backlog; the event loop has seen neither when the drain begins."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with serving() as served:
            with socket.socket() as idle, socket.socket() as new:
                idle.setblocking(False)
                await loop.sock_connect(idle, served.address())
                idle.send(get("/a"))
                assert b"/a" in await loop.sock_recv(idle, 10_000)
                idle.send(get("/b"))
                new.connect(served.address())
                new.setblocking(False)
                new.send(get("/c"))
                drained = asyncio.ensure_future(served.server.drain(DEADLINE_S, grace_s=0.5))
                for client, body in ((idle, b"/b"), (new, b"/c")):
                    answer = await loop.sock_recv(client, 10_000)
                    assert answer.endswith(body)
                    assert b"connection: close" in answer
            assert await drained is True

    run(test())


def test_drain_waits_for_a_request_that_is_still_arriving():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(post("/echo", body=b"hello")[:-2])
            await until(lambda: served.app.checked == ["/echo"])
            drained = asyncio.ensure_future(served.server.drain(DEADLINE_S, grace_s=0))
            await until(lambda: served.server.is_draining)
            answer = await client.ask(b"lo")
            assert (answer.body, answer.headers["connection"]) == (b"hello", "close")
            client.close()
            assert await drained is True

    run(test())


@pytest.mark.parametrize("data", [get("/wait"), get("/a") + post("/echo", body=b"hello")[:-1]])
def test_drain_gives_up_at_its_deadline(data):
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(data)
            await until(lambda: bool(served.app.handled))
            await until(lambda: b"wait" in data or served.app.checked == ["/echo"])
            assert await served.server.drain(0.05, grace_s=0.01) is False
            assert served.server.num_connections == 0
            assert served.server.num_requests_in_flight == 0
            assert served.app.cancelled.is_set() == (b"wait" in data)
            with suppress(ConnectionResetError):
                await client.rest()

    run(test())


def test_drain_counts_an_answer_that_was_not_taken_as_not_given():
    async def test() -> None:
        async with serving() as served:
            with socket.create_connection(served.address()) as sock:
                sock.send(get("/large"))
                await until(lambda: served.app.handled == ["/large"])
                assert await served.server.drain(0.05, grace_s=0.01) is False

    run(test())


def test_drain_owes_nothing_to_a_client_that_does_not_close():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            assert (await client.ask(post("/secret", body=b"hello")[:-1])).status == 401
            assert await served.server.drain(0.05, grace_s=0.01) is True

    run(test())


def test_drain_waits_for_cancelled_handlers_to_tidy_up():
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            client.send(get("/slow-to-stop"))
            await served.app.started.wait()
            assert await served.server.drain(0) is False
            assert served.app.tidied_up

    run(test())


def test_drain_without_connections():
    async def test() -> None:
        async with serving() as served:
            assert await served.server.drain(DEADLINE_S, grace_s=0) is True

    run(test())


# --- log ------------------------------------------------------------------------------------------------------------


def test_requests_are_logged_at_debug_only_and_never_their_bodies(caplog):
    async def test() -> None:
        async with serving() as served:
            client = await served.connect()
            with caplog.at_level(logging.INFO):
                await client.ask(post("/quiet", body=b"a text"))
            with caplog.at_level(logging.DEBUG):
                await client.ask(post("/loud?a=secret", "X-Request-Id: id-9", "Authorization: secret", body=b"a text"))

    run(test())
    (record,) = [record for record in caplog.records if record.name == "vecd.gateway"]
    line = record.getMessage()
    assert line.startswith("POST /loud 200 ")
    assert line.endswith(" ms id-9")
    assert "a text" not in caplog.text
    assert "secret" not in caplog.text


# --- one connection on a transport that records ---------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class RecordingTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.num_unsent_bytes = 0
        self.is_reading_paused = False
        self.is_shut_down = False
        self.is_closed = False
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def writelines(self, list_of_data: Any) -> None:
        self.sent += b"".join(list_of_data)

    def get_write_buffer_size(self) -> int:
        return self.num_unsent_bytes

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_shut_down = True

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True


@dataclass
class Recorded:
    app: TinyApp
    clock: Clock
    server: Server
    connection: Connection
    transport: RecordingTransport

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.server.sweep()


def record(test: Callable[[Recorded], Awaitable[None]], timeouts: Timeouts | None = None) -> None:
    async def with_connection() -> None:
        app, clock = TinyApp(), Clock()
        server = Server(
            app,
            limits=Limits(max_body_bytes=1000),
            timeouts=timeouts or Timeouts(),
            max_connections=1,
            clock=clock,
        )
        connection = Connection(server, asyncio.get_running_loop())
        transport = RecordingTransport()
        connection.connection_made(transport)
        await test(Recorded(app, clock, server, connection, transport))
        connection.connection_lost(None)

    run(with_connection())


def test_deadlines_are_neither_early_nor_late():
    async def test(recorded: Recorded) -> None:
        recorded.pass_time(119.9)
        recorded.connection.data_received(b"G")
        recorded.pass_time(9.9)
        recorded.connection.data_received(get("/a", "Content-Length: 5")[1:])
        recorded.pass_time(59.9)
        recorded.connection.data_received(b"hello")
        await until(lambda: recorded.transport.sent.endswith(b"hello"))
        recorded.pass_time(119.9)
        assert not recorded.transport.is_closed
        recorded.pass_time(0.1)
        assert recorded.transport.is_closed
        assert b"408" not in recorded.transport.sent

    record(test)


def test_silence_is_measured_from_what_happened_last():
    async def test(recorded: Recorded) -> None:
        recorded.pass_time(5)
        recorded.connection.close_if_silent(recorded.clock.now - 5.1)
        assert not recorded.transport.is_closed
        recorded.connection.data_received(get("/wait"))
        await recorded.app.started.wait()
        recorded.connection.close_if_silent(recorded.clock.now)
        assert not recorded.transport.is_closed
        recorded.app.release.set()
        await until(lambda: recorded.transport.sent.endswith(b"/wait"))
        recorded.connection.close_if_silent(recorded.clock.now - 0.1)
        assert not recorded.transport.is_closed
        recorded.connection.close_if_silent(recorded.clock.now)
        assert recorded.transport.is_closed

    record(test)


def test_a_handler_that_ignores_its_end_does_no_harm():
    async def test(recorded: Recorded) -> None:
        recorded.connection.data_received(get("/stubborn") + get("/2"))
        await recorded.app.started.wait()
        task = recorded.connection.task
        assert task is not None
        recorded.transport.is_closed = True
        recorded.connection.connection_lost(None)
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert recorded.app.handled == ["/stubborn"]
        assert recorded.transport.sent == b""

    record(test)


def test_the_log_says_how_long_an_answer_took(caplog):
    async def test(recorded: Recorded) -> None:
        recorded.pass_time(100)
        recorded.connection.data_received(get("/wait"))
        await recorded.app.started.wait()
        recorded.pass_time(0.25)
        recorded.app.release.set()
        await until(lambda: bool(recorded.transport.sent))

    with caplog.at_level(logging.DEBUG, logger="vecd.gateway"):
        record(test)
    assert "/wait 200 250.0 ms" in caplog.text


def test_what_waits_behind_a_request_is_bounded():
    async def test(recorded: Recorded) -> None:
        recorded.connection.data_received(get("/wait"))
        await recorded.app.started.wait()
        waiting = get("/2") * (64 * 1024 // len(get("/2")))
        recorded.connection.data_received(waiting)
        assert not recorded.transport.is_reading_paused
        recorded.connection.data_received(get("/2"))
        assert recorded.transport.is_reading_paused
        recorded.app.release.set()
        await until(lambda: recorded.transport.sent.count(b"HTTP/1.1 200") == waiting.count(b"GET") + 2)
        assert not recorded.transport.is_reading_paused

    record(test)


def test_the_next_request_waits_until_the_answer_before_it_is_taken():
    async def test(recorded: Recorded) -> None:
        recorded.connection.data_received(get("/1"))
        recorded.connection.pause_writing()
        await until(lambda: recorded.transport.sent.endswith(b"/1"))
        recorded.connection.data_received(get("/2"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert recorded.app.handled == ["/1"]
        recorded.connection.resume_writing()
        await until(lambda: recorded.transport.sent.endswith(b"/2"))

    record(test)


def test_a_slow_reader_is_cut_off_only_when_it_takes_nothing():
    async def test(recorded: Recorded) -> None:
        recorded.connection.data_received(get("/1", "Connection: close"))
        await until(lambda: recorded.transport.is_shut_down)
        for num_unsent_bytes in range(20, 10, -1):
            recorded.transport.num_unsent_bytes = num_unsent_bytes
            recorded.pass_time(29)
            assert not recorded.transport.is_aborted
        recorded.pass_time(29)
        assert not recorded.transport.is_aborted
        recorded.pass_time(1)
        assert recorded.transport.is_aborted

    record(test)


def test_a_slow_reader_has_its_time_to_close_after_the_last_byte():
    async def test(recorded: Recorded) -> None:
        recorded.connection.data_received(get("/1", "Connection: close"))
        await until(lambda: recorded.transport.is_shut_down)
        recorded.transport.num_unsent_bytes = 1
        recorded.pass_time(29)
        recorded.transport.num_unsent_bytes = 0
        recorded.pass_time(2.9)
        assert not recorded.transport.is_aborted
        recorded.pass_time(0.2)
        assert recorded.transport.is_aborted

    record(test)


def test_a_client_that_does_not_close_is_cut_off():
    async def test(recorded: Recorded) -> None:
        recorded.pass_time(5)
        recorded.connection.data_received(b"garbage\r\n\r\n")
        assert recorded.transport.is_shut_down
        assert recorded.transport.sent.startswith(b"HTTP/1.1 400 ")
        recorded.pass_time(2.9)
        assert not recorded.transport.is_aborted
        recorded.pass_time(0.1)
        assert recorded.transport.is_aborted

    record(test)


def test_a_client_that_was_refused_keeps_its_time_to_read_why_in_a_drain():
    async def test(recorded: Recorded) -> None:
        recorded.connection.data_received(b"garbage\r\n\r\n")
        recorded.connection.close_if_silent(recorded.clock.now)
        assert not recorded.transport.is_closed

    record(test)


def test_the_end_of_both_sides_ends_a_connection():
    async def test(recorded: Recorded) -> None:
        recorded.connection.data_received(get("/1", "Connection: close"))
        recorded.connection.pause_writing()
        await until(lambda: recorded.transport.is_shut_down)
        assert recorded.connection.eof_received() is False

    record(test)


def test_a_refused_client_may_finish_sending_but_not_drip():
    async def test(recorded: Recorded) -> None:
        recorded.connection.data_received(b"garbage\r\n\r\n")
        for _ in range(10):
            recorded.connection.data_received(b"x" * 1_000_000)
            recorded.pass_time(2)
            assert not recorded.transport.is_aborted
        recorded.connection.data_received(b"x")
        recorded.pass_time(1.1)
        assert recorded.transport.is_aborted

    record(test)


def test_a_refused_client_may_not_send_for_ever():
    async def test(recorded: Recorded) -> None:
        recorded.connection.data_received(b"garbage\r\n\r\n")
        for _ in range(65):
            recorded.connection.data_received(bytes(1024 * 1024))
        assert recorded.transport.is_aborted

    record(test)


def test_the_telling_of_refused_connections_is_bounded():
    async def test(recorded: Recorded) -> None:
        transports = []
        for _ in range(257):
            transports.append(RecordingTransport())
            Connection(recorded.server, asyncio.get_running_loop()).connection_made(transports[-1])
        assert not any(transport.is_aborted for transport in transports[:-1])
        assert transports[-1].is_aborted

    record(test)


def test_refused_connections_that_left_are_forgotten():
    async def test(recorded: Recorded) -> None:
        for _ in range(300):
            transport = RecordingTransport()
            connection = Connection(recorded.server, asyncio.get_running_loop())
            connection.connection_made(transport)
            assert not transport.is_aborted
            connection.connection_lost(None)

    record(test)
