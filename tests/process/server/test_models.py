"""One server of two gateways and several models: what each is called by, when it is loaded, what a reload changes.

Its configuration is written and read again for what each part is about.
"""

import base64
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.support.serving import Server, eventually, running_server

FORMAT = re.compile(r"[0-9a-f]{32};dtype=float32")
OTHER = "0" * 32
IN_EACH_DIALECT: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "text"},
    "/embed": {"inputs": "text"},
    "/v2/embed": {"texts": ["text"], "input_type": "search_query"},
    "/api/embed": {"model": "a", "input": "text"},
    "/pooling": {"input": "text"},
    "/tokenize": {"prompt": "text"},
    "/decode": {"ids": [101, 102]},
}
WITH_PROMPT = {"prompts": '{ query = "query: " }', "aliases": "{ plain = {}, short = { dimensions = 384 } }"}
ON_DEMAND = {"load": '"demand"'}


class Config:
    """The file, of tables of models, each of which has one worker unless it says otherwise."""

    def __init__(self, path: Path, source: Path) -> None:
        self.path, self._source = path, source

    def write(self, **tables: Mapping[str, object]) -> None:
        lines = []
        for name, table in tables.items():
            settings = {"source": f'"{self._source}"', "workers": 1, **table}
            lines += [f"[models.{name}]", *(f"{key} = {value}" for key, value in settings.items())]
        self.path.write_text("\n".join(lines))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Config:
    return Config(tmp_path_factory.mktemp("config") / "vecd.toml", minilm_folder)


@pytest.fixture(scope="module")
def server(config: Config) -> Iterator[Server]:
    config.write(a=WITH_PROMPT, b=ON_DEMAND)
    flags = ("--engine", "dummy", "--gateways", "2", "--cors-origins", "*", "--config", str(config.path))
    with running_server(*flags) as server:
        yield server


# --- identity -------------------------------------------------------------------------------------------------------


def post(server: Server, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{server.url}{path}", json=body, headers=names, timeout=30)


def identity(server: Server, model: str = "a") -> str:
    return post(server, f"/m/{model}/v1/embeddings", {"input": "text"}).headers["x-vecd-identity"]


def message(response: httpx.Response) -> str:
    body = response.json()
    error = body.get("error", body)
    return str(error["message"] if isinstance(error, dict) else error)


@pytest.mark.parametrize("path", IN_EACH_DIALECT)
def test_each_dialect_says_it_and_refuses_another(server: Server, path: str) -> None:
    own, body = identity(server), IN_EACH_DIALECT[path]
    path = f"/m/a{path}"
    assert FORMAT.fullmatch(own)
    assert post(server, path, body).headers["x-vecd-identity"] == own
    for demand in (own, own.partition(";")[0]):
        assert post(server, path, body, if_vecd_identity=demand).status_code == 200
    for demand in (OTHER, f"{OTHER};dtype=float32", own.replace("float32", "int8")):
        response = post(server, path, body, if_vecd_identity=demand)
        assert response.status_code == 412
        assert response.headers["x-vecd-identity"] == own
        assert demand in message(response)
        assert own in message(response)
    response = post(server, path, body, if_vecd_identity="*")
    assert response.status_code == 400
    assert "if-vecd-identity" in message(response)


def test_the_code_is_openai_s_and_nothing_is_computed(server: Server) -> None:
    def num_batches() -> int:
        return sum(worker["batches"] for worker in server.info()["workers"])

    assert identity(server)  # the counter of its batch is up to date once another request is answered
    before = num_batches()
    response = post(server, "/m/a/v1/embeddings", {"input": "text"}, if_vecd_identity=OTHER)
    assert response.json()["error"]["code"] == "identity_mismatch"
    assert num_batches() == before


def test_an_error_of_the_model_s_route_says_it_and_others_do_not(server: Server) -> None:
    own = identity(server)
    assert post(server, "/m/a/v1/embeddings", {"input": []}).headers["x-vecd-identity"] == own
    assert post(server, "/v1/embeddings", {"model": "a", "input": []}).headers["x-vecd-identity"] == own
    for name in ("a", "short"):
        response = httpx.post(f"{server.url}/m/{name}/v1/embeddings", content=b"{")
        assert (response.status_code, response.headers["x-vecd-identity"]) == (400, identity(server, name))
    for path in ("/health", "/info", "/metrics", "/v1/models"):
        assert "x-vecd-identity" not in httpx.get(f"{server.url}{path}").headers
    assert httpx.get(f"{server.url}/m/a/v1/models").headers["x-vecd-identity"] == own


def test_an_alias_with_defaults_has_its_own(server: Server) -> None:
    own, plain, short = identity(server), identity(server, "plain"), identity(server, "short")
    assert own == plain != short
    assert short == post(server, "/v1/embeddings", {"model": "short", "input": "text"}).headers["x-vecd-identity"]
    assert post(server, "/m/short/embed", {"inputs": "text"}, if_vecd_identity=own).status_code == 412
    assert post(server, "/m/short/embed", {"inputs": "text"}, if_vecd_identity=short).status_code == 200
    listed = {each["id"]: each["identity"] for each in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert {name: listed[name] for name in ("a", "plain", "short")} == {"a": own, "plain": own, "short": short}
    described = httpx.get(f"{server.url}/m/a/info").json()["model"]
    assert (described["identity"], described["alias_identities"]) == (own, {"short": short})
    metrics = httpx.get(f"{server.url}/metrics").text
    for model, value in (("a", own), ("short", short)):
        assert f'vecd_model_identity_info{{identity="{value}",model="{model}"}} 1.0' in metrics


def test_the_document_of_the_api_has_the_header_and_the_status(server: Server) -> None:
    operation = httpx.get(f"{server.url}/openapi.json").json()["paths"]["/v1/embeddings"]["post"]
    assert "if-vecd-identity" in {parameter["name"] for parameter in operation["parameters"]}
    assert "412" in operation["responses"]
    assert "x-vecd-identity" in operation["responses"]["200"]["headers"]


def test_a_model_that_is_not_loaded_is_loaded_for_a_number_format_alone(server: Server) -> None:
    def demand(identity: str) -> tuple[httpx.Response, str]:
        return post(server, "/m/b/embed", {"inputs": "text"}, if_vecd_identity=identity), state(server)

    response, state_after = demand(OTHER)
    assert (response.status_code, state_after) == (412, "unloaded")
    digest = re.findall("[0-9a-f]{32}", message(response))[1]
    assert "x-vecd-identity" not in response.headers, "the number format is not known"
    assert httpx.get(f"{server.url}/m/b/info").json()["model"]["identity"] is None
    response, state_after = demand(f"{OTHER};dtype=float32")
    assert (response.status_code, state_after) == (412, "unloaded")
    response, state_after = demand(f"{digest};dtype=int8")
    assert (response.status_code, state_after) == (412, "ready")
    assert f"{digest};dtype=float32" in message(response)
    response, _ = demand(f"{digest};dtype=float32")
    assert (response.status_code, response.headers["x-vecd-identity"]) == (200, f"{digest};dtype=float32")
    # Both models have the same files, and other prompts.
    assert identity(server) != f"{digest};dtype=float32"


def test_a_reload_has_another_and_a_request_that_crosses_it_is_refused(server: Server, config: Config) -> None:
    before = identity(server)
    head = (
        f"POST /m/a/embed HTTP/1.1\r\nhost: x\r\ncontent-length: 17\r\nif-vecd-identity: {before}\r\n"
        'connection: close\r\n\r\n{"inputs"'
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as waiting:
        waiting.sendall(head.encode())
        config.write(a={"prompts": '{ query = "passage: " }'}, b=ON_DEMAND)
        assert "reloaded" in server.reload_outcome()
        eventually(lambda: before not in {identity(server) for _ in range(10)})
        waiting.sendall(b':"text"}')
        response = b"".join(iter(lambda: waiting.recv(65536), b"")).decode()
    after = identity(server)
    assert response.startswith("HTTP/1.1 412")
    assert f"x-vecd-identity: {after}" in response
    assert before in response
    assert post(server, "/m/a/embed", {"inputs": "text"}, if_vecd_identity=before).status_code == 412
    assert post(server, "/m/a/embed", {"inputs": "text"}, if_vecd_identity=after).status_code == 200
    config.write(a=WITH_PROMPT, b=ON_DEMAND)
    server.reload_outcome()
    eventually(lambda: identity(server) == before)


def test_a_gateway_that_is_started_again_knows_it(server: Server) -> None:
    own = identity(server)
    with server.client_of(1) as other:
        killed = other.get("/info").json()["gateways"][0]["pid"]
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: other.get("/info").json()["gateways"][0]["pid"] not in (0, killed), timeout_s=60)
    with server.client_of(0) as client:
        response = client.post("/m/a/embed", json={"inputs": "text"}, headers={"if-vecd-identity": own})
        assert (response.status_code, response.headers["x-vecd-identity"]) == (200, own)


# --- loaded on demand ------------------------------------------------------------------------------------------------


def embed(server: Server, model: str) -> int:
    body = {"input": "text"}
    return httpx.post(f"{server.url}/m/{model}/v1/embeddings", json=body, timeout=60).status_code


def state(server: Server, model: str = "b") -> str:
    return str(httpx.get(f"{server.url}/m/{model}/health", timeout=10).json()["state"])


def test_it_is_loaded_once_for_all_that_wait_and_goes_and_comes_again(server: Server, config: Config) -> None:
    config.write(a={}, b={**ON_DEMAND, "workers": 2, "keep-alive": '"2"'})
    server.reload_outcome()
    eventually(lambda: state(server) == "unloaded")
    before = len(server.stderr)

    def num(line: str) -> int:
        return server.stderr[before:].count(line)

    processes_before = len(server.processes())
    with ThreadPoolExecutor(32) as threads:
        assert Counter(threads.map(lambda _: embed(server, "b"), range(64))) == {200: 64}
    assert num("b: loaded in") == 1
    assert state(server) == "ready"
    eventually(lambda: state(server) == "unloaded")
    assert num("b: unloaded in") == 1
    assert len(server.processes()) == processes_before
    assert embed(server, "b") == 200
    assert num("b: loaded in") == 2


def test_no_request_fails_while_it_is_loaded_and_its_processes_are_killed(server: Server) -> None:
    eventually(lambda: state(server) == "unloaded")
    served = {process.pid for process in server.processes()}
    with ThreadPoolExecutor(4) as threads:
        requests = [threads.submit(lambda model: [embed(server, model) for _ in range(40)], model) for model in "abab"]
        num_killed = 0
        while not all(request.done() for request in requests):
            for process in server.processes():
                with suppress(psutil.NoSuchProcess):  # the zygote forks twice
                    if process.pid not in served and num_killed < 2 and not process.children():
                        process.kill()  # the fork server in its load, or a worker
                        served.add(process.pid)
                        num_killed += 1
        assert num_killed == 2
        for request in requests:
            assert Counter(request.result()) == {200: 40}


# --- reloaded ---------------------------------------------------------------------------------------------------------


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


def test_models_are_added_replaced_refused_and_removed_beside_another(server: Server, config: Config) -> None:
    config.write(a={}, b={})
    server.reload_outcome()
    before = {model: worker_pids(server, model) for model in "ab"}
    with Requests(server, "a") as requests:
        config.write(a={}, b={"workers": 2}, c={})
        server.reload_outcome()
        eventually(lambda: len(worker_pids(server, "b")) == 2)
        assert not worker_pids(server, "b") & before["b"]
        assert worker_pids(server, "a") == before["a"]
        replaced = {model: worker_pids(server, model) for model in "abc"}

        config.write(a={"workers": 2}, c={}, d={"source": '"/nowhere"'})
        assert "not reloaded, nothing has changed: d: /nowhere: no such folder" in server.reload_outcome()
        assert {model: worker_pids(server, model) for model in "abc"} == replaced

        psutil.Process(replaced["c"].pop()).send_signal(signal.SIGKILL)
        config.write(a={}, c={})
        assert "reloaded: b is no longer served" in server.reload_outcome()
        assert httpx.get(f"{server.url}/m/b/info").status_code == 404
        eventually(lambda: not any(map(psutil.pid_exists, replaced["b"])))  # they end after the line in the log
        assert worker_pids(server, "a") == before["a"]
        assert "reloaded: no model has changed" in server.reload_outcome()
    assert requests.num_answered > 0
    assert requests.failures == []


def test_quantization_ranges_are_used_and_read_again(server: Server, config: Config, tmp_path: Path) -> None:
    def ask(**fields: object) -> httpx.Response:
        return post(server, "/m/a/v1/embeddings", {"input": ["a text", "another"], **fields})

    def codes() -> np.ndarray:
        data = ask(encoding_format="base64", output_dtype="int8").json()["data"]
        return np.array([np.frombuffer(base64.b64decode(item["embedding"]), "i1") for item in data])

    def expected(factor: int = 1) -> np.ndarray:
        low, high = factor * ranges
        return np.floor((rows - low) / ((high - low) / 255) - 128).astype(np.int8)

    path = tmp_path / "ranges.npy"
    ranges = np.outer(np.array([-0.2, 0.25], dtype=np.float32), np.linspace(0.5, 1, 384, dtype=np.float32))
    np.save(path, ranges)
    config.write(a={"matryoshka": "true", "quantization-ranges": f'"{path}"'}, b={})
    assert "reloaded: " in server.reload_outcome()
    rows = np.frombuffer(ask(encoding_format="bytes").raise_for_status().content, "<f4").reshape(2, 384)
    assert np.array_equal(codes(), expected())
    refused = ask(output_dtype="int8", dimensions=128)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")

    path.write_bytes(b"no NumPy file")
    assert "ranges.npy: is no NumPy file (.npy), or is cut off" in server.reload_outcome()
    np.save(path, ranges[:, 1:])
    assert f"{path}: must have the shape (2, 384), has (2, 383)" in server.reload_outcome()
    assert np.array_equal(codes(), expected())

    np.save(path, 2 * ranges)
    server.reload_outcome()
    eventually(lambda: np.array_equal(codes(), expected(2)))


# --- two gateways share the cores -----------------------------------------------------------------------------------


def granted(*clients: httpx.Client) -> list[int]:
    """The grants of the gateways to which clients are connected, after each has computed a text."""
    for client in clients:
        client.post("/v1/embeddings", json={"input": "a"}).raise_for_status()
    return [client.get("/info").raise_for_status().json()["cores"]["granted"] for client in clients]


def test_cores_follow_the_work_and_come_back_with_a_death(server: Server, config: Config) -> None:
    config.write(a={"workers": 2})
    server.reload_outcome()
    with ExitStack() as stack:
        first, second = (stack.enter_context(server.client_of(gateway)) for gateway in (0, 1))
        num_cores = first.get("/info").json()["cores"]["usable"]
        eventually(lambda: granted(first) == [num_cores])
        eventually(lambda: granted(second) == [num_cores], 10)  # the first one has had no work for a while
        part = num_cores // 2
        eventually(lambda: sorted(granted(first, second)) == [part, num_cores - part])
        for _ in range(20):  # both have work, and neither takes from the other
            assert sorted(granted(first, second)) == [part, num_cores - part]
        os.kill(server.gateways()[0].pid, signal.SIGKILL)
        eventually(lambda: granted(second) == [num_cores])
        eventually(lambda: len(server.gateways()) == 2, timeout_s=60)
        again = stack.enter_context(server.client_of(0))
        eventually(lambda: sorted(granted(again, second)) == [part, num_cores - part])
