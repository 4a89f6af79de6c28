import asyncio
import math
import re
import time
from typing import Any

import pytest

from vecd.base.target import parse_target
from vecd.client.bench.load import MAX_RATE_PER_S, Load, RequestShape, Unreachable, render_requests
from vecd.client.bench.report import RunResult
from vecd.client.bench.run import LoadRun

DEADLINE_S = 60.0


def make_load(url: str, *, texts_per_request: int = 1, encoding_format: Any = "base64", **fields: Any) -> Load:
    target = parse_target(url)
    shape = RequestShape(texts_per_request=texts_per_request, encoding_format=encoding_format)
    defaults = {"clients": int("rate_per_s" not in fields), "duration_s": 0.3, "warmup_s": 0.0, "timeout_s": 10.0}
    requests = render_requests(target, shape, num_requests=8)
    return Load(target=target, shape=shape, requests=requests, **(defaults | fields))


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
def test_a_counted_run_sends_exactly_its_number(start_server, clients):
    server = start_server()
    result = run(make_load(server.url, clients=clients, num_requests=50, texts_per_request=3))
    assert len(server.bodies) == 50
    assert server.num_connections == 1 + clients  # the first one is made to see whether there is a server
    assert (result.num_requests, result.num_texts, result.num_tokens) == (50, 150, 50 * 3 * 12)
    assert (result.errors, result.ended_early) == ({}, None)
    assert 0 < latency_of(result, "p50_ms") <= latency_of(result, "p99_ms") <= latency_of(result, "max_ms")


def test_all_clients_share_the_pool_in_turn(start_server):
    server = start_server()
    run(make_load(server.url, clients=2, num_requests=16))
    inputs = [body["input"] for body in server.bodies]
    assert len(set(inputs)) == 8
    assert all(inputs.count(text) == 2 for text in inputs)


@pytest.mark.parametrize("how", [{"clients": 1}, {"rate_per_s": 1000}])
def test_statuses_are_counted_by_kind_and_not_waited_for(start_server, how):
    wait = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3600\r\nContent-Length: 7\r\n\r\nno luck"
    server = start_server(lambda n: (200, 503, wait)[n % 3])
    result = run(make_load(server.url, num_requests=60, **how))
    assert result.num_requests == 20
    assert result.errors == {"HTTP 503": 20, "HTTP 429": 20}
    assert "no luck" in result.first_details["HTTP 503"]
    assert "rate_per_s" in how or server.num_connections == 2


def test_timeouts_are_counted_and_do_not_stop_the_run(start_server):
    server = start_server(lambda n: 200 if n % 2 else None)
    result = run(make_load(server.url, num_requests=4, timeout_s=0.5))
    assert result.errors == {"timeout": 2}
    assert result.num_requests == 2
    assert server.num_connections == 4


@pytest.mark.parametrize("how", [{"clients": 1}, {"rate_per_s": 500, "max_connections": 30}])
def test_connections_that_break_are_counted_and_made_again(start_server, how):
    server = start_server(lambda n: (200, b"HTTP/1.1 200 OK\r\nConnection: close\r\nConte", b"SSH-2.0\r\n")[n % 3])
    result = run(make_load(server.url, num_requests=30, **how))
    assert result.errors == {"connection closed": 10, "bad answer": 10}
    assert result.num_requests == 10


def test_no_server_at_all_is_said_at_once(dead_url):
    with pytest.raises(Unreachable, match="cannot connect to http://127"):
        run(make_load(dead_url))


@pytest.mark.parametrize("how", [{"clients": 2}, {"rate_per_s": 500}])
def test_a_server_that_dies_ends_the_run(start_server, how):
    servers: list[Any] = []

    def die_at_20(n: int) -> int:
        if n == 20:
            servers[0].stop_soon()
        return 200

    servers.append(start_server(die_at_20))
    result = run(make_load(servers[0].url, duration_s=DEADLINE_S, gone_after_s=0.3, **how))
    assert "no connection to http://127.0.0.1" in str(result.ended_early)
    assert result.num_requests > 0
    assert "connection refused" in result.errors


def test_a_server_that_hangs_ends_a_counted_run(start_server):
    server = start_server(lambda n: 200 if n < 5 else None)
    result = run(make_load(server.url, num_requests=10**6, timeout_s=0.5, gone_after_s=0.3))
    assert "answered nothing for 0.8 s" in str(result.ended_early)
    assert result.num_requests == 5


@pytest.mark.parametrize("how", [{"clients": 3}, {"rate_per_s": 100}])
def test_what_a_hanging_server_owes_is_counted(start_server, how):
    result = run(make_load(start_server(lambda _: None).url, duration_s=0.2, drain_s=0.2, **how))
    assert result.errors.keys() == {"unanswered"}
    assert result.num_offered == result.errors.total() > 0
    assert result.num_requests == 0


@pytest.mark.parametrize(
    "load_of",
    [
        lambda url: make_load(url, clients=2, duration_s=DEADLINE_S),
        lambda url: make_load(url, rate_per_s=200, duration_s=DEADLINE_S),
    ],
)
def test_stopping_keeps_what_was_measured(start_server, load_of):
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


def test_a_run_tells_how_it_goes(start_server):
    seen: list[str] = []
    asyncio.run(LoadRun(make_load(start_server().url, warmup_s=0.5, duration_s=0.6), seen.append).run())
    assert seen[0] == "1 client: warming up"
    assert re.fullmatch(r"1 client: [\d,.]+ req/s.*, 1 s left", seen[seen.count(seen[0])])


@pytest.mark.parametrize("encoding_format", ["float", "bytes", "npy"])
def test_every_encoding_is_asked_for_and_counted(start_server, encoding_format):
    load = make_load(start_server().url, num_requests=4, texts_per_request=3, encoding_format=encoding_format)
    result = run(load)
    assert (result.num_texts, result.num_tokens, result.errors) == (4 * 3, 4 * 3 * 12, {})


# --- an open loop -----------------------------------------------------------------------------------------


def test_an_open_loop_does_not_wait_for_a_server_that_stalls(start_server):
    # In a closed loop of one client, a single request of the 100 would see it.
    def stall_at_10(n: int) -> int:
        if n == 10:
            time.sleep(0.5)
        return 200

    result = run(make_load(start_server(stall_at_10).url, rate_per_s=200, num_requests=100))
    assert result.errors == {}
    assert latency_of(result, "p50_ms") > 50
    assert result.num_requests == 100


async def hold_up(server: Any, seconds: float, **fields: Any) -> RunResult:
    """A run of 500 requests a second whose generator stands still in between."""
    running = asyncio.create_task(LoadRun(make_load(server.url, rate_per_s=500, **fields)).run())
    while len(server.bodies) < 10:
        await asyncio.sleep(0.001)
    time.sleep(seconds)  # noqa: ASYNC251 - this is what is tested
    return await running


def test_latency_runs_from_the_arrival_when_the_generator_is_late(start_server):
    server = start_server()
    result = asyncio.run(hold_up(server, 0.3, num_requests=100))
    assert latency_of(result, "p50_ms") > 30
    assert len(result.delays) > 20
    assert result.max_delay_ms > 200
    assert result.num_requests == 100


def test_the_pool_grows_to_its_bound_and_what_finds_it_busy_is_counted(start_server):
    server = start_server(lambda _: None)
    result = run(make_load(server.url, rate_per_s=1000, num_requests=50, max_connections=3, timeout_s=1.0))
    assert result.errors.keys() == {"timeout", "no free connection"}
    assert result.errors.total() == result.num_offered == 50
    assert "all 3 were in use" in result.first_details["no free connection"]
    # Three at a time; a machine that halts for the time of a timeout lets more of them come.
    assert 3 <= server.num_connections - 1 == result.errors["timeout"]


def test_one_connection_is_enough_for_a_fast_server(start_server):
    server = start_server()
    result = run(make_load(server.url, rate_per_s=20, num_requests=10, max_connections=64))
    assert result.num_requests == 10
    assert server.num_connections < 10


def test_what_a_generator_could_not_send_in_time_is_an_error_of_its_own(start_server):
    server = start_server()
    result = asyncio.run(hold_up(server, 1.7, duration_s=0.5))
    assert result.errors["not sent in time"] > 0
    assert result.num_offered == pytest.approx(0.5 * 500, rel=0.3)


def test_the_same_seed_has_the_same_arrivals(start_server):
    url = start_server().url
    first, second = (run(make_load(url, rate_per_s=400, duration_s=0.3)) for _ in range(2))
    assert first.num_offered == second.num_offered > 60


@pytest.mark.parametrize(
    ("clients", "rate_per_s"), [(0, None), (1, 5.0), (0, 0.0), (0, -1.0), (0, float("nan")), (0, MAX_RATE_PER_S * 2)]
)
def test_a_load_has_either_clients_or_a_rate(clients, rate_per_s):
    with pytest.raises(ValueError, match=r"clients or a rate|a rate must be"):
        make_load("http://h:1", clients=clients, rate_per_s=rate_per_s)


# --- bulk beside it ---------------------------------------------------------------------------------------


def make_bulk(url: str) -> Load:
    return make_load(url, clients=2, texts_per_request=5, duration_s=math.inf)


@pytest.mark.parametrize("load_options", [{"clients": 1}, {"rate_per_s": 200.0}])
@pytest.mark.parametrize("length", [{"num_requests": 40}, {"duration_s": 0.3}])
def test_bulk_runs_beside_and_is_counted_apart(start_server, load_options, length):
    server = start_server()
    result = run(make_load(server.url, bulk=make_bulk(server.url), **load_options, **length))
    assert result.bulk is not None
    assert result.bulk.errors == {}
    assert result.num_texts == result.num_requests > 0
    assert result.bulk.num_texts == 5 * result.bulk.num_requests > 0
    assert result.bulk.elapsed_s == pytest.approx(result.elapsed_s, rel=0.5)
    if "num_requests" in length:
        assert result.num_requests == 40


def test_errors_of_the_bulk_are_its_own(start_server):
    servers: list[Any] = []

    def refuse_lists(_: int) -> int:
        return 413 if isinstance(servers[0].bodies[-1]["input"], list) else 200

    servers.append(start_server(refuse_lists))
    result = run(make_load(servers[0].url, clients=1, num_requests=30, bulk=make_bulk(servers[0].url)))
    assert result.bulk is not None
    assert result.errors == {}
    assert result.bulk.errors.keys() == {"HTTP 413"}
    assert result.bulk.num_requests == 0
