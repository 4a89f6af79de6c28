"""Files that hang: a deadline, one thread, one line in the log."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from tests.support.supervision import FakeThreads, run, settle
from vecd.launch.processes.file_access import TIMEOUT_S, FileAccess, FilesHang


def raises(error: BaseException) -> Callable[[], int]:
    def function() -> int:
        raise error

    return function


def test_what_the_function_returns_and_raises() -> None:
    async def test() -> None:
        files = FileAccess(FakeThreads().start)
        assert await files.call("a", lambda: 7) == 7
        with pytest.raises(ValueError, match="no"):
            await files.call("a", raises(ValueError("no")))
        with pytest.raises(TimeoutError, match="the server's own"):  # ETIMEDOUT of a mount, which has responded
            await files.call("a", raises(TimeoutError("the server's own")))
        assert await files.call("a", lambda: 8) == 8

    run(test())


def test_a_file_that_hangs_has_one_thread_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        threads = FakeThreads()
        files = FileAccess(threads.start)
        threads.hangs = True
        began_at = asyncio.get_running_loop().time()
        with pytest.raises(FilesHang, match=r"/keys: the file system has not responded within 10 s"):
            await files.call("/keys", lambda: 1)
        assert asyncio.get_running_loop().time() - began_at == TIMEOUT_S
        for _ in range(5):
            with pytest.raises(FilesHang, match="still does not respond"):
                await files.call("/keys", lambda: 2)
        assert threads.num_hanging == 1
        threads.hangs = False
        assert await files.call("/other", lambda: 3) == 3, "other files are read"
        threads.release()
        await settle()
        assert await files.call("/keys", lambda: 4) == 4

    with caplog.at_level(logging.INFO):
        run(test())
    assert [record.message for record in caplog.records] == [
        "/keys: the file system has not responded within 10 s",
        "/keys: the file system responds again",
    ]


def test_calls_on_the_same_files_wait_for_each_other() -> None:
    async def test() -> None:
        threads = FakeThreads()
        files = FileAccess(threads.start)
        threads.hangs = True
        calls = [asyncio.create_task(files.call("/keys", lambda: 1)) for _ in range(3)]
        await settle()
        assert threads.num_hanging == 1
        threads.release()
        assert await asyncio.gather(*calls) == [1, 1, 1]

    run(test())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_result_that_comes_too_late_is_discarded(is_cancelled: bool) -> None:
    async def test() -> None:
        threads = FakeThreads()
        files = FileAccess(threads.start)
        threads.hangs = True
        discarded: list[int] = []
        call = asyncio.create_task(files.call("/model", lambda: 5, discard=discarded.append))
        await settle(1 if is_cancelled else TIMEOUT_S + 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else FilesHang):
            await call
        assert not discarded
        threads.release()
        await settle()
        assert discarded == [5]
        assert await files.call("/model", lambda: 6, discard=discarded.append) == 6
        await settle()
        assert discarded == [5]

    run(test())


def test_no_thread_can_be_started() -> None:
    async def test() -> None:
        can_start = False

        def start(work: Callable[[], None]) -> None:
            if not can_start:
                raise RuntimeError("can't start new thread")
            work()

        files = FileAccess(start)
        with pytest.raises(FilesHang, match="no more threads or processes"):
            await files.call("/keys", lambda: 1)
        can_start = True
        assert await files.call("/keys", lambda: 2) == 2

    run(test())
