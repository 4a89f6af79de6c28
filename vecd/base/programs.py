"""The programs and packages that this one needs, and how it starts its own modules as processes.

Owns the command lines, and the words for a package that is missing. Imports none of the packages.
"""

import ctypes
import importlib.util
import os
import resource
import shlex
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any, TypeAlias

from vecd.base.failures import without_interrupts


def command_of(module: str, *arguments: str) -> list[str]:
    # -P: a folder named `vecd` in the current directory must not be imported instead of ours.
    return [sys.executable, "-P", "-m", module, *arguments]


def self_command(command: str) -> list[str]:
    return command_of("vecd.child", command)


def start_child(kind: str, **options: Any) -> "Child":
    """Start `vecd.child`, or take one that was started ahead: the process, and our end of its control connection, of
    which the caller becomes the owner. `options`: of Popen. Raises OSError. SIGINT stays blocked in it: a terminal
    sends Ctrl-C to the whole process group."""
    if kind in ahead:
        process, ours = ahead.pop(kind)
        with suppress(OSError):  # a sandbox forbids it
            for limit in _LIMITS:
                resource.prlimit(process.pid, limit, resource.getrlimit(limit))
            if process.poll() is None:
                return process, ours
        _end(process, ours)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [*self_command(kind), str(theirs.fileno())]
    environment = None if kind in _KNOWING_SECRETS else child_environment()
    try:
        with theirs, without_interrupts():
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, **options
            )
    except OSError:
        ours.close()
        raise
    return process, ours


Child: TypeAlias = "tuple[subprocess.Popen[bytes], socket.socket]"
_KNOWING_SECRETS = {"fetch"}
"""It needs the token of the hub."""

# Children that are started while the supervisor itself is still being imported, on another core.

ahead: dict[str, Child] = {}
"""By kind: those that are not taken yet."""
_UMASK = 0o077
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)
"""Which a child gets when it is taken: by then this process has its own."""


def start_ahead(kind: str) -> None:
    """Start a child that `start_child` takes. One that cannot be started is left to its regular start, which reports
    it."""
    with without_interrupts(), suppress(OSError):  # `end_ahead` at an interrupt must know of it
        ahead[kind] = start_child(kind, umask=_UMASK)


def end_ahead() -> None:
    while ahead:
        _end(*ahead.popitem()[1])


def _end(process: "subprocess.Popen[bytes]", ours: socket.socket) -> None:
    ours.close()
    process.kill()
    process.wait()


def child_environment() -> dict[str, str]:
    """This process's environment without its secrets and systemd's sockets, and with what every child needs."""
    not_theirs = _SECRET_VARIABLES | SYSTEMD_VARIABLES
    inherited = {name: value for name, value in os.environ.items() if name not in not_theirs}
    # Importing transformers makes torch create its compiler's cache folder, which nothing here uses: one that exists
    # is named, so that none is left behind.
    return {**inherited, **_CHILD_ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir()}


_SECRET_VARIABLES = {"VECD_API_KEY", "VECD_API_KEYS", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
SYSTEMD_VARIABLES = {"LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}

_CHILD_ENVIRONMENT = {
    # A thread pool started before a fork makes the child hang, and one per library makes processes large.
    "OMP_NUM_THREADS": "1",
    # For torch's threads, where cores are leased: they wait 0.1 ms for work before they sleep, not 10 ms.
    "GOMP_SPINCOUNT": "3000",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The model was found before the children started: they never look for another.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # Counting GPUs must not touch CUDA before the fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


# Which packages are installed, and what users are told about one that is not.


def not_installed(*packages: str) -> str:
    """The end of a sentence about `packages`, which are named as for pip."""
    if getattr(sys, "frozen", False):
        return "not in this binary: use an installed vecd"
    return f"not installed: pip install {shlex.join(packages)}"


def are_installed(*modules: str) -> bool:
    """Imports the packages above a module, and nothing else."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in modules)
    except (ImportError, ValueError):
        return False


NEEDS_TORCH = f"needs torch and transformers ({not_installed('torch', 'transformers')})"


def has_torch() -> bool:
    """Every engine but the lean one needs both, and so does the reference model."""
    return are_installed("torch", "transformers")


# Return memory that was freed to the kernel, which the allocator of libc keeps otherwise.


def return_free_memory() -> None:
    """Return freed memory to the kernel; takes a few milliseconds. Does nothing if libc is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
