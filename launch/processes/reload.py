"""A reload: the configuration is read again, and another generation replaces the one that serves.

Owns the order of its steps, the generations' worker pools from their making to their end, and the reasons for which a
reload is refused. The new generation starts beside the old one. It becomes the active one when every gateway is
connected to all of its workers; the old one ends when its last request has been answered. Whatever fails before that
refuses the reload, and nothing has changed. Called by `vecd.supervisor`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from vecd.gateway.types.config import ApiKey
from vecd.launch.base.exit_codes import ConfigurationError, StartFailure
from vecd.launch.config.keys import load_keys
from vecd.launch.config.plan import Plan
from vecd.launch.config.settings import Settings
from vecd.launch.processes.file_access import FileAccess, FilesHang
from vecd.launch.processes.gateway_pool import GatewayPool
from vecd.launch.processes.worker_pool import WorkerPool
from vecd.shm import logs
from vecd.shm.card import ModelError

log = logging.getLogger("vecd.supervisor")

_PLAN_TIMEOUT_S = 3600.0
"""For a plan, which may fetch the model from the hub. `vecd reload` waits as long."""
_RETIRE_MARGIN_S = 5.0
_MAX_GATEWAY_DEATHS = 3

_FIXED_SETTINGS = (
    "host", "port", "uds", "tls_cert", "tls_key", "admin_host", "admin_port", "admin_uds", "gateways", "vector_cache",
)  # fmt: skip
"""What a reload cannot change: the sockets, which processes listen on them, and the memory that these share. The
content of the certificate's files it can."""


class ReloadObserver(Protocol):
    """Receives the beginning and the end of each reload."""

    def on_reload_requested(self) -> None: ...

    def on_reload_started(self) -> None: ...

    def on_reload_finished(self, num_requested: int, problems: list[str]) -> None:
        """All of the first `num_requested` requests are done. `problems`: why nothing has changed; none if it has."""


class Reloader:
    def __init__(
        self,
        read_settings: Callable[[], Settings],
        make_plan: Callable[[Settings], Plan],
        make_worker_pool: Callable[[int, Plan], WorkerPool],
        worker_pools: dict[int, WorkerPool],
        gateway_pool: GatewayPool,
        files: FileAccess,
        start_task: "Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]",
        changed: asyncio.Event,
        observer: ReloadObserver,
    ) -> None:
        """`read_settings` and `make_plan` are called in threads. `worker_pools`, by generation, belongs to this object.
        `changed` is set whenever a worker, a gateway or its link has changed."""
        self.problems: list[str] = []
        """Why the last reload was refused; empty if it was not."""
        self._read_settings = read_settings
        self._make_plan = make_plan
        self._make_worker_pool = make_worker_pool
        self._worker_pools = worker_pools
        self._gateway_pool = gateway_pool
        self._files = files
        self._start_task = start_task
        self._changed = changed
        self._observer = observer
        self._newest = max(worker_pools)
        self._num_requested = 0
        self._is_requested = False
        self._task: asyncio.Task[None] | None = None
        self._failures: dict[int, str] = {}
        """Generations that cannot start, or that a gateway could not prepare, and why."""

    @property
    def active(self) -> WorkerPool:
        """The workers that new requests go to."""
        return self._worker_pools[self._gateway_pool.active]

    @property
    def is_running(self) -> bool:
        return self._task is not None

    def request(self) -> None:
        """Reload soon. A request during a reload begins another one at its end."""
        self._request()
        self._is_requested = True
        if self._task is None:
            self._task = self._start_task(self._run())

    def refuse(self, problem: str) -> None:
        """Count a request that cannot be granted."""
        self._request()
        log.warning("not reloaded: %s", problem)
        self._observer.on_reload_finished(self._num_requested, [problem])

    def cancel(self) -> None:
        """Leave a reload where it is, because the server ends."""
        if self._task is not None:
            self._task.cancel()

    def on_unprepared(self, generation: int, error: str) -> None:
        """A gateway cannot prepare for a generation that is not active yet, or it cannot start."""
        self._failures[generation] = error
        self._changed.set()

    def _request(self) -> None:
        self._num_requested += 1
        self._observer.on_reload_requested()

    async def _run(self) -> None:
        try:
            while self._is_requested:
                self._is_requested = False
                num_requested = self._num_requested
                log.info("reloading")
                self._observer.on_reload_started()
                self.problems = await self._reload()
                for problem in self.problems:
                    log.error("not reloaded, nothing has changed: %s", problem)
                self._observer.on_reload_finished(num_requested, self.problems)
        finally:
            self._task = None

    async def _reload(self) -> list[str]:
        """Serve by the configuration as it is now. Returns why that cannot be; then all is as before."""
        new = None
        try:
            new = await self._prepare()
            keys = await self._start(new)
        except ConfigurationError as error:
            problems = error.problems
        except (_Refused, FilesHang, ModelError, StartFailure, OSError, SystemExit) as error:
            problems = [str(error)]
        except Exception as error:  # whatever files may hold; a message might quote it
            problems = [f"unexpected {type(error).__name__}"]
        else:
            await self._activate(new, keys)
            return []
        if new is not None:
            await self._end(new)
        return problems

    # --- the new generation ---------------------------------------------------------------------------------

    async def _prepare(self) -> WorkerPool:
        """The worker pool of the configuration as it is now, not started. Raises what reading can raise."""
        settings = await self._files.call("the configuration", self._read_settings)
        for path in _files_of(settings):  # one that hangs is named, and refuses the reload at once
            with suppress(OSError):
                await self._files.call(str(path), path.stat)
        plan = await self._files.call(
            "the model", lambda: self._make_plan(settings), timeout_s=_PLAN_TIMEOUT_S, discard=Plan.close
        )
        try:
            worker_pool = self._make_worker_pool(self._newest + 1, self._fitted(plan))
        except BaseException:
            plan.close()
            raise
        self._newest += 1
        self._worker_pools[worker_pool.generation] = worker_pool
        return worker_pool

    def _fitted(self, plan: Plan) -> Plan:
        """The plan with what must stay as it is. Raises ConfigurationError for what it would have to change."""
        now = self.active.plan
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
            raise ConfigurationError(problems)
        return replace(plan, gateway=replace(plan.gateway, board_workers=board_workers))

    async def _start(self, new: WorkerPool) -> tuple[ApiKey, ...]:
        """Start a generation beside the active one, until it could take over. Returns the keys that it begins with.

        Raises what refuses it, as `_await_connected` and `_await_unchanged`.
        """
        self._start_task(self._supervise(new))
        self._gateway_pool.reconcile()
        await self._await_connected(new)
        return await self._await_unchanged(new)

    async def _supervise(self, new: WorkerPool) -> None:
        """Unlike a failure of the first generation, one of a later generation does not end the server."""
        try:
            await new.supervise()
        except StartFailure as error:
            self.on_unprepared(new.generation, str(error))

    async def _activate(self, new: WorkerPool, keys: tuple[ApiKey, ...]) -> None:
        """Let new requests go to a generation, and end the one before it when its last request is answered."""
        old = self.active
        self._gateway_pool.active, self._gateway_pool.keys = new.generation, keys
        self._gateway_pool.reconcile()
        logs.change(new.plan.settings.log_level, new.plan.settings.log_format)
        await self._await_retired(old)
        log.info("reloaded: %s is served by generation %d", new.plan.gateway.model, new.generation)
        await self._end(old)

    async def _await_connected(self, new: WorkerPool) -> None:
        """Wait until every gateway is connected to all of its workers. Raises _Refused when that will not be."""
        timeout_s, deaths_before = new.plan.settings.start_timeout, self._gateway_pool.num_deaths
        try:
            async with asyncio.timeout(timeout_s):
                while not self._gateway_pool.is_connected(new):
                    failure = self._failures.get(new.generation, new.broken)
                    if failure is not None:
                        raise _Refused(failure)
                    if self._gateway_pool.num_deaths - deaths_before >= _MAX_GATEWAY_DEATHS:
                        raise _Refused(f"gateways have died {_MAX_GATEWAY_DEATHS} times meanwhile")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise _Refused(f"the gateways were not connected to all new workers within {timeout_s:g} s") from None

    async def _await_unchanged(self, new: WorkerPool) -> tuple[ApiKey, ...]:
        """The keys as they are now: they may have changed since the plan was made. Raises _Refused when the model has,
        too, and requests another reload; ConfigurationError for keys that cannot be used."""
        plan = new.plan
        keys = await self._files.call(str(plan.settings.keys_file or "the keys"), lambda: load_keys(plan.settings))
        if await self._files.call(plan.card.folder, plan.model_has_changed):
            self._is_requested = True
            raise _Refused("the model's files changed meanwhile; reloading again")
        return self._gateway_pool.keys if keys == self._gateway_pool.keys else keys

    # --- the end of a generation ----------------------------------------------------------------------------

    async def _await_retired(self, old: WorkerPool) -> None:
        """Wait until the last request of this generation has been answered. Each has a deadline, and so has this."""
        timeout_s = old.plan.settings.request_timeout + _RETIRE_MARGIN_S
        try:
            async with asyncio.timeout(timeout_s):
                while self._gateway_pool.serves(old.generation):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("generation %d still has requests after %g s and is ended", old.generation, timeout_s)

    async def _end(self, worker_pool: WorkerPool) -> None:
        """Forget a generation, and end all that serves it."""
        del self._worker_pools[worker_pool.generation]
        self._gateway_pool.discard(worker_pool.generation)
        await worker_pool.stop()
        worker_pool.close()
        worker_pool.plan.close()
        self._failures.pop(worker_pool.generation, None)


class _Refused(Exception):
    """The new generation cannot take over. The message says why."""


def _files_of(settings: Settings) -> list[Path]:
    """Files and folders that a plan reads."""
    model = Path(settings.model).expanduser() if settings.model else None
    return [path for path in (settings.keys_file, settings.tls_cert, settings.tls_key, model) if path is not None]
