import asyncio

from vecd.gateway.admission.deadlines import TICK_S, Deadlines


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_what_is_due_is_told_once_and_not_before():
    clock = Clock()
    told: list[str] = []
    deadlines = Deadlines(told.append, clock)
    deadlines.set("soon", clock.now + 0.1)
    deadlines.set("late", clock.now + 3600)
    clock.now += 0.099
    await asyncio.sleep(3 * TICK_S)
    assert told == []
    clock.now += 0.001 + TICK_S
    await asyncio.sleep(3 * TICK_S)
    assert told == ["soon"]
    clock.now += 3600
    await asyncio.sleep(3 * TICK_S)
    assert told == ["soon", "late"]


async def test_what_was_dropped_is_not_told_and_leaves_nothing():
    clock = Clock()
    told: list[str] = []
    deadlines = Deadlines(told.append, clock)
    ticks = {name: deadlines.set(name, clock.now + 1) for name in "abc"}
    for name in "ac":
        deadlines.drop(name, ticks[name])
    clock.now += 2
    await asyncio.sleep(3 * TICK_S)
    deadlines.drop("b", ticks["b"])
    assert told == ["b"]
    assert not deadlines._due


async def test_a_deadline_that_has_passed_is_told_at_the_next_tick():
    clock = Clock()
    told: list[str] = []
    deadlines = Deadlines(told.append, clock)
    deadlines.set("other", clock.now + 100)
    await asyncio.sleep(3 * TICK_S)
    clock.now += 1
    await asyncio.sleep(3 * TICK_S)
    deadlines.set("passed", clock.now - 0.5)
    clock.now += TICK_S
    await asyncio.sleep(3 * TICK_S)
    assert told == ["passed"]
