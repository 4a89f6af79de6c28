"""How starting can fail, and the exit code of each way."""

import signal

EXIT_OK, EXIT_BAD_CONFIGURATION, EXIT_COULD_NOT_START, EXIT_INTERNAL_ERROR = 0, 2, 3, 70
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""By Ctrl-C, as shells have it."""


class ConfigurationError(Exception):
    """The settings cannot be used. `problems` has a line for each thing that is wrong."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class StartFailure(Exception):
    """The server cannot go on: a child cannot start, or keeps dying. The message is for the operator."""

    exit_code = EXIT_COULD_NOT_START


class BadSetting(StartFailure):
    """A child cannot start with one of its settings."""

    exit_code = EXIT_BAD_CONFIGURATION


class ChildDied(Exception):
    """A child ended where it should not have. The message says how."""


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first StartFailure of the group; the group itself if it holds anything else.

    For `except BaseExceptionGroup`, not for `except*`: Python before 3.11.4 makes a group again of what is raised in
    that.
    """
    if group.split(StartFailure)[1] is not None:
        return group
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
