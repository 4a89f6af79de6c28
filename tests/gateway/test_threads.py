import asyncio
import threading
from collections.abc import Generator

import pytest

from gateway import threads as threads_module
from gateway.threads import Threads

DEADLINE_S = 20.0


def run(test) -> None:
    async def main() -> None:
        threads = Threads(1)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(threads)
        finally:
            threads.close()

    asyncio.run(main())


def counted(name: str, seen: list[str], num_steps: int = 3) -> Generator[None, None, str]:
    for _ in range(num_steps):
        seen.append(name)
        yield
    return name


def test_steps_run_in_a_thread_and_return_their_result():
    async def test(threads: Threads) -> None:
        def steps() -> Generator[None, None, threading.Thread]:
            yield
            return threading.current_thread()

        assert await threads.run(steps()) is not threading.main_thread()
        assert await threads.call(threading.current_thread) is not threading.main_thread()
        assert await threads.run(counted("a", [], 0)) == "a"

    run(test)


def test_works_take_turns(monkeypatch):
    monkeypatch.setattr(threads_module, "_TURN_S", 0.0)  # a turn is one step

    async def test(threads: Threads) -> None:
        seen: list[str] = []
        assert await asyncio.gather(*(threads.run(counted(name, seen)) for name in "ab")) == ["a", "b"]
        assert seen == ["a", "b", "a", "b", "a", "b"]

    run(test)


def test_what_a_step_raises_is_raised():
    async def test(threads: Threads) -> None:
        def steps() -> Generator[None, None, None]:
            yield
            raise KeyError("as asked")

        with pytest.raises(KeyError, match="as asked"):
            await threads.run(steps())

    run(test)


def test_cancelled_work_ends():
    async def test(threads: Threads) -> None:
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

    run(test)
