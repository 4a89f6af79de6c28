"""Processes that the supervisor waits for while it plans end with it."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.serving import clean_environment, eventually, is_alive
from vecd.base.programs import start_child
from vecd.shm.control import Channel, JobOrder

_RUN = "from vecd.launch.config.plan import _fetch; _fetch('org/name', '', '', print)"


def test_a_download_ends_with_the_supervisor(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # it takes connections, and never answers
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        env = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        supervisor = subprocess.Popen(
            [sys.executable, "-c", _RUN], stdout=subprocess.DEVNULL, env=clean_environment(tmp_path, env)
        )
        hub.settimeout(60)
        connection, _ = hub.accept()
        [child] = psutil.Process(supervisor.pid).children()
        supervisor.kill()
        supervisor.wait()
        eventually(lambda: not is_alive(child))
        connection.close()


def test_one_whose_supervisor_is_gone_does_not_begin(capfd: pytest.CaptureFixture[str]) -> None:
    process, ours = start_child("fetch")
    channel = Channel(ours)
    channel.send(JobOrder({"model": "org/name", "revision": ""}, parent_pid=1))
    assert (process.wait(60), channel.receive(60), capfd.readouterr()) == (0, None, ("", ""))
    channel.close()
