"""The supervisor's children as processes: how they are started, waited for, and killed.

Owns pidfds, our ends of the control channels, and the fork servers. `vecd.launch.workers` and
`vecd.launch.gateways` decide when to restart; they reach the operating system through `System`.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from vecd.base.failures import BadSetting, ChildDied, StartFailure
from vecd.base.kernel import FAULTS, describe_status, reap_strangers
from vecd.base.programs import start_child
from vecd.base.tasks import naming_limit
from vecd.launch.files import FileAccess
from vecd.launch.sockets import make_zmq_endpoint
from vecd.shm.control import (
    Channel,
    ChildFailed,
    Forked,
    ForkServerStart,
    Message,
    Progress,
    Ready,
    readable,
)

log = logging.getLogger("vecd.supervisor")

_FORK_TIMEOUT_S = 10.0
_DYING_TIMEOUT_S = 5.0
_DEATH_S = 0.5
"""Until a death is known whose control channel has ended."""
_ABORT_S = 0.5
_REAP_INTERVAL_S, _REAP_ROUNDS = 0.01, 200

_waited_for: set[int] = set()


@dataclass(slots=True)
class Process:
    """A running child. Owns its pidfd and our end of its control channel."""

    name: str
    pid: int
    pidfd: int
    channel: Channel
    reap: Callable[[], int | None]
    """Returns the exit status, as `os.waitstatus_to_exitcode` gives it, of a process that has ended; None when it
    cannot be known."""
    status: int | None = None
    was_stopped: bool = False
    """By a signal (SIGSTOP) or a debugger, when it was aborted for its silence."""

    async def ended(self) -> str:
        await self.died()
        self.status = self.reap()
        return describe_status(self.status)

    @property
    def has_crashed(self) -> bool | None:
        """Whether it was ended by a signal for a fault of its own. Workers outlive such a signal of another process.
        None: it had been stopped when it was aborted, so that its death says nothing."""
        return None if self.was_stopped else -(self.status or 0) in FAULTS

    async def died(self) -> None:
        """It may not have been reaped yet."""
        await readable(self.pidfd)

    async def receive(self) -> Message | None:
        """The next message; None once the process has closed its end. Descriptors are not expected."""
        await readable(self.channel.fileno())
        received = self.channel.receive(0)
        return None if received is None else received[0]

    async def await_ready(self, timeout_s: float, on_stage: Callable[[str], None] = lambda stage: None) -> Ready:
        """Wait until a process that was just started is ready; returns the message that says so.

        `on_stage` is called with each stage of its start. Raises StartFailure when it reports that it cannot start,
        BadSetting if that is for a setting, and ChildDied when it ends instead, or is still starting after `timeout_s`.
        """
        stage = "starting"
        try:
            async with asyncio.timeout(timeout_s):
                while isinstance(message := await self.receive(), Progress):
                    stage = message.stage
                    on_stage(stage)
        except TimeoutError:
            raise ChildDied(f"was still {stage} after {timeout_s:g} s") from None
        match message:
            case None:
                raise ChildDied(f"{await self.ended()} while {stage}")
            case ChildFailed():
                raise (BadSetting if message.is_configuration else StartFailure)(message.message)
        assert isinstance(message, Ready), message
        return message

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def abort(self) -> None:
        """Send SIGABRT, at which it writes where it hangs, and soon SIGKILL, which also ends a stopped process."""
        with suppress(OSError):  # it has ended; source of the format: proc_pid_stat(5)
            self.was_stopped = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] in "Tt"
        self._signal(signal.SIGABRT)
        asyncio.get_running_loop().call_later(_ABORT_S, self.kill)

    def _signal(self, number: signal.Signals) -> None:
        if self.pidfd >= 0:  # else it is dead and closed, and the number may be another process's
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def __post_init__(self) -> None:
        _waited_for.add(self.pid)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.close()

    def close(self) -> None:
        """Side effect: a process that has not been reaped by now is left to `reap_orphans`."""
        _waited_for.discard(self.pid)
        os.close(self.pidfd)
        self.pidfd = -1
        self.channel.close()


def spawn(name: str, kind: str) -> Process:
    """Start this program again as a child with a control channel. Raises OSError when no process can be started."""
    with naming_limit():
        popen, ours = start_child(kind)
    return Process(name, popen.pid, os.pidfd_open(popen.pid), Channel(ours), popen.wait)


def _reap_adopted(pidfd: int) -> int | None:
    """The exit status of a dead process that was adopted; None if `reap_orphans` came before."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def reap_orphans() -> None:
    """Reap the children that a killed fork server has left behind. Not to be called while something else in this
    process waits for a child by itself, as `subprocess` does."""
    reap_strangers(_waited_for.__contains__)


async def reap_everything() -> None:
    with suppress(ChildProcessError):  # there is none any more
        for _ in range(_REAP_ROUNDS):
            while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:  # noqa: ASYNC222  (does not wait)
                pass
            await asyncio.sleep(_REAP_INTERVAL_S)


class ForkServer:
    """A process that workers are forked from, which die with it, or fork servers, which outlive it. Started when it is
    first needed, and again should it die. This process must adopt orphans: what is forked becomes its child."""

    def __init__(
        self,
        start: ForkServerStart | None = None,
        start_timeout_s: float = 0.0,
        on_stage: Callable[[str], None] = lambda stage: None,
        parent: "ForkServer | None" = None,
    ) -> None:
        """`start`: what it loads for its workers; None: it is the parent of fork servers. `on_stage` is called with
        each stage of loading. `parent`: it is forked from that one; None: this process starts it."""
        self._start_order = start
        self._name = "zygote" if start is None else "fork server"
        self._start_timeout_s = start_timeout_s
        self._on_stage = on_stage
        self._parent = parent
        self._process: Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._has_been_ready = False
        self._starting: asyncio.Task[Process] | None = None
        self._workers: list[Process] = []
        self._forking = asyncio.Lock()
        """Held for one fork at a time: orders for hundreds of processes would fill the channel, and the deadline of one
        does not run while another's modules are imported."""

    def pids(self) -> list[int]:
        return [self._process.pid] if self._process is not None else []

    async def fork(
        self, name: str, order: Message, fds: Sequence[int] = (), timeout_s: float = _FORK_TIMEOUT_S
    ) -> Process:
        """Have it fork a process. `fds`: that one's own but for its control channel. Raises ChildDied with the reason
        why there is none, and StartFailure as `Process.await_ready`."""
        if self._start_order is not None:
            await self._ensure_running()
        async with self._forking:
            if self._start_order is None and self._process is None:
                self._use(self._spawn())
            if (process := self._process) is None:
                raise ChildDied(f"the {self._name} died")
            try:
                forked = await self._forked(process, name, order, fds, timeout_s)
            except OSError as error:
                is_late = isinstance(error, TimeoutError)
                why = f"has not forked it after {timeout_s:g} s" if is_late else f"cannot be told to fork: {error}"
                log.error("the %s %s, and is killed", self._name, why)
                await self._end()
                raise ChildDied(f"the {self._name} {why}, and is killed") from error
        if self._start_order is not None:
            self._workers = [*(each for each in self._workers if each.pidfd >= 0), forked]
            if self._process is not process:  # it has died meanwhile
                forked.kill()
        return forked

    async def _forked(
        self, parent: Process, name: str, order: Message, fds: Sequence[int], timeout_s: float
    ) -> Process:
        try:
            ours, theirs = Channel.pair()
        except OSError as error:
            raise ChildDied(str(error)) from error
        try:
            with closing(theirs):
                parent.channel.send(order, [theirs.fileno(), *fds])
            # Not asyncio.wait_for: before Python 3.12 it forgets a cancellation that comes with the result.
            async with asyncio.timeout(timeout_s):
                await readable(ours.fileno())
            match ours.receive(0):
                case Forked() as forked, [pidfd]:
                    return Process(name, forked.pid, pidfd, ours, partial(_reap_adopted, pidfd))
                case Forked(error=why), []:
                    raise ChildDied(f"the {self._name} cannot fork: {why}")
            assert self._watching is not None
            await asyncio.wait([self._watching], timeout=_DEATH_S)
            raise ChildDied("it died before it began" if self._process is parent else f"the {self._name} died")
        except BaseException:
            ours.close()
            raise

    async def stop(self) -> None:
        """Kill the process, started or not; its workers die with it, and fork servers go on. Not to be called during a
        `fork` of a worker. The next `fork` starts another process, whose failure to start is a StartFailure again."""
        if self._starting is not None:
            self._starting.cancel()
            with suppress(asyncio.CancelledError, ChildDied, StartFailure):
                await self._starting
        await self._end()
        self._has_been_ready = False

    async def _end(self) -> None:
        """A process that a driver keeps from dying is not waited for."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
        if self._watching is not None:
            await asyncio.wait([self._watching], timeout=_DYING_TIMEOUT_S)

    async def _ensure_running(self) -> None:
        """All callers wait for the same start and share its failure: with a try for each worker, each would wait for
        those of the others."""
        if self._process is not None:
            return
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
        starting = self._starting
        await asyncio.wait([starting])  # unlike awaiting it, leaves it alone when this caller is cancelled
        starting.result()

    def _spawn(self) -> Process:
        try:
            return spawn(self._name, "zygote" if self._start_order is None else "forkserver")
        except OSError as error:
            raise ChildDied(f"the {self._name} cannot be started: {error}") from error

    async def _start(self) -> Process:
        assert self._start_order is not None
        if self._parent is None:
            process = self._spawn()
        else:
            try:
                process = await self._parent.fork(self._name, self._start_order, timeout_s=self._start_timeout_s)
            except ChildDied as error:
                raise ChildDied(f"the {self._name} cannot be started: {error}") from error
        try:
            with suppress(ConnectionError):  # it died at once: `await_ready` says how
                process.channel.send(self._start_order)
            await process.await_ready(self._start_timeout_s, self._on_stage)
        except BaseException as error:
            process.kill()
            await process.ended()
            process.close()
            if isinstance(error, ChildDied):
                raise ChildDied(f"the fork server {error}") from error
            if isinstance(error, OSError) or (isinstance(error, StartFailure) and self._has_been_ready):
                raise ChildDied(f"the fork server cannot start: {error}") from error
            raise
        self._has_been_ready = True
        return self._use(process)

    def _use(self, process: Process) -> Process:
        self._process = process
        self._watching = asyncio.create_task(self._watch(process))
        return process

    async def _watch(self, process: Process) -> None:
        how = await process.ended()
        if self._process is process:
            what_follows = "; there will be another one for the next fork server" * (self._start_order is None)
            log.error("the %s %s%s", self._name, how, what_follows)
            self._process = None
        process.close()
        for each in self._workers:
            each.kill()


@dataclass(frozen=True, slots=True)
class System:
    """What supervision needs from the operating system. A test passes functions that start no process."""

    spawn: Callable[[str, str], Process] = spawn
    fork_server: Callable[..., ForkServer] = ForkServer
    make_endpoint: Callable[[], tuple[socket.socket, int]] = make_zmq_endpoint
    reap_orphans: Callable[[], None] = reap_orphans
    reap_everything: Callable[[], Awaitable[None]] = reap_everything
    files: FileAccess = field(default_factory=FileAccess)
