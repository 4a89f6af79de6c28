"""A dispatcher with workers that a test plays."""

from collections.abc import AsyncIterator

import pytest

from tests.support.dispatching import Bench, running_bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with running_bench() as bench:
        yield bench
