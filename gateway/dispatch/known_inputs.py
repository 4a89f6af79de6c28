"""What is known of inputs for a while, by their digests.

Owns how long it is kept, and how much of it. Knows no worker and no request. Used by
`vecd.gateway.dispatch.crash_attribution` and `vecd.gateway.dispatch.quarantine`.
"""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

KEPT_S = 600.0
"""After it was put last. A new version of the model, or more memory, may have made an input harmless; to try a poison
input again costs up to five workers."""


class KnownInputs(Generic[T]):
    """A value for each digest. Costs nothing while it is empty, which is falsy."""

    def __init__(self, max_inputs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_inputs = max_inputs
        self._clock = clock
        self._values: dict[str, tuple[float, T]] = {}
        """With the time at which each is forgotten, the next one first."""

    def __len__(self) -> int:
        return len(self._values)

    def put(self, digest: str, value: T) -> None:
        """Keep a value for KEPT_S from now on. Of more than `max_inputs` the oldest is forgotten."""
        self._values.pop(digest, None)
        self._values[digest] = (self._clock() + KEPT_S, value)
        if len(self._values) > self._max_inputs:
            self._forget_first()

    def find(self, digest: str) -> T | None:
        """None when there is none."""
        now = self._clock()
        while self._values and next(iter(self._values.values()))[0] <= now:
            self._forget_first()
        found = self._values.get(digest)
        return None if found is None else found[1]

    def forget(self, digest: str) -> None:
        """It need not be known."""
        self._values.pop(digest, None)

    def _forget_first(self) -> None:
        del self._values[next(iter(self._values))]
