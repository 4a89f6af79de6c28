"""Lines to stderr, without ever waiting for whoever reads it.

Owns how bytes get there, and what of them waits meanwhile: a reader that has stopped (a full pipe, a terminal that is
held) must not stop a server. A line is written at once where there is room for it, otherwise kept, and written by a
thread that lives until nothing is kept any more; what is too much is lost, and counted. Never formats. Called by
`vecd.shm.logs` alone, in every process; what C code, `faulthandler` or an ending interpreter writes does not go through
it.

Writing must not wait, and O_NONBLOCK on the descriptor itself would be everybody's who has it, also of the shell that
has started us. So by what stderr is:

    pipe, terminal, device    opened anew by /proc, with O_NONBLOCK of our own; where that is forbidden, polled first,
                              which may wait if another process fills the pipe in that very moment
    socket (journald)         sent with MSG_DONTWAIT
    file                      written: the disk is waited for
"""

import os
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

MAX_KEPT_BYTES = 256 * 1024
"""Of lines that wait for room: a thousand or two."""
_POLL_S = 1.0
_PIPE_BUF = 4096
"""A pipe that is writable has room for so much. Source: pipe(7), Linux."""

WriteSome: TypeAlias = Callable[[bytes], int]
"""Writes what there is room for and returns how many bytes that was. Raises BlockingIOError where there is none, and
another OSError where nobody will ever read it."""


class Stderr:
    """Safe to use from several threads. In a process that must stay without threads (`has_thread=False`) what is kept
    goes with the next line."""

    def __init__(self, fd: int, *, has_thread: bool = True, tell_lost: Callable[[int], bytes] | None = None) -> None:
        """`fd` stays the caller's. `tell_lost` makes a line of the number of those that were lost."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called for each line that is lost, by whoever writes it."""
        self._fd = fd
        self._own, self._write_some = _writer(fd)
        self._has_thread = has_thread
        self._tell_lost = tell_lost
        self._lock = threading.Lock()
        self._kept: deque[bytes] = deque()
        self._num_kept_bytes = 0
        self._num_lost = 0  # and not told of yet
        self._thread: threading.Thread | None = None

    def write(self, line: bytes) -> None:
        """`line` with its end. Never waits, never raises."""
        with self._lock:
            self._drain()
            rest = line if self._kept else self._try(line)
            if rest:
                self._keep(rest, has_begun=len(rest) < len(line))

    def flush(self, timeout_s: float) -> None:
        """Wait until nothing is kept, but no longer than that."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._drain()
                if not self._kept:
                    return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            _wait_for_room(self._fd, left_s)

    def close(self) -> None:
        """What is kept is lost."""
        with self._lock:
            self._kept.clear()
            self._write_some = _drop
        if self._own is not None:
            self._own()

    # --- under the lock ---

    def _try(self, line: bytes) -> bytes:
        """What there was no room for."""
        try:
            return line[self._write_some(line) :]
        except BlockingIOError:
            return line
        except OSError:
            return b""  # whoever read it has gone; that is no reason to stop

    def _keep(self, line: bytes, *, has_begun: bool) -> None:
        if self._num_kept_bytes + len(line) > MAX_KEPT_BYTES and not has_begun:
            self._num_lost += 1
            self.on_lost()
            return
        self._kept.append(line)
        self._num_kept_bytes += len(line)
        if self._has_thread and self._thread is None:
            thread = threading.Thread(target=self._write_kept, name="log-writer", daemon=True)
            with suppress(RuntimeError):  # no more threads: the next line tries again
                thread.start()
                self._thread = thread

    def _drain(self) -> None:
        while self._kept:
            line = self._kept[0]
            rest = self._try(line)
            self._num_kept_bytes -= len(line) - len(rest)
            if rest:
                self._kept[0] = rest
                return
            self._kept.popleft()
        if self._num_lost and self._tell_lost is not None:
            num_lost, self._num_lost = self._num_lost, 0
            if rest := self._try(self._tell_lost(num_lost)):
                self._kept.append(rest)
                self._num_kept_bytes += len(rest)

    # --- the thread ---

    def _write_kept(self) -> None:
        while True:
            _wait_for_room(self._fd, _POLL_S)
            with self._lock:
                self._drain()
                if not self._kept:
                    self._thread = None
                    return


def _wait_for_room(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(timeout_s * 1000))


def _writer(fd: int) -> tuple[Callable[[], None] | None, WriteSome]:
    """What closes what was opened for it, and what writes."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return None, lambda line: os.write(fd, line)
    if stat.S_ISSOCK(mode):
        sock = socket.socket(fileno=os.dup(fd))
        return sock.close, lambda line: sock.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    try:
        own = _open_anew(fd)
    except OSError:  # another user's, or without /proc
        return None, lambda line: _write_if_room(fd, line)
    return lambda: os.close(own), lambda line: os.write(own, line)


def _open_anew(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _write_if_room(fd: int, line: bytes) -> int:
    if not _wait_for_room(fd, 0):
        raise BlockingIOError
    return os.write(fd, line[:_PIPE_BUF])


def _drop(line: bytes) -> int:
    return len(line)
