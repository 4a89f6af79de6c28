"""What one of several gateways tells the supervisor about cores: how many it wants, and when it holds no more of them
than a smaller grant allows.

Owns when which message is sent. Pure. `vecd.gateway.scheduling.cores` calls it when leases change, `vecd.gateway.main`
when a grant comes. Nothing is asked per batch, and no batch waits for an answer: without a grant it gets one core. A
lone gateway has no claim.
"""

from collections import deque
from collections.abc import Callable

from vecd.gateway.scheduling.cores import Cores
from vecd.shm.control import CoresHeld, CoresWanted, Message

_LOOK_S = 0.05
"""Between two looks while there is work, and so the least time between two CoresWanted."""

_NUM_LOOKS = 10
"""What is wanted is the most of so many looks: a gateway without work for half a second wants no cores."""

_SMALL = 8
"""A change by less than this part of what was wanted before is not worth a message."""


class CoreClaim:
    def __init__(
        self,
        cores: Cores,
        *,
        num_waiting: Callable[[], int],
        send: Callable[[Message], None],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """Side effect: `cores` has no cores to lend until a grant comes, and reports its leases here.

        `num_waiting`: the sequences that wait for a worker. `send` takes the messages for the supervisor. `call_later`
        calls a function after so many seconds.
        """
        self._cores = cores
        self._num_waiting = num_waiting
        self._send = send
        self._call_later = call_later
        self._most_batches = 0
        """In flight at a time since the last look."""
        self._looks: deque[int] = deque(maxlen=_NUM_LOOKS)
        self._wanted = 0
        """As the supervisor knows it."""
        self._is_looking = False
        self._must_confirm = False
        cores.grant(0)
        cores.on_change = self._on_change

    def grant(self, num: int) -> None:
        """A grant has come: `num` cores may be leased from now on."""
        self._must_confirm = num < self._cores.granted
        self._cores.grant(num)
        self._confirm()

    def _on_change(self) -> None:
        """A lease has begun or ended."""
        self._confirm()
        self._most_batches = max(self._most_batches, self._cores.num_batches)
        if not self._is_looking:
            self._is_looking = True
            self._call_later(0, self._look)

    def _confirm(self) -> None:
        if self._must_confirm and self._cores.is_within_grant:
            self._must_confirm = False
            self._send(CoresHeld(self._cores.granted))

    def _look(self) -> None:
        """Each sequence that waits could have a core of its own."""
        self._looks.append(max(self._most_batches, self._cores.num_batches + self._num_waiting()))
        self._most_batches = self._cores.num_batches
        wanted = min(self._cores.num_cores, max(self._looks))
        if wanted != self._wanted and (not wanted or abs(wanted - self._wanted) * _SMALL >= self._wanted):
            self._wanted = wanted
            self._send(CoresWanted(wanted))
        self._is_looking = wanted > 0
        if self._is_looking:
            self._call_later(_LOOK_S, self._look)
