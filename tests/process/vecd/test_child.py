"""Processes that the supervisor waits for while it plans end with it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.serving import clean_environment, eventually, is_alive
from vecd.base.failures import EXIT_COULD_NOT_START

_RUN = "import os, subprocess, sys; subprocess.run([*sys.argv[1:], str(os.getpid()), '1'])"


def test_a_download_ends_with_the_supervisor(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "vecd.child", "fetch", "org/name", ""]
    with socket.create_server(("127.0.0.1", 0)) as hub:  # it takes connections, and never answers
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        env = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        supervisor = subprocess.Popen(
            [sys.executable, "-c", _RUN, *command], stdout=subprocess.DEVNULL, env=clean_environment(tmp_path, env)
        )
        hub.settimeout(60)
        connection, _ = hub.accept()
        [child] = psutil.Process(supervisor.pid).children()
        supervisor.kill()
        supervisor.wait()
        eventually(lambda: not is_alive(child))
        connection.close()


def test_one_whose_supervisor_is_gone_does_not_begin(tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    command = [sys.executable, "-P", "-m", "vecd.child", "fetch", "org/name", "", str(os.getppid())]
    with answer.open("wb") as file:
        done = subprocess.run(
            [*command, str(file.fileno())], pass_fds=[file.fileno()], timeout=60, check=False, capture_output=True
        )
    assert (done.returncode, done.stderr, answer.read_bytes()) == (EXIT_COULD_NOT_START, b"", b"")
