"""Grants a request a permit, lets it wait for one a moment, or refuses it and says when to come back.

Owns the count of requests in the house, and the short queue at its door. Judges by work: the tokens that would be
served before the request, over the tokens that the workers embed per second. What is ahead of whom the scheduler knows;
a short request behind a huge one is not behind all of it, and no tenant is behind all that another one has. Called by
`vecd.gateway.pipeline` once a request has been parsed and before it is tokenized.

Places, in the house and at its door, are bounded by what is free (the dynamic threshold of Choudhury and Hahne, 1998):
a tenant may have up to `_TIMES_FREE` times as many as are free. Alone it gets eight of nine, and there is always room
for the next; two get eight of seventeen each, and who had more takes no more until the others have as many.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from vecd.gateway.types.errors import TooManyRequests
from vecd.gateway.types.request import Priority

_DOOR_S = 0.25
"""So long a request may wait for a permit: long enough for a burst to be let in, and too short to pile up."""

_TIMES_FREE = 8

_MAX_AT_DOOR = 576
"""512 of one tenant."""

_MAX_LOOKS = 8
"""So many tenants' requests of a kind are looked at when somebody leaves; those that are not have their turn later."""

_SAFE_PART = 0.6
"""Of the time that a request has left, so much may pass until its turn. What is let in up to the last moment is all
answered too late: at twice the capacity, with deadlines of 1 s, not one request was in time with a part of 1."""


class Waiter:
    """What one tenant has in the house, and at its door."""

    __slots__ = ("num_at_door", "num_requests", "num_unqueued", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.num_requests = 0
        """With a permit."""
        self.num_unqueued = 0
        """Tokens of theirs that are not queued yet, estimated."""
        self.num_at_door = 0


class Permit:
    """A request's place in the house. Whoever is granted one releases it, whatever happens."""

    __slots__ = ("_admission", "deadline", "guest", "num_tokens", "num_unqueued", "priority")

    def __init__(
        self, admission: "Admission", guest: Waiter, num_tokens: int, priority: Priority, deadline: float
    ) -> None:
        self._admission = admission
        self.guest = guest
        self.num_tokens = num_tokens
        """Estimated from characters."""
        self.num_unqueued = 0
        """Of these, what the scheduler does not know of yet."""
        self.priority = priority
        self.deadline = deadline
        """When its caller stops waiting for the answer, by `time.monotonic`."""

    def note_queued(self, num_tokens: int | None = None) -> None:
        """So many of its tokens, or all, are now the scheduler's to count."""
        num_tokens = self.num_unqueued if num_tokens is None else min(num_tokens, self.num_unqueued)
        self.num_unqueued -= num_tokens
        self.guest.num_unqueued -= num_tokens
        self._admission.num_unqueued -= num_tokens

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self.note_queued()
        self._admission.leave(self.guest)


class _AtDoor:
    """A request that waits for a permit."""

    __slots__ = ("is_at_door", "is_let_in", "let_in", "permit")

    def __init__(self, permit: Permit, let_in: "asyncio.Future[None]") -> None:
        self.permit = permit
        self.let_in = let_in
        self.is_let_in = False
        self.is_at_door = True
        """Counted there. Whoever is just leaving counts itself out: until then its guest is not forgotten."""


class _Door:
    """Requests of one kind that wait to be let in: a tenant's in the order in which they came, tenants in turns.

    Tenants have queues of their own: one that may not have more must not bar the way for others.
    """

    __slots__ = ("queues",)

    def __init__(self) -> None:
        self.queues: dict[str, deque[_AtDoor]] = {}
        """By tenant, the one whose turn it is first. None is empty."""

    def add(self, entry: _AtDoor) -> None:
        self.queues.setdefault(entry.permit.guest.tenant, deque()).append(entry)

    def remove(self, entry: _AtDoor) -> None:
        """It need not be there."""
        tenant = entry.permit.guest.tenant
        queue = self.queues.get(tenant)
        if queue is None or entry not in queue:
            return
        queue.remove(entry)
        if not queue:
            del self.queues[tenant]

    def pop(self, tenant: str) -> _AtDoor:
        """The tenant's next request. Its other ones have their turn after those of all others."""
        queue = self.queues.pop(tenant)
        entry = queue.popleft()
        if queue:
            self.queues[tenant] = queue
        return entry

    def put_last(self, tenant: str) -> None:
        self.queues[tenant] = self.queues.pop(tenant)


class Admission:
    def __init__(
        self,
        *,
        max_requests: int,
        max_wait_s: float,
        short_tokens: int,
        tokens_waiting: Callable[[], int],
        tokens_ahead: Callable[[int, Priority, str], int],
        tokens_per_s: Callable[[], float],
    ) -> None:
        """`short_tokens`: up to so many make a request a short one, which waits for none but its like.

        `tokens_waiting` is all that is in the queue and on the workers, `tokens_ahead` what of it a tenant's request of
        so many would wait for; `tokens_per_s` is that of all workers, above 0.
        """
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._short_tokens = short_tokens
        self._tokens_waiting = tokens_waiting
        self._tokens_ahead = tokens_ahead
        self._tokens_per_s = tokens_per_s
        # Order is kept among equals: a bulk request that finds no room must not bar the way for short ones.
        self._doors = [(_Door(), _Door()) for _ in Priority]
        self._num_at_door = 0
        self._is_opening_due = False
        self._guests: dict[str, Waiter] = {}
        self.num_requests = 0
        """With a permit."""
        self.num_unqueued = 0
        """Tokens of theirs that are not queued yet, estimated."""

    def try_enter(self, num_tokens: int, priority: Priority, deadline: float, tenant: str = "") -> Permit | None:
        """A permit for a tenant's request of about `num_tokens`, if there is one now and none of its like is at the
        door."""
        permit = Permit(self, self._guest(tenant), num_tokens, priority, deadline)
        if (self._num_at_door and tenant in self._door(permit).queues) or self._obstacle(permit) is not None:
            self._forget_if_gone(permit.guest)
            return None
        self._grant(permit)
        return permit

    async def enter(self, num_tokens: int, priority: Priority, deadline: float, tenant: str = "") -> Permit:
        """The same, after a moment at the door if need be. Raises TooManyRequests."""
        if (granted := self.try_enter(num_tokens, priority, deadline, tenant)) is not None:
            return granted
        permit = Permit(self, self._guest(tenant), num_tokens, priority, deadline)
        entry = _AtDoor(permit, asyncio.get_running_loop().create_future())
        self._go_to_door(entry)
        try:
            async with asyncio.timeout(min(_DOOR_S, deadline - time.monotonic())):
                await entry.let_in
        except TimeoutError:
            self._leave_door(entry)
            if not entry.is_let_in:
                self._enter_or_refuse(permit)
        except BaseException:
            self._leave_door(entry)
            if entry.is_let_in:
                permit.release()
            raise
        finally:
            self._forget_if_gone(permit.guest)
        return permit

    def leave(self, guest: Waiter) -> None:
        """A request gives its permit back."""
        self.num_requests -= 1
        guest.num_requests -= 1
        self._forget_if_gone(guest)
        self._open_door_soon()

    def _open_door_soon(self) -> None:
        """Once for all who leave in this turn of the loop: it is a look at some fifty of those who wait."""
        if self._num_at_door and not self._is_opening_due:
            self._is_opening_due = True
            asyncio.get_running_loop().call_soon(self.open_door)

    def open_door(self) -> None:
        """Let in who stands at the door, as far as there is room."""
        self._is_opening_due = False
        if not self._num_at_door:
            return
        for doors in self._doors:
            for door in doors:
                self._let_in(door)

    @property
    def num_tenants(self) -> int:
        """With a request in the house or at its door."""
        return len(self._guests)

    def num_requests_of(self, tenant: str) -> int:
        """With a permit."""
        guest = self._guests.get(tenant)
        return guest.num_requests if guest is not None else 0

    def wait_s(self, num_tokens: int, priority: Priority, tenant: str = "") -> float:
        """Until a tenant's request of so many tokens would have had its turn, if it were queued now."""
        return self._wait_s(num_tokens, priority, self._guests.get(tenant) or Waiter(tenant))

    def _wait_s(self, num_tokens: int, priority: Priority, guest: Waiter) -> float:
        unqueued = min(guest.num_unqueued, num_tokens * guest.num_requests)
        num_others = len(self._guests) - (guest.tenant in self._guests)
        unqueued += min(self.num_unqueued - guest.num_unqueued, (num_tokens + unqueued) * num_others)
        return (self._tokens_ahead(num_tokens, priority, guest.tenant) + unqueued) / self._tokens_per_s()

    # --- at the door ----------------------------------------------------------------------------------------

    def _door(self, permit: Permit) -> _Door:
        return self._doors[permit.priority][permit.num_tokens > self._short_tokens]

    def _go_to_door(self, entry: _AtDoor) -> None:
        guest = entry.permit.guest
        if guest.num_at_door >= _TIMES_FREE * (_MAX_AT_DOOR - self._num_at_door):
            reason = _too_many("wait to be admitted", guest.num_at_door, self._num_at_door, _MAX_AT_DOOR)
            refusal = self._refusal(entry.permit, reason)
            self._forget_if_gone(guest)
            raise refusal
        self._door(entry.permit).add(entry)
        self._num_at_door += 1
        guest.num_at_door += 1

    def _let_in(self, door: _Door) -> None:
        num_looks = min(_MAX_LOOKS, len(door.queues))
        while num_looks and door.queues:
            tenant, queue = next(iter(door.queues.items()))
            if not queue[0].let_in.done() and self._obstacle(queue[0].permit) is not None:
                door.put_last(tenant)
                num_looks -= 1
                continue
            entry = door.pop(tenant)
            if not entry.let_in.done():  # else it is just leaving
                self._count_out(entry)
                entry.is_let_in = True
                self._grant(entry.permit)
                entry.let_in.set_result(None)

    def _leave_door(self, entry: _AtDoor) -> None:
        self._door(entry.permit).remove(entry)
        if entry.is_at_door:
            self._count_out(entry)
        self._open_door_soon()  # somebody behind it may need less

    def _count_out(self, entry: _AtDoor) -> None:
        entry.is_at_door = False
        self._num_at_door -= 1
        entry.permit.guest.num_at_door -= 1

    def _enter_or_refuse(self, permit: Permit) -> None:
        """At the end of the wait. Nobody has left meanwhile, perhaps, but what was queued may be done."""
        if (obstacle := self._obstacle(permit)) is not None:
            raise self._refusal(permit, obstacle)
        self._grant(permit)

    # --- in the house ---------------------------------------------------------------------------------------

    def _guest(self, tenant: str) -> Waiter:
        guest = self._guests.get(tenant)
        if guest is None:
            guest = self._guests[tenant] = Waiter(tenant)
        return guest

    def _forget_if_gone(self, guest: Waiter) -> None:
        is_gone = not guest.num_requests and not guest.num_at_door
        if is_gone and self._guests.get(guest.tenant) is guest:  # and not a new one of the same tenant
            del self._guests[guest.tenant]

    def _grant(self, permit: Permit) -> None:
        permit.num_unqueued = permit.num_tokens
        permit.guest.num_unqueued += permit.num_tokens
        permit.guest.num_requests += 1
        self.num_unqueued += permit.num_tokens
        self.num_requests += 1

    def _obstacle(self, permit: Permit) -> str | None:
        """Why there is no room for a request; None if there is, as there always is for a lone one."""
        if self.num_requests == 0:
            return None
        guest = permit.guest
        if guest.num_requests >= _TIMES_FREE * (self._max_requests - self.num_requests):
            return _too_many("are being served", guest.num_requests, self.num_requests, self._max_requests)
        safe_s = _SAFE_PART * (permit.deadline - time.monotonic())
        if self._tokens_waiting() + self.num_unqueued <= min(safe_s, self._max_wait_s) * self._tokens_per_s():
            return None  # whatever the order: this takes a tenth of the time, and there is seldom more to say
        wait_s = self._wait_s(permit.num_tokens, permit.priority, guest)
        if wait_s > self._max_wait_s:
            return f"the wait would be about {wait_s:.0f} s, at most {self._max_wait_s:g} s are allowed"
        if wait_s > safe_s:
            left_s = safe_s / _SAFE_PART
            return f"the wait would be about {wait_s:.2g} s, too long for a deadline that is {left_s:.2g} s away"
        return None

    def _refusal(self, permit: Permit, reason: str) -> TooManyRequests:
        return TooManyRequests(reason, retry_after_s=self._wait_s(permit.num_tokens, permit.priority, permit.guest))


def _too_many(do_what: str, num_of_tenant: int, num_in_all: int, max_in_all: int) -> str:
    if num_in_all >= max_in_all:
        return f"{num_in_all} requests {do_what}, at most {max_in_all} are at a time"
    return (
        f"{num_in_all} requests {do_what}, at most {max_in_all} are at a time, and {num_of_tenant} of them are yours: "
        "room is left for other callers"
    )
