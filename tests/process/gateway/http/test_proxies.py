"""Whose a request is behind a proxy, and behind none: real sockets, with TLS and without, of a server that trusts some
peers."""

import asyncio

import pytest

from tests.support.tinyserver import Client, ModelInfo, get, listening, post, serving, until
from vecd.gateway.http.forwarded import TrustedProxies

PROXY, STRANGER = "127.0.0.2", "127.0.0.3"
TRUSTED = TrustedProxies(PROXY)
CALLER = "203.0.113.9"


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
    "X-Forwarded-For: ,,,\xff",
    'Forwarded: for="203.0.113.9:4711";proto=https;by=127.0.0.2',
    "Forwarded: for=203.0.113.9, for=127.0.0.2",
    "X-Real-IP: 203.0.113.9",
    "CF-Connecting-IP: 203.0.113.9",
]


@pytest.mark.parametrize(
    "trusted", [TrustedProxies(), TRUSTED, TrustedProxies("unix,10.0.0.0/8,::1")], ids=["none", "one", "other"]
)
async def test_a_header_of_an_untrusted_peer_changes_nothing(trusted):
    async with serving(trusted_proxies=trusted, max_connections_per_address=1) as model_info:
        stranger = await client_at(model_info, STRANGER)
        for forged in FORGED:
            assert await who(stranger, forged) == STRANGER, forged
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


async def test_a_repeated_head_has_the_caller_again_and_another_head_another():
    """Whose head is not parsed again (`repeated_head`)."""
    async with serving(trusted_proxies=TRUSTED) as model_info:
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
        server.change(server.limits, TRUSTED)
        assert server.num_of_address == {}
        assert await who(proxies[0], header) == CALLER
        proxies.append(await client_at(model_info, PROXY))
        assert await who(proxies[3], header) == CALLER
        server.change(server.limits, TrustedProxies())
        assert server.num_of_address == {PROXY: 4}
        assert await who(proxies[3], header) == PROXY
        assert (await proxies[1].ask(b"67890")).body == b"10"
        assert (await (await client_at(model_info, PROXY)).ask(get("/a"))).status == 503
        for proxy in proxies:
            proxy.close()
        await until(lambda: server.num_connections == 0)
        assert server.num_of_address == {}
        assert server.arriving.num_bytes == 0
