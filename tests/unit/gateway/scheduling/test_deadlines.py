import asyncio

import pytest

from tests.support.supervision import VIRTUAL_TIME
from vecd.gateway.scheduling.admission import TICK_S, Deadlines


@pytest.fixture
def anyio_backend():
    return VIRTUAL_TIME


@pytest.fixture
async def told() -> list[str]:
    return []


@pytest.fixture
async def deadlines(told: list[str]) -> Deadlines:
    return Deadlines(told.append, asyncio.get_running_loop().time)


async def test_what_is_due_is_told_once_and_not_before(deadlines, told):
    deadlines.set("soon", 0.1)
    deadlines.set("late", 3600)
    await asyncio.sleep(0.099)
    assert told == []
    await asyncio.sleep(0.001 + 2 * TICK_S)
    assert told == ["soon"]
    await asyncio.sleep(3600)
    assert told == ["soon", "late"]


async def test_what_was_dropped_is_not_told_and_leaves_nothing(deadlines, told):
    ticks = {name: deadlines.set(name, 1) for name in "abc"}
    for name in "ac":
        deadlines.drop(name, ticks[name])
    await asyncio.sleep(2)
    deadlines.drop("b", ticks["b"])
    assert told == ["b"]
    assert not deadlines.due


async def test_a_deadline_that_has_passed_is_told_at_the_next_tick(deadlines, told):
    deadlines.set("other", 100)
    await asyncio.sleep(1)
    deadlines.set("passed", 0.5)
    await asyncio.sleep(2 * TICK_S)
    assert told == ["passed"]
