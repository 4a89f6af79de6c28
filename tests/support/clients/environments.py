"""An environment for each group of client libraries that go together: made once from exact pins, and kept.

Owns the folders in `build/clients`, or wherever VECD_TEST_ENVIRONMENTS says. What is pinned stands in `environments/`:
a file for pip, or a folder for npm. Never touches the environment that it runs in. Called by `driving`.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from benchmarks.environments import why_failed
from tests.support.serving import cache_folder

PINS = Path(__file__).parent / "environments"
SMALL = frozenset({"openai-1", "openai-2"})
"""A quarter of a minute each to install: where VECD_CLIENTS is "small" or "all"."""
LARGE = frozenset({"agents", "frameworks", "litellm", "mteb", "node-24", "open-webui", "rankers", "stores"})
"""Hundreds of megabytes each, or a minute to install: only where it is "all", as `make test-clients` sets it."""
WITH_TORCH = frozenset({"mteb"})
"""Find the packages of the tests behind their own, because another torch would be another gigabyte."""
INSTALL_TIMEOUT_S = 900.0 if os.environ.get("VECD_CLIENTS") else 180.0
_STAMP = "installed"
_NPM_FLAGS = (
    *("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"),
    *("--fetch-retries=1", "--fetch-timeout=60000"),  # milliseconds
)


class Unavailable(Exception):
    """Raised when an environment cannot be had here. One line: why."""


def prepare(name: str) -> Path:
    """The folder of an environment, installed if it is not there yet.

    Other processes that want the same one wait. Raises Unavailable; then nothing of it is left, and it is not tried
    again in this run.
    """
    wanted = os.environ.get("VECD_CLIENTS", "")
    if (name in LARGE and wanted != "all") or (name in SMALL and wanted not in ("small", "all")):
        size = "all" if name in LARGE else "small"
        raise Unavailable(f"make test-clients, or VECD_CLIENTS={size}, installs the environment '{name}'")
    folder = _root() / f"{name}-{_digest(name)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    failure = Path(cache_folder(), f"environment-{name}.failed")
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if failure.exists():
            raise Unavailable(failure.read_text())
        if not (folder / _STAMP).exists():
            shutil.rmtree(folder, ignore_errors=True)
            try:
                _install(name, folder)
            except Unavailable as error:
                shutil.rmtree(folder, ignore_errors=True)
                failure.write_text(str(error))
                raise
            (folder / _STAMP).touch()
    return folder


def is_node(name: str) -> bool:
    return (PINS / name / "package.json").exists()


def command(name: str, folder: Path) -> list[str]:
    """What runs a script in a prepared environment. An environment for npm may have a node of its own."""
    if not is_node(name):
        return [str(folder / "bin" / "python")]
    own = folder / "node_modules" / ".bin" / "node"
    return [str(own) if own.exists() else _found("node")]


def _install(name: str, folder: Path) -> None:
    if is_node(name):
        folder.mkdir()
        for file in ("package.json", "package-lock.json"):
            shutil.copy(PINS / name / file, folder)
        _run(name, [_found("npm"), "ci", *_NPM_FLAGS], folder)
        return
    # Without a pip of its own, which takes longer to unpack than most of the clients.
    _run(name, [sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--quiet", "--no-input"]
    # What is imported is compiled by the first import: a third of what pip would compile. Pins are complete, and leave
    # out what a library declares but embeddings do not import.
    flags = ["--no-compile", "--no-deps", "--retries", "1", "--requirement", str(PINS / f"{name}.txt")]
    _run(name, [*pip, "install", *flags], folder)
    if name in WITH_TORCH:
        [packages] = (folder / "lib").glob("python*/site-packages")
        (packages / "torch.pth").write_text(_torch_folder() + "\n")


def _torch_folder() -> str:
    """The folder of packages that has the torch of the tests."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise Unavailable("the tests have no torch")
    return str(Path(spec.origin).parents[1])


def _run(name: str, command: list[str], folder: Path) -> None:
    # With a PYTHONPATH, pip takes what it finds there for installed.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    try:
        subprocess.run(
            command, cwd=folder, env=environment, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"'{name}' was not installed: {_last_error(error.stderr)}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"'{name}' was not installed: {_why_not_run(error)}") from error


def _last_error(output: str) -> str:
    """Of pip or npm, in one line."""
    of_npm = [line for line in output.splitlines() if line.startswith("npm error")]
    return "; ".join(of_npm[:2]) if of_npm else why_failed(output)


def _why_not_run(error: Exception) -> str:
    return f"not within {INSTALL_TIMEOUT_S:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else repr(error)


@cache
def _found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise Unavailable(f"'{program}' is not on the PATH")
    return path


def _digest(name: str) -> str:
    """Of all that an environment is made from: its pins, and who runs it."""
    if is_node(name):
        version = subprocess.run([_found("node"), "--version"], capture_output=True, check=True, timeout=60).stdout
        return _hash((PINS / name / "package-lock.json").read_bytes() + version)
    behind = _torch_folder() if name in WITH_TORCH else ""
    return _hash((PINS / f"{name}.txt").read_bytes() + sys.version.encode() + behind.encode())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _root() -> Path:
    named = os.environ.get("VECD_TEST_ENVIRONMENTS")
    return Path(named) if named else Path(__file__).parents[3] / "build" / "clients"
