import asyncio
import math
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from vecd.client.bench import loops as loops_module
from vecd.client.bench import run as run_module
from vecd.client.bench import stream as stream_module
from vecd.client.bench.load import MAX_RATE_PER_S, Load, RequestShape, Unreachable, render_requests
from vecd.client.bench.result import RunResult
from vecd.client.bench.run import LoadRun
from vecd.client.connection import parse_target

DEADLINE_S = 60.0


def make_load(
    url: str,
    *,
    clients: int | None = None,
    rate_per_s: float | None = None,
    max_connections: int = 256,
    goodput_ms: float | None = None,
    encoding_format: str = "base64",
    bulk: Load | None = None,
    num_requests: int | None = None,
    duration_s: float = 0.3,
    warmup_s: float = 0.0,
    texts_per_request: int = 1,
    timeout_s: float = 10.0,
) -> Load:
    target = parse_target(url)
    shape = RequestShape(texts_per_request=texts_per_request, encoding_format=encoding_format)
    return Load(
        target=target,
        shape=shape,
        requests=render_requests(target, shape, num_requests=8),
        clients=clients if clients is not None else int(rate_per_s is None),
        rate_per_s=rate_per_s,
        max_connections=max_connections,
        goodput_ms=goodput_ms,
        bulk=bulk,
        warmup_s=warmup_s,
        duration_s=duration_s,
        num_requests=num_requests,
        timeout_s=timeout_s,
    )


def run(load: Load) -> RunResult:
    async def run_in_time() -> RunResult:
        async with asyncio.timeout(DEADLINE_S):
            return await LoadRun(load).run()

    return asyncio.run(run_in_time())


def latency_of(result: RunResult, name: str) -> float:
    latency_ms = result.latencies_ms()[name]
    assert latency_ms is not None
    return latency_ms


@pytest.mark.parametrize("clients", [1, 7])
def test_a_counted_run_sends_exactly_its_number(start_server: Callable[..., Any], clients: int) -> None:
    server = start_server()
    result = run(make_load(server.url, clients=clients, num_requests=50, texts_per_request=3))
    assert len(server.bodies) == 50
    assert server.num_connections == clients
    assert (result.num_requests, result.num_texts, result.num_tokens) == (50, 150, 50 * 3 * 12)
    assert (result.errors, result.ended_early) == ({}, None)
    assert 0 < latency_of(result, "p50_ms") <= latency_of(result, "p99_ms") <= latency_of(result, "max_ms")


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
    monkeypatch.setattr(stream_module, "_GONE_AFTER_S", 0.3)
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
    monkeypatch.setattr(stream_module, "_GONE_AFTER_S", 0.3)
    server = start_server(lambda n: 200 if n < 5 else None)
    result = run(make_load(server.url, num_requests=10**6, timeout_s=0.5))
    assert "answered nothing for 0.8 s" in str(result.ended_early)
    assert result.num_requests == 5


def test_what_a_hanging_server_owes_is_counted(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_DRAIN_S", 0.2)
    result = run(make_load(start_server(lambda _: None).url, clients=3, duration_s=0.2))
    assert result.errors == {"unanswered": 3}
    assert result.num_requests == 0


@pytest.mark.parametrize(
    "load_of",
    [
        lambda url: make_load(url, clients=2, duration_s=DEADLINE_S),
        lambda url: make_load(url, rate_per_s=200, duration_s=DEADLINE_S),
    ],
)
def test_stopping_keeps_what_was_measured(start_server: Callable[..., Any], load_of: Callable[[str], Load]) -> None:
    server = start_server()

    async def stop_at_once() -> RunResult:
        the_run = LoadRun(load_of(server.url))
        running = asyncio.create_task(the_run.run())
        async with asyncio.timeout(DEADLINE_S):
            while len(server.bodies) < 10:
                await asyncio.sleep(0.01)
            the_run.stop("enough")
            return await running

    result = asyncio.run(stop_at_once())
    assert result.ended_early == "enough"
    assert result.num_requests >= 8
    assert result.errors == {}


def test_stopping_does_not_wait_for_a_connection(monkeypatch: pytest.MonkeyPatch, dead_url: str) -> None:
    async def never(*_: object) -> None:
        await asyncio.sleep(DEADLINE_S * 2)

    monkeypatch.setattr(stream_module, "connect", never)

    async def stop_at_once() -> RunResult:
        the_run = LoadRun(make_load(dead_url))
        asyncio.get_running_loop().call_soon(the_run.stop, "enough")
        async with asyncio.timeout(DEADLINE_S):
            return await the_run.run()

    result = asyncio.run(stop_at_once())
    assert (result.ended_early, result.num_requests, result.errors) == ("enough", 0, {})


def test_a_run_tells_how_it_goes(start_server: Callable[..., Any]) -> None:
    seen: list[str] = []
    server = start_server(lambda n: 200 if n % 2 else 503)
    asyncio.run(LoadRun(make_load(server.url, warmup_s=0.5, duration_s=0.6), seen.append).run())
    num_warming_up = seen.count("1 client: warming up")
    assert 0 < num_warming_up < len(seen)
    assert set(seen[:num_warming_up]) == {"1 client: warming up"}
    assert re.fullmatch(r"1 client: [\d,.]+ req/s, \d+ errors, 1 s left", seen[num_warming_up])
    last = re.fullmatch(r"1 client: ([\d,.]+) req/s, (\d+) errors, .+", seen[-1])
    assert last is not None
    assert float(last[1].replace(",", "")) > 0
    assert int(last[2]) > 0


@pytest.mark.parametrize("encoding_format", ["float", "bytes", "npy"])
@pytest.mark.parametrize("texts_per_request", [1, 3])
def test_every_encoding_is_asked_for_and_counted(
    start_server: Callable[..., Any], encoding_format: str, texts_per_request: int
) -> None:
    server = start_server()
    load = make_load(server.url, num_requests=4, texts_per_request=texts_per_request, encoding_format=encoding_format)
    result = run(load)
    assert result.errors == {}
    assert (result.num_texts, result.num_tokens) == (4 * texts_per_request, 12 * 4 * texts_per_request)


@pytest.mark.parametrize("encoding_format", ["bytes", "npy"])
def test_json_is_a_bad_answer_to_who_asks_for_bytes(start_server: Callable[..., Any], encoding_format: str) -> None:
    body = b'{"data":[{"embedding":"AACAPw=="}],"usage":{"total_tokens":1}}  '
    server = start_server(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert run(make_load(server.url, num_requests=2, encoding_format=encoding_format)).errors == {"bad answer": 2}


# --- an open loop -----------------------------------------------------------------------------------------


def test_an_open_loop_sends_what_arrives(start_server: Callable[..., Any]) -> None:
    server = start_server()
    result = run(make_load(server.url, rate_per_s=2000, num_requests=60, texts_per_request=2))
    assert len(server.bodies) == 60
    assert (result.num_requests, result.num_texts, result.num_offered, result.errors) == (60, 120, 60, {})
    assert 0 < latency_of(result, "p50_ms") <= latency_of(result, "p999_ms") <= latency_of(result, "max_ms")


def test_an_open_loop_does_not_wait_for_a_server_that_stalls(start_server: Callable[..., Any]) -> None:
    # In a closed loop of one client, a single request of the 100 would see it.
    def stall_at_10(n: int) -> int:
        if n == 10:
            time.sleep(0.5)
        return 200

    result = run(make_load(start_server(stall_at_10).url, rate_per_s=200, num_requests=100))
    assert result.errors == {}
    assert latency_of(result, "p50_ms") > 50
    assert result.num_requests == 100


def test_latency_runs_from_the_arrival_when_the_generator_is_late(start_server: Callable[..., Any]) -> None:
    async def hold_up() -> RunResult:
        running = asyncio.create_task(LoadRun(make_load(server.url, rate_per_s=500, num_requests=100)).run())
        while len(server.bodies) < 10:
            await asyncio.sleep(0.001)
        time.sleep(0.3)  # noqa: ASYNC251 - this is what is tested
        return await running

    server = start_server()
    result = asyncio.run(hold_up())
    assert latency_of(result, "p50_ms") > 30
    assert result.num_late > 20
    assert result.max_late_ms > 200
    assert result.num_requests == 100


def test_the_pool_grows_to_its_bound_and_what_finds_it_busy_is_counted(start_server: Callable[..., Any]) -> None:
    server = start_server(lambda _: None)
    result = run(make_load(server.url, rate_per_s=1000, num_requests=50, max_connections=3, timeout_s=1.0))
    assert result.errors.keys() == {"timeout", "no free connection"}
    assert result.errors.total() == result.num_offered == 50
    assert "all 3 were in use" in result.first_details["no free connection"]
    # Three at a time; a machine that halts for the time of a timeout lets more of them come.
    assert 3 <= server.num_connections == result.errors["timeout"]


def test_one_connection_is_enough_for_a_fast_server(start_server: Callable[..., Any]) -> None:
    server = start_server()
    result = run(make_load(server.url, rate_per_s=20, num_requests=10, max_connections=64))
    assert result.num_requests == 10
    assert server.num_connections < 10


def test_overload_is_counted_by_kind_and_not_waited_for(start_server: Callable[..., Any]) -> None:
    head = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3600\r\nContent-Length: 0\r\n\r\n"
    server = start_server(lambda n: (200, 503, head)[n % 3])
    result = run(make_load(server.url, rate_per_s=1000, num_requests=60))
    assert result.errors == {"HTTP 503": 20, "HTTP 429": 20}
    assert result.num_requests == 20


def test_broken_connections_are_replaced_in_an_open_loop(start_server: Callable[..., Any]) -> None:
    server = start_server(lambda n: (200, b"HTTP/1.1 200 OK\r\nConnection: close\r\nConte", b"SSH-2.0\r\n")[n % 3])
    result = run(make_load(server.url, rate_per_s=500, num_requests=30, max_connections=30))
    assert result.errors == {"connection closed": 10, "bad answer": 10}
    assert result.num_requests == 10


def test_a_rate_beyond_the_generator_is_an_error_of_its_own(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops_module, "_MAX_LATE_S", 0.0)
    monkeypatch.setattr(loops_module, "_MAX_BURST", 1)  # or else a fast machine is not too slow
    result = run(make_load(start_server().url, rate_per_s=MAX_RATE_PER_S, duration_s=0.2, max_connections=2))
    assert result.errors["not sent in time"] > 0
    assert result.num_offered == pytest.approx(0.2 * MAX_RATE_PER_S, rel=0.1)


def test_a_slow_answer_counts_for_latency_and_not_for_the_rate(start_server: Callable[..., Any]) -> None:
    def stall_until_the_window_has_closed(n: int) -> int:
        if n == 10:
            time.sleep(0.7)
        return 200

    server = start_server(stall_until_the_window_has_closed)
    result = run(make_load(server.url, rate_per_s=200, duration_s=0.5))
    assert result.latencies.count == result.num_offered > 20
    assert result.num_requests < result.latencies.count


def test_goodput_is_what_came_in_time(start_server: Callable[..., Any]) -> None:
    def stall_at_10(n: int) -> int:
        if n == 10:
            time.sleep(0.5)
        return 503 if n == 0 else 200

    result = run(make_load(start_server(stall_at_10).url, rate_per_s=200, num_requests=100, goodput_ms=100))
    assert 0 < result.num_good < result.latencies.count == 99
    assert result.share(result.num_good) == result.num_good / 100


def test_a_server_that_dies_ends_an_open_loop(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "_GONE_AFTER_S", 0.3)
    servers: list[Any] = []

    def die_at_20(n: int) -> int:
        if n == 20:
            servers[0].stop_soon()
        return 200

    servers.append(start_server(die_at_20))
    result = run(make_load(servers[0].url, rate_per_s=500, duration_s=DEADLINE_S))
    assert "no connection to http://127.0.0.1" in str(result.ended_early)
    assert "connection refused" in result.errors


def test_what_a_hanging_server_owes_an_open_loop_is_counted(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_DRAIN_S", 0.2)
    result = run(make_load(start_server(lambda _: None).url, rate_per_s=100, duration_s=0.2))
    assert result.errors.keys() == {"unanswered"}
    assert result.num_offered == result.errors.total() > 0


def test_the_same_seed_has_the_same_arrivals(start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server()
    results = [run(make_load(server.url, rate_per_s=400, duration_s=0.3))]
    send_stream = loops_module.send_stream

    def send_late(*arguments: Any) -> Any:
        time.sleep(0.05)  # as if this process did not run: what arrives meanwhile is sent late, and counted
        return send_stream(*arguments)

    monkeypatch.setattr(run_module, "send_stream", send_late)
    results.append(run(make_load(server.url, rate_per_s=400, duration_s=0.3)))
    assert results[0].num_offered == results[1].num_offered > 60


@pytest.mark.parametrize(
    ("clients", "rate_per_s"), [(0, None), (1, 5.0), (0, 0.0), (0, -1.0), (0, float("nan")), (0, MAX_RATE_PER_S * 2)]
)
def test_a_load_has_either_clients_or_a_rate(clients: int, rate_per_s: float | None) -> None:
    with pytest.raises(ValueError, match=r"clients or a rate|a rate must be"):
        make_load("http://h:1", clients=clients, rate_per_s=rate_per_s)


# --- bulk beside it ---------------------------------------------------------------------------------------


def make_bulk(url: str) -> Load:
    return make_load(url, clients=2, texts_per_request=5, duration_s=math.inf)


@pytest.mark.parametrize("load_options", [{"clients": 1}, {"rate_per_s": 200.0}])
@pytest.mark.parametrize("length", [{"num_requests": 40}, {"duration_s": 0.3}])
def test_bulk_runs_beside_and_is_counted_apart(
    start_server: Callable[..., Any], load_options: dict[str, Any], length: dict[str, Any]
) -> None:
    server = start_server()
    result = run(make_load(server.url, bulk=make_bulk(server.url), **load_options, **length))
    assert result.bulk is not None
    assert result.bulk.errors == {}
    assert result.num_texts == result.num_requests > 0
    assert result.bulk.num_texts == 5 * result.bulk.num_requests > 0
    assert result.bulk.elapsed_s == pytest.approx(result.elapsed_s, rel=0.5)
    if "num_requests" in length:
        assert result.num_requests == 40


def test_errors_of_the_bulk_are_its_own(start_server: Callable[..., Any]) -> None:
    servers: list[Any] = []

    def refuse_lists(_: int) -> int:
        return 413 if isinstance(servers[0].bodies[-1]["input"], list) else 200

    servers.append(start_server(refuse_lists))
    result = run(make_load(servers[0].url, clients=1, num_requests=30, bulk=make_bulk(servers[0].url)))
    assert result.bulk is not None
    assert result.errors == {}
    assert result.bulk.errors.keys() == {"HTTP 413"}
    assert result.bulk.num_requests == 0
