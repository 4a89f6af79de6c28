"""The supervisor: `vecd serve` from its first line to its last.

Owns what outlives every child: the listening sockets, the shared metrics, the vector cache, the configuration and its
generations. It starts the gateways (`vecd.launch.gateways`) and the workers (`vecd.launch.workers`), reloads on SIGHUP
(`vecd.launch.reload`), drains on SIGTERM, and leaves nothing behind. It imports neither torch nor numpy, maps no shared
memory and never waits for a file: it must never die. If it is killed all the same, its children notice and end by
themselves. Each model has a worker pool, whose fork server a zygote forks if there are several. One coroutine
supervises each child, whose control channel ends with its death. All load at the same time, and one that cannot start
ends the server. Models that are loaded on demand come later, and may go again (`vecd.launch.residency`).
"""

import asyncio
import json
import logging
import os
import resource
import signal
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vecd.base import logs
from vecd.base.failures import (
    EXIT_BAD_CONFIGURATION,
    EXIT_COULD_NOT_START,
    EXIT_INTERNAL_ERROR,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigurationError,
    StartFailure,
    exit_at_interrupt,
    first_of,
    without_interrupts,
)
from vecd.base.kernel import adopt_orphans, leave_no_core, trace_crashes
from vecd.base.programs import ahead, end_ahead
from vecd.base.tasks import NoTasks
from vecd.gateway.config import ApiKey
from vecd.launch.check import model as check_model
from vecd.launch.children import ForkServer, System
from vecd.launch.config.models import ModelEntry, load_models
from vecd.launch.config.plan import Plan, connections_of_gateway, make_plans, max_open_files
from vecd.launch.config.settings import load_settings
from vecd.launch.files import FilesHang, watch_keys
from vecd.launch.gateways import GatewayPool, Link
from vecd.launch.identities import Identities
from vecd.launch.memory import MemoryBook, make_book
from vecd.launch.reload import Reloader
from vecd.launch.residency import Residency
from vecd.launch.sockets import Inherited, Listeners, take_inherited
from vecd.launch.summary import summary
from vecd.launch.systemd.notify import HEALTHY, HealthSignals, Notifier, WatchdogState, serving
from vecd.launch.systemd.reload_command import ReloadSocket
from vecd.launch.workers import ReadyWorker, WorkerPool
from vecd.model.card import ModelError
from vecd.shm.control import (
    Channel,
    Drain,
    GatewayListen,
    Heartbeat,
    InputDeaths,
    InputsCleared,
    KeepAlive,
    Message,
    ModelAsked,
    ModelState,
    ModelUsed,
    ModelWanted,
    Prepared,
    Progress,
    Quarantined,
    ReloadAsked,
    WorkerDown,
    WorkerStuck,
)
from vecd.shm.settings import Settings
from vecd.shm.shared_metrics import create_shared_metrics
from vecd.shm.vector_cache import create_vector_cache
from vecd.workers.machine import available_mb, kilobytes, usable_cores

log = logging.getLogger("vecd.supervisor")

_BLOCKED_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_DRAIN_MARGIN_S = 2.0
_LOOK_INTERVAL_S = 2.0
_MIN_METRICS_MODELS = 16
"""Models that a reload may bring the server to: 51 KB of shared metrics each, per gateway."""
_ROOM = 2
"""A reload may bring the server to this many times the models and workers of its start."""


def serve(arguments: Sequence[str]) -> int:
    """`vecd serve`. Returns the exit code: 0 clean, 2 bad configuration, 3 could not start, 130 interrupted before it
    was ready, 70 internal error."""
    notifier = Notifier.from_environment()
    listeners: Listeners | None = None

    def clean_up() -> None:
        end_ahead()
        if listeners is not None:
            listeners.close()

    exit_at_interrupt(clean_up)
    try:
        settings = load_settings(arguments)
        logs.configure("supervisor", settings.log_level, settings.log_format)
        inherited = take_inherited(settings)
        notifier.status("Finding and reading the model")
        with without_interrupts():
            listeners = _listen_early(settings, inherited)
        with notifier.extending():
            plans = make_plans(load_models(settings), _report_early)
            memory = make_book(plans)
        _prepare_process()
        listeners = listeners or Listeners(settings, inherited)
        return asyncio.run(Supervisor(plans, arguments, notifier, listeners, memory=memory).run())
    except ConfigurationError as error:
        for problem in error.problems:
            logs.say(problem, logging.ERROR)
        notifier.status(f"Cannot start: {error}")
        return EXIT_BAD_CONFIGURATION
    except (ModelError, StartFailure, NoTasks) as error:
        found = check_model.problem(str(error))
        has_remedy = isinstance(error, ModelError) or found.suggestion != check_model.UNKNOWN
        logs.say(f"{found.what}; {found.suggestion}" if has_remedy else found.what, logging.ERROR)
        notifier.status(f"Ended: {error}")
        return error.exit_code if isinstance(error, StartFailure) else EXIT_COULD_NOT_START
    except Exception:
        log.exception("internal error")
        return EXIT_INTERNAL_ERROR
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the last milliseconds
        clean_up()


def _listen_early(settings: Settings, inherited: Inherited) -> Listeners | None:
    """Listen before the model is known, with a gateway that answers what the start is doing; None where there is no
    such gateway yet, or where systemd holds the socket: there, requests wait. Raises StartFailure."""
    if inherited != Inherited() or "gateway" not in ahead:
        return None
    connections_of_gateway()  # with too few descriptors the gateway would end with a traceback of its own
    listeners = Listeners(settings, inherited)
    certificate, key = (None if path is None else str(path) for path in (settings.tls_cert, settings.tls_key))
    message = GatewayListen(
        "finding and reading the model", certificate, key, settings.max_body_bytes, settings.log_level,
        settings.log_format, settings.trusted_proxies,
    )  # fmt: skip
    _tell_early(message, [sock.fileno() for sock in listeners.sockets])
    return listeners


def _report_early(stage: str) -> None:
    logs.say(stage)
    _tell_early(Progress(stage))


def _tell_early(message: Message, fds: Sequence[int] = ()) -> None:
    with suppress(KeyError, OSError):
        Channel(ahead["gateway"][1]).send(message, fds, waits=False)


class Supervisor:
    def __init__(
        self,
        plans: Sequence[Plan],
        arguments: Sequence[str],
        notifier: Notifier,
        listeners: Listeners,
        system: System | None = None,
        memory: MemoryBook | None = None,
    ) -> None:
        """`plans`: of each model, in the order of the configuration, one at least. A reload reads `arguments` again.
        `system`: for tests. `memory`: None if there is no budget. Raises StartFailure when there is no memory, no
        descriptor or no temporary folder."""
        self._system = system or System()
        self._memory = memory or MemoryBook(None, plans[0].settings.cache_folder)
        self._zygote = ForkServer()
        """The parent of several models' fork servers."""
        self._server_nbytes = self._memory.server_nbytes
        """As for the newest plans."""
        self._gateway_pool: GatewayPool
        on_identity = lambda: self._gateway_pool.reconcile()  # noqa: E731, PLW0108  (there is none yet)
        self._identities = Identities(self._system.files, on_identity) if system is None else None
        self._arguments = list(arguments)
        self._notifier = notifier
        self._started_at = time.monotonic()
        self._stopping = asyncio.Event()
        self._lives: dict[int, int] = {}
        self._num_gateways = plans[0].gateway.gateways
        self._has_been_ready = False
        self._exit_code = EXIT_OK
        self._listeners = listeners
        self.reload_socket = ReloadSocket(self.request_reload, lambda: listeners.url)
        try:
            self._first = [
                self.make_worker_pool(index + 1, plan)
                for index, plan in enumerate(map(self._with_inherited, _with_room(plans)))
            ]
            first = self._first[0].plan
            self._metrics_fd = create_shared_metrics(first.gateway.shared_metrics)
            self._vector_cache_fd = _make_vector_cache(first) if first.gateway.vector_cache else None
        except OSError as error:
            raise StartFailure(f"cannot make what processes share: {error}") from None
        self._worker_pools = {worker_pool.generation: worker_pool for worker_pool in self._first}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def plan(self) -> Plan:
        """What new requests for the first model are served by. What the server has once is the same in every plan."""
        return self.reloader.active[0].plan

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; returns the exit code: 0, or 130 if SIGINT came before the server was ready.
        Raises StartFailure when a child cannot start or keeps dying."""
        self._install_signal_handlers()
        try:
            self._gateway_pool = GatewayPool(
                self._num_gateways, self._listeners.sockets, self._metrics_fd, self._worker_pools,
                self._on_gateway_message, self._system, usable_cores(), self._vector_cache_fd,
            )  # fmt: skip
            self._residency = Residency(self._gateway_pool, self._memory, self.start_task)
            self.reloader = Reloader(self, self._gateway_pool, self._residency)
            for worker_pool in self._first:
                await self._residency.add(worker_pool, is_loaded=_is_loaded_at_start(worker_pool))
            await self.reload_socket.listen()  # only now: signals, too, may request a reload in any wait
            async with asyncio.TaskGroup() as group:
                self._group = group
                gateways = [self.start_task(self._gateway_pool.supervise(i)) for i in range(self._num_gateways)]
                for work in (
                    *(worker_pool.supervise() for worker_pool in self._first if _is_loaded_at_start(worker_pool)),
                    self._residency.run(), self._gateway_pool.watch_heartbeats(), self._announce_when_ready(),
                    watch_keys(self._system.files, lambda: self.plan.settings, self._on_keys), self._look_around(),
                    self._keep_notifying(),
                ):  # fmt: skip
                    self.start_task(work)
                if self._identities is not None:
                    self.start_task(self._identities.run())
                await self._stopping.wait()
                if self._has_been_ready:
                    await self._drain(gateways)
                self._cancel_all()
        except FilesHang as error:
            raise StartFailure(str(error)) from None
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None
        finally:
            for worker_pool in self._worker_pools.values():
                await worker_pool.stop()
            await self._zygote.stop()
            await self._system.reap_everything()
            self._close()
        return self._exit_code

    def stop(self) -> None:
        """Drain and end, as at SIGTERM. Before the server is ready, and at a second call, end at once."""
        if self._stopping.is_set() or not self._has_been_ready:
            self._cancel_all()
        self._stopping.set()

    def interrupt(self) -> None:
        if not self._has_been_ready:
            self._exit_code = EXIT_INTERRUPTED
        self.stop()

    def request_reload(self) -> "asyncio.Future[list[str]] | None":
        """Reload soon, as at SIGHUP. Returns why it was refused, [] if it was not; None if the server is ending."""
        if self._stopping.is_set():
            return None
        if self._has_been_ready:
            return self.reloader.request()
        refused = asyncio.get_running_loop().create_future()
        refused.set_result([problem := "the server is still starting"])
        log.warning("not reloaded: %s", problem)
        return refused

    def start_task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(task := self._group.create_task(work))
        return task

    def make_worker_pool(self, generation: int, plan: Plan) -> WorkerPool:
        system = self._system
        if plan.card.assumption:
            log.warning("%s: %s", plan.gateway.model, plan.card.assumption)
        if not plan.is_only_model:
            system = replace(system, fork_server=partial(system.fork_server, parent=self._zygote))
        pool = WorkerPool(generation, plan, self._num_gateways, self._lives, self, system)
        if self._identities is not None:
            try:
                # Beside the load: the first response of a warm start has it.
                self._identities.add(pool)
            except OSError:
                pool.close()
                raise
            pool.before_ready = partial(self._identities.confirm, pool)
        return pool

    def read_models(self) -> Sequence[ModelEntry]:
        return load_models(load_settings(self._arguments, without=["ready_fd"]))

    def make_plans(self, models: Sequence[ModelEntry]) -> list[Plan]:
        plans = make_plans(models)
        self._server_nbytes = make_book(plans).server_nbytes
        return list(map(self._with_inherited, plans))

    def _with_inherited(self, plan: Plan) -> Plan:
        inherited = self._listeners.inherited
        return plan.with_gateway(
            has_admin_listener=plan.gateway.has_admin_listener or inherited.admin is not None,
            keeps_listening=inherited.public is not None,
            keeps_admin_listening=inherited.admin is not None,
        )

    async def _drain(self, gateways: Sequence["asyncio.Task[None]"]) -> None:
        self.reloader.cancel()
        settings = self.plan.settings
        deadline_s = settings.drain_grace + settings.drain_timeout
        log.info("draining, for at most %g s", deadline_s)
        self._notifier.stopping("Stopping: answering the accepted requests", deadline_s + 2 * _DRAIN_MARGIN_S)
        self._listeners.close_sockets()  # the gateways' copies decide from now on when connects are refused
        self._gateway_pool.drain(Drain(deadline_s, settings.drain_grace))
        _, pending = await asyncio.wait(gateways, timeout=deadline_s + _DRAIN_MARGIN_S)
        if pending:
            late_s = deadline_s + _DRAIN_MARGIN_S
            log.warning("%d gateway(s) have not finished in %g s and are killed", len(pending), late_s)

    # --- messages from gateways -----------------------------------------------------------------------------

    def _on_gateway_message(self, link: Link, message: Message) -> None:
        match message:
            case Heartbeat():
                pass
            case WorkerStuck():
                for worker_pool in self._worker_pools.values():
                    worker_pool.kill_stuck(message.incarnation)
            case Quarantined() | InputDeaths() | InputsCleared():
                self._gateway_pool.broadcast(message, but=link)
            case ReloadAsked():
                self.request_reload()
            case Prepared() if message.generation in self._gateway_pool.active.values():
                if not self._has_been_ready:
                    raise StartFailure(f"{self._worker_pools[message.generation].prefix}{message.error}")
                log.error("%s cannot serve what all others do, and is killed: %s", link.process.name, message.error)
                link.process.kill()
            case Prepared():
                self.reloader.on_unprepared(message.generation, message.error)
            case ModelWanted() | ModelUsed() | ModelAsked() | KeepAlive():
                self._residency.on_message(link, message)
            case _:
                log.error("%s from %s is not for the supervisor", type(message).__name__, link.process.name)

    # --- events of workers (WorkerObserver) -----------------------------------------------------------------

    def on_ready(self, worker_pool: WorkerPool, worker: ReadyWorker) -> None:
        if not self._residency.on_worker_ready(worker_pool) and self._has_been_ready:
            worker_pool.log.info("%s is ready", worker.incarnation)
        self._gateway_pool.reconcile()

    def on_down(self, worker_pool: WorkerPool, worker: ReadyWorker, reason: str) -> None:
        self._gateway_pool.reconcile()  # it may have died of changed files
        self._gateway_pool.send_down(WorkerDown(worker.incarnation, reason, worker.process.has_crashed))

    def on_broken(self, worker_pool: WorkerPool, reason: str) -> None:
        if self._is_active(worker_pool):
            worker_pool.log.error("no worker stays alive, requests are refused: %s", reason)
        self._gateway_pool.reconcile()

    def on_model_changed(self, worker_pool: WorkerPool, why: str) -> None:
        if self._is_active(worker_pool):
            worker_pool.log.warning("%s; reloading, so that no mixture of two models is served", why)
            self.request_reload()

    def on_stage(self, worker_pool: WorkerPool, stage: str) -> None:
        if not self._has_been_ready:
            logs.say(stage)
            self._gateway_pool.start_stage = f"workers are loading: {stage}"
            self._gateway_pool.reconcile()
            self._notifier.status(f"Starting: {stage}")

    def on_warning(self, worker_pool: WorkerPool, warning: str) -> None:
        if not self._has_been_ready:
            logs.say(f"warning: {warning}", logging.WARNING)
        else:
            log.warning("%s", warning)

    def _is_active(self, worker_pool: WorkerPool) -> bool:
        return self._gateway_pool.active.get(worker_pool.model) == worker_pool.generation

    # --- events of reloads, and of the keys' file ------------------------------------------

    def on_reload_started(self) -> None:
        self._notifier.reloading("Reloading; requests are served by the present configuration")

    def on_reload_finished(self, problems: list[str]) -> None:
        if not problems:
            self._memory.server_nbytes = self._server_nbytes
        self._notifier.ready(self._status())
        if len(self.reloader.active) == 1:
            self.start_task(self._zygote.stop())  # and its imports are not kept for what may never come

    def _on_keys(self, keys: tuple[ApiKey, ...]) -> None:
        if keys != self._gateway_pool.keys:
            self._gateway_pool.keys = keys
            self._gateway_pool.reconcile()
            log.info("keys read again: %d", len(keys))

    async def _look_around(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            if not self.reloader.is_running:  # which may wait for children of its own
                self._system.reap_orphans()
            for worker_pool in list(self._worker_pools.values()):
                await worker_pool.look_at_files()
            self._gateway_pool.reconcile()

    # --- what the operator sees -----------------------------------------------------------------------------

    async def _announce_when_ready(self) -> None:
        pool = self._gateway_pool

        def is_ready(one: WorkerPool) -> bool:
            return pool.is_connected(one) if _is_loaded_at_start(one) else pool.is_prepared(one)

        await pool.until(lambda: len(pool.ready_links) == self._num_gateways and all(map(is_ready, self._first)))
        self._has_been_ready = True
        pool.start_stage = None
        if self._identities is not None:
            self._identities.read_all()
        self._announce()
        self._notifier.ready(self._status())
        while True:
            pool.changed.clear()
            await pool.changed.wait()
            self._send_status()

    def _announce(self) -> None:
        ready_s = time.monotonic() - self._started_at
        (plan, facts), *others = [
            (pool.plan, next((worker.facts for worker in pool.ready.values()), None)) for pool in self._first
        ]
        url, admin_url = self._listeners.url, self._listeners.admin_url
        lines, fields = summary(plan, url, admin_url, facts, self._memory_mb(), ready_s, others)
        logs.announce(lines, **fields)
        if (ready_fd := self.plan.settings.ready_fd) is not None:
            with suppress(OSError), open(ready_fd, "w") as ready:
                ready.write(json.dumps({"url": url, "admin_url": admin_url, "pid": os.getpid()}) + "\n")

    def _memory_mb(self) -> int:
        pids = [os.getpid(), *(link.process.pid for link in self._gateway_pool.links.values())]
        pids += [pid for worker_pool in self._worker_pools.values() for pid in worker_pool.pids()]
        pids += self._zygote.pids()
        return sum(kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss") for pid in pids) // 1024

    def _send_status(self) -> None:
        if self._has_been_ready and not self.reloader.is_running and not self._stopping.is_set():
            self._notifier.status(self._status())

    def _status(self) -> str:
        models = []
        others = []
        for pool in self.reloader.active:
            if self._residency.state(pool.generation) is ModelState.READY:
                models.append((pool.model, len(pool.ready), len(pool.plan.workers), pool.broken))
            else:
                others.append((pool.model, self._residency.description(pool.generation)))
        return serving(models, self._listeners.url, "; ".join(self.reloader.problems), others)

    async def _keep_notifying(self) -> None:
        """The watchdog's notification stays out if a restart is needed."""
        if not self._notifier.has_listener:
            return
        interval_s, clock = self._notifier.interval_s, asyncio.get_running_loop().time
        watchdog_state = WatchdogState(clock(), interval_s)
        while True:
            if not self._has_been_ready or self.reloader.is_running:
                self._notifier.extend()
            why = watchdog_state.why_restart(self._health_signals(), clock(), self.plan.settings.start_timeout)
            if why and self._notifier.watchdog_s is not None:
                log.critical("only a restart of the server helps, so systemd's watchdog is not notified: %s", why)
            else:
                self._notifier.alive()
            self._send_status()  # again, should systemd have been too busy
            await asyncio.sleep(interval_s)

    def _health_signals(self) -> HealthSignals:
        """A start, a load and a drain have deadlines of their own. One model that is served is enough: a restart would
        end its requests, too."""
        if not self._has_been_ready or self._stopping.is_set():
            return HEALTHY
        links = self._gateway_pool.healthy_links
        active = [pool for pool in self.reloader.active if self._residency.state(pool.generation) is ModelState.READY]
        usable = {worker.incarnation for pool in active for worker in pool.ready.values() if not worker.is_stuck}
        can_serve = not active or any(link.connected & usable for link in links)
        return HealthSignals(bool(links), can_serve, all(worker_pool.broken is not None for worker_pool in active))

    # --- beginning and end ----------------------------------------------------------------------------------

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        loop.add_signal_handler(signal.SIGHUP, self.request_reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)

    def _cancel_all(self) -> None:
        """Each coroutine that supervises a child kills it on the way out."""
        for task in self._tasks:
            task.cancel()

    def _close(self) -> None:
        self._listeners.close()
        for worker_pool in self._worker_pools.values():
            worker_pool.close()
        os.close(self._metrics_fd)
        if self._vector_cache_fd is not None:
            os.close(self._vector_cache_fd)
        self.reload_socket.close()


def _is_loaded_at_start(worker_pool: WorkerPool) -> bool:
    return not worker_pool.plan.gateway.is_loaded_on_demand


def _with_room(plans: Sequence[Plan]) -> list[Plan]:
    configs = [plan.gateway for plan in plans]
    num_workers = sum(config.num_workers for config in configs)
    metrics_workers = max(*(config.metrics_workers for config in configs), _ROOM * num_workers)
    metrics_models = max(*(config.metrics_models for config in configs), _ROOM * len(configs), _MIN_METRICS_MODELS)
    return [plan.with_gateway(metrics_workers=metrics_workers, metrics_models=metrics_models) for plan in plans]


def _make_vector_cache(plan: Plan) -> int:
    """Raises ConfigurationError for a cache that is larger than the free memory, and OSError."""
    free_mb = available_mb()
    if plan.gateway.vector_cache > free_mb << 20:
        raise ConfigurationError(
            f"--vector-cache: {plan.gateway.vector_cache} bytes given, {free_mb << 20} bytes of memory are free"
        )
    return create_vector_cache(plan.gateway.vector_cache_spec)


def _prepare_process() -> None:
    """SIGINT and SIGTERM wait until `Supervisor.run` handles them, because a temporary folder must not be left
    behind."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    adopt_orphans()
    os.umask(0o077)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_open_files(), hard))
    leave_no_core()
    trace_crashes()  # systemd's watchdog asks with SIGABRT where this process hangs
