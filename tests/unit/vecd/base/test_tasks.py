"""Threads are there before they are needed, or the limit that forbids them is named."""

import asyncio
import threading
from concurrent.futures import wait

import pytest

from vecd.base.tasks import NoTasks, Pool, naming_limit, require_threads
from vecd.gateway.tokenization.fair_pool import Threads


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch):
    """Lets so many more threads be started."""
    start, left = threading.Thread.start, [0]

    def start_or_not(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    def set_limit(num: int) -> None:
        left[0] = num
        monkeypatch.setattr(threading.Thread, "start", start_or_not)

    return set_limit


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_all_threads_of_a_pool_are_there_at_once_and_no_other_is_needed(allow) -> None:
    allow(3)
    with Pool(3, "at-once") as pool:
        assert len(named("at-once")) == 3
        calls = [pool.submit(pow, 2, n) for n in range(100)]
        wait(calls)
        assert [call.result() for call in calls] == [2**n for n in range(100)]
    assert not named("at-once")


@pytest.mark.parametrize("num", [0, 1, 2])
def test_of_a_pool_that_cannot_be_had_nothing_is_left(num: int, allow) -> None:
    allow(num)
    with pytest.raises(NoTasks, match=r"pids\.max"):
        Pool(3, "too-many")
    assert not named("too-many")


def test_texts_are_tokenized_where_no_more_threads_can_be_had(allow) -> None:
    threads = Threads(2)
    allow(0)
    try:
        assert asyncio.run(threads.call(lambda: 7)) == 7
    finally:
        threads.close()


def test_what_is_required_is_given_back(allow) -> None:
    allow(2)
    require_threads(2)
    assert not named("required")
    with pytest.raises(NoTasks):
        require_threads(1)


def test_only_the_errors_of_the_limit_are_renamed() -> None:
    for error in (RuntimeError("can't start new thread"), BlockingIOError(11, "Resource temporarily unavailable")):
        with pytest.raises(NoTasks), naming_limit():
            raise error
    for other in (RuntimeError("another"), OSError("another")):
        with pytest.raises(type(other), match="another"), naming_limit():
            raise other
