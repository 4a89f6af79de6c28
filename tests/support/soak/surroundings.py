"""Surroundings to start a server in: full disks, limits, clocks. Each is the beginning of a command line.

Owns what is made for them and takes it away again. A surrounding that this machine does not allow skips its test, and
says why.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_CGROUPS = Path("/sys/fs/cgroup")
_numbers = itertools.count()


def with_mounts(script: str) -> list[str]:
    """In a mount namespace of its own, after a line of shell has been run in it."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a mount namespace")
    return ["unshare", "-m", "sh", "-c", f'{script} && exec "$@"', "sh"]


def with_limits(**limits: int) -> list[str]:
    """Under resource limits, soft and hard, named as prlimit names them."""
    return ["prlimit", *(f"--{name}={value}:{value}" for name, value in limits.items())]


def without_variables(*names: str) -> list[str]:
    return ["env", *itertools.chain.from_iterable(("-u", name) for name in names)]


def as_nobody() -> list[str]:
    """As a user that has no entry, no home and no rights."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    command = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    tried = [*command, "env", sys.executable, "-c", "import vecd.supervisor"]
    if subprocess.run(tried, capture_output=True, check=False).returncode:
        pytest.skip("this interpreter, or the code, is not for others to run")
    return command


class Cgroup:
    """A control group of version 1, with one controller."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def command(self) -> list[str]:
        """What follows is run in it."""
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh"]

    def write(self, name: str, value: int | str) -> None:
        (self.path / name).write_text(str(value))

    def read(self, name: str) -> str:
        return (self.path / name).read_text()

    def used_bytes(self) -> int:
        """Of a group of memory: what cannot be given back."""
        lines = (line.partition(" ") for line in self.read("memory.stat").splitlines())
        numbers = {key: int(value) for key, _, value in lines}
        return numbers["rss"] + numbers.get("mapped_file", 0)


@contextmanager
def cgroup(controller: str) -> Iterator[Cgroup]:
    path = _CGROUPS / controller / f"vecd-trial-{os.getpid()}-{next(_numbers)}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error.strerror}")
    try:
        yield Cgroup(path)
    finally:
        with suppress(OSError):  # whoever is still in it is the test's failure already
            path.rmdir()


def with_clock(offset_file: Path) -> dict[str, str]:
    """The environment with a clock whose offset stands in a file, and may be changed there at any time; the monotonic
    clock goes on."""
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not libraries:
        pytest.skip("libfaketime is not installed")
    return {
        "LD_PRELOAD": str(libraries[0]),
        "FAKETIME_TIMESTAMP_FILE": str(offset_file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }
