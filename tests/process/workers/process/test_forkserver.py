"""Real processes: a fork server, its workers, and every way in which one of them can end."""

import ctypes
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from tests.process.workers.process.test_zygote import PR_SET_CHILD_SUBREAPER, failing_once
from tests.support.checkpoints import worker_config
from tests.support.workers import BATCH, DIM, DUMMY, as_message
from vecd.base import programs
from vecd.base.files import dump
from vecd.base.kernel import FAULTS, adopt_orphans
from vecd.base.tasks import NoTasks
from vecd.model.card import ModelError
from vecd.shm.arena import ArenaSpec, create_arena
from vecd.shm.control import (
    Channel,
    ChildFailed,
    Drain,
    Forked,
    ForkServerStart,
    ForkWorker,
    Message,
    Progress,
    Ready,
)
from vecd.shm.views import Rows, map_arena
from vecd.shm.wire import Done, Failed, FailureCode, Incarnation
from vecd.workers.batch import PackedBatch
from vecd.workers.config import WorkerConfig, modules_to_preload
from vecd.workers.dummy import dummy_vectors
from vecd.workers.process.selection_process import SelectionProcess

DEADLINE_S = 60.0

# What `vecd.child` does.
_BOOTSTRAP = (
    "import sys; from vecd.shm.control import Channel; from vecd.workers.process.fork_server import serve; "
    "sys.exit(serve(Channel.from_fd(int(sys.argv[1]))))"
)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


def is_readable(fd: int, timeout_s: float = DEADLINE_S) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def receive(channel: Channel) -> tuple[Message, list[int]]:
    received = channel.receive(DEADLINE_S)
    assert received is not None, "the other side has ended"
    return received


@dataclass
class Worker:
    """A forked worker, as the supervisor sees it."""

    who: Incarnation
    pid: int
    pidfd: int
    channel: Channel
    slots: list[Rows]

    def until_ready(self) -> tuple[Ready, list[str]]:
        stages: list[str] = []
        while True:
            message, _ = receive(self.channel)
            if isinstance(message, Ready):
                return message, stages
            assert isinstance(message, Progress), message
            stages.append(message.stage)

    def kill(self, number: int = signal.SIGKILL) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def has_ended(self) -> bool:
        return is_readable(self.pidfd)

    def status(self) -> int:
        """Once it has ended, as of `os.waitstatus_to_exitcode`."""
        assert self.has_ended()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkServer:
    """A fork server started like the supervisor does it. Owns the supervisor's end."""

    def __init__(
        self,
        modules: list[str],
        environment: dict[str, str] | None = None,
        config: WorkerConfig | None = None,
        first: str = "",
    ) -> None:
        """With a `config` it loads the engine that its workers share; `first` is Python that it runs first."""
        self.channel, theirs = Channel.pair()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"{first}\n{_BOOTSTRAP}", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT, **(environment or {})},
        )
        theirs.close()
        self.workers: list[Worker] = []
        self.stages: list[str] = []
        self.channel.send(ForkServerStart(os.getpid(), modules, dump(config) if config else None))

    def until_ready(self) -> list[str]:
        message = self.after_progress()
        assert isinstance(message, Ready), message
        return message.facts["modules"]

    def after_progress(self) -> Message:
        while isinstance(message := receive(self.channel)[0], Progress):
            self.stages.append(message.stage)
        return message

    def order(
        self, config: WorkerConfig, address_fd: int, worker: int, life: int, arena: ArenaSpec | None = None
    ) -> tuple[Channel, list[Rows]]:
        """`arena`: what is made instead of the one that `config` says."""
        ours, theirs = Channel.pair()
        arena_fd = create_arena(arena or config.arena)
        slots = map_arena(arena_fd, arena or config.arena, writable=False)[0].rows
        self.channel.send(ForkWorker(Incarnation(worker, life), dump(config)), [theirs.fileno(), arena_fd, address_fd])
        theirs.close()
        os.close(arena_fd)
        return ours, slots

    def fork(
        self, config: WorkerConfig, address_fd: int, worker: int = 0, life: int = 1, arena: ArenaSpec | None = None
    ) -> Worker:
        ours, slots = self.order(config, address_fd, worker, life, arena)
        forked, (pidfd,) = receive(ours)
        assert isinstance(forked, Forked)
        made = Worker(Incarnation(worker, life), forked.pid, pidfd, ours, slots)
        self.workers.append(made)
        return made

    def log(self) -> str:
        """What it and its workers have written, once all have ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def close(self) -> None:
        """Everything must end when the supervisor does, and does so here in every test."""
        self.channel.close()
        for worker in self.workers:
            with suppress(OSError):
                worker.channel.close()
        try:
            self.process.wait(DEADLINE_S)
            assert all(worker.has_ended() for worker in self.workers)
        finally:
            self.process.kill()
            for worker in self.workers:
                with suppress(ProcessLookupError):
                    worker.kill()
                os.close(worker.pidfd)
            assert self.process.stderr is not None
            self.process.stderr.close()


@contextmanager
def forked_from(server: ForkServer) -> Iterator[ForkServer]:
    """Closes it, whatever the test has done to it."""
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module", autouse=True)
def adopting() -> Iterator[None]:
    """This process plays the supervisor, whose children the workers become."""
    adopt_orphans()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture(scope="module")
def lasting() -> Iterator[ForkServer]:
    with forked_from(ForkServer([])) as made:
        made.until_ready()
        yield made


@pytest.fixture
def server(lasting: ForkServer) -> Iterator[ForkServer]:
    """One for all tests that leave it alive. Of each test it loses the workers that are left."""
    yield lasting
    assert lasting.process.poll() is None
    for worker in lasting.workers:
        if not is_readable(worker.pidfd, 0):
            worker.kill()
            assert worker.has_ended()


@pytest.fixture
def mortal() -> Iterator[ForkServer]:
    """For a test that ends it."""
    with forked_from(ForkServer([])) as made:
        made.until_ready()
        yield made


@pytest.fixture(scope="module")
def minilm_config(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    return worker_config(minilm, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def minilm_server(minilm_config: WorkerConfig) -> Iterator[ForkServer]:
    """With the real model loaded, for the first time."""
    with forked_from(ForkServer(modules_to_preload("bert", "auto"), config=minilm_config)) as made:
        made.until_ready()
        yield made


# --- a life -----------------------------------------------------------------------------------------------------


def test_a_worker_becomes_ready_and_serves(server, endpoint, gateway):
    worker = server.fork(DUMMY, endpoint.address_fd, worker=3)
    ready, stages = worker.until_ready()
    assert stages == ["making a dummy engine"]
    assert ready.warnings == ["the dummy engine runs no model: its vectors are made up, for tests alone"]
    assert ready.facts.pop("private_memory_mb") < 500
    assert (ready.facts.pop("pid"), ready.facts.pop("parent_pid")) == (worker.pid, server.process.pid)
    assert ready.facts == {"dtype": "float32", "path": "dummy", "threads": 1, "thread_choices": [1]}

    proc, of_server = (Path(f"/proc/{pid}") for pid in (worker.pid, server.process.pid))
    assert [(each / "comm").read_text() for each in (proc, of_server)] == ["vecd-worker-3\n", "vecd-forkserver\n"]
    before = int((of_server / "oom_score_adj").read_text())
    assert int((proc / "oom_score_adj").read_text()) == 500 or before > 500, "it is the first to go"

    gateway.meet(worker.who)
    gateway.send(worker.who, as_message(BATCH, number=1, slot=1))
    done = gateway.receive(worker.who)
    assert isinstance(done, Done)
    assert np.array_equal(worker.slots[1][:2], dummy_vectors(BATCH, DIM))
    gateway.send(worker.who, as_message(BATCH, number=2, slot=2))
    assert gateway.receive(worker.who) == Failed(1, 2, 2, FailureCode.BAD_MESSAGE)


def test_nothing_of_one_worker_is_left_in_the_fork_server_or_in_the_next(server, endpoint):
    def sockets(pid: int) -> set[str]:
        links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        assert not any("pidfd" in link for link in links)
        return {link for link in links if link.startswith("socket:")}

    idle = sockets(server.process.pid)
    first, second = (server.fork(DUMMY, endpoint.address_fd, worker=index) for index in range(2))
    first.until_ready()
    second.until_ready()
    assert not sockets(first.pid) & sockets(second.pid)
    assert not sockets(second.pid) & idle
    assert sockets(server.process.pid) == idle


# --- every end --------------------------------------------------------------------------------------------------


def test_killed_workers_are_children_of_this_process_and_their_channels_end(server, endpoint):
    workers = [server.fork(DUMMY, endpoint.address_fd, worker=index) for index in range(4)]
    for worker in workers:
        worker.until_ready()
    for worker in workers:
        worker.kill()
    assert [worker.status() for worker in workers] == [-signal.SIGKILL] * 4
    assert [worker.channel.receive(DEADLINE_S) for worker in workers] == [None] * 4
    server.fork(DUMMY, endpoint.address_fd, life=2).until_ready()


def test_a_worker_outlives_faults_that_are_sent_and_says_where_it_is_when_it_is_told_to_abort(
    mortal, endpoint, gateway
):
    worker = mortal.fork(DUMMY, endpoint.address_fd)
    worker.until_ready()
    gateway.meet(worker.who)
    for number in (*FAULTS, *FAULTS):
        worker.kill(number)
    assert not is_readable(worker.pidfd, 0.2)
    worker.kill(signal.SIGABRT)
    assert worker.status() == -signal.SIGABRT
    mortal.channel.close()
    mortal.process.wait(DEADLINE_S)
    log = mortal.log()
    assert "Fatal Python error: Aborted" in log
    assert "workers/process/loop.py" in log


def test_a_bug_at_the_start_is_logged_and_exits_70(mortal, endpoint):
    worker = mortal.fork(DUMMY, endpoint.address_fd, arena=ArenaSpec(1, 1, 1))
    assert worker.status() == 70
    assert worker.channel.receive(DEADLINE_S) is None
    mortal.channel.close()
    mortal.process.wait(DEADLINE_S)
    assert "ends by a bug" in mortal.log()


def test_orders_that_are_none_are_ignored(server, endpoint):
    server.channel.send(Drain(1.0, 0.0))
    server.channel.send(ForkWorker(Incarnation(0, 1), dump(DUMMY)), [endpoint.address_fd])
    server.fork(DUMMY, endpoint.address_fd).until_ready()


def hard_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_CORE)[1]


def test_a_stopped_worker_that_is_told_to_abort_is_still_to_be_killed(server, endpoint):
    worker = server.fork(DUMMY, endpoint.address_fd)
    worker.until_ready()
    worker.kill(signal.SIGSTOP)
    worker.kill(signal.SIGABRT)
    assert not is_readable(worker.pidfd, 0.2)
    assert "Max core file size        1 " in Path(f"/proc/{worker.pid}/limits").read_text() or hard_limit() == 0
    worker.kill(signal.SIGKILL)
    assert worker.status() == -signal.SIGKILL


# --- forks that fail --------------------------------------------------------------------------------------------


def test_a_fork_that_fails_is_told_and_the_next_is_tried(endpoint):
    """As under a limit of processes, which a test that runs as root cannot have."""
    with forked_from(ForkServer([], first=failing_once("fork", "EAGAIN"))) as server:
        server.until_ready()
        ours, _ = server.order(DUMMY, endpoint.address_fd, 3, 7)
        assert receive(ours) == (Forked(0, str(NoTasks())), [])
        assert ours.receive(DEADLINE_S) is None, "nobody is left who has the other end"
        ours.close()
        server.fork(DUMMY, endpoint.address_fd, worker=3, life=8).until_ready()


def test_a_worker_that_nobody_could_watch_is_not_left_running(endpoint):
    with forked_from(ForkServer([], first=failing_once("pidfd_open", "EMFILE"))) as server:
        server.until_ready()
        ours, _ = server.order(DUMMY, endpoint.address_fd, 0, 1)
        assert receive(ours) == (Forked(0, "[Errno 24] Too many open files"), [])
        assert ours.receive(DEADLINE_S) is None
        server_pid = server.process.pid
        assert Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text() == ""
        ours.close()


def test_a_fork_server_out_of_descriptors_lives_on(server, endpoint):
    """There are enough for the order, and none for what it takes to carry it out."""
    process = psutil.Process(server.process.pid)
    _, hard = before = process.rlimit(psutil.RLIMIT_NOFILE)
    open_fds = {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}
    free = [fd for fd in range(max(open_fds) + 5) if fd not in open_fds]
    process.rlimit(psutil.RLIMIT_NOFILE, (free[3], hard))
    ours, _ = server.order(DUMMY, endpoint.address_fd, 0, 1)
    failed, _ = receive(ours)
    assert isinstance(failed, Forked)
    assert "Too many open files" in failed.error
    ours.close()
    process.rlimit(psutil.RLIMIT_NOFILE, before)
    server.fork(DUMMY, endpoint.address_fd, life=2).until_ready()


# --- preloading -------------------------------------------------------------------------------------------------


def test_what_cannot_be_imported_is_left_out_and_an_import_that_starts_a_thread_refused(tmp_path):
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('broken')")
    (tmp_path / "threaded_module.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    path = {"PYTHONPATH": str(tmp_path)}
    with forked_from(ForkServer(["json", "no_such_module", "broken_module", "csv"], path)) as server:
        assert server.until_ready() == ["json", "csv"]
    with forked_from(ForkServer(["json", "threaded_module"], path)) as server:
        failed, _ = receive(server.channel)
        assert isinstance(failed, ChildFailed)
        assert "threaded_module" in failed.message
        assert server.process.wait(DEADLINE_S) == 3


# --- with a model -----------------------------------------------------------------------------------------------


def test_the_real_model_through_the_slot(minilm_server, minilm_config, endpoint, gateway):
    assert minilm_server.stages == ["comparing lean float32 with the remembered reference vectors"]
    texts = ["A text-embedding server.", "x", "Ein zweiter, etwas längerer Text. " * 9]
    worker = minilm_server.fork(minilm_config, endpoint.address_fd)
    ready, stages = worker.until_ready()
    assert stages == [], "the engine was loaded before the fork"
    assert ready.warnings == []
    assert ready.facts["path"] == "lean"
    assert ready.facts["agreement"]["max_abs_diff"] < 1e-5

    folder = Path(minilm_config.card.folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    lengths = np.array([len(each) for each in ids], dtype=np.int32)
    gateway.meet(worker.who)
    gateway.send(worker.who, as_message(PackedBatch(lengths, np.concatenate(ids).astype(np.int32))))
    assert isinstance(gateway.receive(worker.who), Done)
    expected = SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(texts)
    np.testing.assert_allclose(worker.slots[0][: len(texts)], expected, atol=1e-5, rtol=0)
    assert private_dirty_mb(worker.pid) < 40, "laid-out weights of 42 MB are the fork server's"
    worker.kill()
    assert worker.status() == -signal.SIGKILL


def private_dirty_mb(pid: int) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    [line] = [line for line in rollup.splitlines() if line.startswith("Private_Dirty:")]
    return int(line.split()[1]) / 1024


def test_two_threads_compute_after_a_fork_without_any(minilm_server, minilm_config, endpoint, gateway):
    worker = minilm_server.fork(replace(minilm_config, num_threads=2), endpoint.address_fd, worker=2)
    ready, _ = worker.until_ready()
    assert (ready.facts["threads"], ready.facts["thread_choices"]) == (2, [2])
    gateway.meet(worker.who)
    for number in range(1, 4):
        lengths = np.full(8, 100, dtype=np.int32)
        token_ids = np.arange(1000, 1800, dtype=np.int32)
        gateway.send(worker.who, as_message(PackedBatch(lengths, token_ids), number=number))
        assert isinstance(gateway.receive(worker.who), Done)
    worker.channel.close()
    assert worker.status() == 0


def test_the_first_worker_alone_gets_a_session_for_leased_cores(minilm_server, minilm_config, endpoint, gateway):
    config = replace(minilm_config, max_threads=2)
    first, second = (minilm_server.fork(config, endpoint.address_fd, worker=index) for index in (0, 1))
    facts = [worker.until_ready()[0].facts for worker in (first, second)]
    assert [fact["thread_choices"] for fact in facts] == [[1, 2], [1]]
    assert [fact["wide_session_bytes"] for fact in facts] == [facts[0]["converted_bytes"], 0]
    batch = PackedBatch(np.full(2, 100, dtype=np.int32), np.arange(1000, 1200, dtype=np.int32))

    def threads_of(worker: Worker, num_threads: int) -> int:
        gateway.send(worker.who, as_message(batch, num_threads=num_threads))
        done = gateway.receive(worker.who)
        assert isinstance(done, Done)
        return done.num_threads

    for worker in (first, second):
        gateway.meet(worker.who)
        assert threads_of(worker, 1) == 1
    expected = first.slots[0][:2].copy()
    before_mb = private_dirty_mb(first.pid)
    assert threads_of(first, 2) == 1, "nothing waits for the session to be made"
    deadline = time.monotonic() + DEADLINE_S
    while threads_of(first, 2) != 2:
        assert time.monotonic() < deadline, "the session is not made"
    np.testing.assert_allclose(first.slots[0][:2], expected, atol=1e-6, rtol=0)
    assert private_dirty_mb(first.pid) - before_mb < 42 + 25, "its weights of 42 MB, and the memory of a pass"
    assert {threads_of(second, 2) for _ in range(3)} == {1}
    for worker in (first, second):
        worker.channel.close()
        assert worker.status() == 0
    assert psutil.Process(minilm_server.process.pid).num_threads() == 1


@pytest.mark.parametrize("size", [8, -1])
def test_a_model_that_cannot_be_loaded_says_why_and_exits_3_before_it_compares(checkpoint, tmp_path, size):
    folder = shutil.copytree(checkpoint("bert"), tmp_path / "bert")
    config = worker_config(folder, cache_dir=tmp_path / "cache")
    path = folder / "model.safetensors"
    path.write_bytes(b"nonsense" if size == 8 else path.read_bytes()[:size])
    with forked_from(ForkServer(modules_to_preload("bert", "auto"), config=config)) as server:
        failed = server.after_progress()
        assert isinstance(failed, ChildFailed)
        assert f"{path}: is " in failed.message
        assert server.stages == []
        assert server.process.wait(DEADLINE_S) == 3


def test_without_a_shared_engine_a_worker_loads_its_own(server, minilm_server, minilm_config, endpoint, gateway):
    """What `minilm_server` has compared is remembered."""
    worker = server.fork(minilm_config, endpoint.address_fd)
    ready, stages = worker.until_ready()
    assert (ready.facts["path"], stages) == ("lean", ["loading weights for lean float32"])
    gateway.meet(worker.who)
    gateway.send(worker.who, as_message(BATCH))
    assert isinstance(gateway.receive(worker.who), Done)


# What a process that compares may do instead of choosing.
COMPARISONS = {
    "ends": ("channel.receive(); sys.exit(9)", "ended with exit code 9, while busy with: starting"),
    "ends at once": ("channel.close(); sys.exit(9)", "ended with exit code 9, while busy with: starting"),
    "is killed": (
        "channel.receive(); channel.send(Progress('x')); os.kill(os.getpid(), 9)",
        "killed by SIGKILL, as .*, while busy with: x",
    ),
    "refuses": ("channel.send(ChildFailed('no such layer')); time.sleep(300)", "^no such layer$"),
}


def comparing(config: WorkerConfig, do: str, monkeypatch: pytest.MonkeyPatch) -> SelectionProcess:
    code = "import os, sys, time; from vecd.shm.control import *; channel = Channel.from_fd(int(sys.argv[1])); "
    monkeypatch.setattr(programs, "self_command", lambda kind: [sys.executable, "-c", code + do])
    return SelectionProcess(config)


def is_child(choosing: SelectionProcess) -> bool:
    """Also as a zombie."""
    return choosing.process.pid in [child.pid for child in psutil.Process().children()]


@pytest.mark.parametrize(("do", "says"), COMPARISONS.values(), ids=COMPARISONS.keys())
def test_a_comparison_that_gives_no_choice_says_why_and_is_gone(checkpoint, monkeypatch, do, says):
    config = worker_config(checkpoint("bert"), cache_dir=None)
    with pytest.raises(ModelError, match=says), comparing(config, do, monkeypatch) as choosing:
        choosing.result(lambda stage: None)
    assert not is_child(choosing)


def test_a_comparison_that_is_not_needed_after_all_is_ended(checkpoint, monkeypatch):
    config = worker_config(checkpoint("bert"), cache_dir=None)
    with comparing(config, "time.sleep(300)", monkeypatch) as choosing:
        assert is_child(choosing)
    assert not is_child(choosing)


def test_nothing_is_loaded_for_a_supervisor_that_died_at_once(checkpoint):
    ours, theirs = Channel.pair()
    command = [sys.executable, "-P", "-c", _BOOTSTRAP, str(theirs.fileno())]
    # Whoever is adopted has another parent than the one that started it.
    ours.send(ForkServerStart(1, ["torch"], dump(worker_config(checkpoint("bert")))))
    ours.close()
    server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    theirs.close()
    _, stderr = server.communicate(timeout=DEADLINE_S)
    assert (server.returncode, stderr) == (0, b"")
