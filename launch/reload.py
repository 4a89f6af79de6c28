"""A reload: the configuration is read again, and other generations replace those of the models that have changed.

Owns the order of its steps, the generations' worker pools from their making to their end, and the reasons for which a
reload is refused. A model that is configured as before, with the same files, keeps its generation and its processes,
unless it is the only one: then SIGHUP always starts a new one. The new generations start beside the old ones, all at
once. They become active when every gateway is connected to all of their workers; a model that is no longer configured
is withdrawn in the same moment. The new generation of a model that is not loaded starts no workers, and becomes active
with the others. An old generation ends when its last request has been answered. Whatever fails before that refuses the
whole reload, and nothing has changed.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from vecd.base import logs
from vecd.base.failures import ConfigurationError, StartFailure
from vecd.gateway.config import ApiKey
from vecd.launch.config.keys import load_keys
from vecd.launch.config.models import ModelEntry, numbered
from vecd.launch.config.plan import Plan
from vecd.launch.files import FilesHang
from vecd.launch.gateways import GatewayPool, loop_time
from vecd.launch.residency import Residency
from vecd.launch.workers import WorkerPool
from vecd.model.card import ModelError
from vecd.shm.settings import Settings

log = logging.getLogger("vecd.supervisor")

_PLAN_TIMEOUT_S = 3600.0
"""For a plan, which may fetch the model from the hub. `vecd reload` waits as long."""
_RETIRE_MARGIN_S = 5.0
_MAX_GATEWAY_DEATHS = 3

_FIXED_SETTINGS = (
    "host", "port", "uds", "tls_cert", "tls_key", "admin_host", "admin_port", "admin_uds", "gateways", "vector_cache",
    "memory_budget",
)  # fmt: skip
"""The sockets, which processes listen on them, and memory. The content of the certificate's files can change."""


class ReloadingServer(Protocol):
    """What a reload needs of the supervisor. The first two methods are called in threads."""

    def read_models(self) -> Sequence[ModelEntry]: ...

    def make_plans(self, models: Sequence[ModelEntry]) -> list[Plan]: ...

    def make_worker_pool(self, generation: int, plan: Plan) -> WorkerPool: ...

    def start_task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]": ...

    def on_reload_started(self) -> None: ...

    def on_reload_finished(self, problems: list[str]) -> None:
        """`problems`: why nothing has changed; none if it has."""


class Reloader:
    def __init__(self, server: ReloadingServer, gateway_pool: GatewayPool, residency: Residency) -> None:
        self.problems: list[str] = []
        self._server = server
        self._worker_pools, self._files = gateway_pool.worker_pools, gateway_pool.files
        self._gateway_pool = gateway_pool
        self._residency = residency
        self._newest = max(self._worker_pools)
        self._requests: list[asyncio.Future[list[str]]] = []
        """Those that the next reload will grant."""
        self._task: asyncio.Task[None] | None = None

    @property
    def active(self) -> list[WorkerPool]:
        """The workers that new requests go to, in the order of the models' indices."""
        return [self._worker_pools[generation] for generation in self._gateway_pool.active.values()]

    @property
    def is_running(self) -> bool:
        return self._task is not None

    def request(self) -> "asyncio.Future[list[str]]":
        """Reload soon. A request during a reload begins another one at its end. Returns why it was refused; [] if it
        was not."""
        self._requests.append(result := asyncio.get_running_loop().create_future())
        if self._task is None:
            self._task = self._server.start_task(self._run())
        return result

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def on_unprepared(self, generation: int, error: str) -> None:
        """A gateway cannot prepare for a generation that is not active yet."""
        if (new := self._worker_pools.get(generation)) is not None:
            self._fail(new, f"{new.prefix}{error}")

    def _fail(self, new: WorkerPool, reason: str) -> None:
        new.failure = reason
        self._gateway_pool.changed.set()

    async def _run(self) -> None:
        try:
            while self._requests:
                requests, self._requests = self._requests, []
                log.info("reloading")
                self._server.on_reload_started()
                self.problems = await self._reload()
                for problem in self.problems:
                    log.error("not reloaded, nothing has changed: %s", problem)
                self._server.on_reload_finished(self.problems)
                for request in requests:
                    if not request.done():  # who waited may have gone
                        request.set_result(self.problems)
        finally:
            self._task = None

    async def _reload(self) -> list[str]:
        """Serve by the configuration as it is now. Returns why that cannot be; then all is as before."""
        pools: list[WorkerPool] = []
        try:
            await self._prepare(pools)
            keys = await self._start(pools)
        except ConfigurationError as error:
            problems = error.problems
        except (_Refused, FilesHang, ModelError, StartFailure, OSError, SystemExit) as error:
            problems = [str(error)]
        except Exception as error:  # whatever files may hold; a message might quote it
            problems = [f"unexpected {type(error).__name__}"]
        else:
            await self._activate(pools, keys)
            return []
        for new in self._new_of(pools):
            await self._end(new)
        return problems

    # --- the new generations --------------------------------------------------------------------------------

    async def _prepare(self, pools: list[WorkerPool]) -> None:
        """Append the worker pools of the configuration as it is now, in the order of the models' indices: those that
        serve, of models that have not changed; of the others, new ones that are not started. Raises what reading can
        raise."""
        models = await self._files.call("the configuration", self._server.read_models)
        for path in _files_of(models):  # one that hangs is named, and refuses the reload at once
            with suppress(OSError):
                await self._files.call(str(path), path.stat)
        plans = await self._files.call(
            "the model", lambda: self._server.make_plans(models), timeout_s=_PLAN_TIMEOUT_S, discard=_close
        )
        try:
            plans = self._fitted(plans)
            for plan in plans:
                pool = self._unchanged(plan, plans) or self._make_pool(plan)
                pools.append(pool)
        except BaseException:
            _close(plans[len(pools) :])
            raise

    def _new_of(self, pools: Sequence[WorkerPool]) -> list[WorkerPool]:
        active = self.active
        return [worker_pool for worker_pool in pools if worker_pool not in active]

    def _unchanged(self, plan: Plan, plans: Sequence[Plan]) -> WorkerPool | None:
        """The pool that serves this plan already; None if there is none, or if it is that of the only model. Side
        effects if there is one: the plan is closed, and workers that wait for the model's files look at them."""
        active = self.active
        if len(active) == len(plans) == 1:
            return None
        for worker_pool in active:
            is_same = serves_the_same(worker_pool.plan, plan, is_first=plan is plans[0])
            if worker_pool.model == plan.gateway.model and is_same:
                worker_pool.look_again()
                plan.close()
                return worker_pool
        return None

    def _make_pool(self, plan: Plan) -> WorkerPool:
        worker_pool = self._server.make_worker_pool(self._newest + 1, plan)
        self._newest += 1
        self._worker_pools[worker_pool.generation] = worker_pool
        return worker_pool

    def _fitted(self, plans: Sequence[Plan]) -> list[Plan]:
        """The plans with what must stay as it is, in the order of the models' indices. Raises ConfigurationError."""
        now, then = self.active[0].plan.settings, plans[0].settings
        problems = [
            f"{name}: cannot be changed while serving, restart instead (was {getattr(now, name)!s}, "
            f"now {getattr(then, name)!s})"
            for name in _FIXED_SETTINGS
            if getattr(now, name) != getattr(then, name)
        ]
        served = {worker_pool.model: worker_pool.plan.gateway for worker_pool in self.active}
        try:
            configs = numbered([plan.gateway for plan in plans], served)
        except ConfigurationError as error:
            problems += error.problems
        if problems:
            raise ConfigurationError(*problems)
        fitted = [replace(plan, gateway=config) for plan, config in zip(plans, configs, strict=True)]
        return sorted(fitted, key=lambda plan: plan.gateway.model_index)

    async def _start(self, pools: Sequence[WorkerPool]) -> tuple[ApiKey, ...]:
        """Start new generations beside the active ones; returns the keys that they begin with. Raises what refuses it,
        as `_await_connected` and `_await_unchanged`."""
        new = self._new_of(pools)
        for worker_pool in new:
            is_loaded = self._residency.stays_loaded(worker_pool.plan)
            await self._residency.add(worker_pool, is_loaded=is_loaded)
            if is_loaded:
                self._server.start_task(self._supervise(worker_pool))
        await asyncio.sleep(0)  # all of them have begun, so that `_end` finds what it must end
        self._gateway_pool.reconcile()
        await self._await_connected(new)
        return await self._await_unchanged(pools[0].plan.settings, new)

    async def _supervise(self, new: WorkerPool) -> None:
        """Unlike a failure of a first generation, one of a later generation does not end the server."""
        try:
            await new.supervise()
        except StartFailure as error:
            self._fail(new, str(error))

    async def _activate(self, pools: Sequence[WorkerPool], keys: tuple[ApiKey, ...]) -> None:
        before, new = self.active, self._new_of(pools)
        self._gateway_pool.activate({worker_pool.model: worker_pool.generation for worker_pool in pools}, keys)
        settings = pools[0].plan.settings
        logs.change(settings.log_level, settings.log_format)
        old = [worker_pool for worker_pool in before if worker_pool not in pools]
        replaced = {worker_pool.model for worker_pool in before}
        for worker_pool in new:
            if worker_pool.model not in replaced:
                self._log_served(worker_pool.model)
        await asyncio.gather(*map(self._retire, old))
        if not new and not old:
            log.info("reloaded: no model has changed")

    async def _await_connected(self, new: Sequence[WorkerPool]) -> None:
        started_at, deaths_before = loop_time(), self._gateway_pool.num_deaths

        def is_connected(one: WorkerPool) -> bool:
            for each in new:
                if why := each.failure or (each.broken and f"{each.prefix}{each.broken}"):
                    raise _Refused(why)
            if self._gateway_pool.num_deaths - deaths_before >= _MAX_GATEWAY_DEATHS:
                raise _Refused(f"gateways have died {_MAX_GATEWAY_DEATHS} times meanwhile")
            return self._gateway_pool.is_connected(one)

        for one in sorted(new, key=lambda one: one.plan.settings.start_timeout):
            timeout_s = one.plan.settings.start_timeout
            try:
                await self._gateway_pool.until(partial(is_connected, one), started_at + timeout_s - loop_time())
            except TimeoutError:
                why = f"the gateways were not connected to all new workers within {timeout_s:g} s"
                raise _Refused(f"{one.prefix}{why}") from None

    async def _await_unchanged(self, settings: Settings, new: Sequence[WorkerPool]) -> tuple[ApiKey, ...]:
        """The keys as they are now. Raises _Refused when a model has changed since the plans were made, and requests
        another reload; ConfigurationError for keys that cannot be used."""
        keys = await self._files.call(str(settings.keys_file or "the keys"), lambda: load_keys(settings))
        for worker_pool in new:
            plan = worker_pool.plan
            if await self._files.call(plan.card.folder, plan.model_has_changed):
                self.request()
                raise _Refused(f"{worker_pool.prefix}the model's files changed meanwhile; reloading again")
        return self._gateway_pool.keys if keys == self._gateway_pool.keys else keys

    # --- the end of a generation ----------------------------------------------------------------------------

    async def _retire(self, old: WorkerPool) -> None:
        timeout_s = old.plan.settings.request_timeout + _RETIRE_MARGIN_S
        try:
            await self._gateway_pool.until(lambda: not self._gateway_pool.serves(old.generation), timeout_s)
        except TimeoutError:
            log.warning("generation %d still has requests after %g s and is ended", old.generation, timeout_s)
        if old.model in self._gateway_pool.active:
            self._log_served(old.model)
        else:
            log.info("reloaded: %s is no longer served", old.model)
        await self._end(old)

    def _log_served(self, model: str) -> None:
        log.info("reloaded: %s is served by generation %d", model, self._gateway_pool.active[model])

    async def _end(self, worker_pool: WorkerPool) -> None:
        await self._residency.forget(worker_pool.generation)
        del self._worker_pools[worker_pool.generation]
        self._gateway_pool.discard(worker_pool.generation)
        await worker_pool.stop()
        worker_pool.close()
        worker_pool.plan.close()


class _Refused(Exception):
    """The new generation cannot take over. The message says why."""


def serves_the_same(served: Plan, plan: Plan, *, is_first: bool) -> bool:
    """Whether a model would be served as it is. Keys are every generation's. The copies for gateways have other paths
    each time. A certificate is read again with a new generation of the first model."""
    ours = served.gateway
    gateway = replace(plan.gateway, card=ours.card, keys=ours.keys, query_weights=ours.query_weights)
    gateway = replace(gateway, ranges=ours.ranges)
    tls = () if is_first else (str(plan.gateway.tls_cert), str(plan.gateway.tls_key))
    return (
        gateway == served.gateway
        and plan.card == served.card
        and plan.workers == served.workers
        and plan.model_files == served.model_files
        and {name for name, *_ in plan.other_files ^ served.other_files} <= set(tls)
        and replace(plan.settings, ready_fd=None) == replace(served.settings, ready_fd=None)
    )


def _close(plans: Sequence[Plan]) -> None:
    for plan in plans:
        plan.close()


def _files_of(models: Sequence[ModelEntry]) -> list[Path]:
    settings = models[0].settings
    folders = [Path(model.settings.model).expanduser() for model in models if model.settings.model]
    return [path for path in (settings.keys_file, settings.tls_cert, settings.tls_key, *folders) if path is not None]
