"""The terminal that `vecd top` draws on.

Owns the terminal's modes (alternate screen, cursor, keys without Enter) and restores them however the program ends,
except by SIGKILL, and while it is stopped by Ctrl-Z. Knows neither figures nor servers. Called by
`vecd.client.top.command`.
"""

import os
import signal
import sys
import termios
import tty
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console, ConsoleDimensions, RenderableType

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""Alternate screen, no cursor, no wrapping, cleared."""
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
_DEFAULT_SIZE = (80, 24)
_MAX_KEYS = 64
"""Bytes read at a time."""


class Screen:
    """A context: inside it, the terminal shows the pictures and keys come without Enter."""

    def __init__(self) -> None:
        """Standard output is a terminal. Keys come from standard input, if that is one, too."""
        self.console = Console(highlight=False, markup=False, emoji=False)
        self.keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        """The descriptor that keys come from."""
        self._modes: Any = None

    def __enter__(self) -> "Screen":
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _take(self) -> None:
        if self.keyboard is not None and self._modes is None:
            self._modes = termios.tcgetattr(self.keyboard)
            tty.setcbreak(self.keyboard)
        self._write(_ENTER)

    def _restore(self) -> None:
        with suppress(OSError, ValueError):  # a terminal that has gone needs nothing
            self._write(_LEAVE)
        if self.keyboard is not None and self._modes is not None:
            modes, self._modes = self._modes, None
            with suppress(OSError, termios.error):
                termios.tcsetattr(self.keyboard, termios.TCSADRAIN, modes)

    def draw(self, picture: Callable[[int, int], RenderableType]) -> None:
        """Draw `picture` of the terminal's columns and lines over the last one. Raises OSError when the terminal has
        gone."""
        width, height = self._size()
        self.console.size = ConsoleDimensions(width, height)
        with self.console.capture() as captured:
            self.console.print(picture(width, height), end="", soft_wrap=False)
        lines = captured.get().split("\n")[:height]
        # In one piece, and without clearing first, so that nothing flickers.
        self._write(_HOME + "\r\n".join(line + _CLEAR_LINE for line in lines) + _CLEAR_REST)

    def _size(self) -> tuple[int, int]:
        """From the terminal itself: COLUMNS and LINES do not change with it."""
        try:
            width, height = os.get_terminal_size(self.console.file.fileno())
        except OSError:
            width, height = 0, 0
        return width or _DEFAULT_SIZE[0], height or _DEFAULT_SIZE[1]

    def keys(self) -> str:
        """What has been typed; "" at the end of the keyboard. Raises OSError when the terminal has gone."""
        assert self.keyboard is not None
        return os.read(self.keyboard, _MAX_KEYS).decode("latin-1")

    def stop(self) -> None:
        """Restore the terminal, stop this process as Ctrl-Z does, and take the terminal again when it continues."""
        self._restore()
        # Not SIGTSTP, which this program handles. The shell sees no difference.
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _write(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()
