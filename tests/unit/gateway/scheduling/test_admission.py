import asyncio
import math
import time
from dataclasses import dataclass

import pytest

from tests.support.dispatching import admitting, batching
from vecd.gateway.encoding.result import Result
from vecd.gateway.errors import TooManyRequests
from vecd.gateway.request import Priority
from vecd.gateway.scheduling import admission as admission_module
from vecd.gateway.scheduling.admission import Permit
from vecd.gateway.scheduling.policy import BatchingPolicy
from vecd.gateway.scheduling.queue import RequestQueue

NORMAL = Priority.NORMAL


class FixedPolicy(BatchingPolicy):
    """Says of its queue what the test wants."""

    def __init__(self):
        super().__init__(batching(2048, 512, 100))
        self.quantum = 100
        self.queued_tokens = 10**12
        self.ahead = 0
        self.ahead_of: dict[str, int] = {}
        self.num_looks = 0

    def tokens_ahead(self, num_tokens, priority, tokens_per_s, tenant=""):
        self.num_looks += 1
        return self.ahead_of.get(tenant, self.ahead)


@dataclass
class FixedWorkers:
    tokens_per_s: float = 1000.0
    in_flight_tokens: int = 0


class Entrance:
    """An admission, and what it is told of queue and workers."""

    def __init__(self, max_requests=100, max_wait_s=10.0):
        self.policy, self.workers = FixedPolicy(), FixedWorkers()
        self.admission = admitting(max_requests, max_wait_s, self.policy, self.workers)

    def try_enter(self, num_tokens=10, timeout_s=60.0, tenant=""):
        return self.admission.try_enter(num_tokens, NORMAL, time.monotonic() + timeout_s, tenant)

    async def enter(self, num_tokens=10, timeout_s=60.0, tenant=""):
        return await self.admission.enter(num_tokens, NORMAL, time.monotonic() + timeout_s, tenant)

    def wait_s(self, num_tokens, tenant):
        """The estimate for a request that has no permit yet."""
        admission = self.admission
        return admission.wait_s(Permit(admission, admission._use(tenant), num_tokens, NORMAL, math.inf))

    def fill(self, tenant, num=10_000):
        """As many permits for a tenant as it gets, at most `num`."""
        permits: list[Permit] = []
        while len(permits) < num and (permit := self.try_enter(tenant=tenant)) is not None:
            permits.append(permit)
        return permits

    def rejection(self, **ask) -> TooManyRequests:
        with pytest.raises(TooManyRequests) as caught:
            asyncio.run(self.enter(**ask))
        return caught.value


def test_a_permit_is_returned_whatever_happens():
    entrance = Entrance()
    with pytest.raises(RuntimeError), entrance.try_enter(10) as permit:  # noqa: PT012
        permit.note_queued(4)
        assert (entrance.admission.num_requests, entrance.admission.num_unqueued) == (1, 6)
        permit.note_queued(7)
        assert entrance.admission.num_unqueued == 0, "it has one more than estimated"
        raise RuntimeError
    assert (entrance.admission.num_requests, entrance.admission.num_unqueued) == (0, 0)


def test_too_many_requests_are_rejected_with_limit_and_value():
    entrance = Entrance(max_requests=1)
    with entrance.try_enter():
        assert entrance.try_enter() is None
        assert entrance.rejection().message == "1 request is being served, at most 1 may be at a time"


def test_too_long_a_wait_is_rejected_with_limit_and_value():
    entrance = Entrance()
    with entrance.try_enter():
        entrance.policy.ahead = 9_000
        assert entrance.try_enter() is not None
        entrance.policy.ahead = 25_000
        assert entrance.try_enter() is None
        assert "the wait would be about 25 s, at most 10 s" in entrance.rejection().message


def test_a_request_whose_deadline_comes_before_its_turn_is_refused():
    entrance = Entrance()
    with entrance.try_enter():
        entrance.policy.ahead = 2_000
        assert entrance.try_enter(timeout_s=4) is not None
        assert "about 2 s, too long for a deadline that is " in entrance.rejection(timeout_s=3.26).message


def test_a_lone_request_is_admitted_however_large_and_whatever_waits():
    entrance = Entrance()
    entrance.policy.ahead = 10**9
    with entrance.try_enter(10**9):
        assert entrance.try_enter() is None


def test_what_is_not_queued_yet_counts_as_waiting():
    entrance = Entrance()
    with entrance.try_enter(50_000) as large:
        assert entrance.try_enter(20_000) is None
        assert entrance.try_enter(10) is not None, "which a short one will not wait for"
        large.note_queued(50_000)
        assert entrance.try_enter(20_000) is not None, "now the policy says what is ahead"


@pytest.mark.parametrize(("tokens_per_s", "least_s", "most_s"), [(1e9, 1, 3), (1000.0, 30, 45), (0.001, 58, 60)])
def test_retry_after_is_the_wait_between_1_and_60_s(tokens_per_s, least_s, most_s):
    entrance = Entrance(max_wait_s=1e-6)
    with entrance.try_enter():
        entrance.policy.ahead, entrance.workers.tokens_per_s = 30_000, tokens_per_s
        assert least_s <= int(entrance.rejection().headers["retry-after"]) <= most_s


@pytest.fixture
def _no_spread(monkeypatch):
    monkeypatch.setattr("vecd.gateway.errors.random.uniform", lambda least, most: least)


@pytest.mark.usefixtures("_no_spread")
def test_without_a_place_retry_after_is_when_a_request_will_be_over_and_not_the_turn_of_a_short_one():
    entrance = Entrance(max_requests=1)
    entrance.policy.queued_tokens = 0
    with entrance.try_enter(20_000) as permit:
        assert entrance.rejection().headers["retry-after-ms"] == "20000", "it is being tokenized"
        permit.request_queue = RequestQueue(Result(1, (), asyncio.new_event_loop()), NORMAL)
        permit.request_queue.num_tokens = entrance.policy.queued_tokens = 8_000
        permit.note_queued()
        assert entrance.rejection().headers["retry-after-ms"] == "8000", "it is queued"
        permit.request_queue.num_tokens = entrance.policy.queued_tokens = 0
        entrance.workers.in_flight_tokens = 5_100
        headers = entrance.rejection().headers
        assert headers == {"retry-after": "6", "retry-after-ms": "5100"}, "it is computed"


@pytest.mark.usefixtures("_no_spread")
def test_a_place_gets_free_when_the_shortest_request_is_over():
    entrance = Entrance(max_requests=10, max_wait_s=1e9)
    sizes = [3_000, *[50_000] * 9]
    permits = [entrance.try_enter(size, timeout_s=1e9, tenant=str(at)) for at, size in enumerate(sizes)]
    assert entrance.rejection().headers["retry-after-ms"] == "30000", "each of the ten is served as much"
    permits[0].release()
    assert entrance.try_enter() is not None


async def test_waiters_wait_a_moment_and_are_admitted_in_their_order():
    entrance = Entrance(max_requests=2)
    permits = [entrance.try_enter(), entrance.try_enter()]
    entered = []

    async def ask(name):
        permit = await entrance.enter()
        entered.append(name)
        return permit

    tasks = [asyncio.ensure_future(ask(name)) for name in "abc"]
    await asyncio.sleep(0)
    assert entrance.try_enter() is None, "none overtakes"
    permits.pop().release()
    permits.pop().release()
    permits += [await tasks[0], await tasks[1]]
    assert entered == ["a", "b"]
    with pytest.raises(TooManyRequests):
        await tasks[2]
    for permit in permits:
        permit.release()
    assert entrance.admission.num_requests == 0


@pytest.mark.parametrize("is_admitted", [True, False])
async def test_a_waiter_that_is_cancelled_leaves_nothing_behind(is_admitted):
    entrance = Entrance(max_requests=1)
    permit = entrance.try_enter()
    waiting, leaving = (asyncio.ensure_future(entrance.enter()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    permit.release()
    if is_admitted:  # it is cancelled in the same moment
        entrance.admission.admit_waiters()
        assert entrance.admission.num_requests == 1
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (entrance.admission.num_requests, entrance.admission.num_unqueued) == (0, 0)
    assert entrance.try_enter() is not None


async def test_a_large_waiter_does_not_hold_up_short_requests():
    entrance = Entrance()
    held = entrance.try_enter()
    entrance.policy.ahead = 5_000
    large = asyncio.ensure_future(entrance.enter(num_tokens=1_000, timeout_s=1))
    await asyncio.sleep(0)
    assert entrance.try_enter(num_tokens=1_000, timeout_s=60) is None, "its like"
    assert entrance.try_enter(num_tokens=10, timeout_s=60) is not None
    entrance.policy.ahead = 0
    held.release()
    assert (await large).num_tokens == 1_000


async def test_at_the_end_of_the_wait_there_is_one_more_look():
    """What was queued may be done without any release."""

    entrance = Entrance()
    entrance.try_enter()
    entrance.policy.ahead = 50_000
    entering = asyncio.ensure_future(entrance.enter())
    await asyncio.sleep(0)
    entrance.policy.ahead = 0
    await entering
    assert entrance.admission.num_requests == 2


def test_a_lone_tenant_gets_eight_of_nine_places_and_the_next_one_finds_room():
    entrance = Entrance(max_requests=900)
    assert len(entrance.fill("greedy")) == 800
    assert len(entrance.fill("polite", 50)) == 50
    assert len(entrance.fill("third", 5)) == 5
    message = entrance.rejection(tenant="greedy").message
    assert "855 requests are being served, at most 900 may be at a time, and 800 of them are yours" in message
    for few in (1, 2, 8):
        assert len(Entrance(max_requests=few).fill("a")) == few


def test_places_come_to_be_shared_evenly():
    entrance = Entrance(max_requests=900)
    held = {"greedy": entrance.fill("greedy"), "polite": []}
    for _ in range(2000):  # the greedy one's requests are answered, and each wants as many as it gets
        if held["greedy"]:
            held["greedy"].pop(0).release()
        for tenant in held:
            held[tenant] += entrance.fill(tenant, 1)
    assert abs(len(held["greedy"]) - len(held["polite"])) <= 16
    assert len(held["greedy"]) + len(held["polite"]) >= 800


def test_a_tenant_whose_queue_is_full_is_rejected_and_another_is_not():
    entrance = Entrance()
    entrance.policy.ahead_of = {"greedy": 25_000, "polite": 100}
    with entrance.try_enter(tenant="greedy"):
        assert entrance.try_enter(tenant="greedy") is None
        assert "about 25 s, at most 10 s" in entrance.rejection(tenant="greedy").message
        assert entrance.try_enter(tenant="polite") is not None


def test_what_another_tenant_has_not_queued_yet_is_waited_for_as_far_as_it_takes_turns():
    entrance = Entrance()
    with entrance.try_enter(9_000, tenant="greedy"), entrance.try_enter(9_000, tenant="greedy"):
        assert entrance.wait_s(20, tenant="polite") == 0.02
        assert entrance.wait_s(20, tenant="greedy") == 0.04
        assert entrance.wait_s(50_000, tenant="polite") == 18


async def test_a_tenants_waiters_do_not_hold_up_another_tenant():
    entrance = Entrance(max_requests=9)
    held = entrance.fill("greedy")
    assert len(held) == 8
    waiting = [asyncio.ensure_future(entrance.enter(tenant="greedy")) for _ in range(100)]
    await asyncio.sleep(0)
    polite = entrance.try_enter(tenant="polite")
    assert polite is not None, "the waiters are not its like"
    entrance.policy.ahead_of = {"greedy": 50_000}
    late = asyncio.ensure_future(entrance.enter(tenant="polite"))  # there is no free permit
    await asyncio.sleep(0)
    held.pop().release()
    assert (await late).use.tenant == "polite"
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, TooManyRequests) for result in results)


async def test_waiters_of_several_tenants_are_admitted_by_turns():
    entrance = Entrance(max_requests=2)
    held, entered = entrance.fill("first"), []

    async def ask(tenant):
        held.append(await entrance.enter(tenant=tenant))
        entered.append(tenant)

    tasks = [asyncio.ensure_future(ask(tenant)) for tenant in ("a", "a", "a", "b", "b")]
    await asyncio.sleep(0)
    for _ in range(4):
        held.pop(0).release()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert entered == ["a", "b", "a", "b"]
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_waiters_of_one_tenant_leave_room_for_those_of_another():
    entrance = Entrance(max_requests=1)
    entrance.try_enter(tenant="greedy")
    crowd = [asyncio.ensure_future(entrance.enter(tenant="greedy")) for _ in range(600)]
    polite = asyncio.ensure_future(entrance.enter(tenant="polite"))
    await asyncio.sleep(0)  # a rejection comes at once; the rest waits until its time is over
    assert sum(task.done() for task in crowd) == 88
    assert not polite.done()
    await asyncio.gather(*crowd, polite, return_exceptions=True)


async def test_tenants_without_requests_are_forgotten():
    entrance = Entrance(max_requests=3)
    for n in range(50):
        with entrance.try_enter(tenant=f"comes and goes {n}"):
            pass
    permits = entrance.fill("a")
    for n in range(5):
        assert entrance.try_enter(tenant=f"finds no room {n}") is None
    tasks = [asyncio.ensure_future(entrance.enter(tenant=f"waits {n}")) for n in range(5)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    permits.pop().release()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks[1:]:
        if not task.exception():
            task.result().release()
    for permit in permits:
        permit.release()
    assert (entrance.admission.num_tenants, entrance.admission.num_requests, entrance.admission.num_unqueued) == (
        0,
        0,
        0,
    )


async def test_waiters_are_looked_at_once_for_all_permits_released_in_a_turn():
    entrance = Entrance()
    held = entrance.fill("a")
    entrance.policy.ahead = 50_000
    tasks = [asyncio.ensure_future(entrance.enter(tenant=f"t{n}")) for n in range(50)]
    await asyncio.sleep(0)
    entrance.policy.num_looks = 0
    for permit in held[1:]:
        permit.release()
    assert len(held) > 50
    await asyncio.sleep(0)
    assert 1 <= entrance.policy.num_looks <= 16
    entrance.policy.ahead = 0
    held[0].release()
    for permit in await asyncio.gather(*tasks):
        permit.release()
    assert entrance.admission.num_requests == entrance.admission.num_tenants == 0


async def test_the_tenant_of_a_waiter_that_is_just_leaving_is_not_forgotten_before(monkeypatch):
    """Else it would be admitted after all, for a tenant whose requests are not counted."""
    monkeypatch.setattr(admission_module, "MAX_WAIT_FOR_PERMIT_S", 0.01)
    entrance = Entrance(max_requests=9)
    of_a, of_b = entrance.try_enter(tenant="a"), entrance.try_enter(tenant="b")
    entrance.policy.ahead = 50_000
    permits: list[Permit] = []

    def all_are_released():
        assert entrance.admission.num_requests == 2
        entrance.policy.ahead = 0
        of_b.release()
        entrance.admission.admit_waiters()
        of_a.release()
        permits.append(entrance.try_enter(tenant="a"))

    waiting = asyncio.ensure_future(entrance.enter(tenant="a"))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.02, all_are_released)
    # Late, so that this comes between the end of the wait and the moment in which the task hears of it.
    time.sleep(0.1)  # noqa: ASYNC251
    permits.append(await waiting)
    assert entrance.admission.num_requests_of("a") == entrance.admission.num_requests == 2
    for permit in permits:
        permit.release()
    assert entrance.admission.num_tenants == entrance.admission.num_requests == 0
