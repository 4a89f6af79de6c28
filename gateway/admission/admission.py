"""Grants a request a permit, lets it wait a moment for one, or rejects it and says when to come back.

Owns the count of admitted requests, and the admission queues. Judges by work: the time until the request would have had
its turn, by the estimate of `vecd.gateway.scheduling.policy`. Called by `vecd.gateway.pipeline` once a request has been
parsed and before it is tokenized.

Permits, and places in the admission queues, are bounded by what is free (the dynamic threshold of Choudhury and Hahne,
1998): a tenant may have up to `_TIMES_FREE` times as many as are free. Alone it gets eight of nine, and there is always
room for the next tenant; two tenants get eight of seventeen each, and the one that had more gets no more until the
other has as many.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

from vecd.gateway.scheduling.policy import BatchingPolicy, Unqueued, Workers
from vecd.gateway.scheduling.queue import RequestQueue
from vecd.gateway.types.errors import TooManyRequests
from vecd.gateway.types.request import Priority

_MAX_WAIT_FOR_PERMIT_S = 0.25
"""Long enough for a burst to be admitted, and too short for waiters to pile up."""

_TIMES_FREE = 8

_MAX_WAITERS = 576
"""512 of one tenant."""

_MAX_PERMITS_COMPARED = 64
"""The oldest permits, of which the one with the least left is taken for the next to be released."""

_MAX_LOOKS = 8
"""Tenants of an admission queue that are looked at when a request is over; the others are looked at later."""

_SAFE_PART = 0.6
"""The part of the time to a request's deadline that may pass until its turn. Requests that are admitted up to the last
moment are all answered too late: at twice the capacity, with deadlines of 1 s, not one was in time with a part of 1."""


@dataclass(slots=True, eq=False)
class _TenantUse:
    """What one tenant has at this gateway: permits and waiters."""

    tenant: str
    num_requests: int = 0
    """Requests with a permit."""
    num_unqueued: int = 0
    """Tokens of these that are not queued yet, estimated."""
    num_waiters: int = 0


@dataclass(slots=True, eq=False)
class Permit:
    """The right of one request to be served. Whoever is granted one releases it, whatever happens."""

    _admission: "Admission"
    use: _TenantUse
    num_tokens: int
    """Estimated from characters."""
    priority: Priority
    deadline: float
    """When the client stops waiting for the response, by `time.monotonic`."""
    num_unqueued: int = 0
    """The part of `num_tokens` that the batching policy does not know of yet."""
    request_queue: RequestQueue | None = None
    """What is queued of the request, once it may be. Set by the pipeline."""

    @property
    def num_waiting(self) -> int:
        """Tokens that no worker has got, estimated."""
        return self.num_unqueued + (self.request_queue.num_tokens if self.request_queue is not None else 0)

    @property
    def tenant(self) -> str:
        return self.use.tenant

    def note_queued(self, num_tokens: int | None = None) -> None:
        """The batching policy counts `num_tokens` of the request from now on; None: all of them."""
        num_tokens = self.num_unqueued if num_tokens is None else min(num_tokens, self.num_unqueued)
        self.num_unqueued -= num_tokens
        self.use.num_unqueued -= num_tokens
        self._admission.num_unqueued -= num_tokens

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self.num_unqueued:
            self.note_queued()
        self._admission.leave(self)


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for a permit."""

    permit: Permit
    admitted: "asyncio.Future[None]"
    is_admitted: bool = False
    """It has its permit, and is no longer counted among the tenant's waiters. One that leaves without a permit counts
    itself out: until then its tenant is not forgotten."""


class _AdmissionQueue:
    """Waiters of one kind: those of a tenant in the order in which they came, tenants in turns.

    Tenants have queues of their own: one that may not have more must not hold up others.
    """

    def __init__(self) -> None:
        self.by_tenant: dict[str, deque[_Waiter]] = {}
        """The tenant first whose turn it is. No queue is empty."""

    def add(self, waiter: _Waiter) -> None:
        self.by_tenant.setdefault(waiter.permit.tenant, deque()).append(waiter)

    def remove(self, waiter: _Waiter) -> None:
        """It need not be there."""
        tenant = waiter.permit.tenant
        queue = self.by_tenant.get(tenant)
        if queue is None or waiter not in queue:
            return
        queue.remove(waiter)
        if not queue:
            del self.by_tenant[tenant]

    def pop(self, tenant: str) -> _Waiter:
        """The tenant's next waiter. Its other ones have their turn after those of all other tenants."""
        queue = self.by_tenant.pop(tenant)
        waiter = queue.popleft()
        if queue:
            self.by_tenant[tenant] = queue
        return waiter

    def put_last(self, tenant: str) -> None:
        self.by_tenant[tenant] = self.by_tenant.pop(tenant)


class Admission:
    def __init__(self, *, max_requests: int, max_wait_s: float, policy: BatchingPolicy, workers: Workers) -> None:
        """At most `max_requests` have a permit, none of which would wait for longer than `max_wait_s` by the estimate
        of `policy`. A request of at most `policy.quantum` tokens is a short one, which waits only for its like."""
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._policy = policy
        self._workers = workers
        # Order is kept among equals: a large request that finds no room must not hold up short ones.
        self._queues = [(_AdmissionQueue(), _AdmissionQueue()) for _ in Priority]
        self._num_waiters = 0
        self._is_look_due = False
        self._uses: dict[str, _TenantUse] = {}
        self._permits: dict[Permit, None] = {}
        """Those granted, the oldest first."""
        self.num_unqueued = 0
        """Tokens of these that are not queued yet, estimated."""
        self.num_admitted = 0
        """Requests that have got a permit so far."""
        self.has_workers = True
        """False while the model is not ready. Nothing is known of a request's wait then, and none is refused for it:
        `vecd.gateway.dispatch.residence` decides how many wait."""

    def try_enter(self, num_tokens: int, priority: Priority, deadline: float, tenant: str = "") -> Permit | None:
        """A permit for a tenant's request of about `num_tokens`, if there is one now and none of its like waits."""
        permit = Permit(self, self._use(tenant), num_tokens, priority, deadline)
        if (self._num_waiters and tenant in self._queue(permit).by_tenant) or self._rejection_reason(permit):
            self._forget_if_unused(permit.use)
            return None
        self._grant(permit)
        return permit

    async def enter(self, num_tokens: int, priority: Priority, deadline: float, tenant: str = "") -> Permit:
        """A permit as by `try_enter`, after a moment in the admission queue if need be. Raises TooManyRequests."""
        if (granted := self.try_enter(num_tokens, priority, deadline, tenant)) is not None:
            return granted
        permit = Permit(self, self._use(tenant), num_tokens, priority, deadline)
        waiter = _Waiter(permit, asyncio.get_running_loop().create_future())
        self._add_waiter(waiter)
        try:
            async with asyncio.timeout(min(_MAX_WAIT_FOR_PERMIT_S, deadline - time.monotonic())):
                await waiter.admitted
        except TimeoutError:
            self._remove_waiter(waiter)
            if not waiter.is_admitted:
                self._grant_or_reject(permit)
        except BaseException:
            self._remove_waiter(waiter)
            if waiter.is_admitted:
                permit.release()
            raise
        finally:
            self._forget_if_unused(permit.use)
        return permit

    def leave(self, permit: Permit) -> None:
        """Take a permit back."""
        del self._permits[permit]
        permit.use.num_requests -= 1
        self._forget_if_unused(permit.use)
        self._admit_waiters_soon()

    def admit_waiters(self) -> None:
        """Grant permits to waiters, as far as there is room."""
        self._is_look_due = False
        if not self._num_waiters:
            return
        for queues in self._queues:
            for queue in queues:
                self._admit_from(queue)

    @property
    def num_requests(self) -> int:
        """Requests with a permit."""
        return len(self._permits)

    @property
    def num_tenants(self) -> int:
        """Tenants with a permit or a waiter."""
        return len(self._uses)

    def num_requests_of(self, tenant: str) -> int:
        """Requests of a tenant with a permit."""
        use = self._uses.get(tenant)
        return use.num_requests if use is not None else 0

    def wait_s(self, permit: Permit) -> float:
        """Estimated seconds until the request of a permit would have had its turn, if it were queued now."""
        use = permit.use
        unqueued = Unqueued(
            own_tokens=use.num_unqueued,
            own_requests=use.num_requests,
            others_tokens=self.num_unqueued - use.num_unqueued,
            num_others=len(self._uses) - (use.tenant in self._uses),
        )
        return self._policy.wait_s(permit.num_tokens, permit.priority, use.tenant, unqueued, self._workers)

    # --- waiters --------------------------------------------------------------------------------------------

    def _queue(self, permit: Permit) -> _AdmissionQueue:
        return self._queues[permit.priority][permit.num_tokens > self._policy.quantum]

    def _add_waiter(self, waiter: _Waiter) -> None:
        use = waiter.permit.use
        if use.num_waiters >= _TIMES_FREE * (_MAX_WAITERS - self._num_waiters):
            reason = _too_many("waiting to be admitted", use.num_waiters, self._num_waiters, _MAX_WAITERS)
            rejection = self._rejection(waiter.permit, reason)
            self._forget_if_unused(use)
            raise rejection
        self._queue(waiter.permit).add(waiter)
        self._num_waiters += 1
        use.num_waiters += 1

    def _admit_waiters_soon(self) -> None:
        """Once for all requests that are over in this turn of the loop: it looks at some fifty waiters."""
        if self._num_waiters and not self._is_look_due:
            self._is_look_due = True
            asyncio.get_running_loop().call_soon(self.admit_waiters)

    def _admit_from(self, queue: _AdmissionQueue) -> None:
        num_looks = min(_MAX_LOOKS, len(queue.by_tenant))
        while num_looks and queue.by_tenant:
            tenant, waiters = next(iter(queue.by_tenant.items()))
            if not waiters[0].admitted.done() and self._rejection_reason(waiters[0].permit):
                queue.put_last(tenant)
                num_looks -= 1
                continue
            waiter = queue.pop(tenant)
            if not waiter.admitted.done():  # else it is just leaving
                waiter.is_admitted = True
                self._count_out(waiter)
                self._grant(waiter.permit)
                waiter.admitted.set_result(None)

    def _remove_waiter(self, waiter: _Waiter) -> None:
        self._queue(waiter.permit).remove(waiter)
        if not waiter.is_admitted:
            self._count_out(waiter)
        self._admit_waiters_soon()  # one behind it may need less

    def _count_out(self, waiter: _Waiter) -> None:
        self._num_waiters -= 1
        waiter.permit.use.num_waiters -= 1

    def _grant_or_reject(self, permit: Permit) -> None:
        """At the end of the wait. No request may be over since, but what was queued may be done."""
        if (reason := self._rejection_reason(permit)) is not None:
            raise self._rejection(permit, reason)
        self._grant(permit)

    # --- permits --------------------------------------------------------------------------------------------

    def _use(self, tenant: str) -> _TenantUse:
        use = self._uses.get(tenant)
        if use is None:
            use = self._uses[tenant] = _TenantUse(tenant)
        return use

    def _forget_if_unused(self, use: _TenantUse) -> None:
        is_unused = not use.num_requests and not use.num_waiters
        if is_unused and self._uses.get(use.tenant) is use:  # and not a new one of the same tenant
            del self._uses[use.tenant]

    def _grant(self, permit: Permit) -> None:
        permit.num_unqueued = permit.num_tokens
        permit.use.num_unqueued += permit.num_tokens
        permit.use.num_requests += 1
        self.num_admitted += 1
        self.num_unqueued += permit.num_tokens
        self._permits[permit] = None

    def _rejection_reason(self, permit: Permit) -> str | None:
        """Why there is no room for a request; None if there is, as there always is for a lone one."""
        if self.num_requests == 0:
            return None
        use = permit.use
        if self._has_no_place(use):
            return _too_many("being served", use.num_requests, self.num_requests, self._max_requests)
        if not self.has_workers:
            return None
        safe_s = _SAFE_PART * (permit.deadline - time.monotonic())
        if self._policy.max_wait_s(self.num_unqueued, self._workers) <= min(safe_s, self._max_wait_s):
            return None
        wait_s = self.wait_s(permit)
        if wait_s > self._max_wait_s:
            return f"the wait would be about {wait_s:.0f} s, at most {self._max_wait_s:g} s are allowed"
        if wait_s > safe_s:
            left_s = max(0.0, safe_s / _SAFE_PART)
            return f"the wait would be about {wait_s:.2g} s, too long for a deadline that is {left_s:.2g} s away"
        return None

    def _rejection(self, permit: Permit, reason: str) -> TooManyRequests:
        retry_after_s = self._place_s() if self._has_no_place(permit.use) else self.wait_s(permit)
        return TooManyRequests(reason, retry_after_s=retry_after_s)

    def _has_no_place(self, use: _TenantUse) -> bool:
        return use.num_requests >= _TIMES_FREE * (self._max_requests - self.num_requests)

    def _place_s(self) -> float:
        """Estimated seconds until a permit is released."""
        least_tokens = min(permit.num_waiting for permit in islice(self._permits, _MAX_PERMITS_COMPARED))
        return self._policy.place_s(self.num_requests, least_tokens, self.num_unqueued, self._workers)


def _too_many(doing_what: str, num_of_tenant: int, num_in_all: int, max_in_all: int) -> str:
    requests = "1 request is" if num_in_all == 1 else f"{num_in_all} requests are"
    too_many = f"{requests} {doing_what}, at most {max_in_all} may be at a time"
    if num_in_all >= max_in_all:
        return too_many
    return f"{too_many}, and {num_of_tenant} of them are yours: room is left for other callers"
