"""The supervisor: `vecd serve` from its first line to its last.

Owns what outlives every child: the listening sockets, the board, the configuration and its generations. It starts the
gateways (`vecd.launch.processes.gateway_pool`) and the workers (`vecd.launch.processes.worker_pool`), reloads on
SIGHUP, drains on SIGTERM, and leaves nothing behind. It imports neither torch nor numpy and maps no shared memory: it
must never die. Should it be killed all the same, its children notice and end by themselves.

A gateway is a process of its own (`vecd.launch.child`), on the one listening socket that all share; workers are forked
by a fork server that has torch imported. Each child has one control channel, whose end means death. A child's life is
one coroutine, from its start to its end, and its keeper is another, that starts the next life.

A reload makes a new generation beside the old one: a plan, a crew of workers, and in every gateway all that a request
goes through. Requests go to the old one until all of the new one has been met; only then is it their turn, and the old
one ends when its last request is answered. Whatever goes wrong before, nothing has changed.
"""

import asyncio
import faulthandler
import json
import logging
import os
import resource
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from vecd.launch.base.exit_codes import (
    EXIT_BAD_CONFIGURATION,
    EXIT_COULD_NOT_START,
    EXIT_INTERNAL_ERROR,
    EXIT_OK,
    ConfigurationError,
    StartFailure,
    first_of,
)
from vecd.launch.config.keys import load_keys
from vecd.launch.config.plan import Plan, make_plan, max_open_files
from vecd.launch.config.settings import Settings, load_settings
from vecd.launch.config.tokenizer import forget
from vecd.launch.processes.children import reap_everything, reap_orphans
from vecd.launch.processes.gateway_pool import GatewayPool, Link, Sockets
from vecd.launch.processes.sockets import Inherited, listen, listen_admin, take_inherited
from vecd.launch.processes.summary import pss_mb, summary, summary_fields
from vecd.launch.processes.worker_pool import ReadyWorker, WorkerPool
from vecd.launch.systemd.notify import Notifier, serving
from vecd.launch.systemd.reload_command import ReloadOutcome
from vecd.launch.systemd.watchdog import HEALTHY, HealthSignals, WatchdogState
from vecd.shm import logs
from vecd.shm.card import ModelError
from vecd.shm.control import Drain, Heartbeat, Message, Prepared, Quarantined, ReloadAsked, WorkerStuck
from vecd.shm.shared_metrics import create_shared_metrics
from vecd.shm.socketfile import FileId, file_id, remove_if_ours
from vecd.shm.wire import Incarnation
from vecd.workers.process.kernel import adopt_orphans, leave_no_core

T = TypeVar("T")

log = logging.getLogger("vecd.supervisor")

EXIT_INTERRUPTED = 130
_DRAIN_MARGIN_S = 2.0
_RETIRE_MARGIN_S = 5.0
_MAX_GATEWAY_DEATHS = 3
_LOOK_INTERVAL_S = 2.0
_QUARANTINE_KEY_BYTES = 16

_FIXED_SETTINGS = (
    "host", "port", "uds", "tls_cert", "tls_key", "admin_host", "admin_port", "admin_uds", "gateways",
)  # fmt: skip
"""What a reload cannot change: the sockets, and who listens on them. What is in the certificate's files it can."""


def serve(arguments: Sequence[str]) -> int:
    """`vecd serve`. Returns the exit code: 0 clean, 2 bad configuration, 3 could not start, 130 interrupted before it
    was ready, 70 internal error."""
    notifier = Notifier.from_environment()
    try:
        settings = load_settings(arguments)
        logs.configure("supervisor", settings.log_level, settings.log_format)
        inherited = take_inherited(settings)
        notifier.status("Finding and reading the model")
        with notifier.extending():
            plan = make_plan(settings)
        return asyncio.run(Supervisor(plan, arguments, notifier, inherited).run())
    except ConfigurationError as error:
        for problem in error.problems:
            logs.say(problem, logging.ERROR)
        notifier.status(f"Cannot start: {error}")
        return EXIT_BAD_CONFIGURATION
    except (ModelError, StartFailure) as error:
        logs.say(str(error), logging.ERROR)
        notifier.status(f"Ended: {error}")
        return EXIT_COULD_NOT_START
    except KeyboardInterrupt:  # before the server's own handling of signals
        return EXIT_INTERRUPTED
    except Exception:
        log.exception("internal error")
        return EXIT_INTERNAL_ERROR


class Supervisor:
    def __init__(self, plan: Plan, arguments: Sequence[str], notifier: Notifier, inherited: Inherited) -> None:
        """`arguments` are read again, with the environment and the files, for a reload.

        Raises StartFailure when there is no memory, no descriptor or no temporary folder.
        """
        plan = _with_inherited(plan, inherited)
        self._arguments = list(arguments)
        self._notifier = notifier
        self._reload_problems: list[str] = []
        """Of the last reload."""
        self._inherited = inherited
        self._started_at = time.monotonic()
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._lives: dict[int, int] = {}
        self._num_gateways = plan.gateway.num_gateways
        self._has_been_ready = False
        self._listening: list[socket.socket] = []
        self._uds: list[tuple[Path, FileId | None]] = []
        self._admin_url = ""
        try:
            self._crews = {1: WorkerPool(1, plan, self._num_gateways, self._lives, self)}
            self._board_fd = create_shared_metrics(plan.gateway.shared_metrics)
        except OSError as error:
            raise StartFailure(f"cannot make what processes share: {error}") from None
        self._newest = 1
        self._refused: dict[int, str] = {}
        """Generations that a gateway could not prepare for, and why."""
        self._reloading: asyncio.Task[None] | None = None
        self._must_reload_again = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def plan(self) -> Plan:
        """What new requests are served by."""
        return self._crews[self._front.active].plan

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; returns 0. Raises StartFailure when a child cannot start or keeps dying."""
        _prepare_process()
        self._install_signal_handlers()
        self._outcome = ReloadOutcome()  # from now on `vecd reload` may send its signal
        plan = self._crews[1].plan
        try:
            sockets = Sockets(self._listen(plan.settings), self._board_fd, plan.gateway.shared_metrics)
            quarantine_key = secrets.token_hex(_QUARANTINE_KEY_BYTES)
            self._front = GatewayPool(
                self._num_gateways, sockets, quarantine_key, plan.gateway.keys, self._crews, self._on_gateway_message,
                self._changed.set,
            )  # fmt: skip
            async with asyncio.TaskGroup() as group:
                self._group = group
                gateways = [group.create_task(self._front.keep(index)) for index in range(self._num_gateways)]
                self._tasks += gateways
                for work in (
                    self._crews[1].keep(), self._front.watch(), self._announce_when_ready(), self._look_after_things(),
                    self._keep_notifying(),
                ):  # fmt: skip
                    self._tasks.append(group.create_task(work))
                await self._stop.wait()
                await self._drain(gateways)
                self._cancel_all()
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None
        finally:
            await reap_everything()
            self._close()
        return EXIT_OK

    def _listen(self, settings: Settings) -> list[socket.socket]:
        """The public socket, and the admin socket if there is one. Raises StartFailure."""
        listening, self._url = listen(settings, self._inherited.public)
        self._listening.append(listening)
        if settings.uds is not None:
            self._uds.append((settings.uds, file_id(settings.uds)))
        if (admin := listen_admin(settings, self._inherited.admin)) is not None:
            self._listening.append(admin[0])
            self._admin_url = admin[1]
            if settings.admin_uds is not None:
                self._uds.append((settings.admin_uds, file_id(settings.admin_uds)))
        return self._listening

    async def _drain(self, gateways: Sequence["asyncio.Task[None]"]) -> None:
        """Let gateways answer what they have accepted. Workers stay, and are still restarted, until they are done."""
        if self._reloading is not None:
            self._reloading.cancel()
        settings = self.plan.settings
        deadline_s = settings.drain_grace + settings.drain_timeout
        log.info("draining, for at most %g s", deadline_s)
        self._notifier.stopping("Stopping: answering what has been accepted", deadline_s + 2 * _DRAIN_MARGIN_S)
        self._close_listening()  # the gateways' copies decide from now on when connects are refused
        self._front.drain(Drain(deadline_s, settings.drain_grace))
        _, pending = await asyncio.wait(gateways, timeout=deadline_s + _DRAIN_MARGIN_S)
        if pending:
            late_s = deadline_s + _DRAIN_MARGIN_S
            log.warning("%d gateway(s) have not finished in %g s and are killed", len(pending), late_s)

    # --- what gateways and crews say ------------------------------------------------------------------------

    def _on_gateway_message(self, link: Link, message: Message) -> None:
        match message:
            case Heartbeat():
                pass
            case WorkerStuck():
                for worker_pool in self._crews.values():
                    worker_pool.kill_stuck(Incarnation(message.worker, message.life))
            case Quarantined():
                self._front.tell_all(message, but=link)
            case ReloadAsked():
                self._reload_soon()
            case Prepared() if message.generation == self._front.active:
                log.error("%s cannot serve what all others do, and is killed: %s", link.process.name, message.error)
                link.process.kill()
            case Prepared():
                self._refused[message.generation] = message.error
                self._changed.set()
            case _:
                log.error("%s from %s is not for the supervisor", type(message).__name__, link.process.name)

    def on_ready(self, worker_pool: WorkerPool, worker: ReadyWorker) -> None:
        if self._has_been_ready:
            log.info("%s is ready", worker.incarnation)
        self._front.tell()
        self._changed.set()
        self._tell_status()

    def on_down(self, worker_pool: WorkerPool, worker: ReadyWorker, reason: str) -> None:
        has_crashed = worker.process.has_crashed and not worker.is_condemned
        self._front.tell_down(worker.incarnation, reason, has_crashed=has_crashed)
        self._tell_status()

    def on_broken(self, worker_pool: WorkerPool, reason: str) -> None:
        if worker_pool.generation == self._front.active:
            log.error("no worker stays alive, requests are refused: %s", reason)
        self._front.tell()
        self._changed.set()
        self._tell_status()

    def on_model_changed(self, worker_pool: WorkerPool) -> None:
        if worker_pool.generation == self._front.active:
            log.warning(
                "the model's files have changed; reloading, so that nobody is answered by a mixture of two models"
            )
            self._reload_soon()

    def on_stage(self, worker_pool: WorkerPool, stage: str) -> None:
        if not self._has_been_ready:
            logs.say(stage)
            self._notifier.status(f"Starting: {stage}")

    def on_warning(self, worker_pool: WorkerPool, warning: str) -> None:
        if not self._has_been_ready:
            logs.say(f"warning: {warning}", logging.WARNING)
        else:
            log.warning("%s", warning)

    # --- reloading ------------------------------------------------------------------------------------------

    def _reload_soon(self) -> None:
        if self._stop.is_set():
            return
        self._outcome.asked()
        if not self._has_been_ready:
            log.warning("not reloaded: the server is still starting")
            self._outcome.done(self._outcome.num_asked, ["the server is still starting"])
        elif self._reloading is not None:
            self._must_reload_again = True
        else:
            self._reloading = self._group.create_task(self._reload_and_again())
            self._tasks.append(self._reloading)

    async def _reload_and_again(self) -> None:
        try:
            await self._reload_and_tell()
            while self._must_reload_again:
                self._must_reload_again = False
                await self._reload_and_tell()
        finally:
            self._reloading = None

    async def _reload_and_tell(self) -> None:
        """Whoever asks for another one meanwhile is answered when that is done."""
        num_asked = self._outcome.num_asked
        log.info("reloading")
        self._notifier.reloading("Reloading, while serving as before")
        self._reload_problems = await self._reload()
        for problem in self._reload_problems:
            log.error("not reloaded, nothing has changed: %s", problem)
        self._notifier.ready(self._status())
        self._outcome.done(num_asked, self._reload_problems)

    async def _reload(self) -> list[str]:
        """Serve by the configuration as it is now; if it cannot be used, by the one before. Returns why it cannot."""
        self._tasks = [task for task in self._tasks if not task.done()]
        try:
            plan = await _in_thread(lambda: make_plan(load_settings(self._arguments, without=["ready_fd"])))
            plan = self._fitted(_with_inherited(plan, self._inherited))
            worker_pool = WorkerPool(self._newest + 1, plan, self._num_gateways, self._lives, self)
        except ConfigurationError as error:
            return error.problems
        except (ModelError, StartFailure, OSError, SystemExit) as error:
            return [str(error)]
        except Exception as error:  # whatever files may hold; a message might quote it
            return [f"unexpected {type(error).__name__}"]
        self._newest += 1
        self._crews[worker_pool.generation] = worker_pool
        return await self._change_to(worker_pool)

    def _fitted(self, plan: Plan) -> Plan:
        """The plan with what must stay as it is. Raises ConfigurationError for what it would have to change."""
        now = self.plan
        problems = [
            f"{name}: cannot be changed while serving, restart instead (was {getattr(now.settings, name)!s}, "
            f"now {getattr(plan.settings, name)!s})"
            for name in _FIXED_SETTINGS
            if getattr(now.settings, name) != getattr(plan.settings, name)
        ]
        board_workers = now.gateway.board_workers
        if plan.gateway.num_workers > board_workers:
            problems.append(f"workers: {plan.gateway.num_workers} given, at most {board_workers} without a restart")
        if problems:
            forget(plan.gateway.card)
            raise ConfigurationError(problems)
        return replace(plan, gateway=replace(plan.gateway, board_workers=board_workers))

    async def _change_to(self, worker_pool: WorkerPool) -> list[str]:
        """The new crew before the old: it takes over when every gateway has met all of it. Returns why it does not."""
        old = self._crews[self._front.active]
        failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks.append(self._group.create_task(_keep_until_failure(worker_pool, failed)))
        self._front.tell()
        failure = await self._await_met(worker_pool, failed)
        if failure is None and worker_pool.plan.model_has_changed():
            failure = "the model's files changed meanwhile; reloading again"
            self._must_reload_again = True
        if failure is None:
            self._front.active = worker_pool.generation
            self._read_keys_again()  # they may have changed since the plan was made
            self._front.tell()
            logs.change(worker_pool.plan.settings.log_level, worker_pool.plan.settings.log_format)
            await self._await_retired(old)
            log.info("reloaded: %s is served by generation %d", worker_pool.plan.gateway.model, worker_pool.generation)
            await self._end(old)
            return []
        await self._end(worker_pool)
        return [failure]

    async def _end(self, worker_pool: WorkerPool) -> None:
        """Forget a crew, with whatever serves or served it."""
        del self._crews[worker_pool.generation]
        self._refused.pop(worker_pool.generation, None)
        self._front.discard(worker_pool.generation)
        await worker_pool.dismiss()
        worker_pool.close()
        forget(worker_pool.plan.gateway.card)

    async def _await_met(self, worker_pool: WorkerPool, failed: "asyncio.Future[str]") -> str | None:
        """None once every gateway has met all of it; else why that will not be."""
        timeout_s, deaths_before = worker_pool.plan.settings.start_timeout, self._front.num_deaths
        failed.add_done_callback(lambda _: self._changed.set())
        try:
            async with asyncio.timeout(timeout_s):
                while not self._front.has_met(worker_pool):
                    if failed.done():
                        return failed.result()
                    if worker_pool.broken is not None:
                        return worker_pool.broken
                    if worker_pool.generation in self._refused:
                        return self._refused[worker_pool.generation]
                    if self._front.num_deaths - deaths_before >= _MAX_GATEWAY_DEATHS:
                        return f"gateways have died {_MAX_GATEWAY_DEATHS} times meanwhile"
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return f"the new workers, or gateways that know them, were not there within {timeout_s:g} s"
        return None

    async def _await_retired(self, worker_pool: WorkerPool) -> None:
        """Until the last request that began with this crew is answered. Each has a deadline, and so has this."""
        timeout_s = worker_pool.plan.settings.request_timeout + _RETIRE_MARGIN_S
        try:
            async with asyncio.timeout(timeout_s):
                while self._front.uses(worker_pool.generation):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("generation %d still has requests after %g s and is ended", worker_pool.generation, timeout_s)

    async def _look_after_things(self) -> None:
        """What nobody tells this process of: a file of keys that has changed, and orphans that have ended."""
        seen = _file_state(self.plan.settings)
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            state = _file_state(self.plan.settings)
            if state != seen:
                seen = state
                self._read_keys_again()
            if self._reloading is None:  # which may wait for children of its own
                reap_orphans()

    def _read_keys_again(self) -> None:
        """A file that cannot be used changes nothing."""
        try:
            keys = load_keys(self.plan.settings)
        except ConfigurationError as error:
            for problem in error.problems:
                log.error("keys not read again, nothing has changed: %s", problem)
        except Exception as error:  # whatever a file may hold; a message might quote it
            log.error("keys not read again, nothing has changed: unexpected %s", type(error).__name__)
        else:
            if keys != self._front.keys:
                self._front.keys = keys
                self._front.tell()
                log.info("keys read again: %d", len(keys))

    # --- what the operator sees -----------------------------------------------------------------------------

    async def _announce_when_ready(self) -> None:
        while len(self._front.ready_links) < self._num_gateways or not self._front.has_met(self._crews[1]):
            self._changed.clear()
            await self._changed.wait()
        self._has_been_ready = True
        self._announce()
        self._notifier.ready(self._status())

    def _announce(self) -> None:
        facts = next(iter(self._crews[1].ready.values())).facts
        memory_mb, ready_s = self._memory_mb(), time.monotonic() - self._started_at
        logs.announce(
            summary(self.plan, self._url, self._admin_url, facts, memory_mb, ready_s),
            **summary_fields(self.plan, self._url, self._admin_url, facts, memory_mb, ready_s),
        )
        ready_fd = self.plan.settings.ready_fd
        if ready_fd is not None:
            with suppress(OSError), open(ready_fd, "w") as ready:
                ready.write(json.dumps({"url": self._url, "admin_url": self._admin_url, "pid": os.getpid()}) + "\n")

    def _memory_mb(self) -> int:
        """Proportional memory of every process of the server."""
        pids = [os.getpid(), *(link.process.pid for link in self._front.links.values())]
        pids += [pid for worker_pool in self._crews.values() for pid in worker_pool.pids()]
        return sum(map(pss_mb, pids))

    def _tell_status(self) -> None:
        if self._has_been_ready and self._reloading is None and not self._stop.is_set():
            self._notifier.status(self._status())

    def _status(self) -> str:
        worker_pool = self._crews[self._front.active]
        model, refused = worker_pool.plan.gateway.model, "; ".join(self._reload_problems)
        return serving(
            model, self._url, len(worker_pool.ready), len(worker_pool.plan.workers), worker_pool.broken, refused
        )

    async def _keep_notifying(self) -> None:
        """Tell systemd that a start or a reload goes on, and that the server is alive; the latter only while it is."""
        if not self._notifier.has_listener:
            return
        interval_s = self._notifier.interval_s
        watchdog_state = WatchdogState(time.monotonic(), interval_s)
        while True:
            if not self._has_been_ready or self._reloading is not None:
                self._notifier.extend()
            why = watchdog_state.why_restart(self._signs(), time.monotonic(), self.plan.settings.start_timeout)
            if why and self._notifier.watchdog_s is not None:
                log.critical("only a new server helps, and systemd does not hear that this one is alive: %s", why)
            else:
                self._notifier.alive()
            self._tell_status()  # again, should systemd have been too busy
            await asyncio.sleep(interval_s)

    def _signs(self) -> HealthSignals:
        """A start and a drain have deadlines of their own."""
        if not self._has_been_ready or self._stop.is_set():
            return HEALTHY
        worker_pool, links = self._crews[self._front.active], self._front.heard_links
        usable = {worker.incarnation for worker in worker_pool.ready.values() if not worker.is_condemned}
        return HealthSignals(bool(links), any(link.met & usable for link in links), worker_pool.broken is not None)

    # --- beginning and end ----------------------------------------------------------------------------------

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal)
        loop.add_signal_handler(signal.SIGHUP, self._reload_soon)

    def _on_stop_signal(self) -> None:
        """The first asks for a drain; a second, from somebody who will not wait, ends it."""
        if self._stop.is_set():
            self._cancel_all()
        self._stop.set()

    def _cancel_all(self) -> None:
        """Each keeper kills its child on the way out."""
        for task in self._tasks:
            task.cancel()

    def _close_listening(self) -> None:
        for sock in self._listening:
            sock.close()

    def _close(self) -> None:
        self._close_listening()
        for worker_pool in self._crews.values():
            worker_pool.close()
        os.close(self._board_fd)
        self._outcome.close()
        for path, ours in self._uds:
            remove_if_ours(path, ours)


def _with_inherited(plan: Plan, inherited: Inherited) -> Plan:
    """The plan of a server whose sockets systemd has made."""
    gateway = replace(
        plan.gateway,
        has_admin_listener=plan.gateway.has_admin_listener or inherited.admin is not None,
        keeps_listening=inherited.public is not None,
        keeps_admin_listening=inherited.admin is not None,
    )
    return replace(plan, gateway=gateway)


async def _keep_until_failure(worker_pool: WorkerPool, failed: "asyncio.Future[str]") -> None:
    """Unlike that of the first generation, the failure of a later one is not the server's."""
    try:
        await worker_pool.keep()
    except StartFailure as error:
        failed.set_result(str(error))


async def _in_thread(function: Callable[[], T]) -> T:
    """Call what may take minutes. Unlike `asyncio.to_thread`, nobody waits for it when the program ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=work, name="reload", daemon=True).start()
    return await future


def _file_state(settings: Settings) -> tuple[int, int, int] | None:
    """What changes when the file of keys does; None without one."""
    if settings.keys_file is None:
        return None
    try:
        found = os.stat(settings.keys_file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _prepare_process() -> None:
    adopt_orphans()
    os.umask(0o077)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_open_files(), hard))
    leave_no_core()
    with suppress(RuntimeError, OSError, ValueError):  # there may be no stderr
        faulthandler.enable()  # systemd's watchdog asks with SIGABRT where this process hangs
