"""A real Prometheus scrapes a real server, with the rules loaded: each query of the dashboard finds something.

Where `prometheus` is on the path (Debian: the package of that name). Takes 40 seconds.
"""

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.serving import Server, eventually, running_server

ROOT = Path(__file__).parents[3]
WINDOW = "15s"
"""For $__rate_interval: figures come every second."""
RECORDS = (
    "vecd:requests_failed:share5m",
    "vecd:requests_refused:share5m",
    "vecd:request_seconds:p99_5m",
    "vecd:memory_bytes",
)
DEADLINE_S = 90.0
NUM_CLIENTS = 8

_CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 2s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: vecd
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def panels() -> list[tuple[str, str]]:
    dashboard = json.loads((ROOT / "deploy/grafana.json").read_text())
    return [
        (f"{panel['title']}: {target['legendFormat']}", target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]


def names_of_rules() -> list[str]:
    groups = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"]
    return [rule.get("alert") or rule["record"] for group in groups for rule in group["rules"]]


@contextmanager
def load(server: Server) -> Iterator[None]:
    """What is answered, refused, late, wrong, and nowhere."""
    stop = threading.Event()

    def ask(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            while not stop.is_set():
                client.post("/v1/embeddings", json={"input": [f"text {number} {n}" for n in range(200)]})
                client.post("/embed", json={"inputs": "one"}, headers={"x-vecd-timeout-ms": "1"})
                client.post("/v1/embeddings", content=b"{")
                client.get("/nowhere")
                stop.wait(0.05)

    threads = [threading.Thread(target=ask, args=[number]) for number in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def prometheus(server: Server, folder: Path) -> Iterator[httpx.Client]:
    program = shutil.which("prometheus")
    assert program is not None
    config = folder / "prometheus.yml"
    config.write_text(_CONFIG.format(rules=ROOT / "deploy/alerts.yaml", port=server.port))
    address = f"127.0.0.1:{free_port()}"  # Prometheus 2 cannot say which port it took
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, *flags], stdout=log, stderr=log, cwd=folder)
    try:
        with httpx.Client(base_url=f"http://{address}") as client:
            eventually(lambda: is_ready(client, process), timeout_s=DEADLINE_S)
            yield client
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def is_ready(client: httpx.Client, process: "subprocess.Popen[bytes]") -> bool:
    assert process.poll() is None, "prometheus has ended"
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def query(client: httpx.Client, expression: str) -> list[Any]:
    for variable, value in (("$__rate_interval", WINDOW), ("$job", ".*"), ("$instance", ".*"), ("$model", ".*")):
        expression = expression.replace(variable, value)
    answer = client.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer)
    return list(answer["data"]["result"])


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not on the path")
def test_every_query_of_the_dashboard_finds_something_and_every_rule_can_be_evaluated(tmp_path):
    flags = ("--engine", "weightless", "--workers", "2", "--gateways", "2", "--max-requests", "4")
    with running_server(*flags) as server, prometheus(server, tmp_path) as client, load(server):
        # A server of one model that is loaded all the time has no state of it.
        missing = {name: expression for name, expression in panels() if "vecd_model_" not in expression}

        def all_found() -> bool:
            for name, expression in list(missing.items()):
                values = [sample["value"][1] for sample in query(client, expression)]
                if values and "NaN" not in values:
                    del missing[name]
            return not missing

        try:
            eventually(all_found, timeout_s=DEADLINE_S)
        except AssertionError:
            raise AssertionError(f"nothing found by {missing}") from None

        def rules() -> list[dict[str, Any]]:
            groups = client.get("/api/v1/rules").json()["data"]["groups"]
            return [rule for group in groups for rule in group["rules"]]

        eventually(lambda: "unknown" not in {rule["health"] for rule in rules()}, timeout_s=DEADLINE_S)
        assert [rule for rule in rules() if rule["health"] != "ok"] == []
        assert len(rules()) == len(names_of_rules())
        [target] = client.get("/api/v1/targets").json()["data"]["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")
        for record in RECORDS:
            eventually(lambda record=record: bool(query(client, record)), timeout_s=DEADLINE_S)  # type: ignore[misc]
        firing = {alert["labels"]["alertname"] for alert in client.get("/api/v1/alerts").json()["data"]["alerts"]
                  if alert["state"] == "firing"}  # fmt: skip
        assert not firing & {"VecdDown", "VecdNoWorkerReady", "VecdWorkerRestarts", "VecdGatewayRestarted"}
        print("scrape", target["lastScrapeDuration"], "series", len(query(client, '{job="vecd"}')))
