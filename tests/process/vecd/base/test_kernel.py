"""What processes ask of the kernel. Asked in processes of their own, because the answers would stay with pytest."""

import resource
import signal
import subprocess
import sys
import time

import pytest

_LIVE_WITH_PARENT = """
import os, sys
from vecd.base.files import dump
from vecd.shm.arena import ArenaSpec
from vecd.model.card import ModelCard
from vecd.shm.control import Channel, ForkWorker
from vecd.shm.wire import Incarnation
from vecd.workers.process import worker
from vecd.workers.config import WorkerConfig
card = ModelCard("", "", "bert", 4, 4, 4, 4, ("mean",), (), False, "")
config = WorkerConfig(card=card, arena=ArenaSpec(1, 1, 4), engine="dummy", device="cpu", dtype="float32", num_threads=1)
ours, theirs = Channel.pair()
parents = os.getppid() + int(sys.argv[1]), 1
code = worker.run(ForkWorker(Incarnation(0, 1), dump(config)), theirs, -1, [], parents, engine=None)
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
        "from vecd.base.kernel import die_with_parent\n"
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


# --- crashes ----------------------------------------------------------------------------------------------------

_CAREFUL = "import os, sys; from vecd.base.kernel import leave_no_core, trace_crashes; leave_no_core()"
_IN_A_LIBRARY = """
import numpy
matrix = numpy.random.default_rng(0).standard_normal((6000, 6000))
def hang(secret):
    print("about to", flush=True)
    numpy.linalg.svd(matrix)
"""
_IN_PYTHON = """
def hang(secret):
    print("about to", flush=True)
    while True:
        pass
"""
_IN_THE_KERNEL = """
import time
def hang(secret):
    print("about to", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("hanging", [_IN_A_LIBRARY, _IN_PYTHON, _IN_THE_KERNEL])
def test_whoever_hangs_says_on_sigabrt_where_and_nothing_more(hanging: str) -> None:
    code = f"{_CAREFUL}\n{hanging}\ntrace_crashes()\nhang('a secret value')"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "about to\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGABRT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in said
    assert "in hang" in said
    assert "secret value" not in said


def test_no_core_is_left_even_to_a_program_that_collects_them() -> None:
    """1 is what the kernel takes for that; where the limit was 0 already, it cannot be raised."""
    code = (
        f"{_CAREFUL}; import resource; before = int(sys.argv[1]); found = resource.getrlimit(resource.RLIMIT_CORE)\n"
        "sys.exit(found != (before, before))"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    assert exit_code(code, "0" if hard == 0 else "1") == 0


def test_without_stderr_nothing_is_said() -> None:
    assert exit_code(f"{_CAREFUL}; sys.stderr = None; trace_crashes(); os.abort()") == -signal.SIGABRT


_OUTLIVING = f"""
{_CAREFUL}
import ctypes
from vecd.base.kernel import FAULTS, outlive_sent_faults
trace_crashes()  # as the fork server has done
outlive_sent_faults()
trace_crashes()
for _ in range(int(sys.argv[1])):
    for number in FAULTS:
        os.kill(os.getpid(), number)
print("lives", file=sys.stderr)
ctypes.string_at(0)
"""


@pytest.mark.parametrize("num_sent", [0, 3])
def test_only_a_fault_of_its_own_ends_a_process_that_outlives_those_that_are_sent(num_sent: int) -> None:
    command = [sys.executable, "-c", _OUTLIVING, str(num_sent)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == -signal.SIGSEGV
    before, _, after = process.stderr.partition("lives\n")
    assert before.count("Fatal Python error") == (4 if num_sent else 0), "the first of each is traced"
    assert ("Fatal Python error: Segmentation fault" in after) == (not num_sent)


# --- orphans ----------------------------------------------------------------------------------------------------

_ADOPT = """
import os, signal, sys, time
from vecd.base.kernel import adopt_orphans, reap_strangers
adopt_orphans()
mine = os.fork()
if mine == 0:
    os._exit(7)
readable, writable = os.pipe()
middle = os.fork()
if middle == 0:
    child = os.fork()
    if child == 0:
        time.sleep(0.2)
        os._exit(3)
    os.write(writable, str(child).encode())
    os._exit(0)
child = int(os.read(readable, 20))
assert os.waitpid(middle, 0) == (middle, 0)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
os.waitid(os.P_PID, mine, os.WEXITED | os.WNOWAIT)
assert reap_strangers(lambda pid: pid == mine or pid == child) == 0
first = reap_strangers(lambda pid: pid == mine)
assert os.waitstatus_to_exitcode(os.waitpid(mine, 0)[1]) == 7, "what is known is left for whoever waits for it"
assert first + reap_strangers(lambda pid: False) == 1
try:
    os.waitpid(child, os.WNOHANG)
except ChildProcessError:
    sys.exit(42)
"""


def test_strangers_are_reaped_and_nobody_else() -> None:
    assert exit_code(_ADOPT) == 42
