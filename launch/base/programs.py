"""How a process of this program starts one of its modules as another process.

Owns the only place that knows the command lines. Installed, it is Python's. In the binary (`make binary`)
`sys.executable` is the binary itself, and there is no Python: its first lines, `tools/binary/entry.py`, take the same
words and run the module that they name.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from vecd.launch.base.interrupts import without_interrupts


def command_of(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module`, one of this program's own, as `__main__`."""
    # -P: a folder named `vecd` in the current directory must not be imported instead of ours.
    return [sys.executable, "-P", "-m", module, *arguments]


def self_command(command: str) -> list[str]:
    """The command line that runs `vecd.launch.child` as this kind of child."""
    return command_of("vecd.launch.child", command)


def start_child(
    kind: str, *arguments: str, fd: int, env: Mapping[str, str] | None = None, umask: int = -1
) -> "subprocess.Popen[bytes]":
    """Start `vecd.launch.child`, whose last argument is `fd`, which it inherits. Raises OSError.

    SIGINT stays blocked in it: a terminal sends Ctrl-C to the whole process group, and this process decides what ends.
    """
    with without_interrupts():
        return subprocess.Popen(
            [*self_command(kind), *arguments, str(fd)], pass_fds=[fd], stdin=subprocess.DEVNULL, env=env, umask=umask
        )


def run_child(
    kind: str, *arguments: str, fd: int, env: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> int:
    """Run a child that ends with this process; returns its exit status. Its last two arguments are this process's id
    and `fd`. Raises OSError, and subprocess.TimeoutExpired after `timeout_s`; then it is killed."""
    with start_child(kind, *arguments, str(os.getpid()), fd=fd, env=env) as process:
        try:
            return process.wait(timeout_s)
        except BaseException:
            process.kill()
            raise


def child_environment() -> dict[str, str]:
    """This process's environment without its secrets and systemd's sockets, and with what every child needs."""
    not_theirs = _SECRET_VARIABLES | _SYSTEMD_VARIABLES
    inherited = {name: value for name, value in os.environ.items() if name not in not_theirs}
    # Importing transformers makes torch create its compiler's cache folder, which nothing here uses: one that exists
    # is named, so that none is left behind.
    return {**inherited, **_CHILD_ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir()}


_SECRET_VARIABLES = {"VECD_API_KEY", "VECD_API_KEYS", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
_SYSTEMD_VARIABLES = {"LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}

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
