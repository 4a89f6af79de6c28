import asyncio
import os
import time

import uvloop

from vecd.client.bench.run import Alarm

DEADLINE_S = 20.0


async def wake_at(moments: list[float]) -> list[float]:
    """When it was woken for each of `moments`, seconds from now."""
    woken: list[float] = []
    finished = asyncio.get_running_loop().create_future()
    started_at = time.perf_counter()

    def on_time() -> None:
        woken.append(time.perf_counter() - started_at)
        if len(woken) < len(moments):
            alarm.set(started_at + moments[len(woken)])
        else:
            alarm.set(None)
            finished.set_result(None)

    with Alarm(on_time) as alarm:
        alarm.set(started_at + moments[0])
        async with asyncio.timeout(DEADLINE_S):
            await finished
        await asyncio.sleep(0.01)
    return woken


def test_it_wakes_once_for_each_moment_and_never_too_early() -> None:
    moments = [0.001, 0.0015, 0.05]
    uvloop.run(asyncio.sleep(0))  # the first loop of a process opens what stays open
    before = len(os.listdir("/proc/self/fd"))
    for run in (asyncio.run, uvloop.run):
        woken = run(wake_at(moments))
        assert len(woken) == len(moments)
        assert all(at >= moment for at, moment in zip(woken, moments, strict=True))

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_moment_gone_by_is_now() -> None:
    assert len(asyncio.run(wake_at([-5.0, 0.0]))) == 2
