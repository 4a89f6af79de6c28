"""One server without a model for all tests of dialects: its vectors are made up, and the same everywhere."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.asking import PLAIN
from tests.support.serving import Server, running_server
from vecd.gateway.api.model_info import ModelInfo


@pytest.fixture(scope="session")
def weightless() -> Iterator[Server]:
    with running_server("--engine", "weightless", "--workers", "1") as server:
        yield server


@pytest.fixture
def model_info() -> ModelInfo:
    """A model without prompts, under any name; tests replace what they are about."""
    return replace(PLAIN, model="all-MiniLM-L6-v2", max_inputs=2048)
