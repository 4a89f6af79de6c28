"""The result of a reload, as a file; and `vecd reload`, which requests a reload and waits for its result.

Owns a file in the folder that systemd makes for the service (RuntimeDirectory=), in which the supervisor writes its
process id and counts the reloads that were requested and those that are done. A signal has no reply: without the file,
`systemctl reload` would succeed before the reload has begun, whatever its result. Without such a folder nothing is
written.
"""

import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from vecd.launch.base.exit_codes import EXIT_BAD_CONFIGURATION, EXIT_COULD_NOT_START, EXIT_OK

_FILE = "reloads.json"
_LOOK_INTERVAL_S = 0.05
_MAX_WAIT_S = 3600.0

_USAGE = """\
usage: vecd reload PID

Send SIGHUP to the server with this process id, and wait for the reload. Exits 0 when the server has its new
configuration, and 2 with the reasons when that cannot be used and nothing has changed.
For ExecReload= of a unit with RuntimeDirectory=, as `vecd install-service` writes it."""


@dataclass(slots=True)
class Reloads:
    """The content of the file."""

    pid: int
    """Of the supervisor, which writes it."""
    num_asked: int = 0
    """Reloads that were requested."""
    num_done: int = 0
    """How many of them are done. One reload may do several that were requested meanwhile."""
    problems: tuple[str, ...] = ()
    """Why the last one was refused. Empty: the server has the new configuration."""


class ReloadResult:
    """The supervisor's side of the file."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Side effect: the file of an earlier process is overwritten."""
        self._path = _path(environ)
        self._reloads = Reloads(os.getpid())
        self._write()

    def requested(self) -> None:
        self._reloads.num_asked += 1
        self._write()

    def done(self, num_requested: int, problems: Sequence[str] = ()) -> None:
        """The first `num_requested` reloads are done. `problems`: why the last of them was refused."""
        self._reloads.num_done = num_requested
        self._reloads.problems = tuple(problems)
        self._write()

    def close(self) -> None:
        """Remove the file."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()

    def _write(self) -> None:
        if self._path is None:
            return
        with suppress(OSError):  # a full disk must not end the server
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(asdict(self._reloads)))
            new.replace(self._path)


def main(arguments: Sequence[str]) -> int:
    """The command `vecd reload`. Returns the exit code."""
    match list(arguments):
        case ["--help" | "-h"]:
            print(_USAGE)
            return EXIT_OK
        case [pid] if re.fullmatch("[1-9][0-9]{0,6}", pid):
            return _reload(int(pid), _path(os.environ))
    return _fail(_USAGE, EXIT_BAD_CONFIGURATION)


def _reload(pid: int, path: Path | None) -> int:
    if path is None:
        return _fail("vecd reload: RUNTIME_DIRECTORY is not set: use SIGHUP, and the log", EXIT_BAD_CONFIGURATION)
    before = _read(path)
    if before is None:
        return _fail(f"vecd reload: no server has written {path}", EXIT_COULD_NOT_START)
    if before.pid != pid:  # the signal would end it
        return _fail(f"vecd reload: {path} is of process {before.pid}, not of {pid}", EXIT_COULD_NOT_START)
    try:
        pidfd = os.pidfd_open(pid)
        signal.pidfd_send_signal(pidfd, signal.SIGHUP)
    except OSError as error:
        return _fail(f"vecd reload: {pid}: {error.strerror}", EXIT_COULD_NOT_START)
    mine = before.num_asked + 1
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + _MAX_WAIT_S
    while time.monotonic() < deadline:
        if (found := _read(path)) is not None and found.num_done >= mine:
            return _fail("\n".join(found.problems), EXIT_BAD_CONFIGURATION) if found.problems else EXIT_OK
        if ended.poll(_LOOK_INTERVAL_S * 1000):
            return _fail("vecd reload: the server has ended meanwhile", EXIT_COULD_NOT_START)
    return _fail(f"vecd reload: not done within {_MAX_WAIT_S:.0f} s", EXIT_COULD_NOT_START)


def _path(environ: Mapping[str, str]) -> Path | None:
    # systemd names several folders with colons between; a unit of vecd has one.
    folder = environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return Path(folder, _FILE) if folder.startswith("/") else None


def _read(path: Path) -> Reloads | None:
    try:
        found = Reloads(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found


def _fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
