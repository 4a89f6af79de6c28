"""Whoever starts vecd may have closed descriptors 0, 1 and 2: what the server opens must not get their numbers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.serving import running_server

_IN_PYTHON = """
import os, vecd
os.closerange(0, 3)
with vecd.Server(engine="dummy", workers=1) as server:
    os._exit(0 if len(server.embed(["a text"])) == 1 else 1)
"""


def test_a_server_whose_streams_are_closed_serves_and_ends_in_good_order() -> None:
    flags = ("--engine", "dummy", "--workers", "1", "--log-level", "debug")
    with running_server(*flags, command=("sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-')) as server:
        for _ in range(3):
            assert len(server.embed(["a text", "another"])) == 2
        for process in server.processes():
            for fd in range(3):
                assert Path(f"/proc/{process.pid}/fd/{fd}").exists(), (process.cmdline(), fd)


def test_the_sdk_starts_its_server_where_the_streams_are_closed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = ["timeout", "60", sys.executable, "-c", _IN_PYTHON]
    assert subprocess.run(command, env=environment, check=False).returncode == 0


@pytest.mark.parametrize("command", ["bench --help", "embed - -o out", "--version"])
def test_a_command_whose_streams_are_all_closed_ends_as_ever(command: str, tmp_path: Path) -> None:
    words = f"{sys.executable} -m vecd {command} <&- >&- 2>&-"
    code = subprocess.run(words, shell=True, cwd=tmp_path, timeout=60, check=False).returncode
    assert code == (2 if "embed" in command else 0)
