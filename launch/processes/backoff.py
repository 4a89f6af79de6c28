"""Decides how long a child that died has to wait for its next life, and when there is no use in another. Pure.

The first restart is at once, the next after 0.5, 1, 2 … 30 s, until a child has been ready for a while. One that dies
again and again without ever having been ready ends the server. One that has been ready does not: what kills it may be a
request, and would end everybody's. It counts as broken then, and is tried again now and then. Called by
`vecd.launch.processes.worker_pool` and `vecd.launch.processes.gateway_pool`.
"""

from dataclasses import dataclass

from vecd.launch.base.exit_codes import StartFailure

_MAX_DEATHS_BEFORE_READY = 3
_QUICK_LIFE_S = 0.25
"""Shorter than what dies by its first batch, longer than what somebody kills now and then by hand: with 1 s, killing a
random one of two workers each second made both wait, and after a minute the model counted as broken."""
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 30.0

_DEATHS_OF_BROKEN = 6
"""Quick deaths in a row: 7.5 s of trying at least."""


@dataclass(slots=True)
class Backoff:
    name: str
    has_been_ready: bool = False
    num_quick_deaths: int = 0

    @property
    def is_broken(self) -> bool:
        """It has died so often that the next life will most likely end the same way."""
        return self.num_quick_deaths >= _DEATHS_OF_BROKEN

    def delay_after(self, reason: str, ready_for_s: float | None) -> float:
        """Seconds to wait after a life that was ready for so long, or never.

        Raises StartFailure when the child has died too often without ever having been ready.
        """
        if ready_for_s is not None:
            self.has_been_ready = True
            if ready_for_s >= _QUICK_LIFE_S:
                self.num_quick_deaths = 0
        self.num_quick_deaths += 1
        if not self.has_been_ready and self.num_quick_deaths >= _MAX_DEATHS_BEFORE_READY:
            raise StartFailure(f"{self.name} keeps dying ({self.num_quick_deaths} times): at last it {reason}")
        if self.num_quick_deaths == 1:
            return 0.0
        return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(16, self.num_quick_deaths - 2))
