"""`vecd.gateway.http.listeners` and `vecd.gateway.http.connection`: real sockets, with TLS and without, and a transport
that only records."""

import asyncio
import gc
import logging
import math
import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Certificate, make_certificate
from tests.support.tinyserver import (
    DEADLINE_S,
    FOREVER,
    Client,
    Listening,
    ModelInfo,
    TinyApp,
    get,
    listening,
    no_collector,
    only,
    post,
    serving,
    until,
)
from vecd.gateway.http.connection import Connection, Timeouts
from vecd.gateway.http.forwarded import TrustedProxies
from vecd.gateway.http.framing import STEPS_PER_READ
from vecd.gateway.http.listeners import Server
from vecd.gateway.http.reader import IncomingRequest, ReadState
from vecd.gateway.request import HttpRequest, Limits


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(params=["tcp", "unix", "tls"])
def sock(request: pytest.FixtureRequest, tmp_path: Path) -> Listening:
    """Each test that takes it is run on each kind of socket."""
    made = listening(tmp_path / "s" if request.param == "unix" else None)
    if request.param == "tls":
        made.certificate = request.getfixturevalue("certificate")
    return made


# --- one request after the other ----------------------------------------------------------------------------------


async def test_a_connection_takes_one_request_after_the_other(sock):
    async with serving(sock) as model_info:
        client = await model_info.connect()
        for number in range(3):
            answer = await client.ask(post("/echo", "X-Request-Id: mine", body=b"text %d" % number))
            assert (answer.status, answer.body) == (200, b"text %d" % number)
            assert answer.headers["x-request-id"] == "mine"
            assert "connection" not in answer.headers
        assert model_info.server.num_connections == 1


async def test_pipelined_requests_are_answered_in_order_one_at_a_time():
    async with serving() as model_info:
        client = await model_info.connect()
        client.send(get("/wait") + post("/echo", body=b"2") + get("/3"))
        await model_info.app.started.wait()
        await (await model_info.connect()).ask(get("/other"))
        assert model_info.app.handled == ["/wait", "/other"]
        assert model_info.server.num_requests_in_flight == 1
        model_info.app.release.set()
        assert [(await client.answer()).body for _ in range(3)] == [b"/wait", b"2", b"/3"]


@pytest.mark.parametrize("last", [get("/b", version="1.0"), get("/b", "Connection: close")])
async def test_a_connection_lasts_as_long_as_its_client_says(last):
    async with serving() as model_info:
        client = await model_info.connect()
        answer = await client.ask(get("/a", "Connection: keep-alive", version="1.0"))
        assert answer.headers["connection"] == "keep-alive"
        answer = await client.ask(last + get("/c"))
        assert answer.headers["connection"] == "close"
        assert await client.rest() == b""
        assert model_info.app.handled == ["/a", "/b"]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_large_answer_in_pieces_arrives_whole(sock, method):
    async with serving(sock) as model_info:
        client = await model_info.connect()
        client.send(get("/pieces", method=method) + get("/next"))
        if method == "HEAD":
            assert (await client.head())[1]["content-length"] == "22500000"
        else:
            body = (await client.answer()).body
            assert body == b"".join(bytes(5000) + b"%d," % (i % 10) * 5000 for i in range(1, 3000, 2))
        assert (await client.answer()).body == b"/next"


# --- the body is outstanding ---------------------------------------------------------------------------------------


async def test_expect_100_continue():
    async with serving() as model_info:
        client = await model_info.connect()
        client.send(post("/echo", "Expect: 100-continue", body=b"hello")[:-5])
        assert await client.head() == (100, {})
        assert model_info.app.checked == ["/echo"]
        assert (await client.ask(b"hello")).body == b"hello"


@pytest.mark.parametrize("expect", [(), ("Expect: 100-continue",)])
@pytest.mark.parametrize(("path", "status"), [("/secret", 401), ("/early", 200), ("/broken-check", 500)])
async def test_the_head_alone_can_be_answered(path, status, expect, caplog):
    async with serving() as model_info:
        client = await model_info.connect()
        answer = await client.ask(post(path, *expect, "X-Request-Id: mine", body=b"hello")[:-5])
        assert answer.status == status
        assert answer.headers["connection"] == "close"
        assert answer.headers["x-request-id"] == "mine"
        assert await client.rest() == b""
        assert model_info.app.handled == []
    assert "quotes" not in caplog.text


async def test_a_request_that_comes_in_one_piece_is_left_to_the_handler():
    async with serving() as model_info:
        client = await model_info.connect()
        assert (await client.ask(post("/secret", body=b"hello"))).body == b"hello"
        assert model_info.app.checked == []


# --- errors --------------------------------------------------------------------------------------------------------


async def test_an_api_error_is_rendered_and_the_connection_lives():
    async with serving() as model_info:
        client = await model_info.connect()
        answer = await client.ask(get("/refused"))
        assert answer.status == 400
        assert answer.headers["x-path"] == "/refused"
        assert b"as asked" in answer.body
        assert (await client.ask(get("/next"))).status == 200


@pytest.mark.parametrize("path", ["/fails", "/cancels", "/unsendable"])
async def test_anything_unexpected_is_a_500_logged_once_without_its_message(path, caplog):
    async with serving() as model_info:
        client = await model_info.connect()
        answer = await client.ask(post(path, "X-Request-Id: id-7", body=b"a body"))
        assert answer.status == 500
        assert b"internal_error" in answer.body
        assert b"quotes" not in answer.body
        assert b"Traceback" not in answer.body
        assert (await client.ask(get("/next"))).status == 200
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "id-7" in record.getMessage()
    assert "connection.py" in record.getMessage()
    assert "a body" not in caplog.text
    assert "quotes" not in caplog.text


async def test_what_a_refused_request_had_in_hand_is_freed_at_once():
    with no_collector():
        async with serving() as model_info:
            client = await model_info.connect()
            client.send(get("/refuses-what-is-large"))
            assert (await client.answer()).status == 400
            assert model_info.app.large is not None
            assert model_info.app.large() is None


async def test_a_body_that_was_broken_off_is_freed_at_once():
    def num_messages() -> int:
        return sum(type(thing) is IncomingRequest for thing in gc.get_objects())

    with no_collector():
        async with serving() as model_info:
            client = await model_info.connect()
            client.send(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 900000\r\n\r\n" + b"x" * 300_000)
            await until(lambda: "/x" in model_info.app.checked)
            assert num_messages() == 1
            client.writer.transport.abort()
            await until(lambda: model_info.server.num_connections == 0)
            assert num_messages() == 0


async def test_nobody_is_left_waiting_when_not_even_an_error_can_be_rendered():
    async with serving() as model_info:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        model_info.app.can_render = False
        for data in (get("/fails"), b"garbage\r\n\r\n", post("/secret", body=b"hello")[:-5]):
            client = await model_info.connect()
            client.send(data)
            with suppress(ConnectionResetError):
                assert await client.rest() == b""


async def test_a_protocol_error_is_answered_after_the_requests_before_it():
    async with serving() as model_info:
        client = await model_info.connect()
        client.send(get("/wait") + get("/2") + b"garbage\r\n\r\n" + get("/never"))
        await model_info.app.started.wait()
        model_info.app.release.set()
        assert (await client.answer()).body == b"/wait"
        assert (await client.answer()).body == b"/2"
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert answer.headers["x-path"] == "None"
        assert await client.rest() == b""
        assert model_info.app.handled == ["/wait", "/2"]


async def test_a_client_that_sends_too_much_still_reads_why(sock):
    async with serving(sock) as model_info:
        client = await model_info.connect()
        client.send(get("/a", "Content-Length: 20000000", method="POST") + b"x" * 20_000_000)
        await client.writer.drain()
        answer = await client.answer()
        assert (answer.status, answer.headers["x-path"]) == (413, "/a")
        assert await client.rest() == b""
        assert model_info.app.checked == []


async def test_a_refused_head_request_has_no_body():
    async with serving() as model_info:
        client = await model_info.connect()
        client.send(get("/", "Content-Encoding: br", method="HEAD"))
        status, headers = await client.head()
        assert status == 415
        assert int(headers["content-length"]) > 0
        assert await client.rest() == b""


# --- clients that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_cancels_its_requests(sock, how, caplog):
    async with serving(sock) as model_info:
        client = await model_info.connect()
        client.send(get("/wait") + get("/2") * (5 if how == "reset" else 0))
        await model_info.app.started.wait()
        if how == "reset":
            client.reset()
        elif sock.certificate is not None:
            client.writer.transport.abort()  # asyncio's close() would first wait for an answer to its close_notify
        else:
            client.close()
        await model_info.app.cancelled.wait()
        await until(lambda: model_info.server.num_connections == 0)
        assert model_info.server.num_requests_in_flight == 0
        assert model_info.app.handled == ["/wait"]
    assert caplog.records == []


async def test_a_client_that_only_shut_down_its_half_is_answered(sock):
    async with serving(sock) as model_info:
        client = await model_info.connect()
        client.send(get("/wait") + get("/2"))
        client.shut_down()
        await model_info.app.started.wait()
        for _ in range(10):
            model_info.server.sweep()
            await asyncio.sleep(0.001)
        model_info.app.release.set()
        while (first := await client.head())[0] == 100:
            pass
        assert first[0] == 200
        everything = await client.rest()
        assert everything.startswith(b"/waitHTTP/1.1 200 OK\r\n")
        assert everything.endswith(b"\r\n\r\n/2")
        assert b"connection: close" in everything
        await until(lambda: model_info.server.num_connections == 0)


async def test_an_http_1_0_client_that_shut_down_its_half_gets_nothing_but_the_answer():
    async with serving() as model_info:
        client = await model_info.connect()
        client.send(get("/wait", version="1.0"))
        client.shut_down()
        await model_info.app.started.wait()
        for _ in range(10):
            model_info.server.sweep()
            await asyncio.sleep(0.001)
        model_info.app.release.set()
        assert (await client.answer()).status == 200
        assert await client.rest() == b""


async def test_requests_behind_a_large_answer_survive_a_shut_down():
    async with serving() as model_info:
        client = await model_info.connect()
        client.send(get("/large") + get("/2"))
        await until(lambda: model_info.app.handled == ["/large"])
        client.shut_down()
        assert len((await client.answer()).body) == 30_000_000
        assert (await client.answer()).body == b"/2"
        assert await client.rest() == b""


async def test_half_a_request_and_a_shut_down_is_no_request():
    async with serving() as model_info:
        for path in ("/a", "/wait"):
            client = await model_info.connect()
            client.send(get(path, "Connection: keep-alive", version="1.0") + get("/b")[:-5])
            client.shut_down()
            if path == "/wait":
                await model_info.app.started.wait()
                model_info.app.release.set()
            assert (await client.answer()).body == path.encode()
            assert await client.rest() == b""
        await until(lambda: model_info.server.num_connections == 0)
        assert model_info.app.handled == ["/a", "/wait"]


# --- limits of time and number --------------------------------------------------------------------------------------


SOON = {"sweep_s": 0.01}


@pytest.mark.parametrize(
    ("begin", "seconds", "what"),
    [
        (b"GET / HTTP/1.1\r\nX: ", 10, b"head"),
        (get("/a", "Content-Length: 500", method="POST"), 60, b"body"),
    ],
)
async def test_what_drips_is_cut_off(begin, seconds, what):
    async with recording() as recorded:
        recorded.connection.data_received(begin)
        for _ in range(seconds - 1):
            recorded.connection.data_received(b"x")
            recorded.pass_time(1)
        assert recorded.transport.sent == b""
        recorded.connection.data_received(b"x")
        recorded.pass_time(1.1)
        head, _, body = recorded.transport.sent.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"\r\nconnection: close" in head
        assert (b"x-path: /a" in head) == (what == b"body")
        assert what in body
        assert recorded.server.arriving.num_bytes == 0


async def test_a_large_body_that_comes_fast_has_longer():
    async with recording(max_body_bytes=32 * 2**20) as recorded:
        recorded.connection.data_received(get("/echo", f"Content-Length: {32 * 2**20}", method="POST"))
        for _ in range(128):
            recorded.connection.data_received(bytes(256 * 1024))
            recorded.pass_time(1.4)
        await until(lambda: recorded.transport.sent != b"")
        assert recorded.transport.sent.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sock", ["tcp", "tls"], indirect=True)
@pytest.mark.parametrize("path", ["/large", "/pieces"])
async def test_a_client_that_does_not_read_is_cut_off(sock, path):
    async with serving(sock, timeouts=only(write_s=0.2, **SOON)) as model_info:
        client = await model_info.connect()
        client.send(get(path) + get("/never"))
        await until(lambda: model_info.app.handled == [path])
        await until(lambda: model_info.server.num_connections == 0)
        # Megabytes that a kernel has of it are dropped, too, and not kept until the client takes them.
        poll = select.poll()
        poll.register(client.writer.get_extra_info("socket").fileno(), 0)
        await until(lambda: bool(poll.poll(0)))
        assert model_info.app.handled == [path]


@pytest.mark.parametrize("sock", ["tcp", "tls"], indirect=True)
async def test_too_many_connections_are_told_so(sock, caplog):
    async with serving(sock, max_connections=2) as model_info:
        first, second = await model_info.connect(), await model_info.connect()
        assert (await first.ask(get("/a"))).status == 200
        assert (await second.ask(get("/a"))).status == 200
        third = await model_info.connect()
        answer = await third.ask(get("/a", "x-request-id: mine"))
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert (answer.headers["retry-after"], answer.headers["x-request-id"]) == ("1", "mine")
        assert b"2" in answer.body
        assert await third.rest() == b""
        assert model_info.server.num_connections == 2
        model_info.server.sweep()
        model_info.server.sweep()
        second.close()
        await until(lambda: model_info.server.num_connections == 1)
        assert (await (await model_info.connect()).ask(get("/b"))).status == 200
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "1 connections refused" in record.getMessage()


async def test_connections_from_one_address_are_limited(caplog):
    async with serving(max_connections_per_address=2) as model_info:
        first, second = await model_info.connect(), await model_info.connect()
        assert (await first.ask(get("/a"))).status == 200
        assert (await second.ask(get("/a"))).status == 200
        answer = await (await model_info.connect()).ask(get("/a"))
        assert (answer.status, answer.headers["connection"], answer.headers["retry-after"]) == (503, "close", "1")
        assert b"one address: 2 are open" in answer.body
        neighbour = await model_info.connect(local_addr=("127.0.0.2", 0))
        assert (await neighbour.ask(get("/who"))).body == b"127.0.0.2 False"
        assert model_info.server.num_connections == 3
        model_info.server.sweep()
        second.close()
        await until(lambda: model_info.server.num_connections == 2)
        assert (await (await model_info.connect()).ask(get("/b"))).status == 200
    assert not model_info.server.num_of_address
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "1 connections refused, 1 of them because their address has 2" in record.getMessage()


async def test_connections_by_a_unix_socket_have_no_address_to_be_limited_by(tmp_path):
    async with serving(listening(tmp_path / "s"), max_connections_per_address=1) as model_info:
        for _ in range(5):
            assert (await (await model_info.connect()).ask(get("/a"))).status == 200


# --- bodies that are still arriving ---------------------------------------------------------------------------------

KIB = 1024


def half_post(num_sent: int, num_bytes: int) -> bytes:
    return get("/half", f"Content-Length: {num_bytes}", method="POST") + bytes(num_sent)


async def hold(model_info: ModelInfo, num_sent: int, num_bytes: int = 900 * KIB, **options: Any) -> Client:
    """A client whose body is not complete, when it has been counted."""
    before = model_info.server.arriving.num_bytes
    client = await model_info.connect(**options)
    client.send(half_post(num_sent, num_bytes))
    await until(lambda: model_info.server.arriving.num_bytes == before + num_sent)
    return client


def by(number: int) -> dict[str, Any]:
    """From an address of its own."""
    return {"local_addr": (f"127.0.0.{number}", 0)}


@pytest.mark.parametrize("sock", ["tcp", "tls"], indirect=True)
async def test_one_address_holds_half_at_most_and_what_has_hardly_begun_is_not_refused(sock):
    async with serving(sock, max_arriving_bytes=900 * KIB) as model_info:
        held = [await hold(model_info, 150 * KIB) for _ in range(3)]
        small = await hold(model_info, 64 * KIB)
        assert model_info.server.arriving.num_bytes == 514 * KIB
        client = await model_info.connect()
        client.send(half_post(65 * KIB, 900 * KIB))
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"], answer.headers["x-path"]) == (429, "close", "/half")
        assert int(answer.headers["retry-after"]) > 0
        assert b"server_overloaded" in answer.body
        assert str(900 * KIB).encode() in answer.body
        await until(lambda: model_info.server.arriving.num_bytes == 514 * KIB)
        assert (await client.rest()) == b""
        neighbour = await hold(model_info, 300 * KIB, 301 * KIB, **by(2))
        assert (await neighbour.ask(bytes(KIB))).status == 200
        answer = await held[0].ask(bytes(750 * KIB))
        assert answer.status == 429, "it was already too much"
        assert (await small.ask(bytes(836 * KIB))).status in (200, 429)
        assert (await (await model_info.connect()).ask(post("/echo", body=b"x" * 60 * KIB))).status == 200


@pytest.mark.parametrize("num_addresses", [2, 3])
async def test_who_holds_most_makes_room_for_who_comes_later(num_addresses):
    async with serving(max_arriving_bytes=600 * KIB) as model_info:
        each = 600 // num_addresses
        silent = [await hold(model_info, (each - number) * KIB, **by(2 + number)) for number in range(num_addresses)]
        client = await model_info.connect()
        client.send(half_post(100 * KIB, 101 * KIB))
        answer = await silent[0].answer()
        assert (answer.status, answer.headers["x-path"]) == (429, "/half")
        assert (await client.ask(bytes(KIB))).status == 200
        assert model_info.server.arriving.num_bytes == sum((each - n) * KIB for n in range(1, num_addresses))


@pytest.mark.parametrize("how", ["reset", "half closed", "too late", "refused", "answered early", "drained"])
async def test_what_has_arrived_is_no_longer_counted_when_nobody_waits_for_the_rest(how):
    timeouts = only(body_s=0.5 if how == "too late" else 1e6, sweep_s=0.01)
    async with serving(timeouts=timeouts) as model_info:
        client = await model_info.connect()
        path = "/early" if how == "answered early" else "/a"
        client.send(get(path, "Transfer-Encoding: chunked", method="POST") + b"1000\r\n" + bytes(4096))
        if how not in ("answered early", "too late"):
            await until(lambda: model_info.server.arriving.num_bytes == 4096)
        match how:
            case "reset":
                client.reset()
            case "half closed":
                client.shut_down()
            case "refused":
                assert (await client.ask(b"nonsense")).status == 400
            case "too late":
                assert (await client.answer()).status == 408
            case "answered early":
                assert (await client.answer()).body == b"early"
                client.send(bytes(4096))
            case "drained":
                assert await model_info.server.drain(0.05, grace_s=0.01) is False
        await until(lambda: model_info.server.arriving.num_bytes == 0)


def ask_without_reading(model_info: ModelInfo, path: str) -> socket.socket:
    """A client whose kernel takes next to nothing of the answer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(model_info.address())
    sock.sendall(get(path))
    return sock


async def test_who_reads_nothing_keeps_responses_from_being_made_and_others_only_for_a_moment():
    """Of five clients of one address that read nothing, one has its answer at a time; another address is not kept
    waiting, and an honest client of the same address only until the silent ones are reset."""
    async with serving(max_unsent_bytes=80_000_000, timeouts=only(sweep_s=0.2)) as model_info:
        silent = [ask_without_reading(model_info, "/made") for _ in range(5)]
        await until(lambda: model_info.server.num_requests_in_flight == 4)
        other = await model_info.connect(**by(2))
        assert len((await other.ask(get("/made"))).body) == 30_000_000
        same = await model_info.connect()
        assert len((await same.ask(get("/made"))).body) == 30_000_000
        assert model_info.server.unsent.num_most_bytes <= 61_000_000, "one of either address"
        for sock in silent:
            sock.close()


async def test_requests_that_wait_for_room_are_held_as_bodies_are():
    """Of three clients of one address whose inputs of 1 MB wait, one is refused, and says so, because half of the limit
    is 2 MB."""
    async with serving(max_unsent_bytes=60_000_000, max_arriving_bytes=4_000_000) as model_info:
        arriving = model_info.server.arriving
        silent = ask_without_reading(model_info, "/made")
        await until(lambda: model_info.server.unsent.num_bytes >= 30_000_000)
        waiting = [await model_info.connect() for _ in range(3)]
        for client in waiting:
            client.send(get("/made"))
        refused = await waiting[2].answer()
        assert (refused.status, refused.headers["connection"]) == (429, "close")
        assert b"at most 4000000 bytes are held" in refused.body
        assert arriving.num_bytes == 2_000_000
        waiting[1].reset()
        await until(lambda: arriving.num_bytes == 1_000_000)
        silent.close()
        assert len((await waiting[0].answer()).body) == 30_000_000
        assert arriving.num_bytes == 0


async def test_memory_goes_back_once_after_much_of_it_was_used(monkeypatch):
    given_back: list[bool] = []
    monkeypatch.setattr("vecd.gateway.http.listeners.return_free_memory", lambda: given_back.append(True))
    async with recording() as recorded:
        for num_bytes, num_times in ((60 * KIB * KIB, 0), (70 * KIB * KIB, 1)):
            recorded.server.unsent.count(recorded.connection, num_bytes)
            recorded.server.unsent.count(recorded.connection, 0)
            recorded.pass_time(1)
            recorded.pass_time(1)
            assert len(given_back) == num_times


# --- other limits ---------------------------------------------------------------------------------------------------


async def test_changed_limits_are_for_open_connections_too():
    async with serving(max_connections=1) as model_info:
        change, limit = model_info.server.change, partial(Limits, max_body_bytes=50)
        first = await model_info.connect()
        assert (await first.ask(get("/a"))).status == 200
        assert (await (await model_info.connect()).ask(get("/a"))).status == 503
        change(limit(max_connections=3, max_connections_per_address=2), TrustedProxies())
        assert (await (await model_info.connect()).ask(get("/a"))).status == 200
        assert (await (await model_info.connect()).ask(get("/a"))).status == 503, "of one address"
        assert (await (await model_info.connect(**by(2))).ask(get("/a"))).status == 200
        change(limit(max_connections=1), TrustedProxies())
        assert model_info.server.max_connections_per_address == 1
        assert (await first.ask(post("/a", body=bytes(50)))).status == 200, "it was open before"
        assert (await first.ask(post("/a", body=bytes(51)))).status == 413
        assert (await (await model_info.connect()).ask(get("/a"))).status == 503


def test_what_may_be_held_follows_the_longest_body():
    def limits_of(server: Server) -> tuple[int, int]:
        return server.arriving.max_bytes, server.unsent.max_bytes

    server = Server(TinyApp(), Limits(max_body_bytes=1))
    assert limits_of(server) == (512 * 2**20, 512 * 2**20)
    server.change(Limits(max_body_bytes=2**30), TrustedProxies())
    assert limits_of(server) == (2**32, 2**32)


# --- the admin listener ---------------------------------------------------------------------------------------------


async def test_the_admin_listener_has_a_limit_of_its_own(tmp_path):
    async with serving(max_connections=1, admin=listening(tmp_path / "admin")) as model_info:
        assert (await (await model_info.connect()).ask(get("/who"))).body == b"127.0.0.1 False"
        admins = [await model_info.connect_admin() for _ in range(64)]
        for admin in admins:
            assert (await admin.ask(get("/who"))).body == b" True"
        assert model_info.server.num_connections == 1
        answer = await (await model_info.connect_admin()).ask(get("/who"))
        assert answer.status == 503
        assert b"64 to the admin listener" in answer.body
        admins[0].close()
        await until(lambda: len(model_info.server.admin_connections) == 63)
        assert (await (await model_info.connect_admin()).ask(get("/who"))).status == 200


async def test_the_admin_listener_answers_no_web_page():
    async with serving(admin=listening()) as model_info:
        client = await model_info.connect_admin()
        for origin in ("http://example.com", "null", "http://127.0.0.1:9000"):
            answer = await client.ask(post("/reload", f"Origin: {origin}", body=b"x"))
            assert answer.status == 403
            assert b"origin_not_allowed" in answer.body
        assert model_info.app.handled == []
        assert (await client.ask(post("/reload", body=b"x"))).status == 200
        assert (await (await model_info.connect()).ask(get("/a", "Origin: http://example.com"))).status == 200
        client.send(get("/reload", "Origin: null", "Content-Length: 5", method="POST"))
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (403, "close")
        assert await client.rest() == b""
        assert model_info.app.handled == ["/reload", "/a"]
        assert model_info.app.checked == []


def host(name: str, path: str = "/a") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {name}\r\n\r\n".encode()


async def test_a_page_whose_name_comes_to_mean_this_machine_reads_nothing(tmp_path):
    """DNS rebinding: the browser takes the admin listener for the page's own server, so that no Origin tells."""
    async with serving(admin=listening()) as model_info:
        client = await model_info.connect_admin()
        for name in ("evil.example", "evil.example:9000", "localhost.evil.example", "notlocalhost", "127.0.0.1.a:8"):
            answer = await client.ask(host(name))
            assert (answer.status, b"host_not_allowed" in answer.body) == (403, True)
        assert model_info.app.handled == []
        for name in ("localhost", "LocalHost:9000", "vecd.localhost:9000", "127.0.0.1:9", "10.0.0.5", "[::1]:9000", ""):
            assert (await client.ask(host(name))).status == 200
        assert (await (await model_info.connect()).ask(host("api.example"))).status == 200
    async with serving(admin=listening(tmp_path / "admin")) as model_info:
        assert (await (await model_info.connect_admin()).ask(host("api.example"))).status == 200
    with socket.create_server(("0.0.0.0", 0)) as sock:
        async with serving(admin=Listening(sock.dup())) as model_info:
            assert (await (await model_info.connect_admin()).ask(host("api.example"))).status == 200


async def test_the_app_may_add_headers_to_every_answer_but_those_on_the_admin_listener(tmp_path):
    """Also where it never sees the request, or it was not understood."""
    asked = {
        get("/a"): (200, "/a"),
        get("/refused"): (400, "/refused"),
        get("/fails"): (500, "/fails"),
        post("/secret", body=b"hello")[:-5]: (401, "/secret"),
        post("/early", body=b"hello")[:-5]: (200, "/early"),
        post("/b", "Content-Encoding: br", body=b"hello"): (415, "/b"),
        get("/c", "Content-Length: 1000001", method="POST"): (413, "/c"),
        b"garbage\r\n\r\n": (400, "-"),
    }
    async with serving(admin=listening(tmp_path / "admin"), max_connections=1) as model_info:
        for data, (status, added) in asked.items():
            client = await model_info.connect()
            answer = await client.ask(data)
            assert (answer.status, answer.headers["x-added"]) == (status, added)
            if status == 200:
                refused = await model_info.connect()
                answer = await refused.ask(get("/a"))
                assert (answer.status, answer.headers["x-added"]) == (503, "-")
                refused.close()
            client.close()
            await until(lambda: model_info.server.num_connections == 0)
        admin = await model_info.connect_admin()
        assert "x-added" not in (await admin.ask(get("/a"))).headers
        assert "x-added" not in (await admin.ask(get("/refused", "Origin: https://a.example"))).headers


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_the_admin_listener_is_the_last_to_close(kind, tmp_path):
    admin = listening(tmp_path / "admin" if kind == "unix" else None)
    address = admin.address
    async with serving(admin=admin) as model_info:
        busy, idle = await model_info.connect(), await model_info.connect_admin()
        assert (await idle.ask(get("/a"))).status == 200
        public_address = model_info.address()
        busy.send(get("/wait"))
        await model_info.app.started.wait()
        drained = asyncio.ensure_future(model_info.server.drain(DEADLINE_S, grace_s=0.01))
        await until(lambda: model_info.listening.sock.fileno() == -1)
        with pytest.raises(OSError):  # noqa: PT011
            await connect_to(public_address)
        for _ in range(2):
            answer = await (await model_info.connect_admin()).ask(get("/who"))
            assert answer.status == 200
            assert answer.body.endswith(b" True")
        assert not drained.done()
        model_info.app.release.set()
        assert (await busy.answer()).body == b"/wait"
        busy.close()
        assert await drained is True
        assert await idle.rest() == b""
        with pytest.raises(OSError):  # noqa: PT011
            await connect_to(address)


async def test_who_waits_on_the_admin_listener_does_not_hold_up_a_drain(tmp_path):
    async with serving(admin=listening(tmp_path / "admin")) as model_info:
        admin = await model_info.connect_admin()
        admin.send(get("/wait"))
        await model_info.app.started.wait()
        assert await model_info.server.drain(DEADLINE_S, grace_s=0) is True
        assert model_info.app.cancelled.is_set()


async def test_a_gateway_that_is_done_leaves_the_admin_socket_to_others(tmp_path):
    """Several gateways listen on it, and the first to be done must not turn away those who come to another."""

    admin = listening(tmp_path / "admin")
    async with serving(is_ahead=lambda: False, admin=Listening(admin.sock.dup())) as model_info:
        assert await model_info.server.drain(DEADLINE_S, grace_s=0) is True
    async with serving(is_ahead=lambda: False, admin=admin) as other:
        assert (await (await other.connect_admin()).ask(get("/who"))).status == 200


# --- drain ----------------------------------------------------------------------------------------------------------


async def test_a_request_that_has_arrived_unread_is_not_closed_upon(sock):
    """A loop that was held up comes to its timers before it reads."""

    async with serving(sock) as model_info:
        client = await model_info.connect()
        assert (await client.ask(get("/a"))).status == 200
        [connection] = model_info.server.connections
        client.send(get("/b"))
        connection.close_if_silent(math.inf)
        assert (await client.answer()).body == b"/b"
        await until(lambda: connection.reader.state is ReadState.IDLE)
        connection.close_if_silent(math.inf)
        assert await client.rest() == b""


async def test_drain_answers_what_is_in_flight_and_closes_what_is_idle(sock):
    async with serving(sock) as model_info:
        idle, busy = [await model_info.connect() for _ in range(2)]
        assert (await idle.ask(get("/a"))).status == 200
        busy.send(get("/wait") + get("/2"))
        await model_info.app.started.wait()
        address = model_info.address()
        drained = asyncio.ensure_future(model_info.server.drain(DEADLINE_S, grace_s=0.02))
        assert await idle.rest() == b""
        assert not drained.done()
        with pytest.raises(OSError):  # noqa: PT011
            await connect_to(address)
        model_info.app.release.set()
        assert "connection" not in (await busy.answer()).headers
        answer = await busy.answer()
        assert (answer.body, answer.headers["connection"]) == (b"/2", "close")
        assert await busy.rest() == b""
        busy.close()
        assert await drained is True


async def connect_to(address: Any) -> None:
    if isinstance(address, str):
        await asyncio.open_unix_connection(address)
    else:
        await asyncio.open_connection(*address)


async def test_drain_serves_all_who_come_in_its_grace():
    async with serving() as model_info:
        idle = await model_info.connect()
        assert (await idle.ask(get("/a"))).status == 200
        drained = asyncio.ensure_future(model_info.server.drain(DEADLINE_S, grace_s=1))
        await until(lambda: model_info.server.is_draining)
        late = await model_info.connect()
        for client in (idle, late):
            assert (await client.ask(get("/b"))).headers["connection"] == "close"
            assert await client.rest() == b""
            client.close()
        assert await drained is True


async def test_drain_answers_what_was_on_its_way():
    """On an idle connection and in the listener's backlog; the event loop has seen neither when the drain begins."""

    loop = asyncio.get_running_loop()
    async with serving() as model_info:
        with socket.socket() as idle, socket.socket() as new:
            idle.setblocking(False)
            await loop.sock_connect(idle, model_info.address())
            idle.send(get("/a"))
            assert b"/a" in await loop.sock_recv(idle, 10_000)
            idle.send(get("/b"))
            new.connect(model_info.address())
            new.setblocking(False)
            new.send(get("/c"))
            drained = asyncio.ensure_future(model_info.server.drain(DEADLINE_S, grace_s=0.5))
            for client, body in ((idle, b"/b"), (new, b"/c")):
                answer = await loop.sock_recv(client, 10_000)
                assert answer.endswith(body)
                assert b"connection: close" in answer
        assert await drained is True


@pytest.mark.parametrize("num_gateways", [1, 2])
async def test_drain_answers_who_was_accepted_at_last_and_leaves_the_others(num_gateways):
    """Of a socket that stays open elsewhere. The drain begins so many turns of the loop after the request has come."""

    for num_turns in range(6):
        options: dict[str, Any] = {"is_ahead": lambda: False} if num_gateways > 1 else {}
        limits = Limits(max_body_bytes=1000)
        app = TinyApp()
        server = Server(app, limits, timeouts=FOREVER, **options)
        elsewhere = listening().sock
        with elsewhere, socket.create_connection(elsewhere.getsockname(), DEADLINE_S) as client:
            client.sendall(get("/len"))
            client.shutdown(socket.SHUT_WR)
            await server.start(elsewhere.dup(), keeps_listening=True)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await server.drain(DEADLINE_S, grace_s=0)
            elsewhere.setblocking(False)
            try:
                elsewhere.accept()[0].close()  # the next life's
            except BlockingIOError:
                assert app.handled == ["/len"]


async def test_drain_waits_for_a_request_that_is_still_arriving():
    async with serving() as model_info:
        client = await model_info.connect()
        client.send(post("/echo", body=b"hello")[:-2])
        await until(lambda: model_info.app.checked == ["/echo"])
        drained = asyncio.ensure_future(model_info.server.drain(DEADLINE_S, grace_s=0))
        await until(lambda: model_info.server.is_draining)
        answer = await client.ask(b"lo")
        assert (answer.body, answer.headers["connection"]) == (b"hello", "close")
        client.close()
        assert await drained is True


@pytest.mark.parametrize("data", [get("/wait"), get("/a") + post("/echo", body=b"hello")[:-1]])
async def test_drain_gives_up_at_its_deadline(data):
    async with serving() as model_info:
        client = await model_info.connect()
        client.send(data)
        await until(lambda: bool(model_info.app.handled))
        await until(lambda: b"wait" in data or model_info.app.checked == ["/echo"])
        assert await model_info.server.drain(0.05, grace_s=0.01) is False
        assert model_info.server.num_connections == 0
        assert model_info.server.num_requests_in_flight == 0
        assert model_info.app.cancelled.is_set() == (b"wait" in data)
        with suppress(ConnectionResetError):
            await client.rest()


async def test_drain_counts_an_answer_that_was_not_taken_as_not_given():
    async with serving() as model_info:
        with socket.create_connection(model_info.address()) as sock:
            sock.send(get("/large"))
            await until(lambda: model_info.app.handled == ["/large"])
            assert await model_info.server.drain(0.05, grace_s=0.01) is False


async def test_drain_owes_nothing_to_a_client_that_does_not_close():
    async with serving() as model_info:
        client = await model_info.connect()
        assert (await client.ask(post("/secret", body=b"hello")[:-1])).status == 401
        assert await model_info.server.drain(0.05, grace_s=0.01) is True


async def test_drain_waits_for_cancelled_handlers_to_tidy_up():
    async with serving() as model_info:
        client = await model_info.connect()
        client.send(get("/slow-to-stop"))
        await model_info.app.started.wait()
        assert await model_info.server.drain(0) is False
        assert model_info.app.tidied_up


# --- log ------------------------------------------------------------------------------------------------------------


async def test_each_request_is_heard_of_once_when_it_is_over():
    heard: list[tuple[int, str]] = []

    def on_finished(status: int, request: HttpRequest | None) -> None:
        heard.append((status, "" if request is None else f"{request.path} {request.timeline.error}".rstrip()))

    async with serving() as model_info:
        model_info.server.on_finished = on_finished
        client = await model_info.connect()
        await client.ask(post("/quiet", body=b"a text"))
        await client.ask(post("/refused", body=b"a text"))
        await client.ask(get("/fails"))
        await client.ask(get("/secret", "content-length: 1"))
        client = await model_info.connect()
        await client.ask(b"nonsense\r\n\r\n")
        client = await model_info.connect()
        client.send(get("/wait"))
        await model_info.app.started.wait()
        client.reset()
        await until(lambda: len(heard) == 6)
    assert heard == [
        (200, "/quiet"),
        (400, "/refused invalid_request_error"),
        (500, "/fails server_error"),
        (401, "/secret invalid_api_key"),
        (400, ""),
        (499, "/wait"),
    ]


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
        self.socket, self.client_socket = socket.socketpair()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.socket if name == "socket" else default

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


@asynccontextmanager
async def recording(
    timeouts: Timeouts | None = None, *, max_body_bytes: int = 1000, max_arriving_bytes: int | None = None
) -> AsyncIterator[Recorded]:
    app, clock = TinyApp(), Clock()
    server = Server(
        app, Limits(max_body_bytes=max_body_bytes, max_connections=1), timeouts=timeouts or Timeouts(), clock=clock
    )
    server.arriving.max_bytes = max_arriving_bytes or server.arriving.max_bytes
    connection = Connection(server, asyncio.get_running_loop())
    transport = RecordingTransport()
    connection.connection_made(transport)
    yield Recorded(app, clock, server, connection, transport)
    connection.connection_lost(None)
    assert server.num_connections == 0
    assert server.arriving.num_bytes == server.unsent.num_bytes == 0
    transport.socket.close()
    transport.client_socket.close()


async def test_deadlines_are_neither_early_nor_late():
    async with recording() as recorded:
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


async def test_silence_is_measured_from_what_happened_last():
    async with recording() as recorded:
        recorded.pass_time(5)
        recorded.connection.close_if_silent(recorded.clock.now - 5.1)
        assert not recorded.transport.is_closed
        recorded.connection.data_received(get("/wait"))
        await recorded.app.started.wait()
        recorded.pass_time(1000)  # a slow handler has no deadline here
        recorded.connection.close_if_silent(recorded.clock.now)
        assert not recorded.transport.is_closed
        recorded.app.release.set()
        await until(lambda: recorded.transport.sent.endswith(b"/wait"))
        recorded.connection.close_if_silent(recorded.clock.now - 0.1)
        assert not recorded.transport.is_closed
        recorded.connection.close_if_silent(recorded.clock.now)
        assert recorded.transport.is_closed


async def test_a_handler_that_ignores_its_end_does_no_harm():
    async with recording() as recorded:
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


async def test_what_waits_behind_a_request_is_bounded():
    async with recording() as recorded:
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


async def test_a_connection_whose_waiting_requests_were_dropped_is_read_on():
    """So that a disconnect is noticed, and the client is not held back."""
    async with recording(max_arriving_bytes=1000) as recorded:
        recorded.connection.data_received(get("/wait"))
        await recorded.app.started.wait()
        recorded.connection.data_received(get("/2") * 3000)
        assert recorded.server.arriving.num_bytes == 0
        assert not recorded.transport.is_reading_paused
        recorded.app.release.set()
        await until(lambda: recorded.transport.is_shut_down)
        assert b"connection: close" in recorded.transport.sent


async def test_small_chunks_are_read_a_few_in_each_turn_of_the_loop():
    """In order, with the client held back meanwhile, and although it has shut down its half."""
    chunk, num_chunks = b"1;a\r\nx\r\n", 20_000
    async with recording(max_body_bytes=num_chunks) as recorded:
        transport, reader = recorded.transport, recorded.connection.reader
        head = get("/len", "Transfer-Encoding: chunked", method="POST")
        recorded.connection.data_received(head + chunk * (num_chunks - 1))
        assert transport.is_reading_paused
        recorded.connection.data_received(chunk + b"0\r\n\r\n")
        assert recorded.connection.eof_received()
        num_before, most_in_a_turn, num_turns = 0, 0, 0
        while reader.num_body_bytes:
            most_in_a_turn = max(most_in_a_turn, reader.num_body_bytes - num_before)
            num_before, num_turns = reader.num_body_bytes, num_turns + 1
            await asyncio.sleep(0)
        assert most_in_a_turn <= STEPS_PER_READ <= 1024
        assert num_turns > 20
        await until(lambda: transport.sent.endswith(b"%d" % num_chunks))
        assert not transport.is_reading_paused


async def test_one_pipelined_request_is_handled_in_a_turn_of_the_loop():
    async with recording() as recorded:
        recorded.connection.data_received(get("/a") * 100)
        for num_turns in range(1, 101):
            await asyncio.sleep(0)
            assert len(recorded.app.handled) <= num_turns
        await until(lambda: len(recorded.app.handled) == 100)


async def test_what_waits_behind_a_request_counts_as_arriving():
    async with recording() as recorded:
        waiting = post("/len", body=bytes(900))
        recorded.connection.data_received(get("/wait") + waiting)
        assert recorded.server.arriving.num_bytes == len(waiting)
        recorded.connection.data_received(waiting)
        assert recorded.server.arriving.num_bytes == 2 * len(waiting)
        recorded.app.release.set()
        await until(lambda: recorded.transport.sent.count(b"HTTP/1.1 200") == 3)
        assert recorded.server.arriving.num_bytes == 0


async def test_too_much_behind_a_request_is_dropped_and_its_answer_is_the_last():
    async with recording(max_body_bytes=200 * KIB, max_arriving_bytes=150 * KIB) as recorded:
        recorded.connection.data_received(get("/wait") + post("/len", body=bytes(150 * KIB)))
        assert recorded.server.arriving.num_bytes == 0
        assert recorded.transport.sent == b""
        recorded.app.release.set()
        await until(lambda: recorded.transport.is_shut_down)
        assert recorded.transport.sent.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in recorded.transport.sent
        assert not recorded.transport.is_reading_paused
        assert recorded.app.handled == ["/wait"]


async def test_the_next_request_waits_until_the_answer_before_it_is_taken():
    async with recording() as recorded:
        recorded.connection.data_received(get("/1"))
        recorded.connection.pause_writing()
        await until(lambda: recorded.transport.sent.endswith(b"/1"))
        recorded.connection.data_received(get("/2"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert recorded.app.handled == ["/1"]
        recorded.connection.resume_writing()
        await until(lambda: recorded.transport.sent.endswith(b"/2"))


def send_large_answer(recorded: Recorded, num_unsent_bytes: int) -> None:
    """As if so much of an answer waited for the client."""
    recorded.connection.send([bytes(num_unsent_bytes)])
    recorded.transport.num_unsent_bytes = num_unsent_bytes


MUCH = 32 * 33 * 100_000


@pytest.mark.parametrize(
    ("num_bytes", "steps", "is_aborted"),
    [
        pytest.param(320 * 1024, [(16 * 1024, 30)] * 10, False, id="16 KiB in each 30 s"),
        pytest.param(320 * 1024, [(16 * 1024 - 1, 30)] * 10, True, id="a byte less"),
        pytest.param(100, [(99, 29.9)], False, id="not all of little, yet"),
        pytest.param(100, [(99, 29.9), (0, 0.1)], True, id="not all of little"),
        pytest.param(MUCH, [(MUCH // 32, 30)] * 31, False, id="all of much after 32 periods"),
        pytest.param(MUCH, [(MUCH // 33, 30)] * 32, True, id="not all of much after 32 periods"),
    ],
)
async def test_how_fast_a_slow_reader_has_to_take_its_answer(num_bytes, steps, is_aborted):
    """The time begins with the answer, and not when the connection was looked at last, which on a busy machine may have
    been long before."""
    async with recording() as recorded:
        for num_unsent_bytes in (10, 0):
            send_large_answer(recorded, num_unsent_bytes)
            recorded.pass_time(0)
        recorded.clock.now += 25
        send_large_answer(recorded, num_bytes)
        recorded.pass_time(0)
        for num_taken_bytes, seconds in steps:
            recorded.transport.num_unsent_bytes -= num_taken_bytes
            recorded.pass_time(seconds)
        assert recorded.transport.is_aborted == is_aborted


async def test_only_who_takes_nothing_of_its_answer_is_reset_for_want_of_room(caplog):
    async with recording() as recorded:
        recorded.server.limits = replace(recorded.server.limits, max_connections=10)
        recorded.server.unsent.max_bytes = 1000
        connections = [(recorded.connection, recorded.transport)]
        for _ in range(4):
            transport = RecordingTransport()
            connection = Connection(recorded.server, asyncio.get_running_loop())
            connection.connection_made(transport)
            connections.append((connection, transport))
        for (connection, transport), num_bytes in zip(connections, [900, 300, 500, 400, 300], strict=True):
            connection.send([bytes(num_bytes)])
            transport.num_unsent_bytes = num_bytes
        for _ in range(3):
            recorded.pass_time(1)
            assert not any(transport.is_aborted for _, transport in connections), "they may be busy for a moment"
            connections[0][1].num_unsent_bytes -= 1
        recorded.pass_time(1)
        aborted = [transport.is_aborted for _, transport in connections]
        assert aborted == [False, True, True, True, True], "those that hold most first, and it was not enough"
        for connection, transport in connections[1:]:
            connection.connection_lost(None)
            transport.socket.close()
            transport.client_socket.close()
        recorded.server.unsent.max_bytes = 800
        for _ in range(2):
            recorded.pass_time(1)
            assert not connections[0][1].is_aborted
        recorded.pass_time(1)
        assert connections[0][1].is_aborted
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [
        "4 connections reset that read nothing of their responses: 2400 bytes were unsent, at most 1000 are held, "
        "half of them for one address",
        "1 connections reset that read nothing of their responses: 900 bytes were unsent, at most 800 are held, "
        "half of them for one address",
    ]


async def test_what_a_kernel_holds_for_a_client_counts_as_not_taken():
    """It takes megabytes from us at a time, and the client may read them as slowly as it pleases."""

    async with recording() as recorded:
        recorded.transport.socket.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                recorded.connection.num_sent_bytes += recorded.transport.socket.send(bytes(8192))
        send_large_answer(recorded, 100_000)
        recorded.pass_time(0)
        for _ in range(5):
            recorded.pass_time(20)
            assert not recorded.transport.is_aborted
            recorded.transport.client_socket.recv(32 * 1024)
        for _ in range(3):
            recorded.pass_time(20)
        assert recorded.transport.is_aborted


async def test_a_client_reads_the_last_answer_as_slowly_as_any_other():
    async with recording() as recorded:
        recorded.connection.data_received(get("/1", "Connection: close"))
        await until(lambda: recorded.transport.is_shut_down)
        recorded.transport.socket.send(bytes(100_000))
        for _ in range(3):
            recorded.pass_time(9)
            assert not recorded.transport.is_aborted
        recorded.transport.client_socket.recv(200_000)
        recorded.pass_time(2.9)
        assert not recorded.transport.is_aborted
        recorded.pass_time(0.2)
        assert recorded.transport.is_aborted


async def test_a_client_that_does_not_close_is_cut_off():
    async with recording() as recorded:
        recorded.pass_time(5)
        recorded.connection.data_received(b"garbage\r\n\r\n")
        assert recorded.transport.is_shut_down
        assert recorded.transport.sent.startswith(b"HTTP/1.1 400 ")
        recorded.pass_time(2.9)
        assert not recorded.transport.is_aborted
        recorded.pass_time(0.1)
        assert recorded.transport.is_aborted


async def test_a_client_that_was_refused_keeps_its_time_to_read_why_in_a_drain():
    async with recording() as recorded:
        recorded.connection.data_received(b"garbage\r\n\r\n")
        recorded.connection.close_if_silent(recorded.clock.now)
        assert not recorded.transport.is_closed


async def test_a_refused_client_may_finish_sending_but_not_drip():
    async with recording() as recorded:
        recorded.connection.data_received(b"garbage\r\n\r\n")
        for _ in range(10):
            recorded.connection.data_received(b"x" * 1_000_000)
            recorded.pass_time(2)
            assert not recorded.transport.is_aborted
        recorded.connection.data_received(b"x")
        recorded.pass_time(1.1)
        assert recorded.transport.is_aborted


async def test_a_refused_client_may_not_send_for_ever():
    async with recording() as recorded:
        recorded.connection.data_received(b"garbage\r\n\r\n")
        for _ in range(65):
            recorded.connection.data_received(bytes(1024 * 1024))
        assert recorded.transport.is_aborted


async def test_the_telling_of_refused_connections_is_bounded():
    async with recording() as recorded:
        for num_transports in range(300 + 257):
            transport = RecordingTransport()
            connection = Connection(recorded.server, asyncio.get_running_loop())
            connection.connection_made(transport)
            assert transport.is_aborted == (num_transports == 300 + 256)
            if num_transports < 300:  # these leave, and are forgotten
                connection.connection_lost(None)
