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
    num_beside_others: int = 0
    """Of those alone, after other batches had been done since the death before."""
    num_done: int = 0
    """Batches that the gateway's workers had done by the time of the last death."""

    @property
    def must_run_alone(self) -> bool:
        return self.num >= _ALONE_FROM
