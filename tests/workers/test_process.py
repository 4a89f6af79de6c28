"""What a worker asks of the kernel. Asked in processes of their own, because the answers would stay with pytest."""

import os
import subprocess
import sys
import threading

from workers.process import num_threads, private_memory_mb

_LIVE_WITH_PARENT = """
import os, sys
from shm.arena import ArenaSpec
from shm.card import ModelCard
from shm.control import Channel
from shm.wire import Incarnation
from workers import main
from workers.config import WorkerConfig
card = ModelCard("", "", "bert", 4, 4, 4, 4, ("mean",), (), False, "")
config = WorkerConfig(card, ArenaSpec(1, 1, 4), "weightless", "cpu", "float32", 1, "info", "")
ours, theirs = Channel.pair()
code = main.run(config, Incarnation(0, 1), theirs, -1, -1, parent_pid=os.getppid() + int(sys.argv[1]))
os._exit(code)
"""


def exit_code(code: str, *arguments: str) -> int:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=60, check=False).returncode


def test_a_worker_whose_parent_is_gone_does_not_begin() -> None:
    assert exit_code(_LIVE_WITH_PARENT, "1") == 0
    assert exit_code(_LIVE_WITH_PARENT, "0") == 70, "with its parent it goes on, to the arena that is none"


def test_a_process_dies_with_its_parent() -> None:
    code = (
        "import os, signal, sys, time\n"
        "from workers.process import die_with_parent\n"
        "readable, writable = os.pipe()\n"
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    assert die_with_parent(parent)\n"
        "    os.close(readable); os.write(writable, b'x')\n"
        "    signal.pause()\n"
        "os.read(readable, 1); os.kill(parent, signal.SIGKILL)\n"
    )
    # Both hold the pipe to us: its end is the end of both.
    process = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60, check=False)
    assert process.returncode == -9


def test_threads_are_counted() -> None:
    before = num_threads()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert num_threads() == before + 1
    stop.set()
    thread.join()


def test_private_memory_grows_with_what_is_written() -> None:
    before = private_memory_mb()
    written = bytearray(os.urandom(1)) * (64 * 2**20)
    assert private_memory_mb() - before >= 60
    assert len(written) == 64 * 2**20
