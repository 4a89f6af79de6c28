import asyncio

import pytest

from vecd.base.target import parse_target
from vecd.client import connection as connection_module
from vecd.client.connection import (
    BadResponse,
    ClientConnection,
    ConnectionClosed,
    ServerResponse,
    connect,
    render_request,
)

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1\r\n \r\n5;ext=1\r\nworld\r\n0\r\nTrailer: x\r\n\r\n"
)


async def exchange_all(
    url: str, num_requests: int, timeout_s: float = 10
) -> tuple[ClientConnection, list[ServerResponse]]:
    target = parse_target(url)
    connection = await connect(target, 10)
    request = render_request(target, "/x", b"{}", api_key=None)
    try:
        return connection, [await connection.exchange(request, timeout_s) for _ in range(num_requests)]
    finally:
        connection.close()


def ask(url: str, num_requests: int = 1, timeout_s: float = 10) -> list[ServerResponse]:
    return asyncio.run(exchange_all(url, num_requests, timeout_s))[1]


def test_a_connection_is_kept_alive(start_server):
    server = start_server(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
    assert ask(server.url, num_requests=5) == [ServerResponse(200, b"hi")] * 5
    assert server.num_connections == 1


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (CHUNKED, b"hello world"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhi there", b"hi there"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"hi"),
    ],
    ids=["in chunks", "to the end of the connection", "behind an interim one"],
)
def test_an_answer_is_whole(start_server, sent, body):
    assert ask(start_server(lambda _: sent).url) == [ServerResponse(200, body)]


def test_a_server_that_closes_is_taken_at_its_word(start_server):
    server = start_server(lambda _: b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi")
    connection, answers = asyncio.run(exchange_all(server.url, 1))
    assert answers == [ServerResponse(200, b"hi")]
    assert not connection.is_open
    with pytest.raises(ConnectionClosed):
        asyncio.run(exchange_all(server.url, 2))


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", ConnectionClosed),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 10\r\n\r\nhi", ConnectionClosed),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe", ConnectionClosed),
        (b"SSH-2.0-OpenSSH_9.6\r\n", BadResponse),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", BadResponse),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhi", TimeoutError),
    ],
)
def test_what_is_no_whole_answer_is_an_error(start_server, sent, error):
    with pytest.raises(error):
        ask(start_server(lambda _: sent).url, timeout_s=0.05 if error is TimeoutError else 10)


def test_headers_that_tell_of_the_vectors_are_read(start_server):
    told = b"HTTP/1.1 200 OK\r\nX-Vecd-Tokens: 7\r\nx-vecd-dimensions: 384\r\nContent-Length: 2\r\n\r\nhi"
    silent = b"HTTP/1.1 200 OK\r\nX-Vecd-Tokens: many\r\nContent-Length: 2\r\n\r\nhi"
    server = start_server(lambda n: (told, silent)[n])
    assert ask(server.url, 2) == [ServerResponse(200, b"hi", 7, 384), ServerResponse(200, b"hi")]


def test_an_answer_without_end_is_cut(start_server, monkeypatch):
    monkeypatch.setattr(connection_module, "_MAX_BODY_BYTES", 1000)
    server = start_server(lambda _: b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000)
    with pytest.raises(BadResponse, match="longer than"):
        ask(server.url)


def test_after_a_timeout_the_connection_is_closed(start_server):
    async def exchange_twice() -> None:
        target = parse_target(start_server(lambda n: 200 if n == 0 else None).url)
        connection = await connect(target, 10)
        request = render_request(target, "/x", b'{"input":"a"}', api_key=None)
        assert (await connection.exchange(request, 10)).status == 200
        with pytest.raises(TimeoutError):
            await connection.exchange(request, 0.05)
        assert not connection.is_open
        with pytest.raises(ConnectionClosed):
            await connection.exchange(request, 10)

    asyncio.run(exchange_twice())


def test_closing_ends_an_exchange_under_way(start_server):
    async def close_meanwhile() -> None:
        target = parse_target(start_server(lambda _: None).url)
        connection = await connect(target, 10)
        exchange = asyncio.create_task(
            connection.exchange(render_request(target, "/x", b'{"input":"a"}', api_key=None), 60)
        )
        await asyncio.sleep(0)
        connection.close()
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(exchange, 20)

    asyncio.run(close_meanwhile())
