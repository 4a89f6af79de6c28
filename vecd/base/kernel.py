"""Requests of a process to the kernel about itself: death with its parent, name, memory priority, core files, crashes.

Owns the calls into libc and /proc, and the description of how a process ended. Linux only.
"""

import ctypes
import faulthandler
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Linux UAPI include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36

FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals by which the kernel ends a process for what it has done itself. SIGABRT is none: others send it, too."""

_OOM_SCORE = 500
"""In -1000 … 1000. A worker is replaced in a second, whereas the gateway holds all requests."""

_THREADS_TIMEOUT_S = 1.0


def die_with_parent(parent_pid: int) -> bool:
    """Have the kernel kill this process when its parent dies. False if the parent is dead already.

    The kernel sends the signal when the parent's *thread* that forked ends; the fork server has only one.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent_pid


def adopt_orphans() -> None:
    """Become the parent of descendants that lose their own parent, in order to reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_strangers(is_known: Callable[[int], bool]) -> int:
    """Reap adopted processes that have ended, but for known ones, which their owner reaps; returns how many. A known
    child that has ended may hide others behind it until then; the next call finds those."""
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


def leave_signals_to_parent() -> None:
    """Ctrl-C in a terminal reaches the whole process group, and SIGTERM may; a child serves until its control channel
    ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def trace_crashes() -> None:
    """On SIGABRT, SIGSEGV, SIGBUS, SIGFPE and SIGILL, write each thread's stack to stderr, and die of the signal. The
    stack has files, lines and function names, no values. SIGABRT works even during a long call into C. Forked children
    do the same."""
    with suppress(RuntimeError, OSError, ValueError):
        faulthandler.enable(sys.stderr)


def outlive_sent_faults() -> None:
    """Live on when another process sends SIGSEGV, SIGBUS, SIGFPE or SIGILL, so that only a fault of this process's own
    ends it by one: the kernel does not let a signal be ignored that it sends for a fault. Call in the main thread,
    before `trace_crashes`, whose handler hands on to what was there before it."""
    faulthandler.disable()  # a fork has that of its parent
    for number in FAULTS:
        signal.signal(number, signal.SIG_IGN)


def leave_no_core() -> None:
    """Write no core file on a crash, because it would contain texts. Children inherit this. The limit is 1 byte,
    because with any other the kernel still passes a core to a program that collects them. Source: Linux,
    fs/coredump.c."""
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
    """How a process ended, from its exit code or its negative signal number; None if that is unknown."""
    if status is None:
        return "died"
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def num_threads() -> int:
    """Raises OSError, as without a free descriptor."""
    found = re.search(r"^Threads:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, "the kernel counts threads"
    return int(found[1])


def is_single_threaded() -> bool:
    """Whether only this thread is left. Waits, because transformers does not join the threads that load weights."""
    deadline = time.monotonic() + _THREADS_TIMEOUT_S
    while num_threads() != 1:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(ctypes.c_int(option), value, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
