"""What a process asks of the kernel about itself: to die with its parent, a name, to be first when memory runs out; and
what it writes when it is made to crash.

Owns the calls into libc and /proc, and the words for how a process ended. Called by every process but the gateway.
Linux only.
"""

import ctypes
import faulthandler
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
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


def reap_strangers(is_known: Callable[[int], bool]) -> int:
    """Reap what was adopted and has ended, but for children that `is_known`, by pid, says that somebody waits for.

    Returns how many. One that is known, and has ended but has not been waited for yet, may hide others behind it: they
    are found the next time.
    """
    num_reaped = 0
    while (pid := _first_zombie()) is not None and not is_known(pid):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        num_reaped += 1
    return num_reaped


def _first_zombie() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


def trace_crashes() -> None:
    """On SIGABRT, SIGSEGV, SIGBUS, SIGFPE and SIGILL, write to stderr where each thread is, and die of the signal.

    Files, lines and names of functions; no values. SIGABRT does it even in the middle of a long call into C. Forked
    children do the same. Without effect where there is no stderr.
    """
    with suppress(RuntimeError, OSError, ValueError):
        faulthandler.enable(sys.stderr)


def leave_no_core() -> None:
    """Write no core file on a crash: it would hold texts. Children inherit that.

    A limit of 1 byte, not of 0, because the kernel hands a core to a program that collects them (systemd-coredump,
    apport) whatever the limit, but for this one. Source: Linux, fs/coredump.c.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    limit = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


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
