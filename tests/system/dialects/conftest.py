"""Servers with the dummy engine for all tests of dialects: its vectors are the same everywhere."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.serving import RunningServer
from tests.support.several_models import dummy_models, model_of
from tests.support.shared_servers import DUMMY, shared_server

KEY = "right-0123456789"
STRICT = (
    "--strict-model", "--matryoshka", "--overflow", "error", "--max-request-tokens", "300", "--token-ids", "cl100k",
    "--model-aliases", "text-embedding-3-small,org/alias", "--api-key", KEY,
)  # fmt: skip
"""Makes all the exceptions."""


@pytest.fixture(scope="session")
def served(minilm_folder: Path) -> Callable[[str], RunningServer]:
    """By a name: `dummy`, `strict`, or that of a model of `dummy_models`."""

    def find(name: str) -> RunningServer:
        if name in ("dummy", "strict"):
            return shared_server(*DUMMY, *(STRICT if name == "strict" else ()))
        return model_of(dummy_models(minilm_folder), name)

    return find


@pytest.fixture(scope="session")
def dummy(served: Callable[[str], RunningServer]) -> RunningServer:
    return served("dummy")


@pytest.fixture(scope="session")
def strict(served: Callable[[str], RunningServer]) -> RunningServer:
    return served("strict")
