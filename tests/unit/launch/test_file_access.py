"""Files that hang: a deadline, one thread, one line in the log."""

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.supervision import VIRTUAL_TIME, FakeThreads, settle
from vecd.launch.files import TIMEOUT_S, FileAccess, FilesHang, watch_keys


@pytest.fixture
def anyio_backend() -> Any:
    return VIRTUAL_TIME


def raises(error: BaseException) -> Callable[[], int]:
    def function() -> int:
        raise error

    return function


async def test_what_the_function_returns_and_raises() -> None:
    files = FileAccess(FakeThreads().start)
    assert await files.call("a", lambda: 7) == 7
    with pytest.raises(ValueError, match="no"):
        await files.call("a", raises(ValueError("no")))
    with pytest.raises(TimeoutError, match="the server's own"):  # ETIMEDOUT of a mount, which has responded
        await files.call("a", raises(TimeoutError("the server's own")))
    assert await files.call("a", lambda: 8) == 8


async def test_a_file_that_hangs_has_one_thread_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
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
    assert [record.message for record in caplog.records] == [
        "/keys: the file system has not responded within 10 s",
        "/keys: the file system responds again",
    ]


async def test_calls_on_the_same_files_wait_for_each_other() -> None:
    threads = FakeThreads()
    files = FileAccess(threads.start)
    threads.hangs = True
    calls = [asyncio.create_task(files.call("/keys", lambda: 1)) for _ in range(3)]
    await settle()
    assert threads.num_hanging == 1
    threads.release()
    assert await asyncio.gather(*calls) == [1, 1, 1]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_result_that_comes_too_late_is_discarded(is_cancelled: bool) -> None:
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


async def test_no_thread_can_be_started() -> None:
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


class WatchedPath:
    """Counts how often it is looked at."""

    num_looks = 0

    def __fspath__(self) -> str:
        self.num_looks += 1
        return "/nowhere/keys.toml"


async def test_the_file_of_keys_is_looked_at_in_threads_alone() -> None:
    threads, path = FakeThreads(), WatchedPath()
    threads.hangs = True
    settings: Any = SimpleNamespace(keys_file=path)
    watching = asyncio.create_task(watch_keys(FileAccess(threads.start), lambda: settings, lambda keys: None))
    await settle(5)
    assert (threads.num_hanging, path.num_looks) == (1, 0)
    threads.release()
    await settle()
    assert path.num_looks == 1
    watching.cancel()
