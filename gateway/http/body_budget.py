"""What connections hold of requests that cannot be served yet, and who is to give his up when it is too much.

Owns the count of these bytes: of bodies that are not complete, and of requests behind the one being answered. Never
sees a byte of them, and ends nothing itself: `vecd.gateway.http.connection` counts, asks, and has whom it is told give
up.

Parts are counted per holder: an address (`connection.client_of`), or, where there is none, as on a unix socket, each
connection by itself. So a client that sends much, and then nothing for minutes, keeps out nobody but himself:

    one address holds more than half of all that is allowed    → it has no more
    all hold more than is allowed, the one who sends now more
      than an equal part of it                                 → he has no more
    all hold more than is allowed, he does not                 → the one who holds most gives up his largest part

A part of up to 64 KiB is never refused. What can be held is thus bounded by the limit, or what the small parts have in
all, and that much more.
"""

from collections import Counter
from typing import Protocol

SMALL_PART_BYTES = 64 * 1024


class Sender(Protocol):
    """A connection, as it is seen here."""

    client: str
    num_held_bytes: int
    """Set by `BodyBudget.count`."""

    def give_up_held(self) -> None:
        """Let go of what is held, for want of room, and count it no more."""


class BodyBudget:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Held by all."""
        self._num_of: Counter[str | Sender] = Counter()
        self._large: set[Sender] = set()
        """Those that hold more than a small part."""

    def count(self, sender: Sender, num_bytes: int) -> None:
        """Take down how much `sender` holds now, which is 0 before the first and after the last call."""
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

    def one_too_many(self, sender: Sender) -> Sender | None:
        """Who is to give up what he holds, now that `sender` has got more; None when nobody has to."""
        num_own = self._num_of[_holder(sender)]
        if sender in self._large:
            if sender.client and num_own > self.max_bytes // 2:
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
    return sender.client or sender
