"""A virtual environment for each peer that is installed with pip, made once and kept.

Owns the folders under `.bench/` and what is in them. Never touches the environment that it runs in: peers pin versions
that vecd does not want. Called by `benchmarks.recipes`.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
_FOLDER = Path(__file__).parents[1] / ".bench"
_STAMP = "requirements.sha256"
_TIMEOUT_S = 1800.0
"""A wheel of torch on a slow line."""
_WITH_FOLDERS = re.compile(r"\S*[/\\]\S*")


class NotInstalled(Exception):
    """Raised when pip fails. One line, without the names of hosts or folders."""


def prepare(name: str, folder: Path = _FOLDER) -> Path:
    """The folder of commands of `name`'s environment, installed if it is not there yet.

    Side effect: an environment that was made from other requirements, or by another Python, is made anew. Raises
    NotInstalled; then nothing of it is left.
    """
    requirements = REQUIREMENTS / f"{name}.txt"
    environment = folder / name
    if not is_prepared(name, folder):
        print(f"installing {name} ({requirements.name}) …", file=sys.stderr, flush=True)
        try:
            _run([sys.executable, "-m", "venv", "--clear", str(environment)])
            pip = [str(environment / "bin" / "python"), "-m", "pip", "--quiet", "--no-input"]
            _run([*pip, "install", "--requirement", str(requirements)])
        except NotInstalled:
            shutil.rmtree(environment, ignore_errors=True)
            raise
        (environment / _STAMP).write_text(_digest(requirements))
    return environment / "bin"


def is_prepared(name: str, folder: Path = _FOLDER) -> bool:
    """Whether `prepare` would find everything there."""
    stamp = folder / name / _STAMP
    return stamp.is_file() and stamp.read_text() == _digest(REQUIREMENTS / f"{name}.txt")


def pinned_version(name: str, package: str) -> str:
    """Of `package` in `name`'s requirements."""
    found = re.search(rf"^{re.escape(package)}==(\S+)$", (REQUIREMENTS / f"{name}.txt").read_text(), re.MULTILINE)
    return found[1] if found else "?"


def why_failed(output: str) -> str:
    """pip's last error in one line that can be published: it often names hosts and folders."""
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")]
    line = errors[-1] if errors else "pip failed without an error"
    return _WITH_FOLDERS.sub("…", line.removeprefix("ERROR:").strip())[:200]


def _digest(requirements: Path) -> str:
    return hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()


def _run(command: list[str]) -> None:
    # With a PYTHONPATH, pip takes what it finds there for installed (seen with `packaging`), and the server misses it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment)
    except subprocess.CalledProcessError as error:
        raise NotInstalled(why_failed(error.stderr)) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{type(error).__name__} while installing") from error
