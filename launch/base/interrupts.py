"""What SIGINT, which a terminal sends at Ctrl-C, does before a command or the server handles it.

Python's own handler raises KeyboardInterrupt at any line. An import then ends with a traceback, or prints one from a
callback and goes on.
Called by `vecd.launch.cli`, `vecd.supervisor` and `vecd.launch.base.programs`.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vecd.launch.base.exit_codes import EXIT_INTERRUPTED


def exit_at_interrupt(clean_up: Callable[[], None] = lambda: None) -> None:
    """Let SIGINT end this process at once, after `clean_up`, with EXIT_INTERRUPTED and no message. For the main thread.
    `vecd.__main__` does the same before it imports anything.

    Side effect: SIGINT's handler is replaced.
    """

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        clean_up()
        os._exit(EXIT_INTERRUPTED)

    signal.signal(signal.SIGINT, end)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Block SIGINT in this thread; it comes afterwards. A child that is started meanwhile keeps it blocked."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
