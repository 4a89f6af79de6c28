"""How far a run is, how fast it goes, and how long it will take, in words.

Pure. Called by `vecd.client.bulk.run` and `vecd.client.bulk.command`.
"""

from collections import deque
from typing import NamedTuple

_WINDOW_S = 30.0
"""Rates are of the last seconds: an earlier restart of the server says nothing about the time left."""
_BAR_WIDTH = 24


class Moment(NamedTuple):
    """The state of a run at one time."""

    at_s: float
    """On any monotonic clock."""
    num_rows: int
    """Rows of the input that are done, also by earlier runs."""
    num_tokens: int
    num_bytes: int
    """Bytes of the inputs up to the last row that is done."""


class Course:
    """The moments of a run within the window of its rates."""

    def __init__(self, total_bytes: int, first: Moment) -> None:
        """`total_bytes` of the inputs; 0 if it is not known. Rates count from `first`."""
        self._total_bytes = total_bytes
        self._moments = deque([first])

    def add(self, moment: Moment) -> None:
        moments = self._moments
        moments.append(moment)
        while len(moments) > 2 and moments[1].at_s <= moment.at_s - _WINDOW_S:
            moments.popleft()

    def describe(self, now_s: float, num_in_flight: int = 0) -> str:
        """A bar, rows, rates and time left, as far as they are known. `num_in_flight`: rows that are requested."""
        first, last, total = self._moments[0], self._moments[-1], self._total_bytes
        elapsed_s = max(now_s - first.at_s, 1e-3)
        parts = [f"{last.num_rows:,} rows", *([f"{num_in_flight:,} in flight"] if num_in_flight else [])]
        if last is not first:
            parts.append(f"{(last.num_rows - first.num_rows) / elapsed_s:,.0f} rows/s")
            parts.append(f"{(last.num_tokens - first.num_tokens) / elapsed_s:,.0f} tokens/s")
            bytes_per_s = (last.num_bytes - first.num_bytes) / elapsed_s
            if total and bytes_per_s > 0:
                parts.append(f"{in_words((total - last.num_bytes) / bytes_per_s)} left")
        return (_bar(min(1.0, last.num_bytes / total)) if total else "") + ", ".join(parts)


def _bar(share: float) -> str:
    num_full = int(share * _BAR_WIDTH)
    return f"{share:4.0%} {'━' * num_full}{'╌' * (_BAR_WIDTH - num_full)} "


def in_words(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes."""
    whole = max(0, round(seconds))
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
