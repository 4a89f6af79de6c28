import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from vecd.client import connection as connection_module
from vecd.client.connection import (
    BadResponse,
    ClientConnection,
    ConnectionClosed,
    ServerResponse,
    Target,
    connect,
    name_failure,
    parse_target,
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


def test_a_connection_is_kept_alive(start_server: Callable[..., Any]) -> None:
    server = start_server(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
    assert ask(server.url, num_requests=5) == [ServerResponse(200, b"hi")] * 5
    assert server.num_connections == 1


def test_chunked_answers_are_put_together(start_server: Callable[..., Any]) -> None:
    assert ask(start_server(lambda _: CHUNKED).url, 2) == [ServerResponse(200, b"hello world")] * 2


def test_an_answer_may_end_with_its_connection(start_server: Callable[..., Any]) -> None:
    server = start_server(lambda _: b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhi there")
    assert ask(server.url) == [ServerResponse(200, b"hi there")]


def test_an_interim_answer_is_not_the_answer(start_server: Callable[..., Any]) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    assert ask(start_server(lambda _: interim).url, 2) == [ServerResponse(200, b"hi")] * 2


def test_a_server_that_closes_is_taken_at_its_word(start_server: Callable[..., Any]) -> None:
    server = start_server(lambda _: b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi")
    connection, answers = asyncio.run(exchange_all(server.url, 1))
    assert answers == [ServerResponse(200, b"hi")]
    assert not connection.is_open
    with pytest.raises(ConnectionClosed):
        asyncio.run(exchange_all(server.url, 2))


@pytest.mark.parametrize(
    "cut",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 10\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe",
    ],
)
def test_half_an_answer_is_none(start_server: Callable[..., Any], cut: bytes) -> None:
    with pytest.raises(ConnectionClosed):
        ask(start_server(lambda _: cut).url)


@pytest.mark.parametrize("junk", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 2x0 OK\r\n\r\n"])
def test_what_is_not_http_is_a_bad_answer(start_server: Callable[..., Any], junk: bytes) -> None:
    with pytest.raises(BadResponse):
        ask(start_server(lambda _: junk).url)


def test_silence_ends_at_the_timeout(start_server: Callable[..., Any]) -> None:
    with pytest.raises(TimeoutError):
        ask(start_server(lambda _: None).url, timeout_s=0.05)


def test_half_an_answer_ends_at_the_timeout(start_server: Callable[..., Any]) -> None:
    server = start_server(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhi")
    with pytest.raises(TimeoutError):
        ask(server.url, timeout_s=0.05)


def test_an_answer_that_nobody_asked_for_closes_the_connection() -> None:
    async def receive_unasked() -> bool:
        connection = ClientConnection()
        transport = FakeTransport()
        connection.connection_made(transport)
        connection.data_received(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        return connection.is_open or not transport.is_aborted

    assert not asyncio.run(receive_unasked())


class FakeTransport(asyncio.Transport):
    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize(
    ("url", "target", "host_header"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000, None), "127.0.0.1:8000"),
        ("http://localhost/", Target("localhost", 80, None), "localhost:80"),
        ("http://[::1]:9000", Target("::1", 9000, None), "[::1]:9000"),
        ("unix:/run/vecd.sock", Target("", 0, "/run/vecd.sock"), "localhost"),
    ],
)
def test_urls(url: str, target: Target, host_header: str) -> None:
    assert parse_target(url) == target
    assert target.host_header == host_header


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "https://h", "ftp://h", "http://", "http://h:x", "http://h/v1", "unix:", "unix://h/s"]
)
def test_urls_that_name_no_server_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_target(url)


@pytest.mark.parametrize(("path", "api_key"), [("v1", None), ("/a b", None), ("/a\r\nX: y", None), ("/", "k\n")])
def test_what_cannot_be_sent_is_refused(path: str, api_key: str | None) -> None:
    with pytest.raises(ValueError, match=r".+"):
        render_request(Target("h", 1, None), path, b"", api_key=api_key)


def test_a_request_carries_its_key_and_length() -> None:
    request = render_request(Target("h", 1, None), "/v1/embeddings", b'{"a":1}', api_key="s3cret")
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/embeddings HTTP/1.1\r\nHost: h:1\r\n")
    assert b"Authorization: Bearer s3cret" in head
    assert b"Content-Length: 7" in head
    assert body == b'{"a":1}'


def test_headers_that_tell_of_the_vectors_are_read(start_server: Callable[..., Any]) -> None:
    told = b"HTTP/1.1 200 OK\r\nX-Vecd-Tokens: 7\r\nx-vecd-dimensions: 384\r\nContent-Length: 2\r\n\r\nhi"
    silent = b"HTTP/1.1 200 OK\r\nX-Vecd-Tokens: many\r\nContent-Length: 2\r\n\r\nhi"
    server = start_server(lambda n: (told, silent)[n])
    assert ask(server.url, 2) == [ServerResponse(200, b"hi", 7, 384), ServerResponse(200, b"hi")]


def test_an_answer_without_end_is_cut(start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_MAX_BODY_BYTES", 1000)
    server = start_server(lambda _: b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000)
    with pytest.raises(BadResponse, match="longer than"):
        ask(server.url)


def test_a_request_carries_further_headers() -> None:
    headers = {"x-vecd-priority": "bulk", "x-vecd-timeout-ms": "50"}
    request = render_request(Target("h", 1, None), "/", b"", api_key=None, accept="application/x-npy", headers=headers)
    assert b"\r\nx-vecd-priority: bulk\r\nx-vecd-timeout-ms: 50\r\n\r\n" in request
    assert b"\r\nAccept: application/x-npy\r\n" in request


@pytest.mark.parametrize("value", ["", "a\r\nb: c", "ü"])
def test_headers_that_cannot_be_sent_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="x-vecd-priority"):
        render_request(Target("h", 1, None), "/", b"", api_key=None, headers={"x-vecd-priority": value})


def test_after_a_timeout_the_connection_is_closed(start_server: Callable[..., Any]) -> None:
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


def test_closing_ends_an_exchange_under_way(start_server: Callable[..., Any]) -> None:
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


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError(), "timeout"),
        (ConnectionRefusedError(111, "x"), "connection refused"),
        (ConnectionResetError(), "connection reset"),
        (ConnectionClosed(), "connection closed"),
        (BadResponse(), "bad answer"),
        (FileNotFoundError(2, "x"), "connection error ENOENT"),
        (OSError("odd"), "connection error OSError"),
    ],
)
def test_failures_have_names(error: Exception, kind: str) -> None:
    assert name_failure(error) == kind
