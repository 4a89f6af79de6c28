"""Limit the memory of responses that are being made, or that their clients have not read, and choose who waits.

Owns the count of these bytes, and those who wait until there are fewer. Holds no bytes and closes nothing itself:
`vecd.gateway.http.connection` counts, `vecd.gateway.pipeline` waits before it has vectors computed, and
`vecd.gateway.http.server` drops the chosen connection. Bytes are counted by holder, as
`vecd.gateway.http.body_budget` does:

    there is room in half of the limit for the holder, and in all of it → the response is made
    there is none                                                       → it waits; the least holder goes first
    somebody waits, or responses became larger than was thought         → of the clients that read nothing, the one
                                                                          whose holder has most is dropped
"""

import asyncio
from collections import Counter
from typing import Protocol

from vecd.gateway.http.body_budget import SMALL_PART_BYTES


class Receiver(Protocol):
    """A connection, as this module uses it."""

    address: str
    num_unsent_bytes: int
    """Set by `ResponseBudget.count`."""


class ResponseBudget:
    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.num_most_bytes = 0
        """Of all responses: now, and the most of it."""
        self._num_of: Counter[str | Receiver] = Counter()
        self._waiting: dict[Receiver, tuple[int, asyncio.Future[None]]] = {}
        """In the order in which they came, with the bytes that each wants."""

    def take(self, receiver: Receiver, num_bytes: int) -> asyncio.Future[None] | None:
        """Count a response of up to `num_bytes`, before it is made. Returns what to await if there is no room yet. One
        response may be larger than there is room, and a small one needs none."""
        if num_bytes <= SMALL_PART_BYTES:
            return None
        has_room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        has_room.add_done_callback(lambda _: self._waiting.pop(receiver, None))
        self._waiting[receiver] = min(num_bytes, self.max_bytes // 2), has_room
        self._let_in()
        return None if has_room.done() else has_room

    def count(self, receiver: Receiver, num_bytes: int) -> None:
        """Note how many bytes there are now of the response to `receiver`: 0 once all are sent."""
        num_more = num_bytes - receiver.num_unsent_bytes
        receiver.num_unsent_bytes = num_bytes
        self.num_bytes += num_more
        self.num_most_bytes = max(self.num_most_bytes, self.num_bytes)
        holder = _holder(receiver)
        self._num_of[holder] += num_more
        if not self._num_of[holder]:
            del self._num_of[holder]
        if num_more < 0:
            self._let_in()

    def forget(self, receiver: Receiver) -> None:
        """It is closed."""
        self._waiting.pop(receiver, None)
        self.count(receiver, 0)

    def must_drop(self, receiver: Receiver) -> bool:
        """Whether `receiver`, which reads nothing, is in the way. Ask for those first whose `rank` is greatest."""
        if self.num_bytes > self.max_bytes:
            return True
        waiting = min(self._waiting, key=self._num_held, default=None)
        if waiting is None:
            return False
        has_part = self._num_held(waiting) + self._waiting[waiting][0] <= self.max_bytes // 2
        return has_part or _holder(receiver) == _holder(waiting)

    def rank(self, receiver: Receiver) -> tuple[int, int]:
        return self._num_held(receiver), receiver.num_unsent_bytes

    def _num_held(self, receiver: Receiver) -> int:
        return self._num_of[_holder(receiver)]

    def _let_in(self) -> None:
        while self._waiting:
            half = self.max_bytes // 2
            fitting = (each for each, (num, _) in self._waiting.items() if self._num_held(each) + num <= half)
            receiver = min(fitting, key=self._num_held, default=None)
            if receiver is None or self.num_bytes + self._waiting[receiver][0] > self.max_bytes:
                return
            num_bytes, has_room = self._waiting.pop(receiver)
            if not has_room.done():
                self.count(receiver, num_bytes)
                has_room.set_result(None)


def _holder(receiver: Receiver) -> str | Receiver:
    return receiver.address or receiver
