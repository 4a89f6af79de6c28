"""How far a run is, how fast it goes, and how long it will take.

Owns the line: rewritten four times a second on a terminal, a plain one every ten seconds elsewhere, and none when it is
not wanted. Called by `vecd.client.bulk.run` and `vecd.client.bulk.command`.
"""

import io
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TextIO

_REDRAW_S, _PLAIN_S = 0.25, 10.0
_WINDOW_S = 30.0
"""Rates are of the last so many seconds: a restart of the server in the past says nothing of what is to come."""
_BAR_WIDTH = 24
_CLEAR_LINE = "\r\x1b[K"


class Moment(NamedTuple):
    """How far a run is at some time."""

    at_s: float
    """On any monotonic clock."""
    num_rows: int
    """Done, and earlier runs' with them; of the input, not of the output."""
    num_tokens: int
    num_bytes: int
    """Of the inputs, up to the last row that is done."""


class Course:
    """The moments of a run, as far back as rates look."""

    def __init__(self, total_bytes: int | None) -> None:
        """None: how much there will be is not known."""
        self._total_bytes = total_bytes
        self._moments: deque[Moment] = deque()

    def begin(self, moment: Moment) -> None:
        """Count from here. To be called before `describe`."""
        self._moments.clear()
        self._moments.append(moment)

    def add(self, moment: Moment) -> None:
        moments = self._moments
        moments.append(moment)
        while len(moments) > 2 and moments[1].at_s <= moment.at_s - _WINDOW_S:
            moments.popleft()

    def describe(self, now_s: float) -> str:
        """Rows, rates, time left; what is not known yet, or never, is left out."""
        first, last = self._moments[0], self._moments[-1]
        elapsed_s = max(now_s - first.at_s, 1e-3)
        parts = [f"{last.num_rows:,} rows"]
        if last is not first:
            parts.append(f"{(last.num_rows - first.num_rows) / elapsed_s:,.0f} rows/s")
            parts.append(f"{(last.num_tokens - first.num_tokens) / elapsed_s:,.0f} tokens/s")
            bytes_per_s = (last.num_bytes - first.num_bytes) / elapsed_s
            if self._total_bytes and bytes_per_s > 0:
                parts.append(f"{in_words((self._total_bytes - last.num_bytes) / bytes_per_s)} left")
        return ", ".join(parts)

    @property
    def share(self) -> float | None:
        """How much is done, from 0 to 1; None when it is not known of how much."""
        if not self._total_bytes:
            return None
        return min(1.0, self._moments[-1].num_bytes / self._total_bytes)


def in_words(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes."""
    whole = max(0, round(seconds))
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


def bar(share: float) -> str:
    num_full = int(share * _BAR_WIDTH)
    return f"{share:4.0%} {'━' * num_full}{'╌' * (_BAR_WIDTH - num_full)}"


class BulkLine:
    """`show` and `clear`, on standard error."""

    def __init__(self, stream: TextIO | None = None, *, is_quiet: bool = False, is_live: bool | None = None) -> None:
        """`is_live` decides instead of looking whether it is a terminal."""
        # None is Python's word for a standard error that was closed when it started.
        self._stream = stream = stream or sys.stderr or io.StringIO()
        self._is_quiet = is_quiet
        self._is_live = stream.isatty() if is_live is None else is_live
        self._drawn_at = time.monotonic() if not self._is_live else 0.0
        self._is_drawn = False

    def show(self, describe: Callable[[], str]) -> None:
        """Draw what `describe` says, unless the line is still fresh."""
        now = time.monotonic()
        if self._is_quiet or now - self._drawn_at < (_REDRAW_S if self._is_live else _PLAIN_S):
            return
        self._drawn_at = now
        self._is_drawn = self._is_live
        self._write(f"{_CLEAR_LINE}{describe()}" if self._is_live else f"vecd embed: {describe()}\n")

    def say(self, line: str) -> None:
        """Something that stays, whatever the line does."""
        self.clear()
        self._write(f"vecd embed: {line}\n")

    def clear(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._write(_CLEAR_LINE)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the terminal has gone, the run has not
            self._is_quiet = True
