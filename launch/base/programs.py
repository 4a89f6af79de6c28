"""The command lines by which a process of this program starts one of its modules as another process.

Owns the only place that knows them. Installed, it is Python's. In the binary (`make binary`) `sys.executable` is the
binary itself, and there is no Python: its first lines, `tools/binary/entry.py`, take the same words and run the module
that they name. Starts no process itself.
"""

import sys


def command_of(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module`, one of this program's own, as `__main__`."""
    # -P: a folder named `vecd` in the current directory must not be imported instead of ours.
    return [sys.executable, "-P", "-m", module, *arguments]


def self_command(command: str) -> list[str]:
    """The command line that runs `vecd.launch.child` as this kind of child."""
    return command_of("vecd.launch.child", command)
