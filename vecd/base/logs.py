"""The log of every process: one line on stderr for each message, as text or as JSON, without waiting for a reader.

Owns the two formats, the root logger's handler, and how bytes get to stderr. Every process of a server calls
`configure` once; `say` and `announce` write what the person who starts the server reads. docs/logs.md describes the
fields.
"""

import json
import logging
import math
import os
import re
import select
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeAlias

# Write lines to stderr without ever waiting for its reader.
#
# A line is written at once where there is room for it. Otherwise it is kept, and written by a thread that lives until
# nothing is kept any more; what exceeds MAX_KEPT_BYTES is lost and counted. The standard library's `QueueListener` does
# not fit: a line would be on its queue when a process dies right after it was logged, its thread would live in the fork
# server, which must have none, and its `stop` waits for a reader that may never read.
#
# A write must not block, and O_NONBLOCK on the descriptor itself would hold for every process that shares it, also for
# the shell. How a line is written depends on what stderr is:
#
#     pipe, terminal, device    opened again through /proc, with an O_NONBLOCK of its own; where that is forbidden,
#                               polled first, which blocks if another process fills the pipe at that very moment
#     socket (journald)         sent with MSG_DONTWAIT
#     file                      written: the disk is waited for

MAX_KEPT_BYTES = 256 * 1024
_POLL_S = 1.0
_PIPE_BUF = 4096
"""A writable pipe has room for this many bytes. Source: pipe(7), Linux."""

WriteSome: TypeAlias = Callable[[bytes], int]
"""Returns the number of bytes written. Raises BlockingIOError without room, and another OSError without a reader."""


class Stderr:
    """May be used by several threads. Without a thread of its own, kept lines are written with the next line."""

    def __init__(self, fd: int, *, has_thread: bool = True, tell_lost: Callable[[int], bytes] | None = None) -> None:
        self.on_lost: Callable[[], None] = lambda: None
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
        with self._lock:
            self._kept.clear()
            self._write_some = len  # as if all of a line were written
        if self._own is not None:
            self._own()

    # --- under the lock ---

    def _try(self, line: bytes) -> bytes:
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


# A message cannot forge another line: in text, its further lines are indented and control characters are escaped; in
# JSON, all of it is one string. Floods are cut: of messages of one kind only some are written each second, and the next
# one says how many were not.

JSON = "json"
ACCESS = "vecd.access"

_MAX_ALIKE_PER_S, _MAX_ALIKE_AT_ONCE = 20.0, 100.0
_MAX_KINDS = 512
_FLUSH_S = 0.5
_INDENT = "\n    "
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
# Those of syslog. Source: sd-daemon(3).
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class TextFormatter(logging.Formatter):
    def __init__(self, process: str, *, is_journal: bool = False) -> None:
        """`is_journal`: each line begins with its priority, which journald removes."""
        super().__init__(f"%(asctime)s {process} %(levelname)s %(message)s")
        self._is_journal = is_journal

    def format(self, record: logging.LogRecord) -> str:
        return self.finish(super().format(record), record.levelno)

    def finish(self, text: str, level: int) -> str:
        """Escape and indent `text`, so that it cannot look like another line, or control a terminal."""
        text = _CONTROL_CHARACTERS.sub(_escaped, text).replace("\n", _INDENT)
        if not self._is_journal:
            return text
        prefix = f"<{_PRIORITIES.get(level, _PRIORITIES[logging.INFO])}>"
        return prefix + text.replace("\n", f"\n{prefix}")


class JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


class Repeats(logging.Filter):
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], list[float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG or record.name == ACCESS:
            return True
        kind, now = (record.name, record.levelno, str(record.msg)), self._clock()
        state = self._kinds.get(kind)
        if state is None:
            if len(self._kinds) >= _MAX_KINDS:  # some code logs without templates
                self._kinds.clear()
            state = self._kinds[kind] = [_MAX_ALIKE_AT_ONCE, now, 0]
        allowed = min(_MAX_ALIKE_AT_ONCE, state[0] + (now - state[1]) * _MAX_ALIKE_PER_S)
        if allowed < 1:
            state[:] = allowed, now, state[2] + 1
            return False
        if state[2]:
            record.msg = f"{record.msg} (and {state[2]:.0f} more like it, not logged)"
        state[:] = allowed - 1, now, 0
        return True


class LogHandler(logging.Handler):
    """Formats in the thread that logs, because a message's arguments may change."""

    def __init__(self, process: str, log_format: str, fd: int, *, has_thread: bool = True) -> None:
        super().__init__()
        self._process = process
        self._pid = os.getpid()
        self.out = Stderr(fd, has_thread=has_thread, tell_lost=self._tell_lost)
        self._is_journal = is_journal(fd)
        self.addFilter(Repeats())
        self.set_format(log_format)

    def set_format(self, log_format: str) -> None:
        self.is_json = log_format == JSON
        text = TextFormatter(self._process, is_journal=self._is_journal)
        self.setFormatter(JsonFormatter(self._process) if self.is_json else text)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # its message might quote an argument, which may be a client's text
            name = type(error).__name__
            line = self.format(_made(logging.ERROR, f"a line of {record.name} cannot be formatted: {name}"))
        self.out.write(line.encode(errors="backslashreplace") + b"\n")

    def write_plain(self, text: str, level: int) -> None:
        assert isinstance(self.formatter, TextFormatter)
        self.out.write(self.formatter.finish(text, level).encode(errors="backslashreplace") + b"\n")

    def close(self) -> None:
        if os.getpid() == self._pid:  # lines inherited by a fork are written by its parent
            self.out.flush(_FLUSH_S)
        self.out.close()
        super().close()

    def _tell_lost(self, num: int) -> bytes:
        line = f"{num} lines are lost here: stderr was not read in time"
        return self.format(_made(logging.WARNING, line, {"event": "lines_lost", "count": num})).encode() + b"\n"


def _made(level: int, message: str, fields: dict[str, Any] | None = None, name: str = "vecd.log") -> logging.LogRecord:
    record = logging.LogRecord(name, level, "", 0, message, None, None)
    record.fields = fields or {}
    return record


_handler: LogHandler | None = None


def configure(process: str, level: str, log_format: str, *, has_thread: bool = True) -> None:
    """Log as `process` from now on. `has_thread`: this process may have threads. Without stderr nothing is logged. Side
    effects: the root logger's handlers are replaced by one; in JSON, Python's warnings are logged."""
    global _handler
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    _handler = None
    if sys.stderr is not None:  # otherwise descriptor 2 may be anything
        with suppress(OSError, ValueError):
            _handler = LogHandler(process, log_format, sys.stderr.fileno(), has_thread=has_thread)
    root.addHandler(_handler or logging.NullHandler())
    change(level, log_format)


def change(level: str, log_format: str) -> None:
    logging.getLogger().setLevel(level.upper())
    if _handler is not None:
        _handler.set_format(log_format)
    logging.captureWarnings(log_format == JSON)


def count_lost(on_lost: Callable[[], None]) -> None:
    if _handler is not None:
        _handler.out.on_lost = on_lost


def say(line: str, level: int = logging.INFO, **fields: Any) -> None:
    """Write a line for the person who started the server. In text, and before `configure`: `vecd: LINE`."""
    _tell([f"vecd: {line}"], line, level, fields)


def announce(lines: Sequence[str], **fields: Any) -> None:
    """Write lines for the person who started the server, unchanged; in JSON the first one, with the fields."""
    _tell(lines, lines[0], logging.INFO, fields)


def _tell(lines: Sequence[str], message: str, level: int, fields: dict[str, Any]) -> None:
    if _handler is None:
        with suppress(OSError):
            for line in lines:
                print(line, file=sys.stderr, flush=True)
    elif _handler.is_json:
        _handler.handle(_made(level, message, fields, "vecd.supervisor"))
    else:
        for line in lines:
            _handler.write_plain(line, level)


def is_journal(fd: int) -> bool:
    """Whether `fd` leads to systemd's journal. Source: systemd.exec(5), JOURNAL_STREAM."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    found = os.fstat(fd)
    return (device, inode) == (str(found.st_dev), str(found.st_ino))
