"""The first lines of the `vecd` command, which `python -m vecd` is, too.

They let SIGINT end the process quietly before anything is imported: Python's own handler would end an import with a
traceback. Then they open what is missing of the standard streams.
"""

import os
import sys
from _signal import SIGINT, signal  # type: ignore[import-not-found]  # built in: `signal` would import others first

_EXIT_INTERRUPTED = 128 + SIGINT
_python_handler = signal(SIGINT, lambda *_: os._exit(_EXIT_INTERRUPTED))

from vecd.base.failures import fill_standard_streams  # noqa: E402

fill_standard_streams()

from vecd.cli import main as run_command  # noqa: E402


def main() -> int:
    """Run the command in `sys.argv`; returns its exit code."""
    return run_command(sys.argv[1:], _python_handler)


if __name__ == "__main__":
    sys.exit(main())
