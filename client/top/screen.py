"""The terminal that `vecd top` draws on.

Owns the terminal's modes (alternate screen, cursor, keys without Enter) and gives back what it found, however the
program ends but by SIGKILL; while it is stopped by Ctrl-Z, too. Knows neither figures nor servers. Called by
`vecd.client.top.command`.
"""

import os
import signal
import sys
import termios
import tty
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleDimensions, RenderableType

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""Alternate screen, no cursor, no wrapping, nothing on it …"""
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""… and back."""
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
_USUAL_SIZE = (80, 24)
"""Of a terminal that does not know."""
_MAX_KEYS = 64
"""Bytes read at a time."""


def terminal() -> Console:
    """Standard output, as far as it has colours; without them under NO_COLOR."""
    return Console(highlight=False, markup=False, emoji=False)


class Screen:
    """A context: the terminal is ours inside it."""

    def __init__(self, console: Console) -> None:
        """`console`: on a terminal. Keys come from standard input, if that is one, too."""
        self.console = console
        self._output = console.file
        self._keyboard: int | None = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._modes: list[object] | None = None

    @property
    def keyboard(self) -> int | None:
        """The descriptor that keys come from."""
        return self._keyboard

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    def take(self) -> None:
        if self._keyboard is not None and self._modes is None:
            self._modes = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard)
        self._write(_ENTER)

    def give_back(self) -> None:
        """May be called again. A terminal that has gone wants nothing back."""
        with suppress(OSError, ValueError):
            self._write(_LEAVE)
        if self._keyboard is not None and self._modes is not None:
            modes, self._modes = self._modes, None
            with suppress(OSError, termios.error):
                termios.tcsetattr(self._keyboard, termios.TCSADRAIN, modes)  # type: ignore[arg-type]

    def draw(self, picture: Callable[[int, int], RenderableType]) -> None:
        """Draw what `picture` makes of the terminal's columns and lines, over what is there. Raises OSError when the
        terminal has gone."""
        width, height = self._size()
        self.console.size = ConsoleDimensions(width, height)
        with self.console.capture() as captured:
            self.console.print(picture(width, height), end="", soft_wrap=False)
        lines = captured.get().split("\n")[:height]
        # In one piece, and without clearing first: nothing flickers.
        self._write(_HOME + "\r\n".join(line + _CLEAR_LINE for line in lines) + _CLEAR_REST)

    def _size(self) -> tuple[int, int]:
        """The terminal's own word, whatever COLUMNS and LINES say: those do not change with it."""
        try:
            width, height = os.get_terminal_size(self._output.fileno())
        except OSError:
            width, height = 0, 0
        return width or _USUAL_SIZE[0], height or _USUAL_SIZE[1]

    def keys(self) -> str:
        """What has been typed; "" at the end of the keyboard. Raises OSError as `draw` does."""
        assert self._keyboard is not None
        return os.read(self._keyboard, _MAX_KEYS).decode("latin-1")

    def stop(self) -> None:
        """What Ctrl-Z asks for: give the terminal back, stop, and take it again when told to go on."""
        self.give_back()
        # Not SIGTSTP, which is ours to handle. The shell sees no difference.
        os.kill(os.getpid(), signal.SIGSTOP)
        self.take()

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()
