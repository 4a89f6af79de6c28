"""Fast clients among slow and idle ones: slowloris heads, bodies and readers that drip, connections that say nothing.

The short trial runs with short limits, and says nothing of time. The long one, with VECD_SOAK set, runs a real server
with its own limits, and compares the latency of fast clients with and without a thousand slow and five hundred idle
ones.
"""

import asyncio
import json
import sys
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support import slowclients
from tests.support.serving import running_server
from tests.support.shared_servers import DUMMY
from tests.support.slowclients import End, run_slow_clients
from tests.support.soak.form import only_long, record
from tests.support.soak.tenants import make_dummy_tenants
from tests.support.soak.traffic import Traffic
from tests.support.tinyserver import DEADLINE_S, get, post, serving
from vecd.gateway.http.connection import Timeouts

SHORT = Timeouts(head_s=1.0, body_s=2.0, idle_s=1e6, write_s=1.0, linger_s=0.5, sweep_s=0.05)


def check_ends(ends: list[End], timeouts: Timeouts) -> None:
    """Each was cut, not before its time, and told why if it could be."""
    for end in ends:
        limit_s = {"head": timeouts.head_s, "body": timeouts.body_s, "reader": timeouts.write_s}[end.kind]
        assert end.after_s >= limit_s - 0.1, end
        if end.kind != "reader":
            assert end.answer.startswith("HTTP/1.1 408"), end


async def test_fast_clients_are_served_while_slow_ones_are_cut():
    async with serving(timeouts=SHORT) as served:
        idle = [await served.connect() for _ in range(20)]
        slow = asyncio.ensure_future(
            run_slow_clients(
                served.address()[1],
                {"head": 25, "body": 20, "reader": 5},
                interval_s=0.2,
                large=get("/large"),
                body_line=b"POST /echo HTTP/1.1",
                give_up_s=DEADLINE_S,
            )
        )
        fast = [await served.connect() for _ in range(4)]
        num_answered = 0
        while not slow.done():
            for client in fast:
                body = b"text %d" % num_answered
                assert (await client.ask(post("/echo", body=body))).body == body
                num_answered += 1
            await asyncio.sleep(0.01)
        check_ends(await slow, SHORT)
        assert Counter(end.kind for end in slow.result()) == {"head": 25, "body": 20, "reader": 5}
        assert num_answered > 0
        for client in idle:
            assert (await client.ask(get("/a"))).body == b"/a"
        assert served.server.num_connections == 24


# --- the long trial -------------------------------------------------------------------------------------------------

NUM_SLOW = {"head": 480, "body": 480, "reader": 40}
NUM_IDLE = 500
NUM_FAST = 4
QUIET_S = 20.0
BODY_LINE = "POST /v1/embeddings HTTP/1.1"


def request(body: bytes) -> bytes:
    return b"%b\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (BODY_LINE.encode(), len(body), body)


@asynccontextmanager
async def idle_connections(port: int, num: int):
    """Connections that say nothing, and are still good for a request in the end."""
    async with AsyncExitStack() as stack:
        streams = []
        for _ in range(num):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            streams.append((reader, writer))
        yield
        for reader, writer in streams:
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")


async def slow_process(port: int) -> list[End]:
    options: dict[str, Any] = {
        "port": port,
        "kinds": NUM_SLOW,
        "interval_s": 5.0,
        "large": request(json.dumps({"input": ["text"] * 2048}).encode()).decode(),
        "body_line": BODY_LINE,
        "give_up_s": 200.0,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(slowclients.__file__)), json.dumps(options), stdout=asyncio.subprocess.PIPE
    )
    try:
        printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return [End(**fields) for fields in json.loads(printed)]


@only_long
@pytest.mark.timeout(1200)
def test_a_thousand_slow_clients_do_not_slow_down_fast_ones(minilm_folder: Path):
    tenants = make_dummy_tenants(minilm_folder, 100)

    async def p99_ms(port: int, is_beset: bool) -> float:
        """Of clients that send one small request after the other; each answer is right."""
        async with Traffic(f"http://127.0.0.1:{port}", tenants, NUM_FAST, max_texts=1, pause_s=0.01) as fast:
            if is_beset:
                async with idle_connections(port, NUM_IDLE):
                    ends = await slow_process(port)
                check_ends(ends, Timeouts())
                assert Counter(end.kind for end in ends) == NUM_SLOW
            else:
                await asyncio.sleep(QUIET_S)
        fast.tally.assert_all_right()
        return fast.tally.percentile_ms(99)

    async def trial(port: int) -> list[tuple[float, float]]:
        return [(await p99_ms(port, is_beset=False), await p99_ms(port, is_beset=True)) for _ in range(3)]

    with running_server(*DUMMY) as server:
        alone_ms, beset_ms = zip(*asyncio.run(trial(server.port)), strict=True)
    ratio = median(beset_ms) / median(alone_ms)
    record("slow clients", slow=NUM_SLOW, idle=NUM_IDLE, p99_alone_ms=alone_ms, p99_beset_ms=beset_ms, ratio=ratio)
    assert ratio <= 2
