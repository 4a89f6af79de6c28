"""The supervisor's children as processes: how they are started, waited for, and killed.

Owns pidfds, the control channels' ends, and the fork server. Decides nothing: when to restart is for
`vecd.launch.processes.worker_pool` and `vecd.launch.processes.gateway_pool`.
"""

import asyncio
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from vecd.launch.base.exit_codes import ChildDied, StartFailure
from vecd.launch.base.programs import self_command
from vecd.shm.control import (
    Channel,
    ChildFailed,
    ForkFailed,
    ForkServerReady,
    ForkServerStart,
    ForkWorker,
    Message,
    Progress,
    WorkerExited,
    WorkerForked,
)
from vecd.shm.wire import Incarnation
from vecd.workers.config import WorkerConfig
from vecd.workers.process.kernel import describe_status, reap_strangers

log = logging.getLogger("vecd.supervisor")

_FORK_TIMEOUT_S = 10.0
_ABORT_S = 0.5
_REAP_TIMEOUT_S = 1.0
_REAP_INTERVAL_S, _REAP_ROUNDS = 0.01, 200


_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}

_waited_for: set[int] = set()
"""Pids of processes that somebody may still want to reap."""


@dataclass(slots=True)
class Process:
    """A running child. Owns its pidfd and our end of its control channel."""

    name: str
    pid: int
    pidfd: int
    channel: Channel
    reap: Callable[[], Awaitable[int | None]]
    """Returns the exit status, as `os.waitstatus_to_exitcode` gives it, once the process has ended; None when nobody
    can tell."""
    status: int | None = None
    """The same, once `ended` has returned."""

    async def ended(self) -> str:
        """Wait until the process has ended, and has been reaped; says how."""
        await self.died()
        self.status = await self.reap()
        return describe_status(self.status)

    @property
    def has_crashed(self) -> bool:
        """Whether it was ended by a signal that processes bring upon themselves."""
        return self.status is not None and -self.status in _CRASHES

    async def died(self) -> None:
        """Wait until the process has ended. What it held may be taken from it now."""
        await _readable(self.pidfd)

    async def receive(self) -> Message | None:
        """The next message; None once the process has closed its end. Descriptors are not expected."""
        await _readable(self.channel.fileno())
        received = self.channel.receive(0)
        return None if received is None else received[0]

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def abort(self) -> None:
        """Have it write where it hangs, and kill it: SIGABRT, and soon SIGKILL, which also ends what is stopped."""
        self._signal(signal.SIGABRT)
        asyncio.get_running_loop().call_later(_ABORT_S, self.kill)

    def _signal(self, number: signal.Signals) -> None:
        if self.pidfd >= 0:  # else it is dead and closed, and the number may be another's
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def __post_init__(self) -> None:
        _waited_for.add(self.pid)

    def close(self) -> None:
        """Side effect: who has not been reaped by now is for `reap_orphans`."""
        _waited_for.discard(self.pid)
        os.close(self.pidfd)
        self.pidfd = -1
        self.channel.close()


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(fd, wake)
    try:
        await future
    finally:
        loop.remove_reader(fd)


def spawn(name: str, command: str) -> Process:
    """Start this program again as a child with a control channel. Raises OSError when it cannot be."""
    environment = child_environment()
    ours, theirs = Channel.pair()
    try:
        popen = subprocess.Popen(
            [*self_command(command), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()

    async def reap() -> int:
        return popen.wait()

    return Process(name, popen.pid, os.pidfd_open(popen.pid), ours, reap)


def _reap_orphan(pidfd: int) -> int | None:
    """The exit status of a worker whose fork server died first, and which is therefore ours to reap."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None  # its fork server lives, and hangs
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def reap_orphans() -> None:
    """Reap what children of ours have left behind: a fork server that is killed leaves those that it had started.

    Not while something else in this process waits for a child by itself, as `subprocess` does.
    """
    reap_strangers(_waited_for.__contains__)


async def reap_everything() -> None:
    """Reap what is left of killed children, so that not even a zombie stays behind."""
    for _ in range(_REAP_ROUNDS):
        if not _reap_some():
            return
        await asyncio.sleep(_REAP_INTERVAL_S)


def _reap_some() -> bool:
    """Reap whatever has ended; says whether there are children left."""
    try:
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
            pass
    except ChildProcessError:
        return False
    return True


def child_environment() -> dict[str, str]:
    """Ours, without what no child has any business with."""
    inherited = {name: value for name, value in os.environ.items() if name not in _SECRET_VARIABLES}
    # Importing transformers makes torch create its compiler's cache folder, which nothing here uses: let it find one
    # that exists, and leave none behind.
    return {**inherited, **_CHILD_ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir()}


_SECRET_VARIABLES = {"VECD_API_KEY", "VECD_API_KEYS", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}

_CHILD_ENVIRONMENT = {
    # A thread pool started before a fork makes the child hang, and one per library makes processes large.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # What is served was found before the children started; they never go and look for something else.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # Counting GPUs must not touch CUDA before the fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class ForkServer:
    """The process that workers are forked from. Started when first needed, and again should it die."""

    def __init__(self, start: ForkServerStart, start_timeout_s: float, on_stage: Callable[[str], None]) -> None:
        """`on_stage` is called with each stage of loading."""
        self._order = start
        self._start_timeout_s = start_timeout_s
        self._on_stage = on_stage
        self._has_been_ready = False
        self._process: Process | None = None
        self._starting: asyncio.Task[Process] | None = None
        self._forked: dict[Incarnation, asyncio.Future[tuple[int, int, asyncio.Future[int]]]] = {}
        self._exited: dict[int, asyncio.Future[int]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def fork(
        self, incarnation: Incarnation, config: WorkerConfig, arena_fd: int, address_fds: Sequence[int]
    ) -> Process:
        """Fork a worker. Raises ChildDied when the fork server dies or does not answer, OSError without descriptors."""
        channel = await self._ensure_running()
        loop = asyncio.get_running_loop()
        ours, theirs = Channel.pair()
        forked = self._forked[incarnation] = loop.create_future()
        message = ForkWorker(incarnation.worker, incarnation.life, config.to_json())
        try:
            channel.send(message, [theirs.fileno(), arena_fd, *address_fds])
            # Not asyncio.wait_for: before Python 3.12 it forgets a cancellation that comes with the result.
            async with asyncio.timeout(_FORK_TIMEOUT_S):
                pid, pidfd, exited = await forked
        except BaseException as error:
            ours.close()
            if forked.done() and not forked.cancelled() and forked.exception() is None:
                os.close(forked.result()[1])
            if isinstance(error, TimeoutError | OSError):
                await self._give_up(f"does not fork: {error or 'no answer'}")
                raise ChildDied("the fork server does not answer") from error
            raise
        finally:
            theirs.close()
            del self._forked[incarnation]

        async def reap() -> int | None:
            with suppress(TimeoutError, ChildDied):
                async with asyncio.timeout(_REAP_TIMEOUT_S):
                    return await asyncio.shield(exited)
            return _reap_orphan(pidfd)

        return Process(str(incarnation), pid, pidfd, ours, reap)

    def pids(self) -> list[int]:
        """Of the process, if it runs."""
        return [self._process.pid] if self._process is not None else []

    async def stop(self) -> None:
        """Kill the process, started or not; its workers die with it. Nobody may be waiting in `fork`."""
        if self._starting is not None:
            self._starting.cancel()
            with suppress(asyncio.CancelledError, ChildDied, StartFailure):
                await self._starting
        await self._end()

    async def _give_up(self, why: str) -> None:
        """A fork server that hangs is killed, and another started when next needed."""
        log.error("the fork server %s and is killed", why)
        await self._end()

    async def _end(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        if self._process is not None:
            await self._bury(self._process)

    async def _ensure_running(self) -> Channel:
        """Whoever comes while it is being started waits for the same start, and shares its failure: a try for each
        worker would make them wait for one another's."""
        if self._process is not None:
            return self._process.channel
        if self._starting is None:
            self._starting = asyncio.create_task(self._run())
        starting = self._starting
        await asyncio.wait([starting])  # unlike awaiting it, leaves it alone when this caller is cancelled
        return starting.result().channel

    async def _run(self) -> Process:
        try:
            process = self._process = await self._start()
            self._reader = asyncio.create_task(self._read(process))
            return process
        finally:
            self._starting = None

    async def _start(self) -> Process:
        try:
            process = spawn("fork server", "forkserver")
        except OSError as error:
            raise ChildDied(f"the fork server cannot be started: {error}") from error
        stage = "starting"
        try:
            process.channel.send(self._order)
            async with asyncio.timeout(self._start_timeout_s):
                while isinstance(message := await process.receive(), Progress):
                    stage = message.stage
                    self._on_stage(stage)
            match message:
                case ForkServerReady():
                    self._has_been_ready = True
                    return process
                case ChildFailed() if not self._has_been_ready:
                    raise StartFailure(message.message)
                case ChildFailed():
                    raise ChildDied(f"the fork server cannot start: {message.message}")
            raise ChildDied(f"the fork server {await process.ended()} while {stage}")
        except BaseException as error:
            await self._bury(process)
            if isinstance(error, TimeoutError):
                raise ChildDied(f"the fork server was still {stage} after {self._start_timeout_s:g} s") from error
            if isinstance(error, OSError):
                raise ChildDied(f"the fork server does not start: {error}") from error
            raise

    async def _read(self, process: Process) -> None:
        """Hear what is forked and what has exited, until the fork server is dead."""
        try:
            while await self._hear(process):
                pass
            log.error("the fork server %s", await process.ended())
        except Exception:
            log.exception("the fork server is not understood and is killed")
        await self._bury(process)

    async def _hear(self, process: Process) -> bool:
        await _readable(process.channel.fileno())
        match process.channel.receive(0):
            case None:
                return False
            case WorkerForked() as forked, [pidfd]:
                self._exited[forked.pid] = exited_future = asyncio.get_running_loop().create_future()
                future = self._forked.get(Incarnation(forked.worker, forked.life))
                if future is not None and not future.done():
                    future.set_result((forked.pid, pidfd, exited_future))
                else:
                    os.close(pidfd)  # nobody waits for it any more; it ends with its control channel
            case ForkFailed() as failed, []:
                future = self._forked.get(Incarnation(failed.worker, failed.life))
                if future is not None and not future.done():
                    future.set_exception(ChildDied(f"the fork server cannot fork: {failed.reason}"))
            case WorkerExited() as exited, []:
                done = self._exited.pop(exited.pid, None)
                if done is not None and not done.done():
                    done.set_result(exited.status)
            case message, fds:
                log.error("%s is not for the supervisor", type(message).__name__)
                for fd in fds:
                    os.close(fd)
        return True

    async def _bury(self, process: Process) -> None:
        """Kill the process, and tell everybody who waits for it."""
        if self._process is process:
            self._process = None
        process.kill()
        waiting: list[asyncio.Future[Any]] = [*self._forked.values(), *self._exited.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(ChildDied("the fork server is gone"))
                future.exception()  # seen: nobody may be waiting
        self._exited.clear()
        await process.ended()
        process.close()


@contextmanager
def killed_after(process: Process) -> Iterator[None]:
    """Whatever happens inside, the process has been killed and its descriptors closed afterwards."""
    try:
        yield
    finally:
        process.kill()
        process.close()
