"""The supervisor: `vecd serve` from its first line to its last.

Owns the listening socket, the ZeroMQ endpoints, the arenas, the board, and every child: it starts the gateways and the
workers, restarts what dies, drains on SIGTERM, and leaves nothing behind. It imports neither torch nor numpy and maps
no shared memory: it must never die. Should it be killed all the same, its children notice and end by themselves.

A gateway is a process of its own (`launch.child`), on the one listening socket that all share; workers are forked by a
fork server that has torch imported. Each child has one control channel, whose end means death. A child's life is one
coroutine here, from its start to its end, and its keeper is another, that starts the next life.
"""

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from launch.children import ForkServer, Process, killed_after, reap_everything, self_command, spawn
from launch.failure import (
    EXIT_BAD_CONFIGURATION,
    EXIT_COULD_NOT_START,
    EXIT_INTERNAL_ERROR,
    EXIT_OK,
    ChildDied,
    ConfigurationError,
    StartFailure,
)
from launch.plan import Plan, make_plan, max_open_files, version
from launch.settings import load_settings
from launch.sockets import listen, make_zmq_endpoint
from launch.summary import pss_mb, summary
from shm.arena import create_arena
from shm.board import clear_gauges, create_board
from shm.card import ModelError
from shm.control import (
    ChildFailed,
    Drain,
    ForkServerStart,
    GatewayReady,
    GatewayStart,
    Message,
    Progress,
    WorkerDown,
    WorkerReady,
    WorkerStuck,
    WorkerUp,
)
from shm.socketfile import file_id, remove_if_ours
from shm.wire import Incarnation
from workers.preload import modules_to_preload
from workers.process import adopt_orphans

log = logging.getLogger("vecd.supervisor")

EXIT_INTERRUPTED = 130
_GATEWAY_START_TIMEOUT_S = 60.0
_DRAIN_MARGIN_S = 2.0

# Restarts: the first at once, then after 0.5, 1, 2 … 30 s, until a child has been ready for this long. One that dies
# this often without ever having been ready ends the server. One that has been ready does not: what kills it may be a
# request, and would end everybody's; `/health` says that it is away.
_MAX_DEATHS_BEFORE_READY = 3
_QUICK_LIFE_S = 1.0
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 30.0


# --- the command line -------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The `vecd` command. Returns the exit code."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    match command:
        case "serve":
            return _serve(arguments)
        case "bench":
            from client.bench import main as bench

            return bench(arguments)
        case "--version" | "version":
            print(f"vecd {version()}")
            return EXIT_OK
        case "--help" | "-h" | "help":
            print(_USAGE)
            return EXIT_OK
    print(f"vecd: unknown command {command!r}\n\n{_USAGE}", file=sys.stderr)
    return EXIT_BAD_CONFIGURATION


_USAGE = """\
usage: vecd serve [MODEL] [--flags]    serve a model's embeddings (vecd serve --help)
       vecd bench [--flags]            measure a running server (vecd bench --help)
       vecd --version"""


def _serve(arguments: Sequence[str]) -> int:
    try:
        settings = load_settings(arguments)
        logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s supervisor %(levelname)s %(message)s")
        plan = make_plan(settings)
        return asyncio.run(Supervisor(plan).run())
    except ConfigurationError as error:
        for problem in error.problems:
            _say(problem)
        return EXIT_BAD_CONFIGURATION
    except (ModelError, StartFailure) as error:
        _say(str(error))
        return EXIT_COULD_NOT_START
    except KeyboardInterrupt:  # before the server's own handling of signals
        return EXIT_INTERRUPTED
    except Exception:
        log.exception("internal error")
        return EXIT_INTERNAL_ERROR


def _say(line: str) -> None:
    _print(f"vecd: {line}")


def _print(line: str) -> None:
    with suppress(OSError):  # whoever read it has gone; that is no reason to stop
        print(line, file=sys.stderr, flush=True)


# --- the supervisor ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Restarts:
    """Decides how long to wait before a child is started again, and when to give up."""

    name: str
    has_been_ready: bool = False
    num_quick_deaths: int = 0

    def delay_after(self, reason: str, ready_for_s: float | None) -> float:
        """Seconds to wait after a life that was ready for so long, or never.

        Raises StartFailure when the child has died too often without ever having been ready.
        """
        if ready_for_s is not None:
            self.has_been_ready = True
            if ready_for_s >= _QUICK_LIFE_S:
                self.num_quick_deaths = 0
        self.num_quick_deaths += 1
        if not self.has_been_ready and self.num_quick_deaths >= _MAX_DEATHS_BEFORE_READY:
            raise StartFailure(f"{self.name} keeps dying ({self.num_quick_deaths} times): at last it {reason}")
        if self.num_quick_deaths == 1:
            return 0.0
        return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(16, self.num_quick_deaths - 2))


@dataclass(slots=True)
class ReadyWorker:
    """What every gateway must be told of an incarnation that is ready."""

    incarnation: Incarnation
    process: Process
    arena_fd: int
    facts: dict[str, Any]
    is_condemned: bool = False
    """A gateway has said that it is stuck, and it has been killed for it."""

    def introduce_to(self, gateway: Process) -> None:
        message = WorkerUp(self.incarnation.worker, self.incarnation.life, self.facts)
        send_or_kill(gateway, message, [self.arena_fd])


def send_or_kill(process: Process, message: Message, fds: Sequence[int] = ()) -> None:
    """Tell a child what it must not miss: one that does not listen is killed, and its successor told everything."""
    try:
        process.channel.send(message, fds)
    except BlockingIOError:
        log.error("the %s does not read its control messages and is killed", process.name)
        process.kill()
    except OSError:
        pass  # it has just died, which its keeper is about to see


class Supervisor:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._started_at = time.monotonic()
        self._fork_server = ForkServer(_fork_server_start(plan), plan.settings.start_timeout, self._show_load_stage)
        self._stop = asyncio.Event()
        self._is_draining = False
        self._gateways: dict[int, Process] = {}
        """Those that are ready, by index."""
        self._ready: dict[int, ReadyWorker] = {}
        self._has_been_ready = False
        self._changed = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; returns 0. Raises StartFailure when a child cannot start or keeps dying."""
        _prepare_process()
        self._install_signal_handlers()
        self._board_fd = create_board(self.plan.gateway.board)
        self._endpoints: list[tuple[socket.socket, int]] = [make_zmq_endpoint() for _ in self._gateway_indices]
        self._listening, self._url = listen(self.plan.settings)
        self._uds_id = file_id(self.plan.settings.uds) if self.plan.settings.uds else None
        try:
            async with asyncio.TaskGroup() as group:
                gateway_keepers = [group.create_task(self._keep_gateway(index)) for index in self._gateway_indices]
                self._keepers = [*gateway_keepers, group.create_task(self._announce_when_ready())]
                for index in range(len(self.plan.workers)):
                    self._keepers.append(group.create_task(self._keep_worker(index)))
                await self._stop.wait()
                await self._drain(gateway_keepers)
                self._cancel_keepers()
        except* StartFailure as group:
            raise _first(group) from None
        finally:
            await self._fork_server.stop()
            await reap_everything()
            self._close()
        return EXIT_OK

    @property
    def _gateway_indices(self) -> range:
        return range(self.plan.gateway.num_gateways)

    async def _drain(self, gateway_keepers: Sequence["asyncio.Task[None]"]) -> None:
        """Let gateways answer what they have accepted. Workers stay, and are still restarted, until they are done."""
        self._is_draining = True
        deadline_s = self.plan.settings.drain_timeout
        log.info("draining, for at most %g s", deadline_s)
        self._listening.close()  # the gateways' copies decide from now on when connects are refused
        for gateway in list(self._gateways.values()):
            send_or_kill(gateway, Drain(deadline_s))
        _, pending = await asyncio.wait(gateway_keepers, timeout=deadline_s + _DRAIN_MARGIN_S)
        if pending:
            late_s = deadline_s + _DRAIN_MARGIN_S
            log.warning("%d gateway(s) have not finished in %g s and are killed", len(pending), late_s)

    # --- gateways -------------------------------------------------------------------------------------------

    async def _keep_gateway(self, index: int) -> None:
        name = "the gateway" if len(self._gateway_indices) == 1 else f"gateway {index}"
        restarts = Restarts(name)
        epoch = 0
        while not self._stop.is_set():
            epoch += 1
            reason, ready_for_s = await self._live_gateway(index, epoch)
            if self._is_draining:
                log.info("%s %s", name, reason)
                return
            log.error("%s %s", name, reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(restarts.delay_after(reason, ready_for_s)):
                    await self._stop.wait()

    async def _live_gateway(self, index: int, epoch: int) -> tuple[str, float | None]:
        """One life of a gateway; returns how it ended, and for how many seconds it had been ready.

        Raises StartFailure when another life would not help.
        """
        try:
            process = spawn(f"gateway {index}", "gateway")
        except OSError as error:
            return f"cannot be started: {error}", None
        with killed_after(process):
            start = GatewayStart(self.plan.gateway.to_json(), index, epoch)
            zmq_listening, _ = self._endpoints[index]
            send_or_kill(process, start, [self._listening.fileno(), zmq_listening.fileno(), self._board_fd])
            try:
                async with asyncio.timeout(_GATEWAY_START_TIMEOUT_S):
                    ready = await process.receive()
            except TimeoutError:
                process.kill()
                await self._gateway_ended(process, index)
                return f"was not ready within {_GATEWAY_START_TIMEOUT_S:g} s", None
            if isinstance(ready, ChildFailed):
                raise StartFailure(ready.message)
            if ready is None:
                return await self._gateway_ended(process, index), None
            assert isinstance(ready, GatewayReady)
            ready_at = time.monotonic()
            self._gateways[index] = process
            if self._is_draining:
                send_or_kill(process, Drain(self.plan.settings.drain_timeout))
            self._changed.set()
            for worker in self._ready.values():
                worker.introduce_to(process)
            try:
                while (message := await process.receive()) is not None:
                    self._on_gateway_message(message)
                return await self._gateway_ended(process, index), time.monotonic() - ready_at
            finally:
                del self._gateways[index]

    async def _gateway_ended(self, process: Process, index: int) -> str:
        """Wait until it has; says how. Side effect: the board says no longer what the gateway had."""
        reason = await process.ended()
        clear_gauges(self._board_fd, self.plan.gateway.board, index)
        return reason

    def _on_gateway_message(self, message: Message) -> None:
        """Any gateway is believed, once."""
        assert isinstance(message, WorkerStuck)
        worker = self._ready.get(message.worker)
        if worker is not None and worker.incarnation.life == message.life and not worker.is_condemned:
            log.error("%s is stuck and is killed", worker.incarnation)
            worker.is_condemned = True
            worker.process.kill()

    def _tell_gateways_down(self, incarnation: Incarnation, reason: str) -> None:
        for gateway in list(self._gateways.values()):
            send_or_kill(gateway, WorkerDown(incarnation.worker, incarnation.life, reason))

    # --- workers --------------------------------------------------------------------------------------------

    async def _keep_worker(self, index: int) -> None:
        restarts = Restarts(f"worker {index}")
        life = 0
        while True:
            life += 1
            incarnation = Incarnation(index, life)
            reason, ready_for_s = await self._live_worker(incarnation)
            log.error("%s %s", incarnation, reason)
            await asyncio.sleep(restarts.delay_after(reason, ready_for_s))

    async def _live_worker(self, incarnation: Incarnation) -> tuple[str, float | None]:
        """One life of a worker; returns how it ended, and for how many seconds it had been ready.

        Raises StartFailure when it says that it cannot start, before the server has ever been ready.
        """
        try:
            arena_fd = create_arena(self.plan.gateway.arena)
        except OSError as error:
            return f"has no memory for its arena of {self.plan.gateway.arena.nbytes} bytes: {error.strerror}", None
        try:
            try:
                config = self.plan.workers[incarnation.worker]
                addresses = [address for _, address in self._endpoints]
                process = await self._fork_server.fork(incarnation, config, arena_fd, addresses)
            except (ChildDied, OSError) as error:
                return f"could not be forked: {error}", None
            with killed_after(process):
                facts, reason = await self._await_worker_ready(process)
                if facts is None:
                    return reason, None
                self._worker_is_ready(ReadyWorker(incarnation, process, arena_fd, facts))
                ready_at = time.monotonic()
                try:
                    await process.died()
                finally:
                    del self._ready[incarnation.worker]
                ready_for_s = time.monotonic() - ready_at
                reason = await process.ended()
                self._tell_gateways_down(incarnation, reason)
                return reason, ready_for_s
        finally:
            os.close(arena_fd)

    async def _await_worker_ready(self, process: Process) -> tuple[dict[str, Any] | None, str]:
        """What the worker says of itself, or None and why there is nothing."""
        stage = "starting"
        try:
            async with asyncio.timeout(self.plan.settings.start_timeout):
                while True:
                    match await process.receive():
                        case Progress() as progress:
                            stage = progress.stage
                            self._show_stage(process, stage)
                        case WorkerReady() as ready:
                            self._show_warnings(ready.warnings)
                            return ready.facts, ""
                        case ChildFailed() as failed if not self._has_been_ready:
                            raise StartFailure(failed.message)
                        case ChildFailed() as failed:
                            return None, f"cannot start: {failed.message}"
                        case None:
                            return None, f"{await process.ended()} while {stage}"
        except TimeoutError:
            return None, f"was still {stage} after {self.plan.settings.start_timeout:g} s"

    def _worker_is_ready(self, worker: ReadyWorker) -> None:
        self._ready[worker.incarnation.worker] = worker
        for gateway in list(self._gateways.values()):
            worker.introduce_to(gateway)
        if self._has_been_ready:
            log.info("%s is ready", worker.incarnation)
        self._changed.set()

    # --- what the operator sees -----------------------------------------------------------------------------

    def _show_stage(self, process: Process, stage: str) -> None:
        """One line per stage, not per worker, and none for restarts."""
        if process.name == str(Incarnation(0, 1)):
            _say(stage)

    def _show_load_stage(self, stage: str) -> None:
        if not self._has_been_ready:
            _say(stage)

    def _show_warnings(self, warnings: list[str]) -> None:
        if not self._has_been_ready and not self._ready:
            for warning in warnings:
                _say(f"warning: {warning}")

    async def _announce_when_ready(self) -> None:
        while len(self._gateways) < len(self._gateway_indices) or len(self._ready) < len(self.plan.workers):
            self._changed.clear()
            await self._changed.wait()
        self._has_been_ready = True
        self._announce()

    def _announce(self) -> None:
        facts = next(iter(self._ready.values())).facts
        for line in summary(self.plan, self._url, facts, self._memory_mb()):
            _print(line)
        _print(f"  ready in   {time.monotonic() - self._started_at:.1f} s")
        ready_fd = self.plan.settings.ready_fd
        if ready_fd is not None:
            with open(ready_fd, "w") as ready:
                ready.write(json.dumps({"url": self._url, "pid": os.getpid()}) + "\n")

    def _memory_mb(self) -> int:
        """Proportional memory of every process of the server."""
        pids = [os.getpid(), *self._fork_server.pids(), *(worker.process.pid for worker in self._ready.values())]
        pids += [gateway.pid for gateway in self._gateways.values()]
        return sum(map(pss_mb, pids))

    # --- beginning and end ----------------------------------------------------------------------------------

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_stop_signal)

    def _on_stop_signal(self) -> None:
        """The first asks for a drain; a second, from somebody who will not wait, ends it."""
        if self._stop.is_set():
            self._cancel_keepers()
        self._stop.set()

    def _cancel_keepers(self) -> None:
        """Each keeper kills its child on the way out."""
        for keeper in self._keepers:
            keeper.cancel()

    def _close(self) -> None:
        self._listening.close()
        for zmq_listening, address in self._endpoints:
            zmq_listening.close()
            os.close(address)
        os.close(self._board_fd)
        if self.plan.settings.uds is not None:
            remove_if_ours(self.plan.settings.uds, self._uds_id)


def _prepare_process() -> None:
    adopt_orphans()
    os.umask(0o077)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_open_files(), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold texts


def _fork_server_start(plan: Plan) -> ForkServerStart:
    """What the fork server imports and loads: an engine for processors is shared, one for a GPU is each worker's."""
    config = plan.workers[0]
    if config.engine == "weightless":
        return ForkServerStart(os.getpid(), [])
    modules = modules_to_preload(plan.card.model_type, config.engine)
    shared = config.to_json() if config.device == "cpu" else None
    return ForkServerStart(os.getpid(), modules, shared, self_command("choose"))


def _first(group: BaseExceptionGroup[StartFailure]) -> StartFailure:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, StartFailure)
    return error


if __name__ == "__main__":
    sys.exit(main())
