"""Room for what requests hold, of which one tenant gets at most half.

Owns the count by tenant. Holds nothing itself, and frees nothing: who has a share gives it back. Called by
`vecd.gateway.pipeline` for rows of tokens, and for requests of the tokenizer and of the chat template.
"""

from collections import Counter

from vecd.gateway.types.errors import TooManyRequests


class TenantRoom:
    def __init__(self, total: int, what: str, retry_after_s: float = 1.0) -> None:
        """`total`: of all tenants. `what`: begins the message of a refusal, with `{}` for what others hold."""
        self.total = total
        self.what = what
        self.retry_after_s = retry_after_s
        self.num = 0
        """Held by all."""
        self.num_of: Counter[str] = Counter()
        """By tenant, without those that hold nothing."""

    def share(self, tenant: str) -> "Share":
        """An empty share for one request."""
        return Share(self, tenant)


class Share:
    """What one request holds. Leaving it as a context, or `keep(0)`, gives all back."""

    __slots__ = ("_room", "_tenant", "num")

    def __init__(self, room: TenantRoom, tenant: str) -> None:
        self._room = room
        self._tenant = tenant
        self.num = 0

    def take(self, num: int, most: int | None = None) -> None:
        """Hold so much more. `most`: of this tenant's requests together; None: half of the room. A request that is the
        only one of its tenant is held to the whole room, and one that is alone to nothing: it may be larger than the
        room. Raises TooManyRequests."""
        room, all_num = self._room, self.num + num
        most = room.total // 2 if most is None else most
        others, own = room.num - self.num, room.num_of[self._tenant] - self.num
        if (others and others + all_num > room.total) or (own and own + all_num > most):
            raise TooManyRequests(
                f"{room.what.format(others)}, {own} of them yours, and this request has {all_num} or more: at most "
                f"{room.total} may be at a time, and {most} of one caller",
                retry_after_s=room.retry_after_s,
            )
        self.keep(all_num)

    def keep(self, num: int) -> None:
        """Hold so much from now on, without a look at the limits."""
        room, num_more = self._room, num - self.num
        self.num = num
        room.num += num_more
        room.num_of[self._tenant] += num_more
        if not room.num_of[self._tenant]:
            del room.num_of[self._tenant]

    def __enter__(self) -> "Share":
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(0)
