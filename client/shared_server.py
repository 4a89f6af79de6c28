"""One `vecd serve` for all programs of a user on this host that want the same server, as long as there are any.

Owns the folder that they meet in, its locks, and the keeper: a small process that starts the server and stops it some
seconds after the last of them has gone. Sends no request. Called by `vecd.client.bulk.command`; the keeper is
`python -m vecd.client.shared_server`, started by the first caller and by the one that finds it dead.

    KEY.lock      each caller holds it shared for as long as it lives; the keeper takes it alone to end
    KEY.keeper    held by the keeper and inherited by its server: free only when both have ended
    KEY.json      what the keeper has come to: starting, ready, failed or ended
    KEY.log       what the server has written
    KEY.sock      where the server listens

KEY stands for all that a server depends on. Locks are those of open files, so a process that is killed lets go of its
own, and no process has to be there to notice. The keeper has a session of its own and is no child of the caller: what
kills a caller with its process group or its descendants does not reach it. If the keeper is killed, the server stops,
as its parent has died; whoever notices first then starts another keeper, on the same socket. Files are removed only by
one that holds both locks alone, so nobody can wait for a file that is no longer in the folder: whoever has locked
KEY.lock looks whether it is still there, and begins again if not. Others may remove the folder meanwhile, as a log-out
does with the user's runtime folder: what is there then belongs to later callers, and is left to them.
"""

import fcntl
import hashlib
import importlib.metadata
import os
import secrets
import select
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import orjson

from vecd.client.bulk.errors import EmbedError
from vecd.client.bulk.server_process import last_lines, spawn_server, stop_server

_POLL_S = 0.1
_LINGER_S = 5.0
"""From the end of the last caller to that of the server: an array job's next task comes within seconds."""
_KEEPER_START_S = 30.0
_MAX_PATH_BYTES = 107
# Source: unix(7), sun_path.
_VARIABLES = (
    "VECD_", "HF_", "HUGGING_FACE_", "TRANSFORMERS_", "TORCH_", "PYTORCH_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "OMP_",
    "MKL_", "ONEDNN_", "DNNL_", "ORT_", "LD_", "PYTHONPATH", "XDG_CACHE_HOME", "CACHE_DIRECTORY", "HOME",
)  # fmt: skip
"""Beginnings of the names of variables that a server depends on."""


@contextmanager
def shared_server(
    model: str | None, flags: Sequence[str], on_wait: Callable[[str], None]
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """The server of all callers of this user on this host with the same model and flags, variables of the environment
    that matter, working folder and processor cores. It is started if there is none.

    "unix:" and its socket's path, and a function that returns why no server will come back, or None. That function
    starts another server when there is none any more, and never waits for it. `on_wait` is called until the server is
    ready. Raises EmbedError when the server does not start, or its folder is not this user's alone.
    """
    arguments = [*([model] if model else []), *flags]
    files = _Files.of(arguments)
    with _Caller(files, arguments) as caller:
        caller.await_ready(on_wait)
        yield f"unix:{files.path('sock')}", caller.why_gone


@dataclass(frozen=True, slots=True)
class _State:
    """Of one attempt to keep a server. In KEY.json."""

    attempt: str
    name: str
    """starting, ready, failed or ended."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one server."""

    folder: Path
    key: str

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Self:
        """Raises EmbedError when the folder cannot be made, or is not this user's alone. Side effects: creates it."""
        facts = {
            "arguments": list(arguments),
            "environment": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
            "folder": os.getcwd(),  # .env, and paths that are relative
            "cores": sorted(os.sched_getaffinity(0)),  # those of one job are not for the work of another
            "program": [sys.executable, __file__, importlib.metadata.version("vecd")],
        }
        key = hashlib.sha256(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
        folder = _runtime_folder(f"{key}.sock")
        try:
            with suppress(FileExistsError):
                folder.mkdir(0o700)
            found = folder.lstat()
        except OSError as error:
            raise EmbedError(f"{folder}: no folder for the shared server: {error.strerror}") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise EmbedError(f"{folder} is not a folder of this user alone (chmod 700); or take --no-share-server")
        return cls(folder, key)

    def path(self, suffix: str) -> Path:
        return self.folder / f"{self.key}.{suffix}"

    def read_state(self) -> _State | None:
        try:
            return _State(**orjson.loads(self.path("json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def write_state(self, state: _State) -> None:
        """To be called by one that holds KEY.keeper."""
        draft = self.path("new")
        draft.write_bytes(orjson.dumps(asdict(state)))
        draft.rename(self.path("json"))

    def has(self, suffix: str, fd: int) -> bool:
        """Whether the file is still the one that `fd` has open."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path(suffix)))
        except OSError:
            return False

    def remove(self) -> None:
        """To be called by one that holds both locks alone."""
        for suffix in ("sock", "json", "new", "log", "keeper", "lock"):
            self.path(suffix).unlink(missing_ok=True)


def _runtime_folder(file_name: str) -> Path:
    """Below the user's own runtime folder, if it has one and a socket's path there may be as long as `file_name`'s."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    with suppress(OSError):  # `su` and `sudo` may leave another user's
        is_own = stat.S_ISDIR((found := os.stat(given)).st_mode) and found.st_uid == os.geteuid()
        if is_own and len(os.fsencode(f"{given}/vecd/{file_name}")) <= _MAX_PATH_BYTES:
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


# --- a caller -----------------------------------------------------------------------------------------------


class _Caller:
    """One program that uses the server. `await_ready` once; to be closed by `with`."""

    def __init__(self, files: _Files, arguments: Sequence[str]) -> None:
        self._files = files
        self._arguments = arguments
        self._seen: set[str] = set()
        """Attempts that this caller has begun or waited for: their failure is its own."""
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Let go. Side effects: removes the files if there is neither a keeper nor another caller."""
        if self._fd < 0:
            return
        with suppress(OSError):  # what is left in a folder that is gone harms nobody
            if self._files.has("lock", self._fd) and (keeper_fd := self._take_keeper_lock()) is not None:
                if _try_lock(self._fd, fcntl.LOCK_EX) and self._files.has("lock", self._fd):
                    self._files.remove()
                os.close(keeper_fd)
        os.close(self._fd)

    def await_ready(self, on_wait: Callable[[str], None]) -> None:
        """Join the others, and wait for the server, or start it. Raises EmbedError when it does not start."""
        began_at = time.monotonic()
        while not self._join():  # a keeper that ends holds the lock alone
            on_wait(f"waiting for the end of an earlier server, {time.monotonic() - began_at:.0f} s")
            time.sleep(_POLL_S)
        while True:
            state = self._files.read_state()
            if state is not None and state.name == "starting":
                self._seen.add(state.attempt)
            keeper_fd = self._take_keeper_lock()
            if keeper_fd is not None:
                if state is not None and state.name == "failed" and state.attempt in self._seen:
                    os.close(keeper_fd)
                    raise EmbedError(f"the server did not start: {state.why}")
                self._start_keeper(keeper_fd)
            elif state is not None and state.name == "ready":
                return
            said = self._log_end().rpartition("\n")[2]
            on_wait(f"starting a server to share, {time.monotonic() - began_at:.0f} s: {said}")
            time.sleep(_POLL_S)

    def why_gone(self) -> str | None:
        """Why no server will come back, or None. Side effects: starts another one if there is none."""
        lock = self._files.path("lock")
        if not self._files.has("lock", self._fd):  # no keeper would see this caller
            return f"{lock} was removed while the shared server was in use; the same command again starts another"
        try:
            keeper_fd = self._take_keeper_lock()
        except OSError as error:
            return f"the shared server cannot be looked for: {lock.parent}: {error.strerror}"
        if keeper_fd is None:
            return None
        state = self._files.read_state()
        if state is not None and state.name == "failed":
            os.close(keeper_fd)
            return f"the shared server has ended, and could not be started again: {state.why}"
        try:
            self._start_keeper(keeper_fd)
        except (EmbedError, OSError) as error:
            return f"the shared server has ended, and could not be started again: {error}"
        return None

    def _join(self) -> bool:
        """Take a share of the lock of callers; False if a keeper has it, or has just removed the file."""
        fd = _open(self._files.path("lock"))
        try:
            if _try_lock(fd, fcntl.LOCK_SH) and self._files.has("lock", fd):
                self._fd, fd = fd, -1
                return True
        finally:
            if fd >= 0:
                os.close(fd)
        return False

    def _take_keeper_lock(self) -> int | None:
        """A descriptor that holds it; None while a keeper or its server lives, or another caller looks."""
        fd = _open(self._files.path("keeper"))
        if _try_lock(fd, fcntl.LOCK_EX):
            return fd
        os.close(fd)
        return None

    def _start_keeper(self, keeper_fd: int) -> None:
        """Hand the lock over to a new keeper. Raises EmbedError when that does not start."""
        attempt = secrets.token_hex(8)
        self._seen.add(attempt)
        files = self._files
        # As `launch/base/programs.py` writes it.
        command = [sys.executable, "-P", "-m", "vecd.client.shared_server"]
        # A job's own folder of temporary files goes with the job, the server may outlive it.
        environment = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
        try:
            files.write_state(_State(attempt, "starting"))
            with files.path("log").open("wb") as log:
                begun = subprocess.run(
                    [*command, str(files.folder), files.key, attempt, str(keeper_fd), *self._arguments],
                    pass_fds=[keeper_fd],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=environment,
                    timeout=_KEEPER_START_S,
                    check=False,
                )
        except subprocess.TimeoutExpired as error:
            raise EmbedError(f"the keeper of the shared server did not start in {_KEEPER_START_S:g} s") from error
        finally:
            os.close(keeper_fd)  # its copy in the keeper holds the lock
        if begun.returncode:
            raise EmbedError(f"the keeper of the shared server did not start: {self._log_end()}")

    def _log_end(self) -> str:
        try:
            with self._files.path("log").open("rb") as log:
                return last_lines(log)
        except OSError:
            return ""


# --- the keeper ---------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Keep a server, as FOLDER KEY ATTEMPT LOCK_FD ARGUMENTS… say. Returns the exit code."""
    folder, key, attempt, lock_fd, *arguments = argv
    if os.fork():  # the caller waits for this process, and the keeper is not its child
        return 0
    return _keep(_Files(Path(folder), key), attempt, int(lock_fd), arguments)


def _keep(files: _Files, attempt: str, lock_fd: int, arguments: Sequence[str]) -> int:
    """Start a server, and stop it some seconds after the last caller has gone. Returns the exit code."""
    callers_fd = _open(files.path("lock"))

    def tell(name: str, why: str = "") -> None:
        if files.has("keeper", lock_fd):
            files.write_state(_State(attempt, name, why))

    reader, writer = os.pipe()
    # It may be an earlier server's, whose children are about to end: the new one would not replace it.
    files.path("sock").unlink(missing_ok=True)
    with files.path("log").open("r+b", buffering=0) as log:
        process = spawn_server([*arguments, "--uds", str(files.path("sock"))], log, writer, lock_fd)
        os.close(writer)
        is_ready, idle_since = False, None
        while process.poll() is None:
            if not is_ready and select.select([reader], [], [], 0)[0] and os.read(reader, 1 << 16):
                is_ready = True
                tell("ready")
            if not _try_lock(callers_fd, fcntl.LOCK_EX):
                idle_since = None
            elif time.monotonic() - (idle_since := idle_since or time.monotonic()) < _LINGER_S:
                fcntl.flock(callers_fd, fcntl.LOCK_UN)
            else:  # who comes now waits until the lock's file is gone
                stop_server(process)
                if files.has("lock", callers_fd):
                    files.remove()
                return 0
            time.sleep(_POLL_S)
        tell("ended" if is_ready else "failed", last_lines(log))
    if _try_lock(callers_fd, fcntl.LOCK_EX) and files.has("lock", callers_fd):
        files.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
