"""Decides how long to wait before a child that died is restarted, and when to give up. Pure.

The first restart is at once, the next after 0.5, 1, 2 … 30 s, until a child has been ready for a while. One that dies
again and again without ever having been ready ends the server. One that has been ready does not: a request may kill it,
and ending the server would fail all other requests. It then counts as broken, and is restarted every 30 s. A load of a
model that has failed is tried again after 1, 2, 4 … 300 s, if there is a request for it then. Called by
`vecd.launch.processes.worker_pool`, `vecd.launch.processes.gateway_pool` and `vecd.launch.processes.model_life`.
"""

from dataclasses import dataclass

from vecd.launch.base.exit_codes import StartFailure

_MAX_DEATHS_BEFORE_READY = 3
_QUICK_LIFE_S = 0.25
"""A child that was ready for less has died quickly. With 1 s, killing a random one of two workers each second made both
wait, and after a minute the model counted as broken."""
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 30.0

_FIRST_LOAD_PAUSE_S, _MAX_LOAD_PAUSE_S = 1.0, 300.0

_DEATHS_OF_BROKEN = 6
"""Quick deaths in a row; they take at least 7.5 s."""


@dataclass(slots=True)
class Backoff:
    name: str
    has_been_ready: bool = False
    num_quick_deaths: int = 0

    @property
    def is_broken(self) -> bool:
        """Whether it has died quickly so often that the next restart will most likely end the same way."""
        return self.num_quick_deaths >= _DEATHS_OF_BROKEN

    def delay_after(self, reason: str, ready_for_s: float | None) -> float:
        """Seconds to wait before the next restart, after a process that was ready for `ready_for_s`, or never (None).

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


def load_pause_s(num_failures: int) -> float:
    """Seconds for which a model is not loaded again after this many failed loads in a row, 1 at least."""
    return min(_MAX_LOAD_PAUSE_S, _FIRST_LOAD_PAUSE_S * 2.0 ** min(16, num_failures - 1))
