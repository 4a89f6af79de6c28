import asyncio
import time

import pytest

from gateway.admission import Admission
from gateway.errors import TooManyRequests
from gateway.request import Priority

NORMAL = Priority.NORMAL


class House:
    """An admission, and what it is told of queue and workers."""

    def __init__(self, max_requests=100, max_wait_s=10.0):
        self.tokens_ahead, self.tokens_per_s = 0, 1000.0
        self.admission = Admission(
            max_requests=max_requests,
            max_wait_s=max_wait_s,
            short_tokens=100,
            tokens_waiting=lambda: 10**12,
            tokens_ahead=lambda num_tokens, priority: self.tokens_ahead,
            tokens_per_s=lambda: self.tokens_per_s,
        )

    def try_enter(self, num_tokens=10, patience_s=60.0):
        return self.admission.try_enter(num_tokens, NORMAL, time.monotonic() + patience_s)

    async def enter(self, num_tokens=10, patience_s=60.0):
        return await self.admission.enter(num_tokens, NORMAL, time.monotonic() + patience_s)

    def refusal(self, **ask) -> TooManyRequests:
        with pytest.raises(TooManyRequests) as caught:
            asyncio.run(self.enter(**ask))
        return caught.value


def test_a_permit_is_returned_whatever_happens():
    house = House()
    with pytest.raises(RuntimeError), house.try_enter(10) as permit:  # noqa: PT012
        permit.note_queued(4)
        assert (house.admission.num_requests, house.admission.num_unqueued) == (1, 6)
        raise RuntimeError
    assert (house.admission.num_requests, house.admission.num_unqueued) == (0, 0)


def test_more_tokens_than_estimated_are_not_counted_twice():
    house = House()
    with house.try_enter(10) as permit:
        permit.note_queued(7)
        permit.note_queued(7)
        assert house.admission.num_unqueued == 0


def test_too_many_requests_are_refused_with_limit_and_value():
    house = House(max_requests=1)
    with house.try_enter():
        assert house.try_enter() is None
        assert "1 requests are being served, at most 1" in house.refusal().message


def test_too_long_a_wait_is_refused_with_limit_and_value():
    house = House()
    with house.try_enter():
        house.tokens_ahead = 9_000
        assert house.try_enter() is not None
        house.tokens_ahead = 25_000
        assert house.try_enter() is None
        assert "the wait would be about 25 s, at most 10 s" in house.refusal().message


def test_a_request_whose_deadline_comes_before_its_turn_is_refused():
    house = House()
    with house.try_enter():
        house.tokens_ahead = 2_000
        assert house.try_enter(patience_s=4) is not None
        assert "about 2 s, too long for a deadline that is 3 s away" in house.refusal(patience_s=3.26).message


def test_a_lone_request_is_admitted_however_large_and_whatever_waits():
    house = House()
    house.tokens_ahead = 10**9
    with house.try_enter(10**9):
        assert house.try_enter() is None


def test_what_is_not_queued_yet_counts_as_waiting():
    house = House()
    with house.try_enter(50_000) as large:
        assert house.try_enter(20_000) is None
        assert house.try_enter(10) is not None, "which a short one will not wait for"
        large.note_queued(50_000)
        assert house.try_enter(20_000) is not None, "now the scheduler says what is ahead"


@pytest.mark.parametrize(("tokens_per_s", "seconds"), [(1e9, 1), (1000.0, 30), (0.001, 60)])
def test_retry_after_is_the_drain_time_between_1_and_60_s(tokens_per_s, seconds):
    house = House(max_requests=1)
    with house.try_enter():
        house.tokens_ahead, house.tokens_per_s = 30_000, tokens_per_s
        assert int(house.refusal().headers()["retry-after"]) == seconds


def test_at_the_door_requests_wait_a_moment_and_enter_in_their_order():
    async def test():
        house = House(max_requests=2)
        permits = [house.try_enter(), house.try_enter()]
        entered = []

        async def ask(name):
            permit = await house.enter()
            entered.append(name)
            return permit

        tasks = [asyncio.ensure_future(ask(name)) for name in "abc"]
        await asyncio.sleep(0)
        assert house.try_enter() is None, "nobody overtakes"
        permits.pop().release()
        permits.pop().release()
        permits += [await tasks[0], await tasks[1]]
        assert entered == ["a", "b"]
        with pytest.raises(TooManyRequests):
            await tasks[2]
        for permit in permits:
            permit.release()
        assert house.admission.num_requests == 0

    asyncio.run(test())


def test_who_leaves_the_door_leaves_nothing_behind():
    async def test():
        house = House(max_requests=1)
        permit = house.try_enter()
        waiting, leaving = (asyncio.ensure_future(house.enter()) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        permit.release()
        waiting.cancel()  # in the same moment in which it is let in
        await asyncio.wait([waiting])
        assert (house.admission.num_requests, house.admission.num_unqueued) == (0, 0)
        assert house.try_enter() is not None

    asyncio.run(test())


def test_a_crowd_at_the_door_is_refused_at_once():
    async def test():
        house = House(max_requests=1)
        house.try_enter()
        tasks = [asyncio.ensure_future(house.enter(patience_s=60)) for _ in range(600)]
        await asyncio.sleep(0.01)
        assert sum(task.done() for task in tasks) == 88
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, TooManyRequests) for result in results)

    asyncio.run(test())


def test_who_leaves_the_door_in_the_moment_of_a_release_takes_no_permit_and_harms_nobody():
    async def test():
        house = House(max_requests=1)
        with house.try_enter():
            leaving = asyncio.ensure_future(house.enter())
            await asyncio.sleep(0)
            leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        assert house.admission.num_requests == 0

    asyncio.run(test())


def test_a_large_request_at_the_door_does_not_bar_the_way_for_short_ones():
    async def test():
        house = House()
        held = house.try_enter()
        house.tokens_ahead = 5_000
        large = asyncio.ensure_future(house.enter(num_tokens=1_000, patience_s=1))
        await asyncio.sleep(0)
        assert house.try_enter(num_tokens=1_000, patience_s=60) is None, "its like"
        assert house.try_enter(num_tokens=10, patience_s=60) is not None
        house.tokens_ahead = 0
        held.release()
        assert (await large).num_tokens == 1_000

    asyncio.run(test())


def test_at_the_end_of_the_wait_there_is_one_more_look():
    """What was queued may be done without anybody having left."""

    async def test():
        house = House()
        house.try_enter()
        house.tokens_ahead = 50_000
        entering = asyncio.ensure_future(house.enter())
        await asyncio.sleep(0)
        house.tokens_ahead = 0
        await entering
        assert house.admission.num_requests == 2

    asyncio.run(test())
