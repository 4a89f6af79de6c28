"""vecd behind Ray Serve's HAProxy, on real Ray nodes: what dies costs no request, and a queue brings another node.

The clients never repeat anything, and compare every vector with those of a server without Ray. The dummy engine takes
20 ms a text, so that several nodes fit on two cores.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.support.ray_cluster import Node, RayCluster, free_port, ray_cluster
from tests.support.serving import eventually, running_server

pytestmark = [
    pytest.mark.skipif(not os.environ.get("VECD_FLEET"), reason="make test-fleet starts Ray"),
    pytest.mark.timeout(600),
]

_FLAGS = "--engine dummy --workers 1 --dummy-ms-per-text 20"
_TEXTS = [f"text {n} of a caller who never repeats" for n in range(2000)]
"""More than are ever under way: vecd computes a text once for all who wait for it."""
_RELOAD_S = 5.0
_DEPLOY = """
import json, sys
from ray import serve
from vecd.client.ray.serve import build
serve.start(proxy_location="HeadOnly", http_options={"host": "0.0.0.0", "port": int(sys.argv[1])})
serve.run(build(json.loads(sys.argv[2])), name="vecd")
"""


class Served:
    """A cluster, and the address at which Serve answers."""

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster, self.port = cluster, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def deploy(self, **arguments: object) -> None:
        driver = self.cluster.driver("-c", _DEPLOY, str(self.port), json.dumps({"flags": _FLAGS, **arguments}))
        assert driver.wait(120) == 0, self.cluster.log()
        eventually(lambda: self.status() == 200, 30)

    def status(self) -> int:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code
        except httpx.HTTPError:
            return 0

    def servers(self) -> list[tuple[Node, str]]:
        """The admin socket of each vecd that has been started and whose node lives."""
        nodes = [node for node in self.cluster.nodes if node.process.poll() is None]
        return [(node, str(path)) for node in nodes for path in node.folder.glob("vecd-*/admin")]

    def num_serving(self) -> int:
        """How many vecds have answered requests for vectors."""
        return sum(_num_embedded(path) > 0 for _, path in self.servers())


def _num_embedded(admin_path: str) -> int:
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=admin_path), timeout=5) as client:
            stats = client.get("http://vecd/stats").json()
    except (httpx.HTTPError, ValueError):
        return 0
    requests = stats.get("requests", ())  # none in the answer of a server that still reads its model
    return sum(each["count"] for each in requests if each["route"] == "/v1/embeddings")


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    with running_server("--engine", "dummy", "--workers", "1") as server:
        return [vector for start in range(0, len(_TEXTS), 500) for vector in server.embed(_TEXTS[start : start + 500])]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ray_cluster(2, with_serve=True) as cluster:
        yield Served(cluster)


class Load:
    """Clients that count what they get and repeat nothing."""

    def __init__(self, url: str, expected: list[list[float]]) -> None:
        self.num_answered = 0
        self.failures: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._url, self._expected = f"{url}/v1/embeddings", expected

    @asynccontextmanager
    async def running(self, num_clients: int):
        step = len(_TEXTS) // num_clients
        clients = [asyncio.create_task(self._client(n * step)) for n in range(num_clients)]
        try:
            yield
        finally:
            self._expected = []
            await asyncio.wait_for(asyncio.gather(*clients), 90)

    async def _client(self, n: int) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            while expected := self._expected:
                n = (n + 1) % len(_TEXTS)
                began_at = time.monotonic()
                try:
                    answer = await http.post(self._url, json={"input": [_TEXTS[n]]})
                except httpx.HTTPError as error:
                    self.failures[repr(error)] += 1
                    continue
                self.slowest_s = max(self.slowest_s, time.monotonic() - began_at)
                if answer.status_code != 200:
                    self.failures[f"{answer.status_code} {answer.text[:200]} {sorted(answer.headers)}"] += 1
                elif answer.json()["data"][0]["embedding"] != expected[n]:
                    self.failures["a wrong vector"] += 1
                else:
                    self.num_answered += 1


async def _eventually(condition, timeout_s: float) -> float:
    began_at = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() - began_at < timeout_s, "did not happen in time"
        await asyncio.sleep(0.1)
    return time.monotonic() - began_at


def test_a_queue_brings_another_node(served, expected):
    served.deploy(min_replicas=1, max_replicas=2, upscale_delay_s=1)
    [(first, _)] = served.servers()

    async def overload() -> tuple[Load, float]:
        load = Load(served.url, expected)
        async with load.running(128):
            return load, await _eventually(lambda: served.num_serving() == 2, 60)

    load, took_s = asyncio.run(overload())
    _tell("Ray Serve: 1 → 2 by queue age", load, served_by_two_after_s=round(took_s, 1))
    assert not load.failures
    assert {node for node, _ in served.servers()} > {first}


def test_what_dies_costs_no_request(served, expected):
    served.deploy(min_replicas=2)
    eventually(lambda: len(served.servers()) == 2, 60)

    async def deaths() -> tuple[Load, int, float, float]:
        load = Load(served.url, expected)
        async with load.running(32):
            await asyncio.sleep(3)
            [supervisor] = served.cluster.nodes[0].supervisors()
            before = served.servers()
            supervisor.kill()  # its replica lives on, if nothing ends it
            vecd_s = await _eventually(lambda: len(set(served.servers()) - set(before)) == 1 and _all_serve(served), 60)
            failed_by_vecd = sum(load.failures.values())
            # HAProxy's process from before still ends what it has begun, and knows no replica but the two of then.
            await asyncio.sleep(_RELOAD_S)
            await asyncio.to_thread(served.cluster.nodes[1].kill)
            killed_at = time.monotonic()
            await asyncio.to_thread(served.cluster.add_nodes)
            await _eventually(lambda: _all_serve(served), 90)
            return load, failed_by_vecd, vecd_s, time.monotonic() - killed_at

    load, failed_by_vecd, vecd_s, node_s = asyncio.run(deaths())
    times = {"vecd_back_after_s": round(vecd_s, 1), "node_replaced_after_s": round(node_s, 1)}
    _tell("Ray Serve: deaths", load, failed_by_vecd=failed_by_vecd, **times)
    assert not load.failures
    assert load.num_answered > 500


def _all_serve(served: Served) -> bool:
    return len(served.servers()) == 2 and served.num_serving() == 2


def _tell(trial: str, load: Load, **figures: float) -> None:
    failed = sum(load.failures.values())
    slowest = round(load.slowest_s, 1)
    print(
        "RESULT",
        json.dumps({"trial": trial, "right": load.num_answered, "failed": failed, "slowest_s": slowest, **figures}),
    )
