"""Servers that client libraries are pointed at, and the comparison with the reference."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.clients import corpus
from tests.support.clients.environments import INSTALL_TIMEOUT_S
from tests.support.clients.keys import KEY, SLOW_KEY
from tests.support.serving import Server, running_server


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
