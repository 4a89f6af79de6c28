"""The log of every process: one line on stderr for each message, as text or as JSON.

Owns the two formats, and the root logger's handler. `vecd.shm.stderr` writes the lines, and never blocks. Every process
of a server calls `configure` once, and `change` when its configuration changes; `say` and `announce` write what the
person who starts the server reads, which in text is no log line. docs/logs.md describes the fields.

A message cannot forge another line: in text, its further lines are indented and control characters are escaped; in
JSON, all of it is one string. Floods are cut: of messages of one kind only some are written each second, and the next
one says how many were not.
"""

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from vecd.shm.stderr import Stderr

JSON = "json"
ACCESS = "vecd.access"
"""The name of the access log, which has limits of its own."""

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
    """One JSON object: time, level, process, logger, message; the record's `fields`; a traceback as `exception`."""

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
    """Limits the messages of one kind: those of the same logger and level with the same template."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], list[float]] = {}
        """By kind: how many may pass, when that was computed, and how many were cut since one passed."""

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
    """The root logger's handler. Formats in the thread that logs, because a message's arguments may change."""

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
        if self.is_json:
            self.setFormatter(JsonFormatter(self._process))
        else:
            self.setFormatter(TextFormatter(self._process, is_journal=self._is_journal))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # its message might quote an argument, which may be a client's text
            name = type(error).__name__
            line = self.format(_made(logging.ERROR, f"a line of {record.name} cannot be formatted: {name}"))
        self.out.write(line.encode(errors="backslashreplace") + b"\n")

    def write_plain(self, text: str, level: int) -> None:
        """Write a line of text without time and level."""
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
    """Log as `process` from now on; `level` and `log_format` as in the settings. `has_thread`: this process may have
    threads. Without stderr nothing is logged.

    Side effects: the root logger's handlers are closed, and replaced by one; in JSON, Python's warnings are logged.
    """
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
    """Use another level and format."""
    logging.getLogger().setLevel(level.upper())
    if _handler is not None:
        _handler.set_format(log_format)
    logging.captureWarnings(log_format == JSON)


def count_lost(on_lost: Callable[[], None]) -> None:
    """Call `on_lost` for each line that is lost because stderr is not read."""
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
