import asyncio
import time

import pytest

from vecd.gateway.admission import admission as admission_module
from vecd.gateway.admission.admission import Admission, Permit
from vecd.gateway.types.errors import TooManyRequests
from vecd.gateway.types.request import Priority

NORMAL = Priority.NORMAL


class House:
    """An admission, and what it is told of queue and workers."""

    def __init__(self, max_requests=100, max_wait_s=10.0):
        self.tokens_ahead, self.tokens_per_s = 0, 1000.0
        self.tokens_ahead_of: dict[str, int] = {}
        self.num_looks = 0
        self.admission = Admission(
            max_requests=max_requests,
            max_wait_s=max_wait_s,
            short_tokens=100,
            tokens_waiting=lambda: 10**12,
            tokens_ahead=self._tokens_ahead,
            tokens_per_s=lambda: self.tokens_per_s,
        )

    def _tokens_ahead(self, num_tokens, priority, tenant):
        self.num_looks += 1
        return self.tokens_ahead_of.get(tenant, self.tokens_ahead)

    def try_enter(self, num_tokens=10, patience_s=60.0, tenant=""):
        return self.admission.try_enter(num_tokens, NORMAL, time.monotonic() + patience_s, tenant)

    async def enter(self, num_tokens=10, patience_s=60.0, tenant=""):
        return await self.admission.enter(num_tokens, NORMAL, time.monotonic() + patience_s, tenant)

    def fill(self, tenant, num=10_000):
        """As many permits for a tenant as it gets, at most `num`."""
        permits: list[Permit] = []
        while len(permits) < num and (permit := self.try_enter(tenant=tenant)) is not None:
            permits.append(permit)
        return permits

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


@pytest.mark.parametrize("is_let_in", [True, False])
def test_who_leaves_the_door_leaves_nothing_behind(is_let_in):
    async def test():
        house = House(max_requests=1)
        permit = house.try_enter()
        waiting, leaving = (asyncio.ensure_future(house.enter()) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        permit.release()
        if is_let_in:  # it is cancelled in the same moment
            house.admission.open_door()
            assert house.admission.num_requests == 1
        waiting.cancel()
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


def test_a_lone_tenant_gets_eight_of_nine_places_and_the_next_one_finds_room():
    house = House(max_requests=900)
    assert len(house.fill("greedy")) == 800
    assert len(house.fill("polite", 50)) == 50
    assert len(house.fill("third", 5)) == 5
    message = house.refusal(tenant="greedy").message
    assert "855 requests are being served, at most 900 are at a time, and 800 of them are yours" in message


def test_places_come_to_be_shared_evenly():
    house = House(max_requests=900)
    held = {"greedy": house.fill("greedy"), "polite": []}
    for _ in range(2000):  # the greedy one's requests are answered, and each wants as many as it gets
        if held["greedy"]:
            held["greedy"].pop(0).release()
        for tenant in held:
            held[tenant] += house.fill(tenant, 1)
    assert abs(len(held["greedy"]) - len(held["polite"])) <= 16
    assert len(held["greedy"]) + len(held["polite"]) >= 800


@pytest.mark.parametrize("max_requests", [1, 2, 8])
def test_of_few_places_a_lone_tenant_gets_all(max_requests):
    assert len(House(max_requests=max_requests).fill("a")) == max_requests


def test_a_tenant_whose_queue_is_full_is_refused_and_another_is_not():
    house = House()
    house.tokens_ahead_of = {"greedy": 25_000, "polite": 100}
    with house.try_enter(tenant="greedy"):
        assert house.try_enter(tenant="greedy") is None
        assert "about 25 s, at most 10 s" in house.refusal(tenant="greedy").message
        assert house.try_enter(tenant="polite") is not None


def test_what_another_tenant_has_not_queued_yet_is_waited_for_as_far_as_it_takes_turns():
    house = House()
    with house.try_enter(9_000, tenant="greedy"), house.try_enter(9_000, tenant="greedy"):
        assert house.admission.wait_s(20, NORMAL, "polite") == 0.02
        assert house.admission.wait_s(20, NORMAL, "greedy") == 0.04
        assert house.admission.wait_s(50_000, NORMAL, "polite") == 18


def test_at_the_door_one_tenant_does_not_bar_the_way_for_another():
    async def test():
        house = House(max_requests=9)
        held = house.fill("greedy")
        assert len(held) == 8
        waiting = [asyncio.ensure_future(house.enter(tenant="greedy")) for _ in range(100)]
        await asyncio.sleep(0)
        polite = house.try_enter(tenant="polite")
        assert polite is not None, "those at the door are not its like"
        house.tokens_ahead_of = {"greedy": 50_000}
        late = asyncio.ensure_future(house.enter(tenant="polite"))  # the house is full
        await asyncio.sleep(0)
        held.pop().release()
        assert (await late).guest.tenant == "polite"
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, TooManyRequests) for result in results)

    asyncio.run(test())


def test_from_the_door_tenants_are_let_in_by_turns():
    async def test():
        house = House(max_requests=2)
        held, entered = house.fill("first"), []

        async def ask(tenant):
            held.append(await house.enter(tenant=tenant))
            entered.append(tenant)

        tasks = [asyncio.ensure_future(ask(tenant)) for tenant in ("a", "a", "a", "b", "b")]
        await asyncio.sleep(0)
        for _ in range(4):
            held.pop(0).release()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert entered == ["a", "b", "a", "b"]
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(test())


def test_a_crowd_of_one_tenant_leaves_room_at_the_door():
    async def test():
        house = House(max_requests=1)
        house.try_enter(tenant="greedy")
        crowd = [asyncio.ensure_future(house.enter(tenant="greedy")) for _ in range(600)]
        polite = asyncio.ensure_future(house.enter(tenant="polite"))
        await asyncio.sleep(0)  # who is refused is so at once; the rest waits for as long as its deadline allows
        assert sum(task.done() for task in crowd) == 88
        assert not polite.done()
        await asyncio.gather(*crowd, polite, return_exceptions=True)

    asyncio.run(test())


def test_tenants_that_have_left_are_forgotten():
    async def test():
        house = House(max_requests=3)
        for n in range(50):
            with house.try_enter(tenant=f"comes and goes {n}"):
                pass
        permits = house.fill("a")
        for n in range(5):
            assert house.try_enter(tenant=f"finds no room {n}") is None
        tasks = [asyncio.ensure_future(house.enter(tenant=f"at the door {n}")) for n in range(5)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        permits.pop().release()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks[1:]:
            if not task.exception():
                task.result().release()
        for permit in permits:
            permit.release()
        assert house.admission._guests == {}
        assert (house.admission.num_requests, house.admission.num_unqueued) == (0, 0)

    asyncio.run(test())


def test_at_the_door_each_looks_at_itself_and_not_at_all_the_others():
    async def test():
        house = House()
        held = house.try_enter()
        house.tokens_ahead = 50_000
        tasks = [asyncio.ensure_future(house.enter(tenant=f"t{n}")) for n in range(200)]
        await asyncio.sleep(0)
        assert house.num_looks <= 200
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        held.release()

    asyncio.run(test())


def test_the_door_is_opened_once_for_all_who_leave_in_a_turn():
    async def test():
        house = House()
        held = house.fill("a")
        house.tokens_ahead = 50_000
        tasks = [asyncio.ensure_future(house.enter(tenant=f"t{n}")) for n in range(50)]
        await asyncio.sleep(0)
        house.num_looks = 0
        for permit in held[1:]:
            permit.release()
        assert len(held) > 50
        await asyncio.sleep(0)
        assert 1 <= house.num_looks <= 16
        house.tokens_ahead = 0
        held[0].release()
        for permit in await asyncio.gather(*tasks):
            permit.release()
        assert house.admission.num_requests == house.admission.num_tenants == 0

    asyncio.run(test())


def test_whoever_is_just_leaving_the_door_is_not_forgotten_before(monkeypatch):
    """Else it would enter after all as a tenant whose requests nobody counts."""
    monkeypatch.setattr(admission_module, "_DOOR_S", 0.01)

    async def test():
        house = House(max_requests=9)
        of_a, of_b = house.try_enter(tenant="a"), house.try_enter(tenant="b")
        house.tokens_ahead = 50_000
        permits: list[Permit] = []

        def everybody_goes():
            assert house.admission.num_requests == 2
            house.tokens_ahead = 0
            of_b.release()
            house.admission.open_door()
            of_a.release()
            permits.append(house.try_enter(tenant="a"))

        waiting = asyncio.ensure_future(house.enter(tenant="a"))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.02, everybody_goes)
        # Late, so that this comes between the end of the wait and the moment in which the task hears of it.
        time.sleep(0.1)  # noqa: ASYNC251
        permits.append(await waiting)
        assert house.admission.num_requests_of("a") == house.admission.num_requests == 2
        for permit in permits:
            permit.release()
        assert house.admission.num_tenants == house.admission.num_requests == 0

    asyncio.run(test())
