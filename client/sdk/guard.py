"""Runs a server for as long as the process that started this one lives. A program of the standard library alone.

Owns the server's process and its folder, which it removes. Started by `vecd.client.sdk.server` as a file, not as a
module: it must be there before vecd is imported, and never fail because of that.

    guard.py PARENT_PID FOLDER READY_FD COMMAND…

The kernel's signal for the death of a parent is tied to the *thread* that started the child: a server that a worker
thread starts would end with that thread. So this process starts the server, in its only thread, and watches its parent
as a process, whose death does not depend on how it dies. Ends with the server's exit code.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

# Linux UAPI include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG = 1
_STOP_S = 30.0
_LOOK_S = 0.5
"""Between looks for the parent, where the kernel has no file descriptors of processes."""


def main(parent_pid: int, folder: str, ready_fd: int, command: list[str]) -> int:
    is_told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # the pipe has it
    parent_fd = _pidfd(parent_pid)
    me = os.getpid()
    libc = ctypes.CDLL(None)

    def die_with_guard() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != me:
            os._exit(1)

    server = subprocess.Popen(command, pass_fds=[ready_fd], preexec_fn=die_with_guard)  # noqa: PLW1509 (one thread)
    os.close(ready_fd)  # its end is the server's
    try:
        while server.poll() is None and os.getppid() == parent_pid:
            found, _, _ = select.select([is_told, *parent_fd], [], [], _LOOK_S if not parent_fd else 60.0)
            if is_told in found and {signal.SIGTERM, signal.SIGINT}.intersection(os.read(is_told, 64)):
                break
        return _stop(server)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pidfd(pid: int) -> list[int]:
    with contextlib.suppress(OSError, AttributeError):
        return [os.pidfd_open(pid)]
    return []


def _stop(server: "subprocess.Popen[bytes]") -> int:
    if server.poll() is None:
        server.terminate()
    try:
        return server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
