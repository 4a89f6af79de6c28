"""How starting can fail, the exit code of each way, and what Ctrl-C does before a command handles it."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_OK, EXIT_BAD_CONFIGURATION, EXIT_COULD_NOT_START, EXIT_INTERNAL_ERROR = 0, 2, 3, 70
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""By Ctrl-C, as shells have it."""


class ConfigurationError(Exception):
    """The settings cannot be used. `problems` has a line for each thing that is wrong."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


def source_of(path: str) -> str:
    """The path that the user knows: a model whose weights have been made is read from a folder in the cache,
    `…/converted/<32 digits>` and then the path of the model's own folder."""
    return re.sub(r"^.*/converted/[0-9a-f]{32}(?=/)", "", path)


class ModelError(Exception):
    """The model cannot be served. The message is one line with the file and its fault."""

    def __init__(self, message: str) -> None:
        path, colon, fault = message.partition(": ")
        super().__init__(source_of(path) + colon + fault)


class StartFailure(Exception):
    exit_code = EXIT_COULD_NOT_START


class BadSetting(StartFailure):
    exit_code = EXIT_BAD_CONFIGURATION


class ChildDied(Exception):
    """A child ended where it should not have. The message says how."""


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first StartFailure of the group; the group itself if it holds anything else. For `except BaseExceptionGroup`:
    Python before 3.11.4 makes a group again of what `except*` raises."""
    if group.split(StartFailure)[1] is not None:
        return group
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# What SIGINT, which a terminal sends at Ctrl-C, does before a command or the server handles it.
#
# Python's own handler raises KeyboardInterrupt at any line. An import then ends with a traceback, or prints one from a
# callback and goes on.


def exit_at_interrupt(clean_up: Callable[[], None] = lambda: None) -> None:
    """Let SIGINT end this process at once, after `clean_up`, with EXIT_INTERRUPTED and no message. For the main thread.
    Side effect: SIGINT's handler is replaced."""

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


# Descriptors 0 to 2 of a process that was started without some of them.
#
# The kernel gives the lowest free number to whatever is opened next: a control socket or a worker's memory would become
# descriptor 1 or 2, and a line that is printed or logged would be written into it. It runs before anything is opened.


def fill_standard_streams() -> None:
    """Children inherit it. `sys.stdin` stays None, which says that there is no input."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is `fd`
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 (for as long as the process lives)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
