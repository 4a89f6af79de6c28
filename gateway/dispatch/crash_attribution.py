"""Whose fault a worker's death is: that of an input which it was computing, or of none. Pure.

Owns the verdict, and the record on which it rests (`CrashAttribution`). The record is of inputs and not of requests:
one whose caller never waits for the end, and sends it again and again, is found out all the same. An input that is
answered is struck off. Workers die of inputs, but also of a kill from outside, or because memory runs out that others
took; then an innocent input is in every batch that is lost. A verdict costs its caller the answer, and everybody else
who sends the same for a while; so it takes deaths that say something:

    in company          says little: the input runs alone from the second one on
    alone, by a crash   (SIGSEGV and its like, which nobody sends) the third death is proof
    alone, otherwise    (SIGKILL, which the kernel sends for memory, too; a hang) three, if others' batches were done in
                        between each time; five in any case

Measured, 2 workers of which a random one was killed each second for a minute, on a busy machine: where the third death,
alone, was proof in any case, 27 of 618 requests were condemned. Called by `vecd.gateway.dispatch.dispatcher`.
"""

import time
from collections.abc import Callable

from vecd.gateway.types.deaths import Deaths

REMEMBERED_S = 600.0
"""After the last death."""

MAX_REMEMBERED = 4096
"""Inputs; a worker that dies leaves a batch of them, some hundreds at most."""


class CrashAttribution:
    """The deaths of each input that has not been answered since, by its digest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, tuple[float, Deaths]] = {}
        """With the time at which each is forgotten, the next one first."""

    def __len__(self) -> int:
        return len(self._records)

    def find(self, digest: str) -> Deaths | None:
        """Of the workers that died of the input; None when there are none."""
        self._forget_old()
        record = self._records.get(digest)
        return None if record is None else record[1]

    def record(self, digest: str, known: Deaths | None) -> Deaths:
        """Where one more death is to be counted, remembered from now on. `known`: those that one of its requests knows
        of. Of more than MAX_REMEMBERED inputs the one with the oldest death is forgotten."""
        deaths = known or self.find(digest) or Deaths()
        self._records.pop(digest, None)
        self._records[digest] = (self._clock() + REMEMBERED_S, deaths)
        if len(self._records) > MAX_REMEMBERED:
            self._forget_first()
        return deaths

    def forget(self, digest: str) -> None:
        """The input has been answered, or found guilty. It need not be known."""
        self._records.pop(digest, None)

    def _forget_old(self) -> None:
        now = self._clock()
        while self._records and next(iter(self._records.values()))[0] <= now:
            self._forget_first()

    def _forget_first(self) -> None:
        del self._records[next(iter(self._records))]
