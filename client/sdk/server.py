"""`vecd.Server`: a server of one's own, for as long as a block or the process lasts.

Owns the folder of its unix socket until the guard has it, and the guard's process. Knows `vecd serve` by its command
line alone. Called by users.
"""

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import IO, Any

from vecd.client.connection import ConnectionClosed
from vecd.client.sdk.client import Client
from vecd.client.sdk.errors import ServerNotStarted, VecdError

_STOP_S = 45.0
_TAIL_BYTES = 4096
_MAX_PATH_BYTES = 107
"""Of a unix socket."""
_NOT_OURS = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
"""Variables of systemd for this process, not for the server."""
_NOT_STARTED = "unix:/not-started"


class Server(Client):
    """A server of its own, on a unix socket in a folder that only this user can read; a `Client` of it.

    It ends with the block, with `close`, and with this process, however that dies. In a forked process, and unpickled
    in another one of this machine, it is a client of the same server, and does not end it.
    """

    def __init__(
        self,
        *models: str | os.PathLike[str],
        timeout: float | None = None,
        retry_for: float = 60.0,
        connections: int = 4,
        start_timeout: float = 600.0,
        **flags: Any,
    ) -> None:
        """Nothing is started before `start`, or the block.

        `models`: as `vecd serve` takes them; none for the bundled one. `start_timeout`: seconds until the server must
        be ready. `flags`: those of `vecd serve` (docs/operating.md), with _ for -: `dtype="float32", workers=2`. True
        is a flag without a value, False one with `no-` in front, None none, and a list has its items joined by commas.
        The other arguments are those of `vecd.Client`.
        """
        key = flags.pop("api_key", None)
        super().__init__(_NOT_STARTED, api_key=key, timeout=timeout, retry_for=retry_for, connections=connections)
        self._environment = {} if key is None else {"VECD_API_KEY": key}  # a flag shows in ps
        self._command = ["serve", *(os.fspath(model) for model in models), *_written(flags)]
        self._start_timeout_s = start_timeout
        self._starting = threading.Lock()
        self._guard: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes]
        self._owner = 0
        """The process that has started it."""
        self._finalizer: weakref.finalize[..., Server]

    @property
    def pid(self) -> int | None:
        """Of the guard, the server's parent; None unless it runs."""
        return self._guard.pid if self._guard is not None else None

    def start(self) -> "Server":
        """Returns when the server is ready; at once if it runs. Raises ServerNotStarted with the end of its log."""
        with self._starting:
            if self._guard is None:
                self._start()
        return self

    def close(self) -> None:
        """Stop the server. It can be started again."""
        super().close()
        guard, self._guard = self._guard, None
        if guard is not None:
            self._finalizer()
            self._point_to(_NOT_STARTED)

    def __enter__(self) -> "Server":
        return self.start()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._guard is None:
            raise VecdError("a server that does not run cannot be pickled: start it first")
        return _client_of, (self._arguments,)

    def _why_gone(self) -> str | None:
        if self._guard is None:
            return "the server has not been started: use `with vecd.Server(...)`, or `start`"
        if self._owner != os.getpid() or self._guard.poll() is None:
            return None
        return f"the server has ended with {self._guard.returncode}: {_last_lines(self._log)}"

    def _start(self) -> None:
        folder = _new_folder()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (read for as long as the server may end)
        reader, low = os.pipe()
        # Above the standard streams, of which a program may have closed some: the guard gets others in their place.
        writer = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(low)
        command = [
            sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")),
            str(os.getpid()), folder, str(writer),
            sys.executable, "-P", "-m", "vecd", *self._command,
            "--uds", f"{folder}/sock", "--ready-fd", str(writer), "--drain-grace", "0",
        ]  # fmt: skip
        with os.fdopen(reader, "rb", buffering=0) as ready:
            try:
                guard = subprocess.Popen(
                    command,
                    pass_fds=[writer],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    start_new_session=True,  # Ctrl-C is for this process, which stops the server in its own time
                    env={name: os.environ[name] for name in os.environ if name not in _NOT_OURS} | self._environment,
                )
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            finally:
                os.close(writer)
            try:
                _await_ready(ready, time.monotonic() + self._start_timeout_s)
            except (TimeoutError, ConnectionClosed) as error:
                _stop(guard, folder, os.getpid())
                raise ServerNotStarted(f"{error}: {_last_lines(self._log)}") from None
            except BaseException:
                _stop(guard, folder, os.getpid())
                raise
        self._point_to(f"unix:{folder}/sock")
        self._limits = self._identity = None
        self._guard, self._owner = guard, os.getpid()
        # Also when this object is no longer used, and when the interpreter ends in good order.
        self._finalizer = weakref.finalize(self, _stop, guard, folder, self._owner)


def _client_of(arguments: dict[str, Any]) -> Client:
    return Client(**arguments)


def _written(flags: dict[str, Any]) -> list[str]:
    """Keyword arguments as words of a command line."""
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words.append(f"--{flag}={text}")  # one word: a value may begin with -
    return words


def _new_folder() -> str:
    """One that only this user can enter, with a path that leaves room for a unix socket's."""
    folder = tempfile.mkdtemp(prefix="vecd-")  # mode 0700
    if len(os.fsencode(folder)) + len("/sock") <= _MAX_PATH_BYTES:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="vecd-", dir="/tmp")


def _await_ready(ready: IO[bytes], until: float) -> None:
    """Raises TimeoutError, and ConnectionClosed when the server has ended."""
    if not select.select([ready], [], [], max(0.0, until - time.monotonic()))[0]:
        raise TimeoutError("the server was not ready in time")
    if not ready.readline():
        raise ConnectionClosed("the server did not start")


def _stop(guard: "subprocess.Popen[bytes]", folder: str, owner: int) -> None:
    """Stop the server and remove its folder, if this is the process that has started it."""
    if owner != os.getpid():
        return
    if guard.poll() is None:
        guard.send_signal(signal.SIGTERM)
    try:
        guard.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        guard.kill()  # the kernel stops the server
        guard.wait()
    shutil.rmtree(folder, ignore_errors=True)  # a guard that was killed has not


def _last_lines(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()
