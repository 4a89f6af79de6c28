"""The deaths of workers that an input was involved in. Pure.

Carried by sequences, because an input with two deaths is scheduled alone. Counted by
`vecd.gateway.dispatch.crash_attribution`, which also has the rule on when an input is rejected.
"""

from dataclasses import dataclass

_ALONE_FROM = 2


@dataclass(slots=True)
class Deaths:
    """The deaths of workers while they computed one input."""

    num: int = 0
    num_alone: int = 0
    """Of these, in a batch of this input alone."""
    num_in_a_row: int = 0
    """Of those alone, the newest, between which no other worker has died."""
    last_worker_death: int = 0
    """The number of the newest, among the deaths of all workers."""

    @property
    def must_run_alone(self) -> bool:
        return self.num >= _ALONE_FROM
