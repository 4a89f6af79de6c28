"""Limits on the memory of bodies that arrive and of responses that wait to be read, and whose turn it is to wait.

Owns both counts. Holds no bytes and closes nothing itself: a connection counts, asks, and drops what it holds.
"""

import asyncio
from collections import Counter
from typing import Protocol

# Bytes are counted by holder: an address (`forwarded.client_of`), or, on a unix socket and from a trusted proxy, each
# connection by itself. So a client that sends much, and then nothing for minutes, takes room from itself only:
#
#     one address holds more than half of the limit                    → it gets no more
#     all hold more than the limit, the sender more than an equal part → it gets no more
#     all hold more than the limit, the sender does not                → the largest holder drops its largest part
#
# A part of up to 64 KiB is never refused. So the memory held is at most the limit, or the sum of the small parts, and
# that much more.

SMALL_PART_BYTES = 64 * 1024


class Holder(Protocol):
    """A connection, as this module uses it."""

    address: str
    num_held_bytes: int
    """Set by `BodyBudget.count`."""
    num_unsent_bytes: int
    """Set by `ResponseBudget.count`."""

    def drop_held(self) -> None:
        """Drop what is held, because the limit is reached, and count it no more."""


class _Budget:
    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Of all connections."""
        self.num_of: Counter[str | Holder] = Counter()

    def _count_more(self, connection: Holder, num_more: int) -> None:
        self.num_bytes += num_more
        holder = connection.address or connection
        self.num_of[holder] += num_more
        if not self.num_of[holder]:
            del self.num_of[holder]

    def _num_held(self, connection: Holder) -> int:
        return self.num_of[connection.address or connection]


class BodyBudget(_Budget):
    def __init__(self, max_bytes: int = 0) -> None:
        super().__init__(max_bytes)
        self.large: set[Holder] = set()
        """Those that hold more than a small part."""

    def count(self, sender: Holder, num_bytes: int) -> None:
        """`sender` holds `num_bytes` now: 0 before the first and after the last call."""
        self._count_more(sender, num_bytes - sender.num_held_bytes)
        sender.num_held_bytes = num_bytes
        if num_bytes > SMALL_PART_BYTES:
            self.large.add(sender)
        else:
            self.large.discard(sender)

    def next_to_drop(self, sender: Holder) -> Holder | None:
        """The connection that must drop what it holds, now that `sender` holds more."""
        num_own = self._num_held(sender)
        if sender in self.large:
            if sender.address and num_own > self.max_bytes // 2:
                return sender
            if self.num_bytes > self.max_bytes and self._is_over_equal_part(num_own):
                return sender
        if self.num_bytes <= self.max_bytes:
            return None
        return max(
            (other for other in self.large if self._is_over_equal_part(self._num_held(other))),
            key=lambda other: (self._num_held(other), other.num_held_bytes),
            default=None,
        )

    def _is_over_equal_part(self, num_bytes: int) -> bool:
        return num_bytes * len(self.num_of) > self.max_bytes


# Of responses:
#
#     there is room in half of the limit for the holder, and in all of it → the response is made
#     there is none                                                       → it waits; the least holder goes first
#     a response waits, or responses became larger than was thought         → of the clients that read nothing, the one
#                                                                           whose holder has most is dropped


class ResponseBudget(_Budget):
    def __init__(self, max_bytes: int = 0) -> None:
        super().__init__(max_bytes)
        self.num_most_bytes = 0
        """The most that `num_bytes` was."""
        self.waiting: dict[Holder, tuple[int, asyncio.Future[None]]] = {}
        """In the order in which they came, with the bytes that each wants."""

    def take(self, receiver: Holder, num_bytes: int) -> asyncio.Future[None] | None:
        """Count a response of up to `num_bytes`, before it is made. Returns what to await if there is no room yet. One
        response may be larger than there is room, and a small one needs none."""
        if num_bytes <= SMALL_PART_BYTES:
            return None
        has_room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        has_room.add_done_callback(lambda _: self.waiting.pop(receiver, None))
        self.waiting[receiver] = min(num_bytes, self.max_bytes // 2), has_room
        self._let_in()
        return None if has_room.done() else has_room

    def count(self, receiver: Holder, num_bytes: int) -> None:
        """The response to `receiver` has `num_bytes` now: 0 once all are sent."""
        num_more = num_bytes - receiver.num_unsent_bytes
        receiver.num_unsent_bytes = num_bytes
        self._count_more(receiver, num_more)
        self.num_most_bytes = max(self.num_most_bytes, self.num_bytes)
        if num_more < 0:
            self._let_in()

    def forget(self, receiver: Holder) -> None:
        self.waiting.pop(receiver, None)
        self.count(receiver, 0)

    def must_drop(self, receiver: Holder) -> bool:
        """Whether `receiver`, which reads nothing, is in the way. Ask for those first whose `rank` is greatest."""
        if self.num_bytes > self.max_bytes:
            return True
        waiting = min(self.waiting, key=self._num_held, default=None)
        if waiting is None:
            return False
        has_part = self._num_held(waiting) + self.waiting[waiting][0] <= self.max_bytes // 2
        return has_part or (receiver.address or receiver) == (waiting.address or waiting)

    def rank(self, receiver: Holder) -> tuple[int, int]:
        return self._num_held(receiver), receiver.num_unsent_bytes

    def _let_in(self) -> None:
        while self.waiting:
            half = self.max_bytes // 2
            fitting = (each for each, (num, _) in self.waiting.items() if self._num_held(each) + num <= half)
            receiver = min(fitting, key=self._num_held, default=None)
            if receiver is None or self.num_bytes + self.waiting[receiver][0] > self.max_bytes:
                return
            num_bytes, has_room = self.waiting.pop(receiver)
            if not has_room.done():
                self.count(receiver, num_bytes)
                has_room.set_result(None)
