"""The first lines of the binary: the `vecd` command, or, for `-P -m MODULE …`, one of its modules as a process.

Those are Python's own words, by which `vecd/base/programs.py` starts processes. Only modules of this program are run:
the binary is no Python interpreter. Built in by `tools/binary/vecd.spec`; never imported, and imports by name, so that
PyInstaller looks at nothing but the standard library.
"""

import importlib
import os
import runpy
import sys

_PROGRAM = "vecd"
_MODULE_FLAGS = ["-P", "-m"]
_EXIT_BAD_CALL = 2


def main() -> int:
    _restore_environment()
    if sys.argv[1:3] != _MODULE_FLAGS:
        return int(importlib.import_module("vecd.__main__").main())
    module, *arguments = sys.argv[3:] or [""]
    if module.partition(".")[0] != _PROGRAM:
        print(f"vecd: {module!r} is no module of this program", file=sys.stderr)
        return _EXIT_BAD_CALL
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _restore_environment() -> None:
    """The launcher's variables are for this process, which has read them; not for programs of the system that it may
    start. A child that is this program again sets them anew."""
    for name in [name for name in os.environ if name.startswith("_PYI_")]:
        del os.environ[name]
    before = os.environ.pop("LD_LIBRARY_PATH_ORIG", None)
    if before is not None:
        os.environ["LD_LIBRARY_PATH"] = before
    else:
        os.environ.pop("LD_LIBRARY_PATH", None)


if __name__ == "__main__":
    sys.exit(main())
