"""Processes that the supervisor waits for while it plans end with it."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.serving import clean_environment, eventually


def test_a_download_ends_with_the_supervisor(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "vecd.launch.child", "fetch", "org/name", "", "1"]
    with socket.create_server(("127.0.0.1", 0)) as hub:  # it takes connections, and never answers
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        env = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        supervisor = subprocess.Popen(
            [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *command],
            stdout=subprocess.DEVNULL,
            env=clean_environment(tmp_path, env),
        )
        hub.settimeout(60)
        connection, _ = hub.accept()
        [child] = psutil.Process(supervisor.pid).children()
        supervisor.kill()
        supervisor.wait()
        eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        connection.close()
