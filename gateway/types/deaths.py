"""How often workers died while they computed one input, and when that is proof. Pure.

Owns the thresholds. Kept by `vecd.gateway.dispatch.crash_attribution`, carried by sequences.
"""

from dataclasses import dataclass

_ALONE_FROM = 2


_CRASHES = 3


_ALONE_BESIDE_OTHERS = 3


_ALONE = 5


@dataclass(slots=True)
class Deaths:
    """Of the workers that died while they computed one input."""

    num: int = 0
    num_alone: int = 0
    """Of these, in a batch of it alone."""
    num_beside_others: int = 0
    """Of these, after others' batches had been done since the one before."""
    num_done: int = 0
    """Batches that had been done by the time of the last one."""

    @property
    def must_run_alone(self) -> bool:
        return self.num >= _ALONE_FROM

    def count(self, *, is_alone: bool, has_crashed: bool, num_done: int) -> bool:
        """One more; says whether the input is guilty. `num_done`: all batches that this gateway's workers have done."""
        self.num += 1
        if is_alone:
            self.num_alone += 1
            self.num_beside_others += num_done > self.num_done
        self.num_done = num_done
        if has_crashed and is_alone:
            return self.num >= _CRASHES
        return self.num_beside_others >= _ALONE_BESIDE_OTHERS or self.num_alone >= _ALONE
