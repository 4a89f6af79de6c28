"""Descriptors 0 to 2 of a process that was started without some of them.

The kernel gives the lowest free number to whatever is opened next: a control socket or a worker's memory would become
descriptor 1 or 2, and a line that is printed or logged would be written into it. Called by `vecd.__main__` and
`vecd.launch.child` before they open anything. Imports nothing but `os` and `sys`.
"""

import os
import sys


def fill_standard_streams() -> None:
    """Open /dev/null where descriptor 0, 1 or 2 is closed; children inherit it. `sys.stdin` stays None, which says that
    there is no input."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is `fd`
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 (for as long as the process lives)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
