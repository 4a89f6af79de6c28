"""What differs where the listener speaks TLS. `test_server` runs what does not on such a listener, too."""

import asyncio
import gc
import logging
import socket
import ssl
from contextlib import suppress
from typing import Any

import pytest
import uvloop

from tests.support.certificates import Certificate, make_certificate
from tests.support.tinyserver import (
    DEADLINE_S,
    Listening,
    ModelInfo,
    get,
    listening,
    no_collector,
    only,
    post,
    serving,
    until,
)
from vecd.gateway.http.tls import ServerTls
from vecd.gateway.http.tls_layer import TlsLayer


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def tls(certificate: Certificate) -> Listening:
    return Listening(listening().sock, certificate)


class TlsClient:
    """A client that holds TLS in its own hands: what it sends, when, and whether it says goodbye."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self.sock = sock
        self.from_server, self.to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.from_server, self.to_server, server_hostname="localhost")

    @classmethod
    async def connect(cls, model_info: ModelInfo, *, version: ssl.TLSVersion | None = None) -> "TlsClient":
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, model_info.address())
        assert model_info.listening.certificate is not None
        context = model_info.listening.certificate.client_context()
        if version is not None:
            context.maximum_version = version
        return cls(sock, context)

    def begin(self) -> bytes:
        """The first thing that a client sends."""
        with suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self.to_server.read()

    async def shake_hands(self) -> None:
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self.flush()
                self.from_server.write(await self.received())
        await self.flush()

    async def flush(self) -> None:
        await self.send_raw(self.to_server.read())

    async def send_raw(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def received(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.sock, 100_000)

    async def send(self, data: bytes) -> None:
        self.tls.write(data)
        await self.flush()

    async def read(self) -> bytes:
        """Some of what the server says; b"" after its close_notify. Raises EOFError if the connection ends without."""
        while True:
            try:
                return self.tls.read(100_000)
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLWantReadError:
                data = await self.received()
                if not data:
                    raise EOFError from None
                self.from_server.write(data)

    async def say_goodbye(self) -> None:
        with suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        await self.flush()

    def close(self) -> None:
        self.sock.close()


async def is_gone(model_info: ModelInfo) -> None:
    await until(lambda: model_info.server.num_connections == 0)
    await asyncio.sleep(0)


VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("make_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_request_byte_by_byte_from_the_handshake_on(tls, version, make_loop):
    async def test() -> None:
        async with serving(tls) as model_info:
            client = await TlsClient.connect(model_info, version=version)
            first = client.begin()
            for at in range(len(first)):
                await client.send_raw(first[at : at + 1])
            client.from_server.write(await client.received())
            await client.shake_hands()
            client.tls.write(post("/echo", body=b"hello"))
            for byte in client.to_server.read():
                await client.send_raw(bytes([byte]))
            assert (await client.read()).endswith(b"hello")
            client.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(asyncio.wait_for(test(), DEADLINE_S))


async def test_a_gateway_among_several(tls):
    async with serving(tls, is_ahead=lambda: True) as model_info:
        for _ in range(3):
            client = await model_info.connect()
            assert (await client.ask(get("/who"))).body == b"127.0.0.1 False"


# --- what is not TLS ------------------------------------------------------------------------------------------------

NOT_TLS = {
    "garbage": bytes(range(256)) * 10,
    "SSL 2": b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10" + bytes(37),
    "a record that is too long": b"\x16\x03\x01\xff\xff" + bytes(70_000),
    "an alert": b"\x15\x03\x01\x00\x02\x02\x28",
}


@pytest.mark.parametrize("name", NOT_TLS)
async def test_what_is_not_tls_is_closed_without_a_word_in_the_log(tls, name, caplog):
    async with serving(tls) as model_info:
        client = await TlsClient.connect(model_info)
        await client.send_raw(NOT_TLS[name])
        with suppress(ConnectionResetError):
            while data := await client.received():
                assert data[0] == 0x15, "an alert, and never an answer in the clear"
        await is_gone(model_info)
        client.close()
        assert (await (await model_info.connect()).ask(get("/b"))).status == 200
    assert [record for record in caplog.records if record.levelno >= logging.INFO] == []


@pytest.mark.parametrize("make_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize(
    ("sent", "size"),
    [(get("/"), 1), (post("/echo", body=b"x" * 300_000), 100_000), (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 5)],
)
def test_plain_http_is_told_to_use_https(tls, sent, size, make_loop, caplog):
    async def test() -> None:
        async with serving(tls) as model_info:
            client = await TlsClient.connect(model_info)
            await client.send_raw(sent[:size])
            with suppress(ConnectionError):
                await client.send_raw(sent[size:])
            response = b""
            while data := await client.received():
                response += data
            head, _, body = response.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert b"\r\ncontent-type: text/plain; charset=utf-8\r\n" in head
            assert b"\r\nconnection: close" in head
            assert b"https://" in body
            client.close()
            await is_gone(model_info)
            model_info.server.sweep()
            model_info.server.sweep()

    with caplog.at_level(logging.WARNING), asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(asyncio.wait_for(test(), DEADLINE_S))
    assert [record.getMessage() for record in caplog.records] == [
        "Connections refused that sent plain HTTP to the TLS port, where clients must use https://: 1"
    ]


@pytest.mark.parametrize("num_bytes", [0, 1, 100])
async def test_a_handshake_that_is_not_done_in_time(tls, num_bytes):
    async with serving(tls) as model_info:
        done = await model_info.connect()
        model_info.server.timeouts = only(handshake_s=0.1)
        client = await TlsClient.connect(model_info)
        await client.send_raw(client.begin()[:num_bytes])
        with suppress(ConnectionResetError):
            assert await client.received() == b""
        await until(lambda: model_info.server.num_connections == 1)
        assert (await done.ask(get("/a"))).status == 200
        client.close()


async def test_a_client_that_leaves_within_the_handshake(tls, caplog):
    async with serving(tls) as model_info:
        for num_bytes in (0, 1, 100, 10_000):
            client = await TlsClient.connect(model_info)
            await client.send_raw(client.begin()[:num_bytes])
            await until(lambda: model_info.server.num_connections == 1)
            client.close()
            await is_gone(model_info)
    assert [record for record in caplog.records if record.levelno >= logging.INFO] == []


async def test_a_record_that_was_tampered_with(tls, caplog):
    async with serving(tls) as model_info:
        client = await TlsClient.connect(model_info)
        await client.shake_hands()
        await client.send(get("/wait"))
        await model_info.app.started.wait()
        client.tls.write(get("/never"))
        record = bytearray(client.to_server.read())
        record[-1] ^= 1
        await client.send_raw(bytes(record))
        await model_info.app.cancelled.wait()
        await is_gone(model_info)
        assert model_info.app.handled == ["/wait"]
        client.close()
    assert [record for record in caplog.records if record.levelno >= logging.INFO] == []


async def test_one_connection_too_many_that_never_speaks_is_let_go(tls):
    async with serving(tls, max_connections=0, timeouts=only(linger_s=0.05, sweep_s=0.01)) as model_info:
        client = await TlsClient.connect(model_info)
        with suppress(ConnectionResetError):
            assert await client.received() == b""
        client.close()


# --- how TLS ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["connection: close", "idle", "drain"])
async def test_the_server_says_goodbye(tls, how):
    """So that a client knows that nothing was cut off."""

    async with serving(tls) as model_info:
        client = await TlsClient.connect(model_info)
        await client.shake_hands()
        await client.send(get("/a", *(["Connection: close"] if how == "connection: close" else [])))
        assert (await client.read()).endswith(b"/a")
        if how == "idle":
            model_info.server.timeouts = only(idle_s=0.05, sweep_s=0.01)
        drained = asyncio.ensure_future(model_info.server.drain(DEADLINE_S, grace_s=0)) if how == "drain" else None
        assert await client.read() == b""
        client.close()
        assert drained is None or await drained is True


async def test_who_says_goodbye_may_still_read(tls):
    async with serving(tls) as model_info:
        client = await TlsClient.connect(model_info)
        await client.shake_hands()
        await client.send(get("/wait") + get("/pieces"))
        await client.say_goodbye()
        await model_info.app.started.wait()
        for _ in range(10):
            model_info.server.sweep()
            await asyncio.sleep(0.001)
        model_info.app.release.set()
        pieces = []
        while data := await client.read():
            pieces.append(data)
        everything = b"".join(pieces)
        assert everything.count(b"HTTP/1.1 200 OK") == 2
        assert len(everything) > 22_500_000
        client.close()


async def test_what_comes_after_a_goodbye_is_ignored(tls):
    async with serving(tls) as model_info:
        client = await TlsClient.connect(model_info)
        await client.shake_hands()
        await client.send(get("/wait"))
        await model_info.app.started.wait()
        await client.say_goodbye()
        for _ in range(20):
            await client.send_raw(b"\x17\x03\x03\x00\x20" + bytes(32))
            await asyncio.sleep(0.002)
        model_info.app.release.set()
        everything = b""
        while data := await client.read():
            everything += data
        assert everything.count(b"HTTP/1.1 100") <= 2
        assert everything.endswith(b"/wait")
        client.close()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("says_goodbye", [True, False])
async def test_who_leaves_is_noticed(tls, says_goodbye, version):
    async with serving(tls) as model_info:
        client = await TlsClient.connect(model_info, version=version)
        await client.shake_hands()
        await client.send(get("/wait"))
        await model_info.app.started.wait()
        if says_goodbye:
            await client.say_goodbye()
        client.close()
        await model_info.app.cancelled.wait()
        await is_gone(model_info)


async def test_what_waits_for_a_client_is_counted_and_not_encrypted_yet(tls):
    async with serving(tls) as model_info:
        client = await TlsClient.connect(model_info)
        await client.shake_hands()
        await client.send(get("/large"))
        await until(lambda: model_info.app.handled == ["/large"])
        (connection,) = model_info.server.connections
        layer: Any = connection.transport
        assert isinstance(layer, TlsLayer)
        await until(lambda: layer.get_write_buffer_size() > 0 and layer.is_socket_blocked)
        assert layer.get_write_buffer_size() > 20_000_000
        assert layer.socket.get_write_buffer_size() < 300_000
        num_bytes = 0
        while num_bytes < 30_000_000:
            num_bytes += len(await client.read())
        assert layer.get_write_buffer_size() == 0
        client.close()


async def test_a_connection_that_ended_is_freed_at_once(tls):
    def num_layers() -> int:
        return sum(type(thing) in (TlsLayer, ssl.SSLObject) for thing in gc.get_objects())

    with no_collector():
        async with serving(tls) as model_info:
            client = await TlsClient.connect(model_info)
            await client.shake_hands()
            await client.send(get("/a"))
            await client.read()
            before = num_layers()
            client.close()
            await is_gone(model_info)
            await asyncio.sleep(0.01)
            assert num_layers() == before - 2


async def test_a_new_certificate_is_for_new_connections(tls, tmp_path):
    other = make_certificate(tmp_path)
    made = ServerTls(tls.certificate.cert, tls.certificate.key)
    async with serving(tls, tls=made) as model_info:
        client = await model_info.connect()
        made.cert, made.key = other.cert, other.key
        made.reload()
        assert (await client.ask(get("/a"))).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await model_info.connect()
        model_info.listening.certificate = other
        assert (await (await model_info.connect()).ask(get("/b"))).status == 200
