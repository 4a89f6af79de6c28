"""What SIGINT, which a terminal sends at Ctrl-C, does before a command or the server handles it.

Python's own handler raises KeyboardInterrupt at any line. An import then ends with a traceback, or prints one from a
callback and goes on.
Called by `vecd.launch.cli`, `vecd.supervisor` and `vecd.launch.base.programs`.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from vecd.launch.base.exit_codes import EXIT_INTERRUPTED


def exit_at_interrupt() -> None:
    """Let SIGINT end this process at once, with EXIT_INTERRUPTED and no message. For the main thread, while the process
    has nothing to clean up. `vecd.__main__` does the same before it imports anything.

    Side effect: SIGINT's handler is replaced.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Block SIGINT in this thread; it comes afterwards. A child that is started meanwhile keeps it blocked."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
