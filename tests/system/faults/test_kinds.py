"""Every kind of model under load: workers that are killed, reloads from one kind to the next, and clients that leave.

The models are tiny and real. One server with two gateways serves one after the other, by reloads.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.checkpoints import Checkpoints
from tests.support.every_kind import remember_reference
from tests.support.multi_vector_checkpoints import WORDS, save_bge_m3, save_pylate
from tests.support.score_checkpoints import save_classifier
from tests.support.serving import Server, eventually, exact_server
from tests.support.soak.faults import kill_one, workers
from tests.support.soak.form import only_long, pick, record
from tests.support.sparse_checkpoints import save_splade

Rows = list[NDArray[np.float64]]

NUM_CLIENTS = 6
KILL_S = pick(short=3.0, long=30.0)
"""As long as a worker is killed each second."""
DEADLINE_S = 120.0
TOLERANCE = 1e-5


# --- what is asked ----------------------------------------------------------------------------------------------


def _ranked(results: Any) -> Rows:
    return [np.array([[item["index"], item["relevance_score"]] for item in results["results"]])]


def _labels(rows: Any) -> Rows:
    return [np.array([score for _, score in sorted((item["label"], item["score"]) for item in row)]) for row in rows]


def _entities(rows: Any) -> Rows:
    return [np.array([[item["start"], item["end"], item["score"]] for item in row]) for row in rows]


def _weights(rows: Any) -> Rows:
    return [np.array([[item["index"], item["value"]] for item in row]) for row in rows]


def _vectors(body: Any) -> Rows:
    """All that an item has."""
    rows = []
    for item in body["data"]:
        sparse = item.get("sparse", {"indices": [], "values": []})
        rows += [np.array(item.get(key, [])) for key in ("embedding", "embeddings")]
        rows += [np.array([sparse["indices"], sparse["values"]])]
    return rows


@dataclass(frozen=True)
class Kind:
    """A model, and a request of which it alone has the capability."""

    save: Callable[[Path], Path]
    path: str
    key: str
    read: Callable[[Any], Rows]
    options: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = tuple(f"w{index}" for index in range(4, 120))
    one: Callable[[str], Any] = str
    """How a text is written in the list of them."""

    def bodies(self) -> list[dict[str, Any]]:
        """Of several sizes, up to the longest text that the model takes."""
        rng = np.random.default_rng(5)
        texts = [[" ".join(rng.choice(self.words, size=rng.integers(1, 40))) for _ in range(n)] for n in (1, 4, 9, 30)]
        return [{self.key: list(map(self.one, of_one)), **self.options} for of_one in texts]

    def ask(self, url: str, body: dict[str, Any], http: httpx.Client) -> Rows | None:
        """None: the model that is served now is of another kind."""
        response = http.post(f"{url}{self.path}", json=body)
        if response.status_code in (400, 424) and "This model can" in response.text:
            return None
        assert response.status_code == 200, response.text
        return self.read(response.json())


KINDS = {
    "dense": Kind(
        lambda folder: Checkpoints(lambda name: _folder(folder / name))("bert"), "/v1/embeddings", "input", _vectors
    ),
    "rerank": Kind(save_classifier, "/rerank", "documents", _ranked, {"query": "w5 w6 w7"}),
    "classify": Kind(
        lambda folder: save_classifier(folder, "distilbert", labels=["sad", "glad", "mad"]),
        "/predict", "inputs", _labels, one=lambda text: [text],
    ),
    "token-classify": Kind(
        lambda folder: save_classifier(folder, "electra", labels=["O", "B-X"], is_of_tokens=True),
        "/predict", "inputs", _entities, {"aggregation_strategy": "none", "ignore_labels": []},
    ),
    "sparse": Kind(save_splade, "/embed_sparse", "inputs", _weights),
    "multi-vector": Kind(
        lambda folder: save_pylate(folder, "bert"), "/v1/embeddings", "input", _vectors,
        {"output": "multi-vector"}, WORDS,
    ),
    "hybrid": Kind(
        save_bge_m3, "/v1/embeddings", "input", _vectors, {"output": ["dense", "sparse", "multi-vector"]}, WORDS
    ),
}  # fmt: skip
_IN_SHORT = ("rerank", "hybrid")


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def same(found: Rows, expected: Rows) -> bool:
    return len(found) == len(expected) and all(
        ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
        for ours, theirs in zip(found, expected, strict=True)
    )


# --- load -------------------------------------------------------------------------------------------------------


class Callers:
    """Threads that send the requests of a kind, one after the other, until the end of the block. Each response is
    compared with that of before."""

    def __init__(self, server: Server, kind: Kind) -> None:
        self.num_right = self.num_of_another_kind = 0
        self.failures: list[str] = []
        self._server, self._kind, self._bodies = server, kind, kind.bodies()
        with httpx.Client(timeout=60) as http:
            expected = [kind.ask(server.url, body, http) for body in self._bodies]
        assert all(expected), "the kind that is served"
        self._expected = expected
        self._stop = Event()
        self._threads = [Thread(target=self._run, args=(n,)) for n in range(NUM_CLIENTS)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def wait_for(self, num: int) -> None:
        """Until so many more responses were right."""
        target, deadline = self.num_right + num, time.monotonic() + DEADLINE_S
        while self.num_right < target and not self.failures:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _run(self, n: int) -> None:
        with httpx.Client(timeout=60) as http:
            for at in cycle([*range(n % len(self._bodies), len(self._bodies)), *range(n % len(self._bodies))]):
                if self._stop.is_set():
                    return
                try:
                    found = self._kind.ask(self._server.url, self._bodies[at], http)
                except (httpx.HTTPError, AssertionError, KeyError, TypeError, ValueError) as error:
                    self.failures.append(f"request {at}: {error!r}"[:500])
                    return
                expected = self._expected[at]
                if found is None:
                    self.num_of_another_kind += 1
                    time.sleep(0.01)
                elif expected is None or not same(found, expected):
                    self.failures.append(f"request {at}: another result")
                    return
                else:
                    self.num_right += 1


@dataclass
class Switching:
    """A server, and the configuration by which it serves one kind or another."""

    config: Path
    new_folder: Callable[[str], Path]
    now: str
    folders: dict[str, Path] = field(default_factory=dict)
    """Of the models that were made."""
    running: Server | None = None

    @property
    def server(self) -> Server:
        assert self.running is not None
        return self.running

    def write(self, name: str) -> None:
        if name not in self.folders:
            self.folders[name] = remember_reference(KINDS[name].save(self.new_folder(name) / "model"))
        self.config.write_text(f'model = "{self.folders[name]}"\nworkers = 2\n')

    def serve(self, name: str) -> None:
        """By a reload, unless it is served."""
        if name != self.now:
            self.write(name)
            outcome = self.server.reload_outcome(DEADLINE_S)
            assert "reloaded: " in outcome, outcome
            self.now = name
        # A worker that was killed is replaced in its own time.
        eventually(lambda: len(workers(self.server)) == 2 == len(self.server.info()["workers"]), DEADLINE_S)


@pytest.fixture(scope="module")
def switching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Switching]:
    switching = Switching(tmp_path_factory.mktemp("config") / "vecd.toml", tmp_path_factory.mktemp, now="dense")
    switching.write(switching.now)
    with exact_server("--config", str(switching.config), "--gateways", "2") as switching.running:
        yield switching


# --- trials -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(name, marks=[only_long] * (name not in _IN_SHORT)) for name in KINDS])
def test_workers_killed_each_second_fail_no_request(switching: Switching, name: str) -> None:
    """And change none: each response is the one of before."""
    switching.serve(name)
    rng, server, num_killed = random.Random(1), switching.server, 0
    with Callers(server, KINDS[name]) as callers:
        callers.wait_for(4)
        until = time.monotonic() + KILL_S
        while time.monotonic() < until and not callers.failures:
            running = workers(server)
            kill_one(running, rng)
            num_killed += bool(running)
            time.sleep(1)
        callers.wait_for(20)
    record(f"workers killed each second: {name}", kills=num_killed, right=callers.num_right)
    assert callers.failures == []
    assert callers.num_of_another_kind == 0
    assert num_killed >= 2


@pytest.mark.parametrize(
    ("name", "following"),
    [
        ("dense", "rerank"),
        *(pytest.param(*names, marks=only_long) for names in (("rerank", "dense"), ("hybrid", "classify"))),
    ],
)
def test_a_reload_to_another_kind_fails_no_request(switching: Switching, name: str, following: str) -> None:
    """A request has its whole response by the model of its generation, or is told what the new model can do; the
    routes are the new model's then, by each gateway."""
    switching.serve(name)
    server = switching.server
    with Callers(server, KINDS[name]) as callers:
        callers.wait_for(20)
        switching.write(following)
        outcome = server.reload_outcome(DEADLINE_S)
        switching.now = following
        assert "reloaded: " in outcome, outcome
        eventually(lambda: callers.num_of_another_kind >= NUM_CLIENTS or bool(callers.failures), 30)
    record(f"reload from {name} to {following}", right=callers.num_right, told=callers.num_of_another_kind)
    assert callers.failures == []
    with Callers(server, KINDS[following]) as callers:
        callers.wait_for(20)
    assert callers.failures == []
    for gateway in (0, 1):
        with server.client_of(gateway) as client:
            body = KINDS[name].bodies()[0]
            for _ in range(3):
                assert KINDS[name].ask("", body, client) is None
            assert following in client.get("/info").json()["model"]["capabilities"]


# --- documents --------------------------------------------------------------------------------------------------
