"""Requests of random shapes, twice as many as can be served, costly ones, and clients that read nothing: right vectors,
refusals that say when to come again, and no process that grows."""

import asyncio
import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.support.canaries import WORD
from tests.support.serving import RunningServer, exact_server, running_server
from tests.support.shared_servers import DUMMY, shared_server
from tests.support.soak.faults import own_memory_bytes, wait_until
from tests.support.soak.form import LONG, only_long, pick, record
from tests.support.soak.questions import Tenant
from tests.support.soak.traffic import Arrivals, Closed, Traffic, connect, under_traffic
from tests.system.faults.test_kinds import KINDS, same

MS = 1000


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """In short shared with other tests."""
    if not LONG:
        yield shared_server(*DUMMY)
        return
    with running_server("--engine", "dummy", "--workers", "2") as running:
        yield running


# --- random shapes ----------------------------------------------------------------------------------------------


def test_a_great_many_requests_of_random_shapes(server: RunningServer, dummy_tenants: list[Tenant]):
    num_warmup, num_requests = pick(short=(200, 2_000), long=(20_000, 200_000))

    async def be_answered(traffic: Traffic) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
        rude = asyncio.create_task(be_rude(server.url, dummy_tenants))
        await until_answered(traffic, num_warmup)
        before = memory_and_descriptors(server)
        await until_answered(traffic, num_requests)
        after = memory_and_descriptors(server)
        rude.cancel()
        with suppress(asyncio.CancelledError):
            await rude
        return before, after

    num_clients = pick(short=8, long=32)
    traffic, (before, after) = under_traffic(server.url, dummy_tenants, num_clients, be_answered, max_texts=12)
    growth = max(after[pid][0] / before[pid][0] - 1 for pid in before)
    more_descriptors = max(after[pid][1] - before[pid][1] for pid in before)
    record(
        "random shapes",
        clients=num_clients,
        most_growth_percent=round(100 * growth, 2),
        more_descriptors=more_descriptors,
        requests_per_s=round(traffic.tally.num_right / traffic.elapsed_s),
        **traffic.tally.figures(),
    )
    traffic.tally.assert_all_right()
    assert set(after) == set(before), "no process has died"
    if LONG:
        asyncio.run(wait_until(lambda: server.info()["queue"]["requests"] == 0, 30))
        assert growth < 0.03
        assert more_descriptors <= 2  # a connection that is just being closed or opened


async def until_answered(traffic: Traffic, num: int) -> None:
    deadline = time.monotonic() + 1800
    while traffic.tally.num_right < num:
        assert not traffic.tally.failures, traffic.tally.failures
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def memory_and_descriptors(server: RunningServer) -> dict[int, tuple[int, int]]:
    return {process.pid: (own_memory_bytes(process), process.num_fds()) for process in server.processes()}


async def be_rude(url: str, tenants: list[Tenant]) -> None:
    """Requests that are cut off, left alone, or wrong, between the others."""
    rng = random.Random(6)
    traffic = Traffic(url, tenants, 0, max_texts=40)
    while True:
        connection = await connect(url)
        request = traffic.question(tenants[0]).render({})
        match rng.randrange(3):
            case 0:  # the client goes away in the middle of its request
                connection._transport.write(request[: rng.randrange(len(request))])
            case 1:  # … before the answer
                connection._transport.write(request)
                await asyncio.sleep(rng.uniform(0, 0.01))
            case _:
                body = json.dumps({"input": rng.choice((5, [], [None], {"a": WORD}, [[-1]]))}).encode()
                head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
                try:
                    assert (await connection.exchange(head.encode() + body)).status == 400
                except Closed as error:
                    raise AssertionError("a bad request was not answered") from error
        connection.close()
        await asyncio.sleep(0.02)


# --- overload ---------------------------------------------------------------------------------------------------

GOOD_S = 1.0
"""An answer within this of its request's arrival is good; requests say so themselves."""


@only_long
def test_twice_the_capacity(tenants: list[Tenant]):
    """Capacity: what a closed loop gets, before and after; goodput: answers within a second of their arrival."""
    with exact_server() as server:

        def memory() -> dict[int, int]:
            return {process.pid: own_memory_bytes(process) for process in server.processes()}

        async def rate(traffic: Traffic) -> float:
            num_before, started_at = traffic.tally.num_right, time.monotonic()
            await asyncio.sleep(15)
            return (traffic.tally.num_right - num_before) / (time.monotonic() - started_at)

        async def overload(rate_per_s: float) -> tuple[Arrivals, float, list[dict[int, int]]]:
            headers = {"x-vecd-timeout-ms": str(round(GOOD_S * MS))}
            samples = []
            async with Arrivals(
                server.url, tenants, 32, max_texts=1, headers=headers, rate_per_s=rate_per_s, good_s=GOOD_S
            ) as arrivals:
                await asyncio.sleep(5)
                num_before, started_at = arrivals.num_good, time.monotonic()
                for _ in range(4):
                    samples.append(memory())
                    await asyncio.sleep(15)
                goodput = (arrivals.num_good - num_before) / (time.monotonic() - started_at)
                samples.append(memory())
            return arrivals, goodput, samples

        first, before_per_s = under_traffic(server.url, tenants, 32, rate, before=32, after=0, max_texts=1)
        arrivals, goodput_per_s, samples = asyncio.run(overload(2 * before_per_s))
        last, after_per_s = under_traffic(server.url, tenants, 32, rate, before=32, after=0, max_texts=1)
    capacity = (before_per_s + after_per_s) / 2
    growth = max(samples[-1][pid] / samples[0][pid] - 1 for pid in samples[0])
    record(
        "overload",
        capacity_per_s=[round(before_per_s, 1), round(after_per_s, 1)],
        offered_per_s=round(2 * before_per_s, 1),
        goodput_per_s=round(goodput_per_s, 1),
        goodput_of_capacity=round(goodput_per_s / capacity, 3),
        most_growth_percent=round(100 * growth, 2),
        refused_by_status={str(status): number for status, number in arrivals.tally.refused.items()},
        **arrivals.tally.figures(),
    )
    for traffic in (first, last):
        traffic.tally.assert_all_right()
    arrivals.tally.assert_none_wrong()  # which has every refusal with a Retry-After
    assert arrivals.tally.refused
    assert (arrivals.tally.num_broken, arrivals.tally.num_unconnected) == (0, 0)
    assert goodput_per_s >= 0.95 * capacity
    assert growth < 0.05


# --- costly bytes -----------------------------------------------------------------------------------------------

CHUNKED = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
COSTLY = {
    "chunks": CHUNKED + b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n",
    "extensions": CHUNKED + b"1;a\r\nx\r\n" * 150_000 + b"0\r\n\r\n",
    "trailers": (CHUNKED + b"0\r\n" + b"A:\r\n" * 8_000 + b"\r\n") * 20,
    "pipelined": b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n" * 5_000,
    "pipelined_openapi": b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 200,
}


@only_long
@pytest.mark.parametrize("kind", COSTLY)
def test_costly_bytes_do_not_stall_the_loop(server: RunningServer, kind: str):
    """`/live` while four clients send what costs the loop most by the byte."""
    over = threading.Event()
    clients = [threading.Thread(target=send_again, args=(server.port, COSTLY[kind], over)) for _ in range(4)]
    alone_ms = latencies_ms(server.port, 2.0)
    for client in clients:
        client.start()
    try:
        beset_ms = latencies_ms(server.port, 10.0)
    finally:
        over.set()
        for client in clients:
            client.join()
    record(
        f"stalls: {kind}",
        alone_max_ms=round(alone_ms[-1], 1),
        beset_p50_ms=round(beset_ms[len(beset_ms) // 2], 1),
        beset_max_ms=round(beset_ms[-1], 1),
    )
    assert beset_ms[-1] <= 50


def latencies_ms(port: int, duration_s: float) -> list[float]:
    """Of `/live`, on one connection, in ascending order."""
    connection, found, end = http.client.HTTPConnection("127.0.0.1", port), [], time.monotonic() + duration_s
    while time.monotonic() < end:
        began_at = time.perf_counter()
        connection.request("GET", "/live")
        assert connection.getresponse().read() is not None
        found.append((time.perf_counter() - began_at) * MS)
        time.sleep(0.002)
    connection.close()
    return sorted(found)


def send_again(port: int, data: bytes, over: threading.Event) -> None:
    while not over.is_set():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
            reading = threading.Thread(target=read_all, args=(sock,))
            reading.start()
            with suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            reading.join()


def read_all(sock: socket.socket) -> None:
    with suppress(OSError):
        while sock.recv(1 << 20):
            pass


# --- clients that read nothing ----------------------------------------------------------------------------------

BODY = json.dumps({"input": ["text"] * 2048}).encode()
REQUEST = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


@only_long
@pytest.mark.timeout(600)
def test_three_hundred_clients_that_read_nothing():
    """The gateway's memory stays within its bound, and goes back; honest clients of the same address are answered."""
    with running_server("--engine", "dummy", "--workers", "1") as server:
        ask(server.port)
        gateway, over, sampled = server.gateway(), threading.Event(), []

        def memory_mb() -> float:
            return own_memory_bytes(gateway) / 1e6

        def watch() -> None:
            while not over.wait(0.05):
                sampled.append(memory_mb())

        start_mb = memory_mb()
        watching = threading.Thread(target=watch)
        watching.start()
        silent = [send_and_read_nothing(server.port) for _ in range(300)]
        time.sleep(3)
        began_at = time.monotonic()
        try:
            with ThreadPoolExecutor(8) as pool:
                statuses = Counter(pool.map(ask, [server.port] * 60))
            honest_s = time.monotonic() - began_at
            time.sleep(max(0.0, 35 - honest_s))
        finally:
            over.set()
            watching.join()
            for sock in silent:
                sock.close()
        time.sleep(60)
        left_mb = memory_mb() - start_mb
        record(
            "slow readers",
            start_mb=round(start_mb),
            growth_mb=round(max(sampled) - start_mb),
            left_mb=round(left_mb),
            honest=statuses,
            honest_s=round(honest_s, 1),
        )
        assert statuses == {200: 60}
        assert max(sampled) - start_mb <= 1.2 * 512
        assert left_mb <= 150
        assert server.gateway().pid == gateway.pid


def send_and_read_nothing(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(REQUEST)
    return sock


def ask(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/embeddings", BODY)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


# --- growth -----------------------------------------------------------------------------------------------------


@only_long
@pytest.mark.timeout(1200)
def test_a_quarter_of_an_hour_of_four_models(tmp_path: Path):
    """Of four kinds in one server: the gateway's memory stays."""
    duration_s, warm_s, sampled_s = 900, 300, 5
    names = ("dense", "rerank", "sparse", "multi-vector")
    models = [f"{name}={KINDS[name].save(tmp_path / name)}" for name in names]
    with running_server("--workers", "1", "--gateways", "1", *models) as server:
        over_at = time.monotonic() + duration_s

        def ask_for(name: str) -> int:
            kind, num_right = KINDS[name], 0
            with httpx.Client(timeout=60) as http:
                asked = [(body, kind.ask(f"{server.url}/m/{name}", body, http)) for body in kind.bodies()]
                while time.monotonic() < over_at:
                    for body, expected in asked:
                        found = kind.ask(f"{server.url}/m/{name}", body, http)
                        assert found is not None
                        assert expected is not None
                        assert same(found, expected)
                        num_right += 1
            return num_right

        gateway, sampled = server.gateway(), []
        with ThreadPoolExecutor(len(names)) as clients:
            asking = [clients.submit(ask_for, name) for name in names]
            while time.monotonic() < over_at:
                time.sleep(sampled_s)
                sampled.append(own_memory_bytes(gateway) / 1e6)
            num_right = {name: future.result() for name, future in zip(names, asking, strict=True)}
        assert server.gateway().pid == gateway.pid
    window = 60 // sampled_s
    parts = sampled[:window], sampled[warm_s // sampled_s :][:window], sampled[-window:]
    first, warm, last = (round(max(part), 1) for part in parts)
    record("growth: four models", right=num_right, first_mb=first, warm_mb=warm, last_mb=last)
    assert last - warm <= 3.0
