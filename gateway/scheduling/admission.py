"""Grants a request a permit, lets it wait a moment for one, or rejects it and says when to come back.

Owns the count of admitted requests, the admission queues, and the deadlines of requests. Judges by the time until the
request would have had its turn, as `vecd.gateway.scheduling.policy` estimates it.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, TypeAlias, TypeVar

from vecd.gateway.config import GatewayConfig
from vecd.gateway.errors import TooManyRequests
from vecd.gateway.request import Priority
from vecd.gateway.scheduling.policy import BatchingPolicy, Workers
from vecd.gateway.scheduling.queue import RequestQueue

# Permits, and places in the admission queues, are bounded by what is free (the dynamic threshold of Choudhury and
# Hahne, 1998): a tenant may have up to `_TIMES_FREE` times the number that are free. Alone it gets eight of nine, and
# there is always room for the next tenant; two tenants get eight of seventeen each, and the one that had more gets no
# more until the other has as many.

MAX_WAIT_FOR_PERMIT_S = 0.25
"""Long enough for a burst to be admitted, and too short for waiters to pile up."""

_TIMES_FREE = 8

_MAX_WAITERS = 576
"""512 of one tenant."""

_MAX_PERMITS_COMPARED = 64
"""The oldest permits, of which the one with the least left is taken for the next to be released."""

_MAX_LOOKS = 8
"""Tenants of an admission queue that are looked at when a request is over; the others are looked at later."""

_SAFE_PART = 0.6
"""The part of the time to a request's deadline that may pass until its turn. With a part of 1, at twice the capacity
and with deadlines of 1 s, not one request was answered in time."""


@dataclass(slots=True, eq=False)
class _TenantUse:
    tenant: str
    num_requests: int = 0
    num_unqueued: int = 0
    """Tokens of these that are not queued yet, estimated."""
    num_waiters: int = 0


@dataclass(slots=True, eq=False)
class Permit:
    """The right of one request to be served, which releases it, whatever happens."""

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
    """Set by the pipeline."""
    admitted: "asyncio.Future[None] | None" = None
    """Of one that waits in an admission queue."""

    @property
    def num_waiting(self) -> int:
        """Tokens that no worker has got, estimated."""
        return self.num_unqueued + (self.request_queue.num_tokens if self.request_queue is not None else 0)

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


_Queue: TypeAlias = dict[str, deque[Permit]]
"""Those of one kind that wait to be granted, by tenant, the tenant first whose turn it is; those of a tenant in the
order in which they came. No deque is empty. One that leaves without having been granted counts itself out: until then
its tenant is not forgotten."""


class Admission:
    def __init__(self, config: GatewayConfig, policy: BatchingPolicy, workers: Workers) -> None:
        """At most `config.max_requests` have a permit, at all gateways together, none of which would wait for longer
        than `config.max_wait` by the estimate of `policy`. A request of at most `policy.quantum` tokens is a short one,
        which waits only for its like."""
        self._max_requests = config.share(config.max_requests)
        self._max_wait_s = config.max_wait
        self._policy = policy
        self._workers = workers
        # Order is kept among equals: a large request that finds no room must not hold up short ones.
        self._queues: list[tuple[_Queue, _Queue]] = [({}, {}) for _ in Priority]
        self._num_waiters = 0
        self._is_look_due = False
        self._uses: dict[str, _TenantUse] = {}
        self.permits: dict[Permit, None] = {}
        self.num_unqueued = 0
        """Tokens of these that are not queued yet, estimated."""
        self.num_admitted = 0
        self.has_workers = True
        """False while the model is not ready: no request is refused for its wait, of which nothing is known."""

    def try_enter(self, num_tokens: int, priority: Priority, deadline: float, tenant: str = "") -> Permit | None:
        """A permit for a tenant's request of about `num_tokens`, if there is one now and none of its like waits."""
        permit = Permit(self, self._use(tenant), num_tokens, priority, deadline)
        if (self._num_waiters and tenant in self._queue(permit)) or self._rejection_reason(permit):
            self._forget_if_unused(permit.use)
            return None
        self._grant(permit)
        return permit

    async def enter(self, num_tokens: int, priority: Priority, deadline: float, tenant: str = "") -> Permit:
        """A permit as by `try_enter`, after a moment in the admission queue if need be. Raises TooManyRequests."""
        if (granted := self.try_enter(num_tokens, priority, deadline, tenant)) is not None:
            return granted
        permit = Permit(self, self._use(tenant), num_tokens, priority, deadline)
        permit.admitted = asyncio.get_running_loop().create_future()
        self._add_waiter(permit)
        try:
            async with asyncio.timeout(min(MAX_WAIT_FOR_PERMIT_S, deadline - time.monotonic())):
                await permit.admitted
        except TimeoutError:
            self._remove_waiter(permit)
            if permit not in self.permits:  # no request may be over since, but what was queued may be done
                if (reason := self._rejection_reason(permit)) is not None:
                    raise self._rejection(permit, reason) from None
                self._grant(permit)
        except BaseException:
            self._remove_waiter(permit)
            if permit in self.permits:
                permit.release()
            raise
        finally:
            self._forget_if_unused(permit.use)
        return permit

    def leave(self, permit: Permit) -> None:
        del self.permits[permit]
        permit.use.num_requests -= 1
        self._forget_if_unused(permit.use)
        self._admit_waiters_soon()

    def admit_waiters(self) -> None:
        """Grant permits to waiters, as far as there is room."""
        self._is_look_due = False
        if self._num_waiters:
            for queue in chain.from_iterable(self._queues):
                self._admit_from(queue)

    @property
    def num_requests(self) -> int:
        return len(self.permits)

    @property
    def num_tenants(self) -> int:
        return len(self._uses)

    def num_requests_of(self, tenant: str) -> int:
        use = self._uses.get(tenant)
        return use.num_requests if use is not None else 0

    def wait_s(self, permit: Permit) -> float:
        """Estimated seconds until the request would have had its turn, if it were queued now."""
        use, num_tokens = permit.use, permit.num_tokens
        before = self._policy.tokens_before(num_tokens, permit.priority, use.tenant, self._workers)
        # Of those that were admitted and have not been queued yet.
        own = min(use.num_unqueued, num_tokens * use.num_requests)
        num_others = len(self._uses) - (use.tenant in self._uses)
        others = min(self.num_unqueued - use.num_unqueued, (num_tokens + own) * num_others)
        return (before + own + others) / self._workers.tokens_per_s

    # --- waiters --------------------------------------------------------------------------------------------

    def _queue(self, permit: Permit) -> _Queue:
        return self._queues[permit.priority][permit.num_tokens > self._policy.quantum]

    def _add_waiter(self, permit: Permit) -> None:
        use = permit.use
        if use.num_waiters >= _TIMES_FREE * (_MAX_WAITERS - self._num_waiters):
            reason = _too_many("waiting to be admitted", use.num_waiters, self._num_waiters, _MAX_WAITERS)
            rejection = self._rejection(permit, reason)
            self._forget_if_unused(use)
            raise rejection
        self._queue(permit).setdefault(use.tenant, deque()).append(permit)
        self._num_waiters += 1
        use.num_waiters += 1

    def _admit_waiters_soon(self) -> None:
        """Once for all requests that are over in this turn of the loop: it looks at some fifty waiters."""
        if self._num_waiters and not self._is_look_due:
            self._is_look_due = True
            asyncio.get_running_loop().call_soon(self.admit_waiters)

    def _admit_from(self, queue: _Queue) -> None:
        num_looks = min(_MAX_LOOKS, len(queue))
        while num_looks and queue:
            tenant = next(iter(queue))
            waiters = queue.pop(tenant)
            permit = waiters[0]
            assert permit.admitted is not None
            is_leaving = permit.admitted.done()
            if not is_leaving and self._rejection_reason(permit):
                num_looks -= 1
            else:
                waiters.popleft()
                if not is_leaving:
                    self._count_out(permit)
                    self._grant(permit)
                    permit.admitted.set_result(None)
            if waiters:
                queue[tenant] = waiters  # its turn is after all other tenants'

    def _remove_waiter(self, permit: Permit) -> None:
        queue, tenant = self._queue(permit), permit.use.tenant
        if permit in queue.get(tenant, ()):
            queue[tenant].remove(permit)
            if not queue[tenant]:
                del queue[tenant]
        if permit not in self.permits:
            self._count_out(permit)
        self._admit_waiters_soon()  # one behind it may need less

    def _count_out(self, permit: Permit) -> None:
        self._num_waiters -= 1
        permit.use.num_waiters -= 1

    # --- permits --------------------------------------------------------------------------------------------

    def _use(self, tenant: str) -> _TenantUse:
        return self._uses.get(tenant) or self._uses.setdefault(tenant, _TenantUse(tenant))

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
        self.permits[permit] = None

    def _rejection_reason(self, permit: Permit) -> str | None:
        """None if there is room, as there always is for a lone request."""
        num_requests, use = len(self.permits), permit.use
        if not num_requests:
            return None
        if use.num_requests >= _TIMES_FREE * (self._max_requests - num_requests):
            return _too_many("being served", use.num_requests, num_requests, self._max_requests)
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
        if permit.use.num_requests < _TIMES_FREE * (self._max_requests - self.num_requests):
            return TooManyRequests(reason, retry_after_s=self.wait_s(permit))
        least_tokens = min(permit.num_waiting for permit in islice(self.permits, _MAX_PERMITS_COMPARED))
        place_s = self._policy.place_s(self.num_requests, least_tokens, self.num_unqueued, self._workers)
        return TooManyRequests(reason, retry_after_s=place_s)


def _too_many(doing_what: str, num_of_tenant: int, num_in_all: int, max_in_all: int) -> str:
    requests = "1 request is" if num_in_all == 1 else f"{num_in_all} requests are"
    too_many = f"{requests} {doing_what}, at most {max_in_all} may be at a time"
    if num_in_all >= max_in_all:
        return too_many
    return f"{too_many}, and {num_of_tenant} of them are yours: room is left for other callers"


# Deadlines of many requests for the price of one timer. A deadline is met at most a tick late. Setting and dropping one
# costs 0.5 µs together, an event loop's own timer 4 µs.

T = TypeVar("T")

TICK_S = 0.02


class Deadlines(Generic[T]):
    def __init__(self, on_due: Callable[[T], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`on_due` is called with each thing that has not been dropped when its deadline has passed."""
        self._on_due = on_due
        self._clock = clock
        self.due: dict[int, set[T]] = {}
        self._is_ticking = False
        self._seen = 0

    def set(self, thing: T, deadline: float) -> int:
        """Returns the tick that `drop` needs. `deadline`: in the clock's seconds. Call on the running loop."""
        tick = max(self._seen + 1, int(deadline / TICK_S) + 1)
        self.due.setdefault(tick, set()).add(thing)
        if not self._is_ticking:
            self._is_ticking = True
            self._tick()
        return tick

    def drop(self, thing: T, tick: int) -> None:
        """Forget a deadline, if it has not passed."""
        if (things := self.due.get(tick)) is not None:
            things.discard(thing)
            if not things:
                del self.due[tick]

    def _tick(self) -> None:
        now = int(self._clock() / TICK_S)
        ticks = range(self._seen + 1, now + 1)
        # Whichever is less: after a long pause there may be more ticks than deadlines.
        for tick in list(ticks) if len(ticks) <= len(self.due) else [tick for tick in self.due if tick in ticks]:
            for thing in self.due.pop(tick, ()):
                self._on_due(thing)
        self._seen = now
        if self.due:
            asyncio.get_running_loop().call_later(TICK_S, self._tick)
        else:
            self._is_ticking = False


# Room for what requests hold, of which one tenant gets at most half.


class TenantRoom:
    def __init__(
        self, total: int, what: str, per_s: float = math.inf, on_refused: Callable[[], None] = lambda: None
    ) -> None:
        """`what`: begins the message of a refusal, with `{}` for what is held. `per_s`: how fast it is given back."""
        self.total = total
        self.what = what
        self.per_s = per_s
        self.on_refused = on_refused
        self.num = 0
        self.num_of: Counter[str] = Counter()
        """By tenant, without those that hold nothing."""

    def share(self, tenant: str) -> "Share":
        """`tenant`: "" if there is none, and so no half."""
        return Share(self, tenant)


class Share:
    """What one request holds, nothing at first. To leave it as a context gives all back."""

    def __init__(self, room: TenantRoom, tenant: str) -> None:
        self._room = room
        self._tenant = tenant
        self.num = 0

    def take(self, num: int, most: int | None = None) -> None:
        """Hold `num` instead of what it held. `most`: of the tenant's requests together; None: half of the room. A
        tenant's only request is held to the whole room, and one that is alone to nothing. Raises TooManyRequests."""
        room = self._room
        most = room.total // 2 if most is None else most
        others, own = room.num - self.num, room.num_of[self._tenant] - self.num
        if (others and others + num > room.total) or (self._tenant and own and own + num > most):
            room.on_refused()
            raise TooManyRequests(
                f"{room.what.format(others)}, {own} of them yours, and this request has {num} or more: at most "
                f"{room.total} may be at a time, and {most} of one caller",
                retry_after_s=max(1.0, others / room.per_s),
            )
        self.keep(num)

    def keep(self, num: int) -> None:
        """As `take`, without a look at the limits."""
        if num == self.num:
            return
        self._room.num += num - self.num
        self._room.num_of[self._tenant] += num - self.num
        self.num = num
        if not self._room.num_of[self._tenant]:
            del self._room.num_of[self._tenant]

    def __enter__(self) -> "Share":
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(0)
