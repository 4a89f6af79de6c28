"""Limit the memory held for requests that cannot be handled yet, and choose what is dropped when it is too much.

Owns the count of these bytes: of incomplete bodies, and of requests that wait behind the one being handled on their
connection. Holds no bytes and closes nothing itself: `vecd.gateway.http.connection` counts, asks, and has the chosen
connection drop what it holds.

Bytes are counted by holder: an address (`forwarded.client_of`), or, on a unix socket and from a trusted proxy, each
connection by itself. So a client that sends much, and then nothing for minutes, takes room from itself only:

    one address holds more than half of the limit                    → it gets no more
    all hold more than the limit, the sender more than an equal part → it gets no more
    all hold more than the limit, the sender does not                → the largest holder drops its largest part

A part of up to 64 KiB is never refused. So the memory held is at most the limit, or the sum of the small parts, and
that much more.
"""

from collections import Counter
from typing import Protocol

SMALL_PART_BYTES = 64 * 1024


class Sender(Protocol):
    """A connection, as this module uses it."""

    address: str
    num_held_bytes: int
    """Set by `BodyBudget.count`."""

    def drop_held(self) -> None:
        """Drop what is held, because the limit is reached, and count it no more."""


class BodyBudget:
    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Held by all connections."""
        self._num_of: Counter[str | Sender] = Counter()
        self._large: set[Sender] = set()
        """The connections that hold more than a small part."""

    def count(self, sender: Sender, num_bytes: int) -> None:
        """Note how many bytes `sender` holds now: 0 before the first and after the last call."""
        num_more = num_bytes - sender.num_held_bytes
        sender.num_held_bytes = num_bytes
        self.num_bytes += num_more
        holder = _holder(sender)
        self._num_of[holder] += num_more
        if not self._num_of[holder]:
            del self._num_of[holder]
        if num_bytes > SMALL_PART_BYTES:
            self._large.add(sender)
        else:
            self._large.discard(sender)

    def next_to_drop(self, sender: Sender) -> Sender | None:
        """The connection that must drop what it holds, now that `sender` holds more; None when none must."""
        num_own = self._num_of[_holder(sender)]
        if sender in self._large:
            if sender.address and num_own > self.max_bytes // 2:
                return sender
            if self.num_bytes > self.max_bytes and self._is_over_equal_part(num_own):
                return sender
        if self.num_bytes <= self.max_bytes:
            return None
        return max(
            (other for other in self._large if self._is_over_equal_part(self._num_of[_holder(other)])),
            key=lambda other: (self._num_of[_holder(other)], other.num_held_bytes),
            default=None,
        )

    def _is_over_equal_part(self, num_bytes: int) -> bool:
        return num_bytes * len(self._num_of) > self.max_bytes


def _holder(sender: Sender) -> str | Sender:
    return sender.address or sender
