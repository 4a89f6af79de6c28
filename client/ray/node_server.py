"""The `vecd serve` of one Ray actor: on unix sockets of its own, alive exactly as long as the actor's process.

Owns the process, its folder and the two directions of dying together: the kernel ends vecd when the thread that started
it dies, which happens with this process; and that thread waits for vecd, and says when it has ended by itself. Knows
`vecd serve` by its command line alone, which VECD_COMMAND replaces. Called by `vecd.client.ray.serve` and
`vecd.client.ray.data`.
"""

import ctypes
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

# Linux UAPI include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG = 1
_STOP_TIMEOUT_S = 45.0
START_TIMEOUT_S = 600.0
"""A first start may download a model, and compares engines."""
_SERVED_HERE = ("--host", "--port", "--uds", "--admin-port", "--admin-uds", "--ready-fd", "--tls-cert", "--tls-key")
_libc = ctypes.CDLL(None)


class NodeServer:
    """A server that has been started. `await_ready` waits for it, `stop` ends it."""

    def __init__(self, model: str | None, flags: Sequence[str], on_death: Callable[[str], None]) -> None:
        """`on_death` is called with the reason, by another thread, when vecd ends between `await_ready` and `stop`.

        Raises ValueError for a flag that says where to listen: that is chosen here.
        """
        for flag in flags:
            if flag.partition("=")[0] in _SERVED_HERE:
                raise ValueError(f"{flag}: where the server of a node listens is chosen by vecd.client.ray")
        self._folder = tempfile.mkdtemp(prefix="vecd-ray-")
        self.path = os.path.join(self._folder, "public")
        self.admin_path = os.path.join(self._folder, "admin")
        """Of /stats, /metrics and /admin, which are not for callers of the fleet."""
        self._on_death = on_death
        self._is_ready = self._is_stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        self._reason = ""
        self._has_started = threading.Event()
        reader, self._writer = os.pipe()
        self._ready = os.fdopen(reader, "rb", buffering=0)
        self._command = [
            *vecd_command(),
            *("serve", *([model] if model else []), *flags),
            *("--uds", self.path, "--admin-uds", self.admin_path, "--ready-fd", str(self._writer)),
        ]
        self._thread = threading.Thread(target=self._live, name="vecd", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the supervisor, behind `await_ready`."""
        assert self._process is not None
        return self._process.pid

    def await_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Raises RuntimeError when the server ends before, TimeoutError when it takes longer. Its log is this
        process's stderr."""
        self._has_started.wait()
        deadline = time.monotonic() + timeout_s
        while not select.select([self._ready], [], [], 0.25)[0]:
            if time.monotonic() > deadline:
                self.stop()
                raise TimeoutError(f"vecd was not ready in {timeout_s:g} s")
        # Set before the process is looked at: whoever is later, this function or the thread, tells of its death.
        self._is_ready = bool(self._ready.readline())  # nothing, if the other end was closed by its death
        if not self._is_ready or self._process is None or self._process.poll() is not None:
            self._thread.join(_STOP_TIMEOUT_S)
            raise RuntimeError(f"{shlex.join(self._command)} did not start ({self._reason}): its log tells why")

    def stop(self) -> None:
        """Let the server finish its requests and end; after 45 s, kill it."""
        self._is_stopping = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._thread.join(_STOP_TIMEOUT_S)
            if self._thread.is_alive():
                self._process.kill()
        self._thread.join()

    def _live(self) -> None:
        """Start the server and wait for its end. The kernel watches this thread in place of the process."""
        try:
            self._process = subprocess.Popen(
                self._command,
                pass_fds=[self._writer],
                stdin=subprocess.DEVNULL,
                env={
                    name: value for name, value in os.environ.items() if name != "VECD_COMMAND"
                },  # no setting of vecd's
                start_new_session=True,  # Ctrl-C is for Ray, which then stops the actor in its own time
                preexec_fn=partial(_end_with_parent, os.getpid()),  # noqa: PLW1509 (takes no lock)
            )
        except OSError as error:
            self._reason = f"{self._command[0]}: {error.strerror}"
        finally:
            os.close(self._writer)
            self._has_started.set()
        if self._process is not None:
            self._reason = f"vecd has ended with {self._process.wait()}"
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._is_ready and not self._is_stopping:
            self._on_death(self._reason)


def vecd_command() -> list[str]:
    """The words of the `vecd` command: those of VECD_COMMAND, or this environment's."""
    return shlex.split(os.environ.get("VECD_COMMAND", "")) or [sys.executable, "-P", "-m", "vecd"]


def exit_at_once(reason: str) -> None:
    """End this process: what it has not answered, the proxy or Ray then gives to another node."""
    print(f"{reason}: this actor ends, too", file=sys.stderr, flush=True)
    os._exit(70)


def _end_with_parent(parent_pid: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)
