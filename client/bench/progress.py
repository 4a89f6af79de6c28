"""One line that tells how a run goes, rewritten while it does.

Owns that line on a terminal, and writes nothing where there is none: a log wants no half lines. Called by
`vecd.client.bench.command`.
"""

import math
import sys
import time
from typing import TextIO

from vecd.client.bench.run import Progress

_REDRAW_S = 0.25
_CLEAR_LINE = "\r\x1b[K"


class ProgressLine:
    """`show` and `clear` the line. On standard error, and only when that and standard output are terminals."""

    def __init__(self, stream: TextIO = sys.stderr, *, is_shown: bool | None = None) -> None:
        """`is_shown` decides instead of looking."""
        self._stream = stream
        self._is_shown = stream.isatty() and sys.stdout.isatty() if is_shown is None else is_shown
        self._drawn_at = -math.inf

    def show(self, name: str, progress: Progress) -> None:
        """Draw the line, unless it is still fresh. `name` is the run's."""
        now = time.monotonic()
        if self._is_shown and now - self._drawn_at >= _REDRAW_S:
            self._drawn_at = now
            self._write(f"{_CLEAR_LINE}{name}: {describe(progress)}")

    def clear(self) -> None:
        """Leave the terminal's line as it was before the first `show`."""
        if self._is_shown and self._drawn_at > -math.inf:
            self._drawn_at = -math.inf
            self._write(_CLEAR_LINE)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the terminal has gone, the run has not
            self._is_shown = False


def describe(progress: Progress) -> str:
    """What a reader who waits wants to know."""
    if progress.is_warming_up:
        return "warming up"
    rate = progress.num_requests / progress.elapsed_s if progress.elapsed_s > 0 else 0.0
    parts = [f"{rate:,.1f} req/s", f"{progress.num_errors} errors"]
    if progress.left_s == 0:
        parts.append(f"waiting for {progress.num_waiting} answers")
    elif progress.left_s < math.inf:
        parts.append(f"{math.ceil(progress.left_s)} s left")
    else:
        parts.append(f"{progress.num_requests} answered")
    return ", ".join(parts)
