"""One line on standard error that shows how far a command is, rewritten while it runs.

Owns that line, its escape sequences and the terminal that may go away.
"""

import io
import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

_REDRAW_S = 0.25
_CLEAR_LINE = "\r\x1b[K"
_NEVER = -1e9


class StatusLine:
    """On a terminal the line is rewritten four times a second. Elsewhere a plain line is written every `plain_s`
    seconds, or none."""

    def __init__(
        self, prog: str, stream: TextIO | None = None, *, is_live: bool | None = None, plain_s: float = math.inf
    ) -> None:
        """`prog` begins every line that stays. `is_live` overrides whether `stream` is a terminal."""
        self._prog = prog
        self._stream = stream or sys.stderr or io.StringIO()  # Python sets a stream that is closed at the start to None
        self._is_live = self._stream.isatty() if is_live is None else is_live
        self._interval_s = _REDRAW_S if self._is_live else plain_s
        self._shown_at = _NEVER if self._is_live else time.monotonic()
        self._is_drawn = False

    def show(self, describe: Callable[[], str]) -> None:
        now = time.monotonic()
        if now - self._shown_at < self._interval_s:
            return
        self._shown_at = now
        self._is_drawn = self._is_live
        self._write(f"{_CLEAR_LINE}{describe()}" if self._is_live else f"{self._prog}: {describe()}\n")

    def say(self, line: str) -> None:
        self.clear()
        self._write(f"{self._prog}: {line}\n")

    def clear(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._shown_at = _NEVER
            self._write(_CLEAR_LINE)

    def silence(self) -> None:
        """Show nothing from now on; `say` is not affected."""
        self._interval_s = math.inf

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # the terminal has gone, the run continues
            self.silence()
