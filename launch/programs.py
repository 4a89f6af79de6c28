"""How a process of this program starts another one of its modules as a process of its own.

Owns the command line for it, the only place that knows it. Installed, that is Python's. In the binary (`make binary`)
`sys.executable` is the binary itself, and there is no Python to ask: its first lines, `tools/binary/entry.py`, take the
same words and run the module that they name. So nobody else has to know which of both he is part of. Called by whoever
starts a process; starts none itself.
"""

import sys


def command_of(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module`, one of this program's own, as `__main__`."""
    # -P: a folder named `gateway` or `shm` in the current directory must not be imported instead of ours.
    return [sys.executable, "-P", "-m", module, *arguments]
