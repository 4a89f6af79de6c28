"""A `vecd serve` that a program starts: for itself, or for all programs of a user on this host that want the same one.

Owns the server's process, and its end: with the process that started it, however that dies, or some seconds after the
last of those that share it has gone. Knows `vecd serve` by its command line alone, and sends no request.

The kernel's signal for the death of a parent is tied to the *thread* that started the child: a server that a worker
thread starts would end with that thread. So a process in between starts the server in its only thread. It is one of
two, both of this module:

    guard   looks for its parent, whose death does not depend on how it dies; ends with the server's code
    keeper  watches the lock of those that share a server; has a session of its own and is no child of any of them
"""

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Self

from vecd.base.programs import SYSTEMD_VARIABLES, command_of

# Linux UAPI include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG = 1
MAX_PATH_BYTES = 107
# Source: unix(7), sun_path.
_STOP_S = 45.0
_GUARD_STOP_S = 30.0
_LOOK_S = 0.5
"""Between looks for the parent."""
_TAIL_BYTES = 4096
_NOT_OURS = {*SYSTEMD_VARIABLES, "VECD_COMMAND"}
"""Variables for this process, not for the server."""
VECD = tuple(command_of("vecd"))
_THIS = tuple(command_of("vecd.client.local_server"))


class NotStarted(RuntimeError):
    """The server did not start, or not in time. The message ends with the end of its log."""


class LocalServer:
    """A server that ends with this process, or by `stop`. It is being started once this has returned."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        sockets: Mapping[str, str] = MappingProxyType({}),
        environment: Mapping[str, str] = MappingProxyType({}),
        command: Sequence[str] = VECD,
        log_fd: int | None = None,
    ) -> None:
        """`arguments`: of `vecd serve`. `sockets`: flags with names of files in a folder that only this user can enter
        (`path`), and that ends with the server. `environment`: beside that of this process. `log_fd`: where its lines
        go, instead of a file that `last_lines` reads. Raises OSError."""
        self._log = tempfile.TemporaryFile() if log_fd is None else None  # noqa: SIM115 (read while it may end)
        self._folder = _new_folder(max(map(len, sockets.values()), default=0))
        own = [word for flag, name in sockets.items() for word in (flag, self.path(name))]
        reader, low = os.pipe()
        # Above the standard streams, of which a program may have closed some: the guard gets others in their place.
        writer = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(low)
        self._ready = os.fdopen(reader, "rb", buffering=0)
        self._owner, self.is_stopping = os.getpid(), False
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
        order = [*_THIS, "guard", str(self._owner), self._folder, str(writer)]
        log = self._log if log_fd is None else log_fd
        try:
            self._guard = subprocess.Popen(
                [*order, *command, "serve", *arguments, *own, "--ready-fd", str(writer)],
                pass_fds=[writer],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which stops the server in its own time
                env={**inherited, **environment},
            )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(writer)
        self.pid = self._guard.pid
        """Of the guard, the server's parent."""

    def path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def await_ready(self, timeout_s: float = 600.0, on_wait: Callable[[str], None] = lambda text: None) -> str:
        """The server's URL, once it is ready. `on_wait` is called meanwhile, with the last line of the log. Raises
        NotStarted; the server is stopped then."""
        began_at = now = time.monotonic()
        try:
            with self._ready as ready:
                while not select.select([ready], [], [], max(0.0, min(0.25, began_at + timeout_s - now)))[0]:
                    if (now := time.monotonic()) >= began_at + timeout_s:
                        raise NotStarted(f"the server was not ready in time: {self.last_lines()}")
                    said = self.last_lines().rpartition("\n")[2]
                    on_wait(f"starting a server, {now - began_at:.0f} s: {said}")
                line = ready.readline()
            if not line:  # the other end was closed, by its death
                code = self.wait(_STOP_S)
                raise NotStarted(f"the server did not start, and ended with {code}: {self.last_lines()}")
            return str(json.loads(line)["url"])
        except BaseException:
            self.stop()
            raise

    def why_gone(self) -> str | None:
        """Why it will not come back; None while it runs, and in a process that was forked from the one that owns it."""
        if self._owner != os.getpid() or self._guard.poll() is None:
            return None
        return f"the server that was started here has ended with {self._guard.returncode}: {self.last_lines()}"

    def wait(self, timeout_s: float | None = None) -> int:
        """The server's exit code. Raises subprocess.TimeoutExpired."""
        return self._guard.wait(timeout_s)

    def stop(self) -> None:
        """Let it finish its requests and end; after 45 s, kill it. Does nothing in a forked process."""
        if self._owner == os.getpid():
            self.is_stopping = True
            _stop(self._guard, _STOP_S)
            shutil.rmtree(self._folder, ignore_errors=True)  # a guard that was killed has not

    def last_lines(self) -> str:
        return _last_lines(self._log) if self._log is not None else "its log tells why"


@contextlib.contextmanager
def local_server(
    arguments: Sequence[str], on_wait: Callable[[str], None] = lambda text: None, *, shared: bool = False
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """A server on a free port of 127.0.0.1 until the end of the block; or, if `shared`, the one of all callers of this
    user with the same arguments, variables that matter, working folder and cores, on a unix socket.

    Its URL, and a function that returns why no server will come back, or None; of a shared one, that function starts
    another when there is none any more, and never waits for it. `on_wait` is called until the server is ready. Raises
    NotStarted; also when the folder of a shared one is not this user's alone.
    """
    if shared:
        with contextlib.closing(_Shared.of(arguments)) as caller:
            caller.await_ready(on_wait)
            yield f"unix:{caller.path('sock')}", caller.why_gone
        return
    server = LocalServer([*arguments, "--port", "0", "--drain-grace", "0"])
    try:
        yield server.await_ready(float("inf"), on_wait), server.why_gone
    finally:
        server.stop()


def _new_folder(name_length: int) -> str:
    """One that only this user can enter, with a path that leaves room for that of a unix socket."""
    folder = tempfile.mkdtemp(prefix="vecd-")  # mode 0700
    if len(os.fsencode(folder)) + 1 + name_length <= MAX_PATH_BYTES:
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="vecd-", dir="/tmp")


def _spawn(command: Sequence[str], *fds: int) -> "subprocess.Popen[bytes]":
    """A child that gets SIGTERM when this thread ends."""
    me, libc = os.getpid(), ctypes.CDLL(None)

    def end_with_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != me:  # it died before the call above
            os._exit(1)

    # This thread is the only one.
    return subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)  # noqa: PLW1509


def _stop(process: "subprocess.Popen[bytes]", timeout_s: float) -> int:
    """Returns its exit code."""
    if process.poll() is None:
        process.terminate()
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _last_lines(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()


# --- the guard ----------------------------------------------------------------------------------------------


def _guard(parent_pid: int, folder: str, ready_fd: int, command: Sequence[str]) -> int:
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, {*ends, signal.SIGCHLD})
    try:
        server = _spawn(command, ready_fd)
        os.close(ready_fd)  # its end is the server's
        while server.poll() is None and os.getppid() == parent_pid:
            found = signal.sigtimedwait({*ends, signal.SIGCHLD}, _LOOK_S)
            if found is not None and found.si_signo in ends:
                break
        code = _stop(server, _GUARD_STOP_S)
        return code if code >= 0 else 128 - code  # as a shell has it
    except OSError as error:
        print(f"vecd: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- a server that programs share ---------------------------------------------------------------------------
#
#     KEY.lock      each caller holds it shared for as long as it lives; the keeper takes it alone to end
#     KEY.keeper    held by the keeper and inherited by its server: free only when both have ended. Its one byte is what
#                   the last keeper has come to
#     KEY.log       what the server has written
#     KEY.sock      where the server listens
#
# KEY stands for all that a server depends on. Locks are those of open files: a process that is killed lets go of its
# own. What kills a caller with its process group or its descendants does not reach the keeper. If the keeper is killed,
# the server stops; the caller that notices first starts another keeper, on the same socket. Files are removed only by
# one that holds both locks alone: a caller that has locked KEY.lock looks whether it is still there, and begins again
# if not. Others may remove the folder meanwhile, as a log-out does: what is there then belongs to later callers.

_POLL_S = 0.1
_LINGER_S = 5.0
"""From the end of the last caller to that of the server: an array job's next task comes within seconds."""
_KEEPER_START_S = 30.0
_VARIABLES = (
    "VECD_", "HF_", "HUGGING_FACE_", "TRANSFORMERS_", "TORCH_", "PYTORCH_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "OMP_",
    "MKL_", "ONEDNN_", "DNNL_", "ORT_", "LD_", "PYTHONPATH", "XDG_CACHE_HOME", "CACHE_DIRECTORY", "HOME",
)  # fmt: skip
"""Beginnings of the names of variables that a server depends on."""


_STARTING, _READY, _FAILED, _ENDED = b"s", b"r", b"f", b"e"
"""In KEY.keeper."""


def runtime_folder(file_name: str) -> Path:
    """Below the user's own runtime folder, if it has one and a socket's path there may be as long as `file_name`'s."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):  # `su` and `sudo` may leave another user's
        is_own = stat.S_ISDIR((found := os.stat(given)).st_mode) and found.st_uid == os.geteuid()
        if is_own and len(os.fsencode(f"{given}/vecd/{file_name}")) <= MAX_PATH_BYTES:
            return Path(given).absolute() / "vecd"
    return Path(f"/tmp/vecd-{os.geteuid()}")


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Shared:
    """As a program that uses it sees it, which calls `await_ready` once, and `close`; and as its keeper does."""

    def __init__(self, folder: Path, key: str, arguments: Sequence[str]) -> None:
        self._folder, self._key, self._arguments = folder, key, arguments
        self._fd = -1

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Self:
        """Raises NotStarted when the folder cannot be made, or is not this user's alone. Side effects: creates it."""
        facts = {
            "arguments": list(arguments),
            "environment": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
            "folder": os.getcwd(),  # .env, and paths that are relative
            "cores": sorted(os.sched_getaffinity(0)),  # those of one job are not for the work of another
            "program": [sys.executable, __file__, importlib.metadata.version("vecd")],
        }
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        folder = runtime_folder(f"{key}.sock")
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)
            found = folder.lstat()
        except OSError as error:
            raise NotStarted(f"{folder}: no folder for the shared server: {error.strerror}") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise NotStarted(f"{folder} is not a folder of this user alone (chmod 700); or take --no-share-server")
        return cls(folder, key, arguments)

    def path(self, suffix: str) -> Path:
        return self._folder / f"{self._key}.{suffix}"

    def _has_lock(self, fd: int) -> bool:
        """Whether KEY.lock is still the file that `fd` has open."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path("lock")))
        except OSError:
            return False

    def _remove(self, lock_fd: int) -> None:
        """Remove the files, if `lock_fd` can be the only one that locks KEY.lock. For one that holds KEY.keeper."""
        if _try_lock(lock_fd, fcntl.LOCK_EX) and self._has_lock(lock_fd):
            for suffix in ("sock", "log", "keeper", "lock"):
                self.path(suffix).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go. Side effects: removes the files if there is neither a keeper nor another caller."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):  # what is left in a folder that is gone harms no program
            if self._has_lock(self._fd) and (keeper_fd := self._look()[0]) is not None:
                self._remove(self._fd)
                os.close(keeper_fd)
        os.close(self._fd)

    def await_ready(self, on_wait: Callable[[str], None]) -> None:
        """Join the others, and wait for the server, or start it. Raises NotStarted when it does not start."""
        began_at = time.monotonic()
        while not self._join():  # a keeper that ends holds the lock alone
            on_wait(f"waiting for the end of an earlier server, {time.monotonic() - began_at:.0f} s")
            time.sleep(_POLL_S)
        has_waited = False  # for the attempt that the state is of, or has begun it: its failure is this caller's, too
        while True:
            keeper_fd, state = self._look()
            if keeper_fd is not None:
                if state == _FAILED and has_waited:
                    with os.fdopen(keeper_fd):  # the log is that attempt's for as long
                        raise NotStarted(f"the server did not start: {self._log_end()}")
                self._start_keeper(keeper_fd)
            elif state == _READY:
                return
            has_waited |= keeper_fd is not None or state == _STARTING
            said = self._log_end().rpartition("\n")[2]
            on_wait(f"starting a server to share, {time.monotonic() - began_at:.0f} s: {said}")
            time.sleep(_POLL_S)

    def why_gone(self) -> str | None:
        """Why no server will come back, or None. Side effects: starts another one if there is none."""
        lock = self.path("lock")
        if not self._has_lock(self._fd):  # no keeper would see this caller
            return f"{lock} was removed while the shared server was in use; the same command again starts another"
        try:
            keeper_fd, state = self._look()
        except OSError as error:
            return f"the shared server cannot be looked for: {lock.parent}: {error.strerror}"
        if keeper_fd is None:
            return None
        try:
            if state == _FAILED:
                with os.fdopen(keeper_fd):
                    raise NotStarted(self._log_end())
            self._start_keeper(keeper_fd)
        except (NotStarted, OSError) as error:
            return f"the shared server has ended, and could not be started again: {error}"
        return None

    def _join(self) -> bool:
        """Take a share of the lock of callers; False if a keeper has it, or has just removed the file."""
        fd = _open(self.path("lock"))
        if _try_lock(fd, fcntl.LOCK_SH) and self._has_lock(fd):
            self._fd = fd
            return True
        os.close(fd)
        return False

    def _look(self) -> tuple[int | None, bytes]:
        """A descriptor that holds KEY.keeper, or None while a keeper or its server lives, or another caller looks; and
        what is written there."""
        fd = _open(self.path("keeper"))
        is_free, state = _try_lock(fd, fcntl.LOCK_EX), os.pread(fd, 1, 0)
        if is_free:
            return fd, state
        os.close(fd)
        return None, state

    def _start_keeper(self, keeper_fd: int) -> None:
        """Hand the lock over to it. Raises NotStarted."""
        try:
            os.pwrite(keeper_fd, _STARTING, 0)
            with self.path("log").open("wb") as log:
                begun = subprocess.run(
                    [*_THIS, "keeper", str(self._folder), self._key, str(keeper_fd), *self._arguments],
                    pass_fds=[keeper_fd],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    # A job's own folder of temporary files goes with the job, the server may outlive it.
                    env={name: value for name, value in os.environ.items() if name not in ("TMPDIR", *_NOT_OURS)},
                    timeout=_KEEPER_START_S,
                    check=False,
                )
        except subprocess.TimeoutExpired as error:
            raise NotStarted(f"the keeper of the shared server did not start in {_KEEPER_START_S:g} s") from error
        finally:
            os.close(keeper_fd)  # its copy in the keeper holds the lock
        if begun.returncode:
            raise NotStarted(f"the keeper of the shared server did not start: {self._log_end()}")

    def _log_end(self) -> str:
        try:
            with self.path("log").open("rb") as log:
                return _last_lines(log)
        except OSError:
            return ""

    def keep(self, lock_fd: int) -> None:
        """Start a server, and stop it some seconds after the last caller has gone."""
        callers_fd = _open(self.path("lock"))
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        # It may be an earlier server's, whose children are about to end: the new one would not replace it.
        self.path("sock").unlink(missing_ok=True)
        own = ["--uds", str(self.path("sock")), "--ready-fd", str(writer), "--drain-grace", "0"]
        server = _spawn([*VECD, "serve", *self._arguments, *own], writer, lock_fd)
        os.close(writer)
        is_ready, idle_since = False, None
        while server.poll() is None:
            if not is_ready and select.select([reader], [], [], 0)[0] and os.read(reader, 1 << 16):
                is_ready = True
                os.pwrite(lock_fd, _READY, 0)
            if not _try_lock(callers_fd, fcntl.LOCK_EX):
                idle_since = None
            elif time.monotonic() - (idle_since := idle_since or time.monotonic()) < _LINGER_S:
                fcntl.flock(callers_fd, fcntl.LOCK_UN)
            else:  # a caller that comes now waits until the lock's file is gone
                _stop(server, _STOP_S)
                self._remove(callers_fd)
                return
            time.sleep(_POLL_S)
        os.pwrite(lock_fd, _ENDED if is_ready else _FAILED, 0)
        self._remove(callers_fd)


def main(kind: str, *words: str) -> int:
    if kind == "guard":
        parent_pid, folder, ready_fd, *command = words
        return _guard(int(parent_pid), folder, int(ready_fd), command)
    folder, key, lock_fd, *arguments = words
    if os.fork() == 0:  # the caller waits for this process, and the keeper is not its child
        _Shared(Path(folder), key, arguments).keep(int(lock_fd))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
