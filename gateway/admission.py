"""Grants a request a permit, lets it wait for one a moment, or refuses it and says when to come back.

Owns the count of requests in the house, and the short queue at its door. Judges by work: the tokens that would be
served before the request, over the tokens that the workers embed per second. What is ahead of whom the scheduler knows;
a short request behind a huge one is not behind all of it. Called by `gateway.app` once a request has been parsed and
before it is tokenized.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from gateway.errors import TooManyRequests
from gateway.request import Priority

_DOOR_S = 0.25
"""So long a request may wait for a permit: long enough for a burst to be let in, and too short to pile up."""

_MAX_AT_DOOR = 512

_SAFE_PART = 0.6
"""Of the time that a request has left, so much may pass until its turn. What is let in up to the last moment is all
answered too late: at twice the capacity, with deadlines of 1 s, not one request was in time with a part of 1."""


class Permit:
    """A request's place in the house. Whoever is granted one releases it, whatever happens."""

    __slots__ = ("_admission", "deadline", "num_tokens", "num_unqueued", "priority")

    def __init__(self, admission: "Admission", num_tokens: int, priority: Priority, deadline: float) -> None:
        self._admission = admission
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
        self._admission.num_unqueued -= num_tokens

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self.note_queued()
        self._admission.num_requests -= 1
        self._admission.open_door()


class _AtDoor:
    """A request that waits for a permit."""

    __slots__ = ("is_let_in", "let_in", "permit")

    def __init__(self, permit: Permit, let_in: "asyncio.Future[None]") -> None:
        self.permit = permit
        self.let_in = let_in
        self.is_let_in = False


class Admission:
    def __init__(
        self,
        *,
        max_requests: int,
        max_wait_s: float,
        short_tokens: int,
        tokens_waiting: Callable[[], int],
        tokens_ahead: Callable[[int, Priority], int],
        tokens_per_s: Callable[[], float],
    ) -> None:
        """`short_tokens`: up to so many make a request a short one, which waits for none but its like.

        `tokens_waiting` is all that is in the queue and on the workers, `tokens_ahead` what of it a request of so many
        would wait for; `tokens_per_s` is that of all workers, above 0.
        """
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._short_tokens = short_tokens
        self._tokens_waiting = tokens_waiting
        self._tokens_ahead = tokens_ahead
        self._tokens_per_s = tokens_per_s
        # Order is kept among equals: a bulk request that finds no room must not bar the way for short ones.
        self._doors: list[tuple[deque[_AtDoor], deque[_AtDoor]]] = [(deque(), deque()) for _ in Priority]
        self._num_at_door = 0
        self.num_requests = 0
        """With a permit."""
        self.num_unqueued = 0
        """Tokens of theirs that are not queued yet, estimated."""

    def try_enter(self, num_tokens: int, priority: Priority, deadline: float) -> Permit | None:
        """A permit for a request of about `num_tokens`, if there is one now and none of its like is at the door."""
        permit = Permit(self, num_tokens, priority, deadline)
        if (self._num_at_door and self._door(permit)) or self._obstacle(permit) is not None:
            return None
        self._grant(permit)
        return permit

    async def enter(self, num_tokens: int, priority: Priority, deadline: float) -> Permit:
        """The same, after a moment at the door if need be. Raises TooManyRequests."""
        permit = Permit(self, num_tokens, priority, deadline)
        if self._num_at_door >= _MAX_AT_DOOR:
            raise self._refusal(permit, f"{self._num_at_door} requests wait to be admitted already")
        entry = _AtDoor(permit, asyncio.get_running_loop().create_future())
        self._door(permit).append(entry)
        self._num_at_door += 1
        try:
            self.open_door()
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
        return permit

    def open_door(self) -> None:
        """Let in who stands at the door, as far as there is room."""
        if not self._num_at_door:
            return
        for doors in self._doors:
            for door in doors:
                while door and (door[0].let_in.done() or self._obstacle(door[0].permit) is None):
                    entry = door.popleft()
                    self._num_at_door -= 1
                    if not entry.let_in.done():  # else it is just leaving
                        entry.is_let_in = True
                        self._grant(entry.permit)
                        entry.let_in.set_result(None)

    def wait_s(self, num_tokens: int, priority: Priority) -> float:
        """Until a request of so many tokens would have had its turn, if it were queued now."""
        unqueued = min(self.num_unqueued, num_tokens * self.num_requests)
        return (self._tokens_ahead(num_tokens, priority) + unqueued) / self._tokens_per_s()

    def _door(self, permit: Permit) -> deque[_AtDoor]:
        return self._doors[permit.priority][permit.num_tokens > self._short_tokens]

    def _leave_door(self, entry: _AtDoor) -> None:
        door = self._door(entry.permit)
        if entry in door:
            door.remove(entry)
            self._num_at_door -= 1
        self.open_door()  # somebody behind it may need less

    def _enter_or_refuse(self, permit: Permit) -> None:
        """At the end of the wait. Nobody has left meanwhile, perhaps, but what was queued may be done."""
        if (obstacle := self._obstacle(permit)) is not None:
            raise self._refusal(permit, obstacle)
        self._grant(permit)

    def _grant(self, permit: Permit) -> None:
        permit.num_unqueued = permit.num_tokens
        self.num_unqueued += permit.num_tokens
        self.num_requests += 1

    def _obstacle(self, permit: Permit) -> str | None:
        """Why there is no room for a request; None if there is, as there always is for a lone one."""
        if self.num_requests == 0:
            return None
        if self.num_requests >= self._max_requests:
            return f"{self.num_requests} requests are being served, at most {self._max_requests} are at a time"
        safe_s = _SAFE_PART * (permit.deadline - time.monotonic())
        if self._tokens_waiting() + self.num_unqueued <= min(safe_s, self._max_wait_s) * self._tokens_per_s():
            return None  # whatever the order: this takes a tenth of the time, and there is seldom more to say
        wait_s = self.wait_s(permit.num_tokens, permit.priority)
        if wait_s > self._max_wait_s:
            return f"the wait would be about {wait_s:.0f} s, at most {self._max_wait_s:g} s are allowed"
        if wait_s > safe_s:
            left_s = safe_s / _SAFE_PART
            return f"the wait would be about {wait_s:.2g} s, too long for a deadline that is {left_s:.2g} s away"
        return None

    def _refusal(self, permit: Permit, reason: str) -> TooManyRequests:
        return TooManyRequests(reason, retry_after_s=self.wait_s(permit.num_tokens, permit.priority))
