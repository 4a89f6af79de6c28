"""Children, files and time for tests of the supervisor: no process, no socket, no thread, and no second passes.

`Fakes.system` is what supervision asks of the operating system. Its gateways and workers reply as healthy ones do, at
once, unless a test says otherwise. With VIRTUAL_TIME a test is a coroutine in a loop whose clock jumps to the next
timer whenever nothing else can run.
"""

import asyncio
import os
import selectors
import signal
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from vecd.base.kernel import describe_status
from vecd.launch.children import ForkServer, Process, System
from vecd.launch.files import FileAccess
from vecd.launch.systemd.notify import Notifier
from vecd.shm.control import (
    Activate,
    Channel,
    Drain,
    ForkServerStart,
    GatewayStart,
    Message,
    ModelDrained,
    ModelIs,
    Prepare,
    Prepared,
    Ready,
    Retired,
    Withdrawn,
    WorkerConnected,
    WorkerUp,
)

_pids = count(10**8)  # of no process: above the kernel's largest


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits. What it would have waited is added to `waited_s`."""

    waited_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout != 0:
            assert timeout is not None, "every coroutine waits for another one"
            self.waited_s += timeout
        return events


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.waited_s


VIRTUAL_TIME = "asyncio", {"loop_factory": JumpingLoop}
"""The `anyio_backend` of a module whose tests are coroutines in such a loop."""


async def settle(seconds: float = 0.001) -> None:
    """Let everything happen that can, and this time pass."""
    await asyncio.sleep(seconds)


class FakeChannel(Channel):
    def __init__(self, on_sent: Callable[[Message], None]) -> None:
        self.sent: list[Message] = []
        self.error: OSError | None = None
        """Raised by the next `send`."""
        self._on_sent = on_sent

    def send(self, message: Message, fds: Sequence[int] = (), *, waits: bool = True) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(message)
        self._on_sent(message)

    def close(self) -> None:
        pass


class FakeProcess(Process):
    def __init__(self, name: str) -> None:
        self.name, self.pid, self.pidfd, self.status = name, next(_pids), -1, None
        self.reap = lambda: None
        self.channel: FakeChannel = FakeChannel(self.on_sent)
        self.inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        """What it says to the supervisor."""
        self.is_hard_to_kill = self.was_stopped = False
        self.num_aborts = 0
        self._has_ended = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        return self.status is None

    def sent(self, *kinds: type) -> list[Message]:
        """The messages of these kinds that it has been sent; of all without."""
        return [message for message in self.channel.sent if not kinds or isinstance(message, kinds)]

    def on_sent(self, message: Message) -> None:
        pass

    def end(self, status: int = 0) -> None:
        if self.status is None:
            self.status = status
            self.inbox.put_nowait(None)
            self._has_ended.set()

    async def receive(self) -> Message | None:
        return await self.inbox.get()

    async def died(self) -> None:
        await self._has_ended.wait()

    async def ended(self) -> str:
        await self.died()
        return describe_status(self.status)

    def kill(self) -> None:
        if not self.is_hard_to_kill:
            self.end(-signal.SIGKILL)

    def abort(self) -> None:
        self.num_aborts += 1
        self.end(-signal.SIGABRT)

    def close(self) -> None:
        pass


class FakeGateway(FakeProcess):
    """Does what it is told at once, unless an attribute says otherwise."""

    starts = True
    connects = True
    unprepared = ""
    """Why it cannot prepare for another generation."""
    slow_generations: Collection[int] = ()
    """Those that it prepares only when a test says so."""
    retires = True
    drains = True
    has_batches = False
    """Something of every model is at a worker."""
    _generation = 0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.served: dict[str, int] = {}
        """By model, the generation that it serves new requests with."""
        self._models: dict[int, str] = {}
        """Of each generation."""

    def on_sent(self, message: Message) -> None:
        match message:
            case GatewayStart():
                self._generation = message.generation
                self._models[message.generation] = message.config["model"]
                self.served = {message.config["model"]: message.generation}
                if self.starts:
                    self.inbox.put_nowait(Ready())
            case WorkerUp() if self.connects:
                self.inbox.put_nowait(WorkerConnected(message.incarnation))
            case Prepare():
                self._models[message.generation] = message.config["model"]
                if message.generation not in self.slow_generations:
                    self.inbox.put_nowait(Prepared(message.generation, self.unprepared))
            case Activate():
                before = self.served.get(self._models[message.generation])
                if self.retires and before is not None:
                    self.inbox.put_nowait(Retired(before))
                self.served[self._models[message.generation]] = self._generation = message.generation
            case Withdrawn():
                assert self.served.pop(self._models[message.generation]) == message.generation
                if self.retires:
                    self.inbox.put_nowait(Retired(message.generation))
            case Drain() if self.drains:
                self.end()
            case ModelIs(state="draining") if not self.has_batches:
                self.inbox.put_nowait(ModelDrained(message.generation))


class FakeForkServer(ForkServer):
    def __init__(self, fakes: "Fakes", order: ForkServerStart) -> None:
        self.order = order
        self.is_running = False
        self.is_stopped = False
        self.fork_error: Exception | None = None
        self.hangs = False
        self._fakes = fakes

    async def fork(self, name: str, order: Message, fds: Sequence[int] = (), timeout_s: float = 0.0) -> Process:
        if self.fork_error is not None:
            raise self.fork_error
        if self.hangs:
            await asyncio.Event().wait()
        self.is_running = True
        worker = FakeProcess(name)
        self._fakes.workers.append(worker)
        self._fakes.on_fork(worker)
        return worker

    def pids(self) -> list[int]:
        return [1] if self.is_running else []

    async def stop(self) -> None:
        self.is_stopped = True


class FakeSocket:
    """A listening socket that nothing can reach."""

    family = socket.AF_INET

    def __init__(self) -> None:
        self.is_closed = False

    def fileno(self) -> int:
        return 0

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 8000

    def close(self) -> None:
        self.is_closed = True


class FakeThreads:
    """A thread is run at once to its end; or it hangs, until `release`."""

    def __init__(self) -> None:
        self.hangs = False
        self.num_hanging = 0
        self._hanging: list[Callable[[], None]] = []

    def start(self, work: Callable[[], None]) -> None:
        if self.hangs:
            self._hanging.append(work)
            self.num_hanging += 1
        else:
            work()

    def release(self) -> None:
        self.hangs = False
        while self._hanging:
            self._hanging.pop()()


class Fakes:
    """All that a test's supervisor has started."""

    def __init__(self) -> None:
        self.gateways: list[FakeGateway] = []
        """Every one that was ever started, in order; so the others."""
        self.workers: list[FakeProcess] = []
        self.fork_servers: list[FakeForkServer] = []
        self.threads = FakeThreads()
        self.on_spawn: Callable[[FakeGateway], None] = lambda gateway: None
        """Called with a gateway before it is sent anything."""
        self.on_fork: Callable[[FakeProcess], None] = ready
        """Called with a worker that has just been forked."""
        self.spawn_error: OSError | None = None
        self.endpoint_error: OSError | None = None
        self.num_endpoints_before_error = 0
        self.system = System(
            self._spawn, self._fork_server, self.endpoint, lambda: None, _nothing, FileAccess(self.threads.start)
        )

    @property
    def living(self) -> list[FakeProcess]:
        return [process for process in (*self.gateways, *self.workers) if process.is_alive]

    def _spawn(self, name: str, command: str) -> Process:
        assert command == "gateway"
        if self.spawn_error is not None:
            raise self.spawn_error
        self.gateways.append(gateway := FakeGateway(name))
        self.on_spawn(gateway)
        return gateway

    def _fork_server(
        self,
        order: ForkServerStart,
        timeout_s: float,
        on_stage: Callable[[str], None],
        parent: ForkServer | None = None,
    ) -> ForkServer:
        self.fork_servers.append(server := FakeForkServer(self, order))
        return server

    def endpoint(self) -> tuple[Any, int]:
        if self.endpoint_error is not None:
            self.num_endpoints_before_error -= 1
            if self.num_endpoints_before_error < 0:
                raise self.endpoint_error
        return FakeSocket(), os.memfd_create("endpoint")


def ready(worker: FakeProcess) -> None:
    worker.inbox.put_nowait(Ready({"path": "dummy", "dtype": "float32"}))


async def _nothing() -> None:
    pass


class FakeNotifier(Notifier):
    """Keeps each line that systemd would have received, and when."""

    def __init__(self, watchdog_s: float | None = 2.0) -> None:
        super().__init__("@nowhere", watchdog_s)
        self.lines: list[tuple[float, str]] = []

    def said(self, start: str) -> list[str]:
        return [line for _, line in self.lines if line.startswith(start)]

    def longest_gap_s(self, since_s: float, until_s: float) -> float:
        """The longest time without a notification for the watchdog."""
        times = [at for at, line in self.lines if line == "WATCHDOG=1" and since_s <= at <= until_s]
        gaps = [later - earlier for earlier, later in zip([since_s, *times], [*times, until_s], strict=True)]
        return max(gaps)

    def send(self, *lines: str) -> bool:
        now = 0.0
        with suppress(RuntimeError):
            now = asyncio.get_running_loop().time()
        while self._unsent:
            self.lines += [(now, line) for line in self._unsent.popleft().decode().split("\n")]
        self.lines += [(now, line) for line in lines]
        return True


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
