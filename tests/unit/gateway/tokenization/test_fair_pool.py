import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from functools import partial

import pytest

from vecd.gateway.tokenization.fair_pool import Threads

DEADLINE_S = 20.0


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads(1)
    yield threads
    threads.close()


def counted(name: str, seen: list[str], num_steps: int = 3) -> Generator[None, None, str]:
    for _ in range(num_steps):
        seen.append(name)
        yield
    return name


async def test_steps_run_in_a_thread_and_return_their_result(threads: Threads):
    def steps() -> Generator[None, None, threading.Thread]:
        yield
        return threading.current_thread()

    assert await threads.run(steps()) is not threading.main_thread()
    assert await threads.call(threading.current_thread) is not threading.main_thread()
    assert await threads.run(counted("a", [], 0)) == "a"


async def test_works_take_turns():
    threads = Threads(1, turn_s=0.0)  # a turn is one step
    seen: list[str] = []
    assert await asyncio.gather(*(threads.run(counted(name, seen)) for name in "ab")) == ["a", "b"]
    assert seen == ["a", "b", "a", "b", "a", "b"]
    threads.close()


async def test_what_a_step_raises_is_raised(threads: Threads):
    def steps() -> Generator[None, None, None]:
        yield
        raise KeyError("as asked")

    with pytest.raises(KeyError, match="as asked"):
        await threads.run(steps())


async def test_cancelled_work_ends(threads: Threads):
    started, is_over = threading.Event(), threading.Event()

    def steps() -> Generator[None, None, None]:
        try:
            while True:
                started.set()
                yield
        finally:
            is_over.set()

    task = asyncio.ensure_future(threads.run(steps()))
    await asyncio.to_thread(started.wait, DEADLINE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    assert await asyncio.to_thread(is_over.wait, DEADLINE_S)


def named(name: str, seen: list[str]) -> Callable[[], None]:
    return lambda: seen.append(name)


async def test_tenants_take_turns_and_each_is_served_in_its_order(threads: Threads):
    seen: list[str] = []
    go_on = threading.Event()
    busy = asyncio.ensure_future(threads.call(lambda: go_on.wait(DEADLINE_S)))
    await asyncio.sleep(0)
    calls = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")]
    waiting = [asyncio.ensure_future(threads.call(named(name, seen), tenant)) for tenant, name in calls]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(busy, *waiting)
    assert seen == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_a_cancelled_turn_is_not_taken(threads: Threads):
    seen: list[str] = []
    go_on = threading.Event()
    busy = asyncio.ensure_future(threads.call(lambda: go_on.wait(DEADLINE_S)))
    await asyncio.sleep(0)
    waiting = [asyncio.ensure_future(threads.call(named(name, seen))) for name in "abc"]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(busy, *waiting, return_exceptions=True)
    assert seen == ["a", "c"]
    assert waiting[1].cancelled()


async def test_who_waits_when_the_threads_end_is_cancelled():
    threads = Threads(1)
    has_begun, go_on = threading.Event(), threading.Event()

    def wait() -> bool:
        has_begun.set()
        return go_on.wait(DEADLINE_S)

    busy = asyncio.ensure_future(threads.call(wait))
    waiting = asyncio.ensure_future(threads.call(threading.current_thread))
    await asyncio.to_thread(has_begun.wait, DEADLINE_S)
    threading.Timer(0.05, go_on.set).start()
    threads.close()
    async with asyncio.timeout(DEADLINE_S):
        assert await busy is True
        with pytest.raises(asyncio.CancelledError):
            await waiting


class Large:
    """Stands for a body of megabytes."""


async def test_what_failed_is_freed_at_once(threads: Threads):
    """And not when the collector comes: a body that is refused is as large as one that is taken."""

    def fail(large: Large) -> None:
        raise KeyError("as asked")

    gc.disable()
    try:
        large = Large()
        alive = weakref.ref(large)
        with pytest.raises(KeyError):
            await threads.call(partial(fail, large))
        del large
        await asyncio.sleep(0)
        await threads.call(int)  # the thread has let go of the one before
        assert alive() is None
    finally:
        gc.enable()
