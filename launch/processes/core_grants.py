"""Who of several gateways may lend which part of the cores to its batches.

Owns the numbers of cores that gateways want, have been granted, and may still use. Pure. Called by
`vecd.launch.processes.gateway_pool`, which sends the grants. A lone gateway holds all cores, and nothing of this runs.

    gateway → CoresWanted     how many cores its batches could use
    gateway ← CoresGranted    how many it may lease from now on; holds until the next one, whatever is done with them
    gateway → CoresHeld       its leases fit into a smaller grant

The sum of what gateways may use never exceeds the cores of the server. Cores that are taken from one gateway are
therefore granted to another only after the first one's CoresHeld, or its death. A gateway whose smaller grant has not
been confirmed is sent no other one, so that a confirmation belongs to one grant.
"""

from dataclasses import dataclass
from typing import TypeAlias

Life: TypeAlias = tuple[int, int]
"""A gateway's index, and which of its lives this is, from 1."""

Grants: TypeAlias = list[tuple[Life, int]]
"""What is to be sent to whom: cores that a gateway may lease from now on, 0 or more."""


@dataclass(slots=True)
class _Holding:
    """Of one gateway, in cores."""

    wanted: int = 0
    granted: int = 0
    """By the newest grant."""
    held: int = 0
    """What it may use: more than is granted until it has confirmed a smaller grant."""

    @property
    def is_giving_back(self) -> bool:
        return self.held > self.granted


class CoreGrants:
    """Divides cores among the gateways that want any.

    While they want more than there is, each gets what it wants or an equal part, whichever is less, and those that want
    more share the rest equally. While they want less than there is, the rest is divided so that the smallest parts are
    as large as possible: one batch may use all cores. Gateways that want nothing lose theirs to those that want any.
    """

    def __init__(self, num_cores: int) -> None:
        """`num_cores`: those that the server may use, at least 1."""
        self._num_cores = num_cores
        self._holdings: dict[Life, _Holding] = {}

    def join(self, life: Life) -> None:
        """A new gateway has no cores and wants none."""
        self._holdings[life] = _Holding()

    def leave(self, life: Life) -> Grants:
        """A gateway is dead, and its cores are free. Returns the grants of others."""
        return self._balance() if self._holdings.pop(life, None) is not None else []

    def want(self, life: Life, num: int) -> Grants:
        """A gateway could use `num` cores. Returns the grants that follow; none for a life that is over."""
        if (holding := self._holdings.get(life)) is None:
            return []
        holding.wanted = max(0, min(num, self._num_cores))
        return self._balance()

    def hold(self, life: Life, num: int) -> Grants:
        """A gateway uses no more than the `num` cores of its newest grant. Returns the grants that follow."""
        holding = self._holdings.get(life)
        if holding is None or not holding.is_giving_back or num != holding.granted:
            return []
        holding.held = num
        return self._balance()

    def _balance(self) -> Grants:
        """Take what is to be taken, and give what is free, the least to those that have the most."""
        parts = self._parts()
        grants: Grants = []
        for life, holding in self._holdings.items():
            if parts and holding.granted > parts.get(life, 0) and not holding.is_giving_back:
                holding.granted = parts.get(life, 0)
                grants.append((life, holding.granted))
        free = self._num_cores - sum(holding.held for holding in self._holdings.values())
        for life in sorted(parts, key=lambda life: self._holdings[life].granted):
            holding = self._holdings[life]
            num = min(free, parts[life] - holding.granted)
            if num > 0 and not holding.is_giving_back:
                free -= num
                holding.granted = holding.held = holding.granted + num
                grants.append((life, holding.granted))
        return grants

    def _parts(self) -> dict[Life, int]:
        """The cores of each gateway that wants any, which are all cores together; empty when none wants any.

        A core that cannot be divided goes to a gateway that has it already, so that the same wants lead to no change.
        """
        wanting = {life: holding for life, holding in self._holdings.items() if holding.wanted}
        parts: dict[Life, int] = {}
        rest = self._num_cores
        if sum(holding.wanted for holding in wanting.values()) >= rest:
            for life in sorted(wanting, key=lambda life: (wanting[life].wanted, wanting[life].granted)):
                parts[life] = min(wanting[life].wanted, rest // (len(wanting) - len(parts)))
                rest -= parts[life]
        else:
            for life in sorted(wanting, key=lambda life: (-wanting[life].wanted, -wanting[life].granted)):
                parts[life] = max(wanting[life].wanted, -(-rest // (len(wanting) - len(parts))))
                rest -= parts[life]
        return parts
