"""One server with the dummy engine for all tests of dialects: its vectors are the same everywhere."""

from collections.abc import Iterator

import pytest

from tests.support.serving import Server, running_server


@pytest.fixture(scope="session")
def weightless() -> Iterator[Server]:
    with running_server("--engine", "weightless", "--workers", "1") as server:
        yield server
