"""A reload of a server of several models: what has not changed keeps its processes, whatever happens to the others."""

import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import httpx
import psutil
import pytest

from tests.support.serving import Server, eventually, running_server

Tables = dict[str, dict[str, object]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "vecd.toml"


@pytest.fixture
def server(config: Path, minilm_folder: Path) -> Iterator[Server]:
    write(config, minilm_folder, {"a": {"workers": 1}, "b": {"workers": 1}})
    with running_server("--engine", "weightless", "--gateways", "2", "--config", str(config)) as server:
        yield server


def write(config: Path, source: Path, tables: Tables) -> None:
    lines = [
        f'[models.{name}]\nsource = "{table.get("source", source)}"\nworkers = {table["workers"]}\n'
        for name, table in tables.items()
    ]
    config.write_text("".join(lines))


def worker_pids(server: Server, model: str) -> set[int]:
    info = httpx.get(f"{server.url}/m/{model}/info", timeout=10).raise_for_status().json()
    return {worker["pid"] for worker in info["workers"]}


class Requests:
    """One request after the other for one model, in a thread."""

    def __init__(self, server: Server, model: str) -> None:
        self.failures: list[str] = []
        self.num_answered = 0
        self._url, self._model, self._ends = server.url, model, Event()
        self._thread = Thread(target=self._send)

    def _send(self) -> None:
        while not self._ends.is_set():
            body = {"model": self._model, "input": "text"}
            response = httpx.post(f"{self._url}/v1/embeddings", json=body, timeout=30)
            if response.status_code != 200 or response.json()["model"] != self._model:
                self.failures.append(response.text[:300])
            self.num_answered += 1

    def __enter__(self) -> "Requests":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def test_models_are_added_replaced_refused_and_removed_beside_another(
    server: Server, config: Path, minilm_folder: Path
) -> None:
    before = {model: worker_pids(server, model) for model in "ab"}
    with Requests(server, "a") as requests:
        write(config, minilm_folder, {"a": {"workers": 1}, "b": {"workers": 2}, "c": {"workers": 1}})
        server.reload_outcome()
        eventually(lambda: len(worker_pids(server, "b")) == 2)
        assert not worker_pids(server, "b") & before["b"]
        assert worker_pids(server, "a") == before["a"]
        replaced = {model: worker_pids(server, model) for model in "abc"}

        broken: Tables = {"a": {"workers": 2}, "c": {"workers": 1}, "d": {"workers": 1, "source": "/nowhere"}}
        write(config, minilm_folder, broken)
        assert "not reloaded, nothing has changed: d: /nowhere: no such folder" in server.reload_outcome()
        assert {model: worker_pids(server, model) for model in "abc"} == replaced

        psutil.Process(replaced["c"].pop()).send_signal(signal.SIGKILL)
        write(config, minilm_folder, {"a": {"workers": 1}, "c": {"workers": 1}})
        assert "reloaded: b is no longer served" in server.reload_outcome()
        assert httpx.get(f"{server.url}/m/b/info").status_code == 404
        eventually(lambda: not any(map(psutil.pid_exists, replaced["b"])))  # they end after the line in the log
        assert worker_pids(server, "a") == before["a"]
        assert "reloaded: no model has changed" in server.reload_outcome()
    assert requests.num_answered > 0
    assert requests.failures == []
