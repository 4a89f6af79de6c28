"""What waits, in the order in which it is served: requests in lanes, lanes in tenants' shares, shares in rings.

Owns whose turn it is among tenants, and the books of what waits; pure. What a turn sends, and into which batch, is
`vecd.gateway.scheduling.scheduler`'s, who alone calls this.

    Level (a priority)
      new   a tenant that comes with nothing waiting has its first turn here, before the others, ──┐
      old   and all later ones here, for as long as it has something waiting                    ◄──┘
        Share (one tenant at that priority)
          fresh    a request has its first turn here
          backlog  and all later ones here
            Flow (what waits of one request)

Both steps are those of fq_codel (RFC 8290), and a turn is worth the same in both. A tenant that runs out is not
forgotten before its turn comes round again: otherwise, by always running out, it would always be new.
"""

import math
from collections import deque
from collections.abc import Iterator

from vecd.gateway.scheduling.queue import Lane, RequestQueue

_MIN_SHARES_LOOKED_THROUGH = 64


class TenantQueue:
    """What one tenant has waiting at one priority."""

    __slots__ = ("backlog", "credit", "fresh", "level", "num_turns", "ring", "tenant")

    def __init__(self, tenant: str, level: "PriorityClass", credit: int) -> None:
        self.tenant = tenant
        self.level = level
        self.ring = level.new
        self.credit = credit
        """Tokens that it may still send before the others have had their turn; counts only where there are others."""
        self.num_turns = 0
        self.fresh = Lane(self)
        self.backlog = Lane(self)

    @property
    def num_flows(self) -> int:
        return self.fresh.num_flows + self.backlog.num_flows

    @property
    def num_tokens(self) -> int:
        return self.fresh.num_tokens + self.backlog.num_tokens


class Ring:
    """Shares that are served in turns."""

    __slots__ = ("num_tokens", "shares")

    def __init__(self) -> None:
        self.shares: deque[TenantQueue] = deque()
        """The next one first; some may have nothing waiting."""
        self.num_tokens = 0


class PriorityClass:
    """The shares of one priority."""

    def __init__(self, quantum: int) -> None:
        """`quantum`: the tokens of a turn, at least those of the longest sequence."""
        self._quantum = quantum
        self.shares: dict[str, TenantQueue] = {}
        """By tenant: of whoever has something waiting, and of some who had."""
        self.new = Ring()
        self.old = Ring()
        self.owed: dict[TenantQueue, int] = {}
        """Tokens that shares are to send before all others, for what was lost of theirs, in turns."""
        self.num_flows = 0
        self.num_backlog_flows = 0
        self.served_at = -math.inf
        self._may_send_fresh: dict[TenantQueue, None] = {}
        self._max_shares = _MIN_SHARES_LOOKED_THROUGH

    @property
    def num_tokens(self) -> int:
        return self.new.num_tokens + self.old.num_tokens

    @property
    def only_share(self) -> TenantQueue | None:
        """That of the only tenant there is, who need not take turns with anybody."""
        return next(iter(self.shares.values())) if len(self.shares) == 1 else None

    @property
    def has_many_turns(self) -> bool:
        """Whether tenants have more than a turn waiting, on average."""
        return self.num_tokens > len(self.shares) * self._quantum

    # --- books ----------------------------------------------------------------------------------------------

    def share_of(self, tenant: str) -> TenantQueue:
        """The tenant's share; a new one has its first turn before it."""
        if not self.num_flows and tenant not in self.shares:
            self._forget_everybody()
        share = self.shares.get(tenant)
        if share is None:
            if len(self.shares) >= self._max_shares:
                self._drop_idle()
            share = self.shares[tenant] = TenantQueue(tenant, self, self._quantum)
            self.new.shares.append(share)
        return share

    def enter(self, request_queue: RequestQueue, lane: Lane, *, at_front: bool = False) -> None:
        """Put what waits of a flow into a lane."""
        request_queue.lane = lane
        share = lane.share
        lane.num_flows += 1
        lane.num_tokens += request_queue.num_tokens
        share.ring.num_tokens += request_queue.num_tokens
        self.num_flows += 1
        if lane is share.fresh:
            self._may_send_fresh[share] = None
        else:
            self.num_backlog_flows += 1
        if at_front:
            lane.request_queues.appendleft(request_queue)
        else:
            lane.request_queues.append(request_queue)

    def leave(self, request_queue: RequestQueue, lane: Lane) -> None:
        """Take a flow off its lane's books; its place among the lane's flows is the caller's to clear."""
        request_queue.lane = None
        share = lane.share
        lane.num_flows -= 1
        lane.num_tokens -= request_queue.num_tokens
        share.ring.num_tokens -= request_queue.num_tokens
        self.num_flows -= 1
        if lane is share.backlog:
            self.num_backlog_flows -= 1
        elif not lane.num_flows:
            self._may_send_fresh.pop(share, None)

    def _forget_everybody(self) -> None:
        """Nobody has been kept waiting, so nobody is behind."""
        self.shares.clear()
        self.new.shares.clear()
        self.old.shares.clear()
        self._may_send_fresh.clear()
        self.owed.clear()

    def _drop_idle(self) -> None:
        """Looks through all shares, but no more often than as many have come."""
        self.shares = {tenant: share for tenant, share in self.shares.items() if share.num_flows}
        for ring in (self.new, self.old):
            ring.shares = deque(share for share in ring.shares if share.num_flows)
        self._max_shares = 2 * len(self.shares) + _MIN_SHARES_LOOKED_THROUGH

    # --- turns ----------------------------------------------------------------------------------------------

    def next_share(self, ring: Ring) -> TenantQueue | None:
        """The share whose turn it is, of those with something waiting."""
        while ring.shares:
            share = ring.shares[0]
            if share.num_flows:
                return share
            if ring is self.new:
                self.end_turn(share)
            else:
                ring.shares.popleft()
                del self.shares[share.tenant]
        return None

    def end_turn(self, share: TenantQueue) -> None:
        """The share at the front of its ring has its next turn after all others."""
        share.ring.shares.popleft()
        self._append_to_old(share)
        share.num_turns += 1
        # What it could not use is not saved for when it has something again.
        share.credit = self._quantum + (share.credit if share.num_flows else 0)
        if share.fresh.num_flows:
            self._may_send_fresh[share] = None

    def end_first_turn(self, share: TenantQueue) -> None:
        """It has been served beside nobody: whoever comes now is newer."""
        if share.ring is self.new:
            self.new.shares.remove(share)
            self._append_to_old(share)

    def with_fresh(self) -> Iterator[TenantQueue]:
        """The shares that have fresh flows, and credit. Whoever's credit does not do is to be `left_out`."""
        return iter(tuple(self._may_send_fresh))

    def leave_out(self, share: TenantQueue) -> None:
        """Not among `with_fresh` before its next turn."""
        self._may_send_fresh.pop(share, None)

    def _append_to_old(self, share: TenantQueue) -> None:
        share.ring.num_tokens -= share.num_tokens
        share.ring = self.old
        self.old.num_tokens += share.num_tokens
        self.old.shares.append(share)
