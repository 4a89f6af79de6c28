import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from client import load as load_module
from client.connection import parse_target
from client.load import ClosedLoop, Load, Unreachable
from client.payload import RequestShape, render_requests
from client.tally import Result

DEADLINE_S = 60.0


def make_load(
    url: str,
    *,
    clients: int = 1,
    num_requests: int | None = None,
    duration_s: float = 0.3,
    warmup_s: float = 0.0,
    texts_per_request: int = 1,
    timeout_s: float = 10.0,
) -> Load:
    return Load(
        target=parse_target(url),
        requests=render_requests(url, RequestShape(texts_per_request=texts_per_request), num_requests=8),
        texts_per_request=texts_per_request,
        clients=clients,
        warmup_s=warmup_s,
        duration_s=duration_s,
        num_requests=num_requests,
        timeout_s=timeout_s,
    )


def run(load: Load) -> Result:
    async def run_in_time() -> Result:
        async with asyncio.timeout(DEADLINE_S):
            return await ClosedLoop(load).run()

    return asyncio.run(run_in_time())


@pytest.mark.parametrize("clients", [1, 7])
def test_a_counted_run_sends_exactly_its_number(start_server: Callable[..., Any], clients: int) -> None:
    server = start_server()
    result = run(make_load(server.url, clients=clients, num_requests=50, texts_per_request=3))
    assert len(server.bodies) == 50
    assert server.num_connections == clients
    assert (result.num_requests, result.num_texts, result.num_tokens) == (50, 150, 50 * 3 * 12)
    assert (result.clients, result.errors, result.ended_early) == (clients, {}, None)
    assert 0 < result.latency.p50_ms <= result.latency.p99_ms <= result.latency.max_ms


def test_all_clients_share_the_pool_in_turn(start_server: Callable[..., Any]) -> None:
    server = start_server()
    run(make_load(server.url, clients=2, num_requests=16))
    inputs = [body["input"] for body in server.bodies]
    assert len(set(inputs)) == 8
    assert all(inputs.count(text) == 2 for text in inputs)


def test_a_timed_run_ends_in_time(start_server: Callable[..., Any]) -> None:
    result = run(make_load(start_server().url, clients=3, duration_s=1.0, warmup_s=0.2))
    assert result.elapsed_s == pytest.approx(1.0)
    assert result.num_requests > 0
    assert result.errors == {}


def test_the_warmup_is_not_measured(start_server: Callable[..., Any]) -> None:
    server = start_server()
    result = run(make_load(server.url, clients=2, num_requests=5, warmup_s=0.2))
    assert result.num_requests == 5
    assert len(server.bodies) > 5


def test_statuses_are_counted_by_kind(start_server: Callable[..., Any]) -> None:
    server = start_server(lambda n: (200, 503, 200, 429)[n % 4])
    result = run(make_load(server.url, num_requests=40))
    assert result.num_requests == 20
    assert result.errors == {"HTTP 503": 10, "HTTP 429": 10}
    assert "no luck" in result.first_details["HTTP 503"]
    assert server.num_connections == 1


def test_too_few_embeddings_are_an_error(start_server: Callable[..., Any]) -> None:
    body = b'{"data":[{"embedding":[1.0]}],"usage":{"total_tokens":1}}'
    server = start_server(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    result = run(make_load(server.url, num_requests=3, texts_per_request=2))
    assert result.errors == {"bad answer": 3}
    assert result.first_details["bad answer"] == "1 embeddings for 2 texts"


def test_timeouts_are_counted_and_do_not_stop_the_run(start_server: Callable[..., Any]) -> None:
    server = start_server(lambda n: 200 if n % 2 else None)
    result = run(make_load(server.url, num_requests=4, timeout_s=0.5))
    assert result.errors == {"timeout": 2}
    assert result.num_requests == 2
    assert server.num_connections == 3


def test_connections_that_break_are_counted_and_made_again(start_server: Callable[..., Any]) -> None:
    server = start_server(lambda n: 200 if n % 2 else b"HTTP/1.1 200 OK\r\nConnection: close\r\nConte")
    result = run(make_load(server.url, num_requests=6))
    assert result.errors == {"connection closed": 3}
    assert result.num_requests == 3


def test_a_server_that_keeps_nothing_alive_is_measured_all_the_same(start_server: Callable[..., Any]) -> None:
    body = b'{"data":[{"embedding":[1.0]}],"usage":{"total_tokens":1}}'
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    server = start_server(lambda _: answer)
    result = run(make_load(server.url, clients=2, num_requests=10))
    assert (result.num_requests, result.errors) == (10, {})
    assert server.num_connections == 10


def test_no_server_at_all_is_said_at_once(dead_url: str) -> None:
    with pytest.raises(Unreachable, match="cannot connect to http://127"):
        run(make_load(dead_url))


def test_a_server_that_dies_ends_the_run(start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "_GONE_AFTER_S", 0.3)
    servers: list[Any] = []

    def die_at_20(n: int) -> int:
        if n == 20:
            servers[0].stop_soon()
        return 200

    servers.append(start_server(die_at_20))
    result = run(make_load(servers[0].url, clients=2, duration_s=DEADLINE_S))
    assert "no connection to http://127.0.0.1" in str(result.ended_early)
    assert result.num_requests >= 19
    assert "connection refused" in result.errors


def test_a_server_that_hangs_ends_a_counted_run(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "_GONE_AFTER_S", 0.3)
    server = start_server(lambda n: 200 if n < 5 else None)
    result = run(make_load(server.url, num_requests=10**6, timeout_s=0.5))
    assert "answered nothing for 0.8 s" in str(result.ended_early)
    assert result.num_requests == 5


def test_what_a_hanging_server_owes_is_counted(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "_DRAIN_S", 0.2)
    result = run(make_load(start_server(lambda _: None).url, clients=3, duration_s=0.2))
    assert result.errors == {"unanswered": 3}
    assert result.num_requests == 0


def test_stopping_keeps_what_was_measured(start_server: Callable[..., Any]) -> None:
    server = start_server()

    async def stop_at_once() -> Result:
        closed_loop = ClosedLoop(make_load(server.url, clients=2, duration_s=DEADLINE_S))
        running = asyncio.create_task(closed_loop.run())
        async with asyncio.timeout(DEADLINE_S):
            while len(server.bodies) < 10:
                await asyncio.sleep(0.01)
            closed_loop.stop("enough")
            return await running

    result = asyncio.run(stop_at_once())
    assert result.ended_early == "enough"
    assert result.num_requests >= 8
    assert result.errors == {}
