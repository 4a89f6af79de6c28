import asyncio

import pytest

from vecd.base.target import parse_target
from vecd.client.http import BadResponse, ConnectionClosed, render_request
from vecd.client.sockets import AsyncConnection, connect

HI = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


async def exchange_all(url: str, num_requests: int, timeout_s: float = 10) -> tuple[AsyncConnection, list[bytes]]:
    target = parse_target(url)
    connection = await connect(target, 10)
    request = render_request(target, "/x", b"{}", api_key=None)
    try:
        return connection, [(await connection.exchange(request, timeout_s)).body for _ in range(num_requests)]
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("sent", "num_requests"),
    [
        (HI, 5),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi", 1),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhi", 1),
    ],
)
def test_a_connection_is_kept_alive_unless_the_server_ends_it(start_server, sent, num_requests):
    server = start_server(lambda _: sent)
    connection, bodies = asyncio.run(exchange_all(server.url, num_requests))
    assert (bodies, server.num_connections, connection.is_open) == ([b"hi"] * num_requests, 1, False)
    if num_requests == 1:
        with pytest.raises(ConnectionClosed):
            asyncio.run(exchange_all(server.url, 2))


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 10\r\n\r\nhi", ConnectionClosed),
        (b"SSH-2.0-OpenSSH_9.6\r\n", BadResponse),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhi", TimeoutError),
    ],
)
def test_after_an_error_the_connection_is_closed(start_server, sent, error):
    async def exchange_twice() -> None:
        target = parse_target(start_server(lambda n: HI if n == 0 else sent).url)
        connection = await connect(target, 10)
        request = render_request(target, "/x", b'{"input":"a"}', api_key=None)
        assert (await connection.exchange(request, 10)).status == 200
        with pytest.raises(error):
            await connection.exchange(request, 0.05 if error is TimeoutError else 10)
        assert not connection.is_open
        with pytest.raises(ConnectionClosed):
            await connection.exchange(request, 10)

    asyncio.run(exchange_twice())


def test_closing_ends_an_exchange_under_way(start_server):
    async def close_meanwhile() -> None:
        connection = await connect(parse_target(start_server(lambda _: None).url), 10)
        exchange = asyncio.create_task(connection.exchange(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", 60))
        await asyncio.sleep(0)
        connection.close()
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(exchange, 20)

    asyncio.run(close_meanwhile())
