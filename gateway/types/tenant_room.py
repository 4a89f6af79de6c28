"""Room for what requests hold, of which one tenant gets at most half.

Owns the counts, and holds nothing itself: who takes a share gives it back. Called by `vecd.gateway.pipeline`, for rows
of tokens, the tokenizer and the chat template, and by `vecd.gateway.api.bodies`.
"""

import math
from collections import Counter

from vecd.gateway.types.errors import TooManyRequests


class TenantRoom:
    def __init__(self, total: int, what: str, per_s: float = math.inf) -> None:
        """`what`: begins the message of a refusal, with `{}` for what is held. `per_s`: how fast it is given back."""
        self.total = total
        self.what = what
        self.per_s = per_s
        self.num = 0
        """Held by all."""
        self.num_of: Counter[str] = Counter()
        """By tenant, without those that hold nothing."""

    def share(self, tenant: str) -> "Share":
        """An empty share for one request. `tenant`: "" if there is none, and so no half."""
        return Share(self, tenant)


class Share:
    """What one request holds. To leave it as a context gives all back."""

    def __init__(self, room: TenantRoom, tenant: str) -> None:
        self._room = room
        self._tenant = tenant
        self.num = 0

    def take(self, num: int, most: int | None = None) -> None:
        """Hold `num` instead of what it held. `most`: of the tenant's requests together; None: half of the room. Its
        only request is held to the whole room, and one that is alone to nothing. Raises TooManyRequests."""
        room = self._room
        most = room.total // 2 if most is None else most
        others, own = room.num - self.num, room.num_of[self._tenant] - self.num
        if (others and others + num > room.total) or (self._tenant and own and own + num > most):
            raise TooManyRequests(
                f"{room.what.format(others)}, {own} of them yours, and this request has {num} or more: at most "
                f"{room.total} may be at a time, and {most} of one caller",
                retry_after_s=max(1.0, others / room.per_s),
            )
        self.keep(num)

    def keep(self, num: int) -> None:
        """As `take`, without a look at the limits."""
        self._room.num += num - self.num
        self._room.num_of[self._tenant] += num - self.num
        self.num = num
        if not self._room.num_of[self._tenant]:
            del self._room.num_of[self._tenant]

    def __enter__(self) -> "Share":
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(0)
