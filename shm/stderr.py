"""Write lines to stderr without ever waiting for its reader.

Owns how bytes get there, and which of them are kept meanwhile: a reader that has stopped (a full pipe, a terminal held
by Ctrl-S) must not stop a server. A line is written at once where there is room for it. Otherwise it is kept, and
written by a thread that lives until nothing is kept any more; what exceeds MAX_KEPT_BYTES is lost and counted. Called
by `vecd.shm.logs` alone, in every process; what C code, `faulthandler` or an ending interpreter writes does not pass
through it.

The standard library's `QueueHandler` and `QueueListener` do not fit: a line would be on the queue when a process dies
right after it was logged, which are the lines that matter most; the listener's thread would have to live in the fork
server, which must have none; and at the end its `stop` waits for a reader that may never read.

A write must not block, and O_NONBLOCK on the descriptor itself would hold for every process that shares it, also for
the shell that started the server. So it depends on what stderr is:

    pipe, terminal, device    opened again through /proc, with an O_NONBLOCK of its own; where that is forbidden, polled
                              first, which blocks if another process fills the pipe at that very moment
    socket (journald)         sent with MSG_DONTWAIT
    file                      written: the disk is waited for
"""

import math
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
"""Of lines that wait for room: one or two thousand lines."""
_POLL_S = 1.0
_PIPE_BUF = 4096
"""A writable pipe has room for so many bytes. Source: pipe(7), Linux."""

WriteSome: TypeAlias = Callable[[bytes], int]
"""Writes the bytes that there is room for and returns their number. Raises BlockingIOError where there is no room, and
another OSError where there is no reader any more."""


class Stderr:
    """May be used by several threads. In a process that must not have threads (`has_thread=False`), kept lines are
    written with the next line."""

    def __init__(self, fd: int, *, has_thread: bool = True, tell_lost: Callable[[int], bytes] | None = None) -> None:
        """`fd` stays the caller's. `tell_lost` makes a line that says how many were lost."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called for each line that is lost, in the thread that writes it."""
        self._fd = fd
        self._own, self._write_some = _writer(fd)
        self._has_thread = has_thread
        self._tell_lost = tell_lost
        self._lock = threading.Lock()
        self._kept: deque[bytes] = deque()
        self._num_kept_bytes = 0
        self._num_lost = 0  # since `tell_lost` was last called
        self._thread: threading.Thread | None = None

    def write(self, line: bytes) -> None:
        """Write or keep `line`, which has its newline. Never blocks, never raises."""
        with self._lock:
            self._drain()
            rest = line if self._kept else self._try(line)
            if rest:
                self._keep(rest, has_begun=len(rest) < len(line))

    def flush(self, timeout_s: float) -> None:
        """Wait until nothing is kept, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._drain()
                if not self._kept:
                    if threading.current_thread() is self._thread:
                        self._thread = None  # under the lock: the next line that is kept starts another
                    return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            _wait_for_room(self._fd, min(left_s, _POLL_S))

    def close(self) -> None:
        """Lose what is kept."""
        with self._lock:
            self._kept.clear()
            self._write_some = len  # as if all of a line were written
        if self._own is not None:
            self._own()

    # --- under the lock ---

    def _try(self, line: bytes) -> bytes:
        """Write what there is room for; returns the rest."""
        try:
            return line[self._write_some(line) :]
        except BlockingIOError:
            return line
        except OSError:
            return b""  # there is no reader any more; that is no reason to stop

    def _keep(self, line: bytes, *, has_begun: bool) -> None:
        if self._num_kept_bytes + len(line) > MAX_KEPT_BYTES and not has_begun:
            self._num_lost += 1
            self.on_lost()
            return
        self._kept.append(line)
        self._num_kept_bytes += len(line)
        if self._has_thread and self._thread is None:
            thread = threading.Thread(target=self.flush, args=(math.inf,), name="log-writer", daemon=True)
            with suppress(RuntimeError):  # too many threads: the next line tries again
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


def _wait_for_room(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(timeout_s * 1000))


def _writer(fd: int) -> tuple[Callable[[], None] | None, WriteSome]:
    """A function that closes what was opened here, and one that writes."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return None, lambda line: os.write(fd, line)
    if stat.S_ISSOCK(mode):
        sock = socket.socket(fileno=os.dup(fd))
        return sock.close, lambda line: sock.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    try:
        own = _open_anew(fd)
    except OSError:  # it belongs to another user, or there is no /proc
        return None, lambda line: _write_if_room(fd, line)
    return lambda: os.close(own), lambda line: os.write(own, line)


def _open_anew(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _write_if_room(fd: int, line: bytes) -> int:
    if not _wait_for_room(fd, 0):
        raise BlockingIOError
    return os.write(fd, line[:_PIPE_BUF])
