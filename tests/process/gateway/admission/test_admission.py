import asyncio
import time

from tests.support.admitting import Entrance
from vecd.gateway.admission import admission as admission_module
from vecd.gateway.admission.admission import Permit


async def test_the_tenant_of_a_waiter_that_is_just_leaving_is_not_forgotten_before(monkeypatch):
    """Else it would be admitted after all, for a tenant whose requests are not counted."""
    monkeypatch.setattr(admission_module, "_MAX_WAIT_FOR_PERMIT_S", 0.01)
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
