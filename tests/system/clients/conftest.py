"""Servers that client libraries are pointed at, the libraries, and the comparison with the reference."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.clients import corpus
from tests.support.clients.driving import Client, running_client
from tests.support.clients.environments import INSTALL_TIMEOUT_S
from tests.support.http_stub import Answer, StubServer
from tests.support.serving import RunningServer
from tests.support.several_models import shared_folder
from tests.support.shared_servers import DUMMY, shared_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of an environment installs it, which has a deadline of its own."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(INSTALL_TIMEOUT_S + 300))


@pytest.fixture(scope="module")
def library() -> Iterator[Callable[..., Client]]:
    """Runs a script in its environment. One at a time, because some take hundreds of megabytes: tests of one script
    follow each other."""
    with ExitStack() as stack:
        running: dict[tuple[str, str], Client] = {}

        def run(environment: str, script: str, settings: dict[str, str] | None = None) -> Client:
            if (environment, script) not in running:
                stack.close()
                running.clear()
                running[environment, script] = stack.enter_context(running_client(environment, script, settings))
            return running[environment, script]

        yield run


@pytest.fixture(scope="session")
def strict_server() -> RunningServer:
    """Refuses whatever it can: wrong keys, other models' names, texts that are too long, more than a key may. It has no
    model, so it is for errors."""

    def write_keys(folder: Path) -> None:
        keys = folder / "keys.toml"
        keys.touch(mode=0o600)
        slow = f'[[keys]]\nname = "slow"\nkey = "{corpus.SLOW_KEY}"\ntokens_per_s = 4\n'
        keys.write_text(f'[[keys]]\nname = "clients"\nkey = "{corpus.KEY}"\n{slow}')

    keys = shared_folder("keys-of-clients", write_keys) / "keys.toml"
    return shared_server(*DUMMY, "--keys-file", str(keys), "--strict-model", "--overflow", "error")


class Counting(StubServer):
    """Passes requests on to a server that others ask, too, and keeps the statuses of its responses."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__()
        self.statuses: list[int] = []
        self._server = server

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        passed = {name: value for name, value in headers.items() if name.lower() in ("authorization", "content-type")}
        answer = httpx.post(self._server.url + path, content=body, headers=passed, timeout=60)
        self.statuses.append(answer.status_code)
        left_out = ("connection", "content-encoding", "content-length", "date", "server")
        return (
            answer.status_code,
            answer.content,
            {name: value for name, value in answer.headers.items() if name not in left_out},
        )


@pytest.fixture
def expected(reference) -> Callable[[list[str]], np.ndarray]:
    """The reference's vectors of texts of the corpus: float32 [B, 384]."""
    return lambda texts: reference(list(corpus.PLACES))[[corpus.PLACES[text] for text in texts]]


@pytest.fixture
def is_right(expected) -> Callable[[list[list[float]], list[str]], bool]:
    """Whether vectors are the reference's for these texts: all of them, in this order, to 1e-5."""

    def compare(vectors: list[list[float]], texts: list[str]) -> bool:
        given, theirs = np.array(vectors, dtype=np.float32), expected(texts)
        assert given.shape == theirs.shape
        difference = np.abs(given - theirs).max(axis=1)
        assert difference.max() < 1e-5, f"text {difference.argmax()}: {difference.max()}"
        return True

    return compare


def of_kind(name: str) -> RunningServer:
    from tests.support.every_kind import served  # imports torch, which the tests of no other client need

    return served(name)


@pytest.fixture(scope="session")
def reranker() -> RunningServer:
    """With one label, so a cross-encoder."""
    return of_kind("scores")


@pytest.fixture(scope="session")
def classifier() -> RunningServer:
    return of_kind("labels")


@pytest.fixture(scope="session")
def token_classifier() -> RunningServer:
    return of_kind("entities")


@pytest.fixture(scope="session")
def sparse_server() -> RunningServer:
    """Of a tiny SPLADE model with random weights."""
    return of_kind("splade")


@pytest.fixture(scope="session")
def ranked(reranker) -> list[tuple[int, float]]:
    """The places of the texts of `corpus.RANKED`, the best first, and their scores, as `/rerank` gives them."""
    body = {"query": corpus.QUERY, "texts": corpus.RANKED}
    answer = httpx.post(f"{reranker.url}/rerank", json=body, timeout=30).raise_for_status().json()
    scores = [item["score"] for item in answer]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(corpus.RANKED)
    assert [item["index"] for item in answer] != list(range(len(scores)))
    return [(item["index"], item["score"]) for item in answer]


@pytest.fixture
def is_ranked(ranked) -> Callable[..., bool]:
    """Whether pairs of a place and a score are those of `ranked`, in this order: all of them, or the first `num`."""

    def compare(given: list[list[Any]], num: int | None = None) -> bool:
        assert [place for place, _ in given] == [place for place, _ in ranked[:num]]
        assert [score for _, score in given] == pytest.approx([score for _, score in ranked[:num]], rel=1e-6)
        return True

    return compare
