"""The server that `vecd embed` starts for one run. It stops at the end of the run, and with this process.

Owns the process. Knows `vecd serve` by its command line alone. Called by `vecd.client.bulk.command`; its parts
also by `vecd.client.shared_server`.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO

import orjson

from vecd.client.bulk.errors import EmbedError

# Linux UAPI include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG = 1
_STOP_TIMEOUT_S = 45.0
_TAIL_BYTES = 4096
_NOT_OURS = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
"""Variables of systemd for this command, not for the server."""
_libc = ctypes.CDLL(None)


@contextmanager
def start_server(
    model: str | None, flags: Sequence[str], on_wait: Callable[[str], None]
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Start a server on a free port of 127.0.0.1, and stop it in the end. `on_wait` is called until it is ready.

    Its URL, and a function that returns why it will not come back: the end of its log, once it has ended. Raises
    EmbedError when the server does not start. To be called by the main thread: when that ends, for whatever reason, the
    server stops.
    """
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as log, os.fdopen(reader, "rb", buffering=0) as ready:
        process = spawn_server([*([model] if model else []), *flags, "--port", "0"], log, writer)
        os.close(writer)

        def why_gone() -> str | None:
            if process.poll() is None:
                return None
            return f"the server that was started here has ended with {process.returncode}: {last_lines(log)}"

        try:
            yield _await_ready(process, ready, log, on_wait), why_gone
        finally:
            stop_server(process)


def spawn_server(arguments: Sequence[str], log: IO[bytes], ready_fd: int, *fds: int) -> "subprocess.Popen[bytes]":
    """`vecd serve` with these arguments, which writes its address to `ready_fd`, and inherits `fds`, too.

    It stops when the thread that calls this ends, for whatever reason. Raises OSError.
    """
    # As `launch/base/programs.py` writes it: in the binary, sys.executable is the binary, and takes the same words.
    command = [sys.executable, "-P", "-m", "vecd", "serve", *arguments]
    return subprocess.Popen(
        [*command, "--ready-fd", str(ready_fd), "--drain-grace", "0"],
        pass_fds=[ready_fd, *fds],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C is for this process, which then stops the server in its own time
        env={name: value for name, value in os.environ.items() if name not in _NOT_OURS},
        preexec_fn=partial(_stop_with_parent, os.getpid()),  # noqa: PLW1509 (takes no lock)
    )


def stop_server(process: "subprocess.Popen[bytes]") -> None:
    """Have it drain, and wait for its end."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _stop_with_parent(parent_pid: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def _await_ready(
    process: "subprocess.Popen[bytes]", ready: IO[bytes], log: IO[bytes], on_wait: Callable[[str], None]
) -> str:
    started_at = time.monotonic()
    while not select.select([ready], [], [], 0.25)[0]:
        said = last_lines(log).rpartition("\n")[2]
        on_wait(f"starting a server, {time.monotonic() - started_at:.0f} s: {said}")
    line = ready.readline()
    if not line:  # the other end was closed, by its death
        process.wait(_STOP_TIMEOUT_S)
        raise EmbedError(f"the server did not start: {last_lines(log)}")
    url: str = orjson.loads(line)["url"]
    return url


def last_lines(log: IO[bytes]) -> str:
    """The end of what a server has written."""
    size = os.fstat(log.fileno()).st_size
    tail = os.pread(log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    return tail.decode(errors="replace").strip()
