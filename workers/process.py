"""What a process asks of the kernel about itself: to die with its parent, a name, to be first when memory runs out.

Owns the calls into libc and /proc, and the words for how a process ended. Called by every process but the gateway.
Linux only.
"""

import ctypes
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

# Linux UAPI include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36

_OOM_SCORE = 500
"""Of -1000 … 1000: a worker is replaced in a second, the gateway holds everybody's requests."""


def die_with_parent(parent_pid: int) -> bool:
    """Be killed when the parent dies, however it dies. False when it is dead already: then nobody will.

    The kernel sends the signal when the parent's *thread* that forked ends; the fork server has only one.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent_pid


def adopt_orphans() -> None:
    """Become the parent of whatever loses its own below this process, in order to reap it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """The name in ps and top; the kernel keeps 15 bytes of it."""
    _prctl(_PR_SET_NAME, name.encode())


def volunteer_for_oom_kill() -> None:
    """Ask to be killed before other processes when memory runs out. Best effort: some containers forbid it."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


def describe_status(status: int | None) -> str:
    """How a process ended, from its exit code or minus its signal's number; None where nobody can tell."""
    if status is None:
        return "died"
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def num_threads() -> int:
    found = re.search(r"^Threads:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, "the kernel counts threads"
    return int(found[1])


def give_memory_back() -> None:
    """Return what has been freed to the kernel; a few milliseconds. Does nothing where libc is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def private_memory_mb() -> int:
    """Memory written by this process alone: what one more worker costs. 0 where the kernel does not say.

    Weights mapped from a file are not in it: all workers share them.
    """
    try:
        rollup = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Private_Dirty:\s+(\d+) kB", rollup, re.MULTILINE)
    return int(found[1]) // 1024 if found else 0


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(ctypes.c_int(option), value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
