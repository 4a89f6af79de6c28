"""A machine with systemd as its first process: a container of systemd-nspawn, with vecd in /opt/vecd.

Owns the container's files, which are made once with debootstrap and kept in `build/systemd`, its start and its end.
Each machine has them under a layer in memory, and a network of its own. A test that cannot have one is skipped, and
says why.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tools.size import PRODUCT

PROJECT = Path(__file__).resolve().parents[3]
_ROOT = PROJECT / "build/systemd/root"
_PACKAGES = "systemd,systemd-sysv,dbus,python3,curl,libgomp1,ca-certificates"
_DEBOOTSTRAP_TIMEOUT_S = 600
_BOOT_TIMEOUT_S = 60
_COMMAND_TIMEOUT_S = 180
_PORT = 8000

_VENV = "/opt/vecd/.venv"
_CODE, _SITE = "/opt/vecd/code", "/opt/vecd/site"
_SCRIPT = f"""\
#!{_VENV}/bin/python
import sys
from vecd.__main__ import main
sys.exit(main())
"""


@dataclass
class Machine:
    leader: int
    """The process id of its systemd, out here."""

    def run(self, *command: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root."""
        enter = ["nsenter", "-t", str(self.leader), "-m", "-u", "-i", "-n", "-p", "-C", "--wd=/"]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        return subprocess.run(
            [*enter, "--", *command], capture_output=True, text=True, check=False, timeout=timeout_s, env=environment
        )

    def must(self, *command: str) -> str:
        """The output of a command that succeeds."""
        done = self.run(*command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}\n{self.log()[-5000:]}"
        return done.stdout

    def show(self, name: str, unit: str = "vecd.service") -> str:
        """A property of the service."""
        return self.must("systemctl", "show", "--value", "--property", name, unit).strip()

    @property
    def supervisor(self) -> int:
        """Its process id inside."""
        return int(self.show("MainPID"))

    def pids(self, pattern: str) -> list[int]:
        """Of processes inside whose command line has it, in order of their start."""
        return [int(line) for line in self.run("pgrep", "-f", pattern).stdout.split()]

    def log(self) -> str:
        """The service's."""
        return self.run("journalctl", "-u", "vecd.service", "-o", "short-precise", "--no-pager").stdout

    def write(self, path: str, text: str) -> None:
        self.must("sh", "-c", 'mkdir -p "$(dirname "$1")" && printf %s "$2" > "$1"', "sh", path, text)

    def embed(self, text: str, port: int = _PORT) -> list[float]:
        body = json.dumps({"input": text})
        url = f"http://127.0.0.1:{port}/v1/embeddings"
        answer = self.must("curl", "-sS", "--fail-with-body", "-m", "60", url, "-d", body)
        vector: list[float] = json.loads(answer)["data"][0]["embedding"]
        return vector

    def until(self, command: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> float:
        """Seconds until a line of shell succeeds inside. It is tried every tenth of a second, in there."""
        began_at = time.monotonic()
        self.must("timeout", str(timeout_s), "sh", "-c", f"until {command}; do sleep 0.1; done")
        return time.monotonic() - began_at


@contextmanager
def booted() -> Iterator[Machine]:
    """A machine that runs."""
    root = _files()
    name = f"vecd-{os.getpid()}"
    log = (_ROOT.parent / f"{name}.log").open("wb")
    command = [
        "systemd-nspawn", "-D", str(root), "-b", "-M", name, "--volatile=overlay", "--private-network",
        "--register=no", "--keep-unit", "--console=pipe", "--quiet",
        *(f"--bind-ro={PROJECT / folder}:{_CODE}/{folder}" for folder in (*PRODUCT, "deploy")),
        f"--bind-ro={_site_packages()}:{_SITE}",
    ]  # fmt: skip
    with log, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as nspawn:
        try:
            machine = Machine(_leader(nspawn))
            _until_up(machine)
            _install(machine)
            yield machine
        finally:
            for child in psutil.Process(nspawn.pid).children() if nspawn.poll() is None else []:
                with suppress(psutil.NoSuchProcess):
                    child.kill()  # its first process, and with it all others
            try:
                nspawn.wait(30)
            except subprocess.TimeoutExpired:
                nspawn.kill()
    Path(log.name).unlink()


def _files() -> Path:
    """The folder of the container's files; made when there is none."""
    if os.geteuid() != 0:
        pytest.skip("only root may start a container")
    if shutil.which("systemd-nspawn") is None:
        pytest.skip("systemd-nspawn is not installed (package systemd-container)")
    if not _ROOT.exists():
        _debootstrap()
    found = [path.name for path in (_ROOT / "usr/lib").glob("python3.[0-9]*")]
    if found != [_version()]:
        pytest.skip(f"the container has {', '.join(found) or 'no Python'}, and the tests run in {_version()}")
    return _ROOT


def _debootstrap() -> None:
    if shutil.which("debootstrap") is None:
        pytest.skip("debootstrap is not installed")
    half_done = _ROOT.with_name(f"root.{os.getpid()}")
    command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(half_done)]
    half_done.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_DEBOOTSTRAP_TIMEOUT_S
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"debootstrap failed: {done.stdout[-300:]}")
        half_done.rename(_ROOT)
    finally:
        shutil.rmtree(half_done, ignore_errors=True)


def _version() -> str:
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def _site_packages() -> Path:
    return Path(sys.prefix) / "lib" / _version() / "site-packages"


def _leader(nspawn: "subprocess.Popen[bytes]") -> int:
    deadline = time.monotonic() + _BOOT_TIMEOUT_S
    while time.monotonic() < deadline:
        if nspawn.poll() is not None:
            pytest.skip("this machine does not let systemd-nspawn start a container")
        for child in psutil.Process(nspawn.pid).children():
            with suppress(psutil.NoSuchProcess):
                if child.name() == "systemd":  # before it, nspawn has children of its own
                    return child.pid
        time.sleep(0.05)
    pytest.skip("systemd-nspawn started no container")


def _until_up(machine: Machine) -> None:
    deadline = time.monotonic() + _BOOT_TIMEOUT_S
    state = ""
    while time.monotonic() < deadline:
        state = machine.run("systemctl", "is-system-running").stdout.strip()
        if state in ("running", "degraded"):
            return
        time.sleep(0.2)
    raise AssertionError(f"the container's systemd is {state!r}, and not running")


def _install(machine: Machine) -> None:
    """A virtual environment whose packages are those of the tests, and vecd's command in it."""
    packages = f"{_VENV}/lib/{_version()}/site-packages"
    machine.must("mkdir", "-p", packages, f"{_VENV}/bin")
    machine.must("ln", "-s", "/usr/bin/python3", f"{_VENV}/bin/python")
    machine.write(f"{_VENV}/pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\n")
    machine.write(f"{packages}/vecd.pth", f"{_CODE}\n{_SITE}\n")
    machine.write(f"{_VENV}/bin/vecd", _SCRIPT)
    machine.must("chmod", "755", f"{_VENV}/bin/vecd")
