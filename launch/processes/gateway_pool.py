"""The gateways: started, watched, restarted when they die, and kept up to date.

Owns a coroutine for each gateway, which supervises it, the links to those that run, what each of them has been sent
about which generation of the configuration, and the division of the cores among them. What is still to be sent is
worked out anew whenever anything has changed (`reconcile`), so that a gateway that starts in the middle of a reload
ends up in the state of the others. Called by `vecd.supervisor` and `vecd.launch.processes.reload`.

Messages to one gateway (→) and from it (←) about a new generation:

    → Prepare   ← Prepared   → WorkerUp …   ← WorkerConnected …   → Activate
    ← Retired (the generation before)   → Discard (the generation before)

With several models, each has one active generation. A gateway starts with the first model's and is sent the others,
which become active as soon as they are prepared: their requests wait for workers, as those of the first model do. A
model that is no longer configured: → Withdrawn   ← Retired   → Discard. The state of a model that is not simply loaded
and stays so is sent with the workers (`vecd.launch.processes.residency`); a generation that is not loaded is active as
soon as it is prepared.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from vecd.gateway.types.config import ApiKey
from vecd.launch.base.exit_codes import ChildDied, StartFailure
from vecd.launch.processes.backoff import Backoff
from vecd.launch.processes.children import Process, System
from vecd.launch.processes.core_grants import CoreGrants, Grants, Life
from vecd.launch.processes.worker_pool import WorkerPool
from vecd.shm.control import (
    Activate,
    CoresGranted,
    CoresHeld,
    CoresWanted,
    Discard,
    Drain,
    GatewayStart,
    Message,
    ModelBroken,
    ModelDrained,
    ModelFiles,
    ModelIdentity,
    ModelIs,
    NewKeys,
    Prepare,
    Prepared,
    Progress,
    Retired,
    Withdrawn,
    WorkerConnected,
    WorkerDown,
    WorkerUp,
)
from vecd.shm.residence import ModelState
from vecd.shm.shared_metrics import clear_gauges
from vecd.shm.wire import Incarnation

log = logging.getLogger("vecd.supervisor")

_START_TIMEOUT_S = 60.0
_HUNG_AFTER_S = 10.0
"""Without a heartbeat. A gateway sends one a second, whatever it has to do: nothing holds its loop up for long."""
_WATCH_INTERVAL_S = 1.0
_QUARANTINE_KEY_BYTES = 16


@dataclass(slots=True)
class Link:
    """A gateway that runs, and what it has been sent."""

    index: int
    epoch: int
    """Which of its lives this is, 1 for the first."""
    process: Process
    generations: dict[str, int]
    """By model, the one that it serves new requests with."""
    awaited: set[str]
    """The other models that it was started for, and that it has not been able to serve yet."""
    heartbeat_at: float
    """When its last message came, by the loop's clock."""
    is_ready: bool = False
    known: set[int] = field(default_factory=set)
    """Generations that it has been sent."""
    prepared: set[int] = field(default_factory=set)
    retiring: set[int] = field(default_factory=set)
    """Generations with requests that began before another one became active, or before their model was withdrawn."""
    sent_up: dict[Incarnation, int] = field(default_factory=dict)
    """Workers that it has been sent, and the generation of each."""
    sent_keys: tuple[ApiKey, ...] = ()
    sent_stage: str | None = None
    sent_broken: dict[int, str] = field(default_factory=dict)
    sent_states: dict[int, ModelIs] = field(default_factory=dict)
    """By generation."""
    drained: set[int] = field(default_factory=set)
    """Generations that drain, of which nothing is at a worker any more."""
    sent_identities: dict[int, ModelIdentity] = field(default_factory=dict)
    """By generation: the identity of the model that it has been sent last."""
    sent_files: dict[int, str] = field(default_factory=dict)
    """By generation: what it has been sent last of changed files."""
    connected: set[Incarnation] = field(default_factory=set)
    """Workers that have replied to it."""
    is_killed: bool = False
    """It has been sent a signal for hanging."""

    @property
    def life(self) -> Life:
        return self.index, self.epoch


class GatewayPool:
    def __init__(
        self,
        num_gateways: int,
        listening: list[socket.socket],
        metrics_fd: int,
        worker_pools: Mapping[int, WorkerPool],
        on_message: Callable[[Link, Message], None],
        on_change: Callable[[], None],
        system: System,
        num_cores: int,
        vector_cache_fd: int | None = None,
        states: Mapping[int, ModelIs] | None = None,
    ) -> None:
        """`listening`: the public socket, and the admin socket if there is one; closed when the drain begins.
        `metrics_fd`: the shared metrics; `vector_cache_fd`: the vector cache, if there is one. `worker_pools`, by
        generation, is read at each `reconcile`. `on_message` is called with the messages of gateways that do not change
        a `Link`; `on_change` when a link has changed, begun or ended. `num_cores`: those that all gateways together may
        lease. `states`, by generation, of those whose state gateways are told, is read at each `reconcile`, too."""
        self.links: dict[int, Link] = {}
        """By the gateway's index; also those that are starting."""
        self.active = {worker_pool.model: generation for generation, worker_pool in sorted(worker_pools.items())}
        """By model, in the order of their indices: the generation that new requests are for."""
        first = next(iter(worker_pools.values())).plan.gateway
        self.keys = first.keys
        """The keys that clients may send, whatever a generation's own configuration says."""
        self.start_stage: str | None = "workers are loading"
        """What the server's start is doing; set to None once the server is ready."""
        self.num_deaths = 0
        """Of all gateways."""
        self._num_gateways = num_gateways
        self._listening = listening
        self._metrics_fd = metrics_fd
        self._vector_cache_fds = [] if vector_cache_fd is None else [vector_cache_fd]
        self._metrics_spec = first.shared_metrics  # of all generations
        self._quarantine_key = secrets.token_hex(_QUARANTINE_KEY_BYTES)
        self._worker_pools = worker_pools
        self._states: Mapping[int, ModelIs] = {} if states is None else states
        self._on_other_message = on_message
        self._on_change = on_change
        self._system = system
        self._core_grants = CoreGrants(num_cores)
        self._drain: Drain | None = None
        self._is_draining = asyncio.Event()

    @property
    def ready_links(self) -> list[Link]:
        return [link for link in self.links.values() if link.is_ready]

    @property
    def healthy_links(self) -> list[Link]:
        """Those that are ready and have sent a heartbeat lately."""
        now = _now()
        return [link for link in self.ready_links if now - link.heartbeat_at <= _HUNG_AFTER_S]

    def is_connected(self, worker_pool: WorkerPool) -> bool:
        """Whether the pool is complete, and each ready gateway, of which there is one, is connected to all of it, and
        awaits no other model: it would count this one for that. If the pool's model is not loaded, whether each is
        prepared for it, and awaits no other."""
        if self._is_unloaded(worker_pool.generation):
            return self.is_prepared(worker_pool)
        workers = {worker.incarnation for worker in worker_pool.ready.values()}
        links = self.ready_links
        is_served = all(link.connected >= workers and not link.awaited for link in links)
        return worker_pool.is_complete and bool(links) and is_served

    def is_prepared(self, worker_pool: WorkerPool) -> bool:
        """Whether each ready gateway, of which there is one, has prepared for the pool's generation, and awaits no
        other model."""
        links = self.ready_links
        return bool(links) and all(worker_pool.generation in link.prepared and not link.awaited for link in links)

    def is_drained(self, generation: int) -> bool:
        """Whether no gateway has anything at a worker of a model that drains."""
        return all(generation in link.drained for link in self.ready_links if generation in link.prepared)

    def _is_unloaded(self, generation: int) -> bool:
        """Whether its model has no workers, and no request needs to wait until it has."""
        state = self._states.get(generation)
        return state is not None and state.state not in (ModelState.LOADING, ModelState.READY)

    # --- supervision ----------------------------------------------------------------------------------------

    async def supervise(self, index: int) -> None:
        """Keep a gateway running until it has drained, or until cancelled. Raises StartFailure when it cannot start or
        keeps dying, if it has never been ready."""
        name = self._name(index)
        backoff = Backoff(name)
        epoch = 0
        while not self._is_draining.is_set():
            epoch += 1
            reason, ready_for_s = await self._run(index, epoch, backoff)
            self.num_deaths += 1
            self._on_change()
            if self._is_draining.is_set():
                log.info("%s %s", name, reason)
                return
            log.error("%s %s", name, reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.delay_after(reason, ready_for_s)):
                    await self._is_draining.wait()

    async def watch_heartbeats(self) -> None:
        """Until cancelled, kill gateways that run but do nothing any more."""
        looked_at = _now()
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now = _now()
            was_stopped = now - looked_at > 2 * _WATCH_INTERVAL_S  # this process: it could receive no heartbeat
            looked_at = now
            for link in list(self.links.values()):
                if was_stopped:
                    link.heartbeat_at = now
                elif link.is_ready and not link.is_killed and now - link.heartbeat_at > _HUNG_AFTER_S:
                    log.error("%s has not sent a heartbeat for %.0f s and is killed", link.process.name, _HUNG_AFTER_S)
                    link.is_killed = True
                    link.process.abort()

    def _name(self, index: int) -> str:
        return "the gateway" if self._num_gateways == 1 else f"gateway {index}"

    async def _run(self, index: int, epoch: int, backoff: Backoff) -> tuple[str, float | None]:
        """Run one process from its start to its end; returns how it ended, and for how many seconds it had been ready.

        Raises StartFailure when it reports that it cannot start, and has never been ready.
        """
        try:
            process = self._system.spawn(self._name(index), "gateway")
        except OSError as error:
            return f"cannot be started: {error}", None
        with process:
            (model, generation), *others = self.active.items()
            link = self.links[index] = Link(
                index, epoch, process, {model: generation}, {other for other, _ in others}, _now(),
                known={generation}, prepared={generation},
            )  # fmt: skip
            try:
                reason = await self._start(link, generation, backoff)
                if reason is not None:
                    return reason, None
                ready_at = _now()
                self._on_ready(link)
                while (message := await process.receive()) is not None:
                    self._on_message(link, message)
                return await self._reap(link), _now() - ready_at
            finally:
                if self.links.get(index) is link:
                    del self.links[index]
                self._grant(self._core_grants.leave(link.life))
                self._on_change()

    async def _start(self, link: Link, generation: int, backoff: Backoff) -> str | None:
        """Why it did not get ready; None when it did."""
        worker_pool = self._worker_pools[generation]
        link.sent_keys, link.sent_stage = self.keys, self.start_stage
        config = replace(worker_pool.plan.gateway, keys=self.keys).to_json()
        start = GatewayStart(
            config, link.index, link.epoch, generation, self._quarantine_key, self.start_stage, len(self.active)
        )
        listening = [sock.fileno() for sock in self._listening]
        fds = [self._metrics_fd, worker_pool.zmq_listening(link.index), *self._vector_cache_fds, *listening]
        send_or_kill(link.process, start, fds)
        try:
            await link.process.await_ready(_START_TIMEOUT_S)
            return None
        except StartFailure as failure:
            if not backoff.has_been_ready:
                raise
            reason = f"cannot start: {failure}"
        except ChildDied as death:
            reason = str(death)
        link.process.kill()
        await self._reap(link)
        return reason

    async def _reap(self, link: Link) -> str:
        """Wait until the process has ended; returns how. Side effect: the gauges that it had written are cleared."""
        reason = await link.process.ended()
        clear_gauges(self._metrics_fd, self._metrics_spec, link.index)
        return reason

    def _on_ready(self, link: Link) -> None:
        link.is_ready = True
        link.heartbeat_at = _now()
        self._core_grants.join(link.life)
        if self._drain is not None:
            send_or_kill(link.process, self._drain)
        self.reconcile()
        self._on_change()

    def _on_message(self, link: Link, message: Message) -> None:
        link.heartbeat_at = _now()
        match message:
            case WorkerConnected():
                link.connected.add(Incarnation(message.worker, message.life))
            case Prepared(error=""):
                link.prepared.add(message.generation)
            case ModelDrained():
                link.drained.add(message.generation)
            case Retired():
                link.retiring.discard(message.generation)
            case CoresWanted():
                self._grant(self._core_grants.want(link.life, message.num))
                return
            case CoresHeld():
                self._grant(self._core_grants.hold(link.life, message.num))
                return
            case _:
                self._on_other_message(link, message)
                return
        self.reconcile()
        self._on_change()

    def activate(self, generations: dict[str, int], keys: tuple[ApiKey, ...]) -> None:
        """Let new requests for each model go to this generation, with these keys. `generations`: of all models that
        are served from now on, in the order of their indices. A gateway that is connected to none of its workers goes
        on with the generation before until it is."""
        self.active, self.keys = generations, keys
        for link in list(self.links.values()):
            if link.awaited - generations.keys():
                log.warning("%s was started for a model that is no longer served, and is killed", link.process.name)
                link.process.kill()
            elif not link.is_ready and generations.keys() - link.generations.keys() - link.awaited:
                log.warning("%s was started without a model that is served now, and is killed", link.process.name)
                link.process.kill()
        self.reconcile()

    # --- messages to gateways -------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Send every ready gateway what it has not been sent yet about keys, generations and workers."""
        for link in self.ready_links:
            # Before it learns of workers: until then it serves no request, with whatever key.
            if link.sent_keys is not self.keys:
                link.sent_keys = self.keys
                send_or_kill(link.process, NewKeys([asdict(key) for key in self.keys]))
            if self.start_stage is not None and link.sent_stage != self.start_stage:
                link.sent_stage = self.start_stage
                send_or_kill(link.process, Progress(self.start_stage))
            for generation, worker_pool in self._worker_pools.items():
                if generation not in link.known:
                    link.known.add(generation)
                    prepare = Prepare(generation, replace(worker_pool.plan.gateway, keys=self.keys).to_json())
                    send_or_kill(link.process, prepare, [worker_pool.zmq_listening(link.index)])
                if generation in link.prepared:
                    self._send_identity(worker_pool, link)
                    self._send_files(worker_pool, link)
                    self._send_workers(worker_pool, link)
                    self._send_state(generation, link)
            self._activate(link)

    def _send_identity(self, worker_pool: WorkerPool, link: Link) -> None:
        identity = worker_pool.identity
        if identity is not None and link.sent_identities.get(worker_pool.generation) != identity:
            link.sent_identities[worker_pool.generation] = identity
            send_or_kill(link.process, identity)

    def _send_files(self, worker_pool: WorkerPool, link: Link) -> None:
        generation, changed = worker_pool.generation, worker_pool.changed_files
        if link.sent_files.get(generation, "") != changed:
            link.sent_files[generation] = changed
            send_or_kill(link.process, ModelFiles(generation, changed))

    def _send_workers(self, worker_pool: WorkerPool, link: Link) -> None:
        for worker in worker_pool.ready.values():
            incarnation = worker.incarnation
            if incarnation not in link.sent_up:
                link.sent_up[incarnation] = worker_pool.generation
                link.sent_broken.pop(worker_pool.generation, None)
                up = WorkerUp(worker_pool.generation, incarnation.worker, incarnation.life, worker.facts)
                send_or_kill(link.process, up, [worker.arena_fd])
        if worker_pool.broken is not None and link.sent_broken.get(worker_pool.generation) != worker_pool.broken:
            link.sent_broken[worker_pool.generation] = worker_pool.broken
            send_or_kill(link.process, ModelBroken(worker_pool.generation, worker_pool.broken))

    def _send_state(self, generation: int, link: Link) -> None:
        state, sent = self._states.get(generation), link.sent_states.get(generation)
        if state is not None and state != sent:
            if sent is None or state.state != sent.state:
                link.drained.discard(generation)
            link.sent_states[generation] = state
            # The pause after a failed load may be over: a new gateway lets a request wait for what is left of it.
            is_old_failure = sent is None and state.state == ModelState.FAILED
            send_or_kill(link.process, replace(state, wait_s=0.0) if is_old_failure else state)

    def _activate(self, link: Link) -> None:
        """Let it serve each model with the active generation, once it is connected to a worker of it, or is prepared if
        the model is not loaded; and no model that is not active. A model that it does not serve yet needs no worker:
        while there is none, its requests are refused as what they are, and not as those for an unknown model."""
        for model, generation in self.active.items():
            before = link.generations.get(model)
            if before == generation or generation not in link.prepared:
                continue
            workers = {worker.incarnation for worker in self._worker_pools[generation].ready.values()}
            if before is None or self._is_unloaded(generation) or link.connected & workers:
                if before is not None:
                    link.retiring.add(before)
                link.generations[model] = generation
                link.awaited.discard(model)
                send_or_kill(link.process, Activate(generation))
        if link.generations.keys() > self.active.keys():  # only then: one may have been renamed
            for model in link.generations.keys() - self.active.keys():
                generation = link.generations.pop(model)
                link.retiring.add(generation)
                send_or_kill(link.process, Withdrawn(generation))

    def send_down(self, incarnation: Incarnation, reason: str, *, has_crashed: bool) -> None:
        """Tell the gateways that know of a worker that it is dead."""
        for link in self.ready_links:
            if link.sent_up.pop(incarnation, None) is not None:
                link.connected.discard(incarnation)
                send_or_kill(link.process, WorkerDown(incarnation.worker, incarnation.life, reason, has_crashed))

    def withdraw_workers(self, generation: int, reason: str) -> None:
        """Tell the gateways that all workers of a generation have been ended."""
        for link in self.ready_links:
            for incarnation in [one for one, its in link.sent_up.items() if its == generation]:
                del link.sent_up[incarnation]
                link.connected.discard(incarnation)
                down = WorkerDown(incarnation.worker, incarnation.life, reason, is_planned=True)
                send_or_kill(link.process, down)

    def broadcast(self, message: Message, but: Link | None = None) -> None:
        """Send all ready gateways a message that one which starts later does not need."""
        for link in self.ready_links:
            if link is not but:
                send_or_kill(link.process, message)

    def _grant(self, grants: Grants) -> None:
        for (index, _), num in grants:
            send_or_kill(self.links[index].process, CoresGranted(num))

    def discard(self, generation: int) -> None:
        """Let every gateway forget a generation, and kill those that serve no other. Its worker pool is to be removed
        from the worker pools first."""
        for link in list(self.links.values()):
            if generation in link.generations.values():
                log.error("%s still serves generation %d and is killed", link.process.name, generation)
                link.process.kill()
            elif generation in link.known:
                link.known.discard(generation)
                link.prepared.discard(generation)
                link.retiring.discard(generation)
                link.drained.discard(generation)
                link.sent_states.pop(generation, None)
                link.sent_identities.pop(generation, None)
                link.sent_files.pop(generation, None)
                send_or_kill(link.process, Discard(generation))

    def serves(self, generation: int) -> bool:
        """Whether any gateway has requests of this generation, or begins new ones with it."""
        return any(
            generation in link.generations.values() or generation in link.retiring for link in self.links.values()
        )

    def drain(self, message: Drain) -> None:
        """Let all gateways drain. From now on one that ends is not restarted."""
        self._drain = message
        self._is_draining.set()
        self.broadcast(message)


def _now() -> float:
    """Seconds, by the clock that timeouts go by."""
    return asyncio.get_running_loop().time()


def send_or_kill(process: Process, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a child a message that it must not miss: one that does not read is killed, and its successor sent all."""
    try:
        process.channel.send(message, fds)
    except BlockingIOError:
        log.error("%s does not read its control messages and is killed", process.name)
        process.kill()
    except OSError as error:
        if not isinstance(error, ConnectionError):  # else it has just died, which its own coroutine is about to see
            log.error("%s cannot be sent a message and is killed: %s", process.name, error)
        process.kill()
