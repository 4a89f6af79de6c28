"""Whose a request is behind a proxy, and behind none: real sockets, with TLS and without, of a server that trusts some
peers."""

import asyncio
import logging
import socket
import struct

import pytest

from tests.support.certificates import Certificate, make_certificate
from tests.support.tinyserver import FOREVER, Client, Listening, ModelInfo, get, listening, only, post, serving, until
from vecd.gateway.http.forwarded import TrustedProxies

PROXY, STRANGER = "127.0.0.2", "127.0.0.3"
TRUSTED = TrustedProxies(PROXY)
CALLER = "203.0.113.9"
V2_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


async def client_at(model_info: ModelInfo, address: str) -> Client:
    return await model_info.connect(local_addr=(address, 0))


async def who(client: Client, *headers: str) -> str:
    """Whom the application takes for the client of two requests: one that comes at once, and one in two parts."""
    whole = (await client.ask(get("/who", *headers))).body
    request = post("/who", *headers, body=b"ab")
    client.send(request[:-1])
    await asyncio.sleep(0.01)
    assert (await client.ask(request[-1:])).body == whole
    return whole.decode().partition(" ")[0]


# --- headers --------------------------------------------------------------------------------------------------------

FORGED = [
    "X-Forwarded-For: 203.0.113.9",
    "X-Forwarded-For: 127.0.0.2",
    "X-Forwarded-For: 203.0.113.9, 127.0.0.2",
    "X-Forwarded-For: 203.0.113.9:4711",
    "X-Forwarded-For: 2001:db8::9",
    "X-Forwarded-For: [2001:db8::9]:4711",
    "X-Forwarded-For: ::ffff:203.0.113.9",
    "X-Forwarded-For: unknown",
    "X-Forwarded-For: ,,,\xff",
    "X-Forwarded-For:",
    "Forwarded: for=203.0.113.9",
    'Forwarded: for="203.0.113.9:4711";proto=https;by=127.0.0.2',
    'Forwarded: for="[2001:db8::9]:4711"',
    "Forwarded: for=203.0.113.9, for=127.0.0.2",
    "Forwarded: for=_hidden",
    'Forwarded: for="',
    "X-Real-IP: 203.0.113.9",
    "X-Forwarded-Proto: https",
    "X-Forwarded-Host: elsewhere",
    "X-Forwarded: for=203.0.113.9",
    "Forwarded-For: 203.0.113.9",
    "X-Client-IP: 203.0.113.9",
    "True-Client-IP: 203.0.113.9",
    "CF-Connecting-IP: 203.0.113.9",
    "Via: 1.1 127.0.0.2",
]


@pytest.mark.parametrize(
    "trusted", [None, TRUSTED, TrustedProxies("unix,10.0.0.0/8,::1")], ids=["none", "one", "other"]
)
@pytest.mark.parametrize("forged", FORGED)
async def test_a_header_of_an_untrusted_peer_changes_nothing(trusted, forged):
    async with serving(trusted_proxies=trusted, max_connections_per_address=1) as model_info:
        stranger = await client_at(model_info, STRANGER)
        assert await who(stranger, forged) == STRANGER
        answer = await (await client_at(model_info, STRANGER)).ask(get("/who", forged))
        assert answer.status == 503, "the limit of its address"


async def test_each_request_of_a_trusted_peer_has_a_caller_of_its_own():
    async with serving(trusted_proxies=TRUSTED) as model_info:
        proxy = await client_at(model_info, PROXY)
        assert await who(proxy) == PROXY
        assert await who(proxy, f"X-Forwarded-For: {CALLER}") == CALLER
        assert await who(proxy, "X-Forwarded-For: 198.51.100.1", f"X-Forwarded-For: {CALLER}, {PROXY}") == CALLER
        assert await who(proxy, 'Forwarded: for="[2001:db8:1:2:3::9]:80"') == "2001:db8:1:2::/64"
        assert await who(proxy, f"X-Forwarded-For: {CALLER}", "Forwarded: for=198.51.100.1") == PROXY
        assert await who(proxy, "X-Forwarded-For: unknown") == PROXY
        assert await who(proxy) == PROXY


async def test_the_caller_of_a_request_is_looked_for_once(monkeypatch):
    read = []
    find = TrustedProxies.caller_of

    def noted(*args):
        read.append(args)
        return find(*args)

    monkeypatch.setattr(TrustedProxies, "caller_of", noted)
    async with serving(trusted_proxies=TRUSTED) as model_info:
        proxy = await client_at(model_info, PROXY)
        assert await who(proxy, f"X-Forwarded-For: {CALLER}") == CALLER
    assert len(read) == 2, "of a request that comes at once, and of one in two parts"


async def test_a_repeated_head_has_the_caller_again_and_another_head_another(certificate):
    """Whose head is not parsed again (`repeated_head`)."""
    sock = listening()
    sock.certificate = certificate
    async with serving(sock, trusted_proxies=TRUSTED) as model_info:
        proxy = await client_at(model_info, PROXY)
        for address in (CALLER, CALLER, "198.51.100.1", CALLER, CALLER):
            answer = await proxy.ask(post("/who", f"X-Forwarded-For: {address}", body=b"{}"))
            assert answer.body == f"{address} False".encode()


@pytest.mark.parametrize(("names", "named"), [("unix", CALLER), (PROXY, "")])
async def test_a_unix_socket_is_trusted_if_unix_is_named(tmp_path, names, named):
    async with serving(listening(tmp_path / "s"), trusted_proxies=TrustedProxies(names)) as model_info:
        client = await model_info.connect()
        assert await who(client, f"X-Forwarded-For: {CALLER}") == named
        assert await who(client) == ""


async def test_the_connections_of_a_trusted_proxy_are_not_those_of_one_caller():
    async with serving(trusted_proxies=TRUSTED, max_connections_per_address=2) as model_info:
        for _ in range(5):
            assert (await (await client_at(model_info, PROXY)).ask(get("/a"))).status == 200
        statuses = [(await (await client_at(model_info, STRANGER)).ask(get("/a"))).status for _ in range(3)]
        assert statuses == [200, 200, 503]


async def test_what_a_trusted_proxy_sends_is_held_by_connection():
    """Half of what may be held is for one address, and many callers are behind a proxy."""
    async with serving(trusted_proxies=TRUSTED, max_arriving_bytes=1_000_000) as model_info:
        arriving = model_info.server.arriving
        head = get("/len", "Content-Length: 400000", method="POST")
        proxies = [await client_at(model_info, PROXY) for _ in range(2)]
        for proxy in proxies:
            proxy.send(head + bytes(399_999))
        await until(lambda: arriving.num_bytes == 2 * 399_999)
        assert [(await proxy.ask(b"x")).status for proxy in proxies] == [200, 200]


async def test_the_admin_listener_believes_no_header(tmp_path):
    trusted = TrustedProxies("127.0.0.0/8,unix")
    async with serving(trusted_proxies=trusted, admin=listening(tmp_path / "admin")) as model_info:
        admin = await model_info.connect_admin()
        answer = await admin.ask(get("/who", f"X-Forwarded-For: {CALLER}", f"Forwarded: for={CALLER}"))
        assert answer.body == b" True"
        assert await who(await model_info.connect(), f"X-Forwarded-For: {CALLER}") == CALLER


async def test_open_connections_go_by_the_proxies_that_are_trusted_now():
    header = f"X-Forwarded-For: {CALLER}"
    async with serving(max_connections_per_address=3) as model_info:
        server = model_info.server
        proxies = [await client_at(model_info, PROXY) for _ in range(3)]
        assert await who(proxies[0], header) == PROXY
        proxies[1].send(get("/len", "Content-Length: 10", method="POST") + b"12345")
        await until(lambda: server.arriving.num_bytes == 5)
        server.trust(TRUSTED)
        assert server._num_of_address == {}
        assert await who(proxies[0], header) == CALLER
        proxies.append(await client_at(model_info, PROXY))
        assert await who(proxies[3], header) == CALLER
        server.trust(None)
        assert server._num_of_address == {PROXY: 4}
        assert await who(proxies[3], header) == PROXY
        assert (await proxies[1].ask(b"67890")).body == b"10"
        assert (await (await client_at(model_info, PROXY)).ask(get("/a"))).status == 503
        for proxy in proxies:
            proxy.close()
        await until(lambda: server.num_connections == 0)
        assert server._num_of_address == {}
        assert server.arriving.num_bytes == 0


# --- the PROXY protocol ---------------------------------------------------------------------------------------------


def v1(address: str, port: int = 50124) -> bytes:
    family = "TCP6" if ":" in address else "TCP4"
    return f"PROXY {family} {address} {address} {port} 8000\r\n".encode()


def v2(command: int, family: int, block: bytes) -> bytes:
    return V2_SIGNATURE + struct.pack("!BBH", command, family, len(block)) + block


def v2_tcp(address: str) -> bytes:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    return v2(0x21, 0x21 if ":" in address else 0x11, packed + packed + struct.pack("!HH", 50124, 8000) + b"\x04\0\0")


HEADERS = [
    (v1(CALLER), CALLER),
    (v1("2001:db8:1:2:3::9"), "2001:db8:1:2::/64"),
    (v1("::ffff:203.0.113.9"), CALLER),
    (v2_tcp(CALLER), CALLER),
    (v2_tcp("2001:db8:1:2:3::9"), "2001:db8:1:2::/64"),
    (b"PROXY UNKNOWN\r\n", PROXY),
    (v2(0x21, 0x00, b""), PROXY),
    (v2(0x20, 0x00, b""), PROXY),
    (v2(0x21, 0x31, bytes(216)), ""),
]


@pytest.mark.parametrize(("header", "named"), HEADERS)
async def test_the_caller_is_the_one_of_the_proxy_header(header, named):
    async with serving(trusted_proxies=TRUSTED, proxy_protocol=True) as model_info:
        client = await client_at(model_info, PROXY)
        client.send(header)
        assert await who(client) == named
        by_bytes = await client_at(model_info, PROXY)
        for byte in header + get("/who"):
            by_bytes.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await by_bytes.answer()).body == f"{named} False".encode()
        at_once = await client_at(model_info, PROXY)
        assert (await at_once.ask(header + get("/who"))).body == f"{named} False".encode()


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (v1(STRANGER), STRANGER),
        (v1(PROXY), CALLER),
        (v2(0x20, 0x00, b""), CALLER),
        (b"PROXY UNKNOWN\r\n", PROXY),
        (v2(0x21, 0x00, b""), PROXY),
    ],
)
async def test_headers_are_believed_if_the_client_of_the_proxy_header_is_trusted(header, named):
    """A proxy of TCP passes on what its clients write."""
    async with serving(trusted_proxies=TRUSTED, proxy_protocol=True) as model_info:
        client = await client_at(model_info, PROXY)
        client.send(header)
        assert await who(client, f"X-Forwarded-For: {CALLER}") == named
        assert await who(client, f"Forwarded: for={CALLER}") == named


async def test_the_limit_of_an_address_is_one_of_the_proxy_header_s():
    async with serving(trusted_proxies=TRUSTED, proxy_protocol=True, max_connections_per_address=2) as model_info:

        async def status(header: bytes) -> int:
            return (await (await client_at(model_info, PROXY)).ask(header + get("/a"))).status

        assert [await status(v1(CALLER)) for _ in range(3)] == [200, 200, 503]
        assert await status(v1("198.51.100.1")) == 200
        assert [await status(b"PROXY UNKNOWN\r\n") for _ in range(3)] == [200, 200, 200]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


REFUSED = [
    (get("/who"), "it begins with something else"),
    (b"\x16\x03\x01\x02\x00\x01\x00", "it begins with something else"),
    (b"PROXY TCP4 nobody\r\n" + get("/who"), "version 1: its line is malformed"),
    (b"PROXY UNKNOWN " + b"a" * 200, "version 1: its line is longer than 107 bytes"),
    (v2(0x2F, 0x11, bytes(12)) + get("/who"), "version 2: its version or command is unknown"),
    (v1(CALLER)[:-1], "it was not complete after 0.1 s"),
    (b"", "it was not complete after 0.1 s"),
    (V2_SIGNATURE + b"\x21\x11\x0f\xff" + b"a" * 100, "it was not complete after 0.1 s"),
]


@pytest.mark.parametrize(("data", "reason"), REFUSED)
async def test_a_connection_without_a_header_is_closed_and_counted_in_the_log(data, reason, caplog):
    timeouts = only(head_s=0.1, sweep_s=0.01)
    async with serving(trusted_proxies=TRUSTED, proxy_protocol=True, timeouts=timeouts) as model_info:
        client = await client_at(model_info, PROXY)
        client.send(data)
        assert await all_of(client) == b""
        await until(lambda: bool(told(caplog)))
        assert model_info.app.handled == []
        assert not model_info.server._awaiting_header
    (line,) = told(caplog)
    assert line.startswith("Connections closed without the PROXY protocol header")
    assert line.endswith(reason)


async def all_of(client: Client) -> bytes:
    try:
        return await client.rest()
    except ConnectionResetError:
        return b""


async def test_a_header_of_an_untrusted_peer_is_not_read(caplog):
    async with serving(trusted_proxies=TRUSTED, proxy_protocol=True) as model_info:
        clients = [await client_at(model_info, STRANGER) for _ in range(20)]
        for client in clients:
            client.send(v1(CALLER) + get("/who"))
            assert await all_of(client) == b""
        assert model_info.app.handled == []
        await until(lambda: sum(int(line.split(": ")[1].partition(";")[0]) for line in told(caplog)) == 20)
    assert all(line.endswith("its peer is not in --trusted-proxies") for line in told(caplog))


async def test_a_check_that_only_connects_is_not_logged(caplog):
    async with serving(trusted_proxies=TRUSTED, proxy_protocol=True) as model_info:
        (await client_at(model_info, PROXY)).close()
        half = await client_at(model_info, PROXY)
        half.send(b"PROX")
        half.close()
        await until(lambda: bool(told(caplog)))
    (line,) = told(caplog)
    assert line.endswith(": 1; the last one: it was closed before its header was complete")


async def test_connections_that_wait_for_a_header_count(caplog):
    async with serving(trusted_proxies=TRUSTED, proxy_protocol=True, max_connections=3) as model_info:
        waiting = [await client_at(model_info, PROXY) for _ in range(3)]
        await until(lambda: len(model_info.server._awaiting_header) == 3)
        assert await all_of(await client_at(model_info, PROXY)) == b""
        assert (await waiting[0].ask(v1(CALLER) + get("/who"))).status == 200
        waiting[1].close()
        await until(lambda: len(model_info.server._awaiting_header) == 1)
        assert (await (await client_at(model_info, PROXY)).ask(v1(CALLER) + get("/who"))).status == 200
    assert any("1 connections refused" in line for line in told(caplog))


async def test_the_header_comes_before_the_handshake(certificate):
    sock = Listening(listening().sock, certificate)
    async with serving(sock, trusted_proxies=TRUSTED, proxy_protocol=True) as model_info:
        for header in (v1(CALLER), v2_tcp(CALLER)):
            plain = socket.socket()
            plain.bind((PROXY, 0))
            plain.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(plain, sock.address)
            await loop.sock_sendall(plain, header)
            context = certificate.client_context()
            streams = await asyncio.open_connection(sock=plain, ssl=context, server_hostname="localhost")
            client = Client(*streams)
            model_info.clients.append(client)
            assert await who(client) == CALLER


async def test_the_admin_listener_expects_no_header(tmp_path):
    admin = listening(tmp_path / "admin")
    async with serving(trusted_proxies=TRUSTED, proxy_protocol=True, admin=admin) as model_info:
        assert (await (await model_info.connect_admin()).ask(get("/who"))).body == b" True"


async def test_a_drain_ends_connections_that_have_no_header():
    async with serving(trusted_proxies=TRUSTED, proxy_protocol=True, timeouts=FOREVER) as model_info:
        client = await client_at(model_info, PROXY)
        await until(lambda: len(model_info.server._awaiting_header) == 1)
        await model_info.server.drain(0)
        assert await all_of(client) == b""
