"""Servers that client libraries are pointed at, and the comparison with the reference."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.clients import corpus
from tests.support.clients.environments import INSTALL_TIMEOUT_S
from tests.support.clients.keys import KEY, SLOW_KEY
from tests.support.serving import Server, exact_server, running_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of an environment installs it, which has a deadline of its own."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(INSTALL_TIMEOUT_S + 300))


@pytest.fixture(scope="session")
def strict_server(tmp_path_factory) -> Iterator[Server]:
    """Refuses whatever it can: wrong keys, other models' names, texts that are too long, more than a key may. It has no
    model, so it is for errors."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text(
        f'[[keys]]\nname = "clients"\nkey = "{KEY}"\n[[keys]]\nname = "slow"\nkey = "{SLOW_KEY}"\ntokens_per_s = 4\n'
    )
    flags = ("--keys-file", str(keys), "--strict-model", "--overflow", "error")
    with running_server("--engine", "weightless", "--workers", "1", *flags) as server:
        yield server


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


@contextmanager
def tiny_server(folder: Path, **options: Any) -> Iterator[Server]:
    """Of a tiny classifier with random weights, as `save_classifier` makes it."""
    score_checkpoints = pytest.importorskip("tests.support.score_checkpoints")
    with exact_server(str(score_checkpoints.save_classifier(folder, **options)), "--workers", "1") as server:
        yield server


@pytest.fixture(scope="session")
def reranker(tmp_path_factory) -> Iterator[Server]:
    """With one label, so a cross-encoder."""
    with tiny_server(tmp_path_factory.mktemp("tiny-reranker")) as server:
        yield server


@pytest.fixture(scope="session")
def classifier(tmp_path_factory) -> Iterator[Server]:
    with tiny_server(tmp_path_factory.mktemp("tiny-classifier"), labels=["sad", "glad", "mad"]) as server:
        yield server


@pytest.fixture(scope="session")
def token_classifier(tmp_path_factory) -> Iterator[Server]:
    labels = ["O", "B-PER", "I-PER"]
    with tiny_server(tmp_path_factory.mktemp("tiny-tagger"), labels=labels, is_of_tokens=True) as server:
        yield server


@pytest.fixture(scope="session")
def sparse_server(tmp_path_factory) -> Iterator[Server]:
    """Of a tiny SPLADE model with random weights."""
    sparse_checkpoints = pytest.importorskip("tests.support.sparse_checkpoints")
    folder = sparse_checkpoints.save_splade(tmp_path_factory.mktemp("tiny-splade"))
    with exact_server(str(folder), "--workers", "1") as server:
        yield server


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
        expected = ranked[:num]
        assert [place for place, _ in given] == [place for place, _ in expected]
        assert [score for _, score in given] == pytest.approx([score for _, score in expected], rel=1e-6)
        return True

    return compare
