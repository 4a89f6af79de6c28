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
from contextlib import suppress
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live

_MAX_KEYS = 64
"""Bytes read at a time."""


class Terminal:
    """A context: inside it, the terminal shows `picture` and keys come without Enter."""

    def __init__(self, picture: RenderableType) -> None:
        """Standard output is a terminal. Keys come from standard input, if that is one, too."""
        for name in ("COLUMNS", "LINES"):  # rich would believe them, and they do not change with the terminal
            os.environ.pop(name, None)
        console = Console(force_terminal=True, force_interactive=True, highlight=False, markup=False, emoji=False)
        self._live = Live(
            picture, console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self.keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        """The descriptor that keys come from."""
        self._modes: Any = None

    def __enter__(self) -> Self:
        if self.keyboard is not None:
            self._modes = termios.tcgetattr(self.keyboard)
            tty.setcbreak(self.keyboard)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, termios.error):  # a terminal that has gone needs nothing
            self._live.stop()
        with suppress(OSError, termios.error):
            if self.keyboard is not None:
                termios.tcsetattr(self.keyboard, termios.TCSADRAIN, self._modes)

    def draw(self) -> None:
        """Draw the picture as it is now. Raises OSError when the terminal has gone."""
        self._live.refresh()

    def keys(self) -> str:
        """What has been typed; "" when the terminal has gone."""
        assert self.keyboard is not None
        with suppress(OSError):
            return os.read(self.keyboard, _MAX_KEYS).decode("latin-1")
        return ""

    def stop(self) -> None:
        """Restore the terminal, stop this process as Ctrl-Z does, and take the terminal again when it continues."""
        self.__exit__()
        # Not SIGTSTP, which this program handles. The shell sees no difference.
        os.kill(os.getpid(), signal.SIGSTOP)
        self.__enter__()
