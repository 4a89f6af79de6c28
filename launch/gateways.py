"""The gateways: started, watched, restarted when they die, and kept up to date.

Owns a coroutine for each gateway, which supervises it, the links to those that run, what each of them has been sent
about which generation of the configuration, and the division of the cores among them. What is still to be sent is
worked out anew whenever anything has changed (`reconcile`), so that a gateway that starts in the middle of a reload
ends up in the state of the others.

Messages to one gateway (→) and from it (←) about a new generation:

    → Prepare   ← Prepared   → WorkerUp …   ← WorkerConnected …   → Activate
    ← Retired (the generation before)   → Discard (the generation before)

With several models, each has one active generation. A gateway starts with the first model's and is sent the others,
which become active as soon as they are prepared: their requests wait for workers, as those of the first model do. A
model that is no longer configured: → Withdrawn   ← Retired   → Discard. The state of a model that is not simply loaded
and stays so is sent with the workers (`vecd.launch.residency`); a generation that is not loaded is active as
soon as it is prepared.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TypeAlias

from vecd.base.failures import ChildDied, StartFailure
from vecd.base.files import dump
from vecd.gateway.config import ApiKey
from vecd.launch.children import Process, System
from vecd.launch.workers import Backoff, WorkerPool
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
    ModelIs,
    ModelState,
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
from vecd.shm.shared_metrics import clear_gauges
from vecd.shm.wire import Incarnation

# Who of several gateways may lend which part of the cores to its batches.
#
# A lone gateway holds all cores, and nothing of this runs.
#
#     gateway → CoresWanted     how many cores its batches could use
#     gateway ← CoresGranted    how many it may lease from now on; holds until the next one, whatever is done with them
#     gateway → CoresHeld       its leases fit into a smaller grant
#
# The sum of what gateways may use never exceeds the cores of the server. Cores that are taken from one gateway are
# therefore granted to another only after the first one's CoresHeld, or its death. A gateway whose smaller grant has not
# been confirmed is sent no other one, so that a confirmation belongs to one grant.

Life: TypeAlias = tuple[int, int]
"""A gateway's index, and which of its lives this is, from 1."""

Grants: TypeAlias = list[tuple[Life, int]]
"""What is to be sent to whom: cores that a gateway may lease from now on, 0 or more."""


@dataclass(slots=True)
class _Holding:
    wanted: int = 0
    granted: int = 0
    held: int = 0
    """What it may use: more than is granted until it has confirmed a smaller grant."""

    @property
    def is_giving_back(self) -> bool:
        return self.held > self.granted


class CoreGrants:
    """Divides cores among the gateways that want any. While they want more than there is, each gets what it wants or an
    equal part, whichever is less. While they want less, the rest is divided so that the smallest parts are as large as
    possible: one batch may use all cores. Gateways that want nothing lose theirs to those that want any."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._holdings: dict[Life, _Holding] = {}

    def join(self, life: Life) -> None:
        self._holdings[life] = _Holding()

    def leave(self, life: Life) -> Grants:
        """A gateway is dead, and its cores are free. Returns the grants of others."""
        return self._balance() if self._holdings.pop(life, None) is not None else []

    def want(self, life: Life, num: int) -> Grants:
        """A gateway could use `num` cores. Returns the grants that follow; none for a life that is over."""
        if (holding := self._holdings.get(life)) is None:
            return []
        holding.wanted = max(0, min(num, self._num_cores))
        return self._balance()

    def hold(self, life: Life, num: int) -> Grants:
        """A gateway uses no more than the `num` cores of its newest grant. Returns the grants that follow."""
        holding = self._holdings.get(life)
        if holding is None or not holding.is_giving_back or num != holding.granted:
            return []
        holding.held = num
        return self._balance()

    def _balance(self) -> Grants:
        parts = self._parts()
        grants: Grants = []
        for life, holding in self._holdings.items():
            part = parts.get(life, 0)
            if parts and holding.granted > part and not holding.is_giving_back:
                holding.granted = part
                grants.append((life, part))
        free = self._num_cores - sum(holding.held for holding in self._holdings.values())
        for life in sorted(parts, key=lambda life: self._holdings[life].granted):
            holding = self._holdings[life]
            num = min(free, parts[life] - holding.granted)
            if num > 0 and not holding.is_giving_back:
                free -= num
                holding.granted = holding.held = holding.granted + num
                grants.append((life, holding.granted))
        return grants

    def _parts(self) -> dict[Life, int]:
        """The cores of each gateway that wants any. A core that cannot be divided goes to a gateway that has it
        already, so that the same wants lead to no change."""
        wanting = {life: (each.wanted, each.granted) for life, each in self._holdings.items() if each.wanted}
        rest, num_left, parts = self._num_cores, len(wanting), dict[Life, int]()
        are_enough = sum(wanted for wanted, _ in wanting.values()) < rest
        for life in sorted(wanting, key=lambda life: wanting[life], reverse=are_enough):
            wanted, _ = wanting[life]
            parts[life] = max(wanted, -(-rest // num_left)) if are_enough else min(wanted, rest // num_left)
            rest -= parts[life]
            num_left -= 1
        return parts


log = logging.getLogger("vecd.supervisor")

_START_TIMEOUT_S = 60.0
_HUNG_AFTER_S = 10.0
"""A gateway sends a heartbeat each second: nothing holds its loop up for long."""
_WATCH_INTERVAL_S = 1.0
_QUARANTINE_KEY_BYTES = 16


@dataclass(slots=True)
class _Known:
    is_prepared: bool = False
    is_retiring: bool = False
    """It has requests that began before another one became active, or before their model was withdrawn."""
    is_drained: bool = False
    sent: dict[type[Message], Message] = field(default_factory=dict)
    """The newest of each kind that counts until another one comes."""


@dataclass(slots=True)
class Link:
    index: int
    epoch: int
    process: Process
    generations: dict[str, int]
    """By model, the one that it serves new requests with."""
    awaited: set[str]
    """The other models that it was started for, and that it has not been able to serve yet."""
    heartbeat_at: float
    """When its last message came, by the loop's clock."""
    is_ready: bool = False
    known: dict[int, _Known] = field(default_factory=dict)
    sent_up: dict[Incarnation, int] = field(default_factory=dict)
    """Workers that it has been sent, and the generation of each."""
    sent_keys: tuple[ApiKey, ...] = ()
    sent_stage: str | None = None
    connected: set[Incarnation] = field(default_factory=set)
    is_killed: bool = False

    @property
    def life(self) -> Life:
        return self.index, self.epoch

    def is_prepared(self, generation: int) -> bool:
        return generation in self.known and self.known[generation].is_prepared

    def tell(self, generation: int, message: Message) -> None:
        """Send what is not the same as before."""
        sent = self.known[generation].sent
        if sent.get(type(message)) != message:
            sent[type(message)] = message
            self.send(message)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """A gateway that does not read is killed, and its successor is sent everything."""
        try:
            self.process.channel.send(message, fds)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                log.error("%s does not read its control messages and is killed", self.process.name)
            elif not isinstance(error, ConnectionError):  # else it has just died, as its coroutine sees
                log.error("%s cannot be sent a message and is killed: %s", self.process.name, error)
            self.process.kill()


class GatewayPool:
    def __init__(
        self,
        num_gateways: int,
        listening: list[socket.socket],
        metrics_fd: int,
        worker_pools: dict[int, WorkerPool],
        on_message: Callable[[Link, Message], None],
        system: System,
        num_cores: int,
        vector_cache_fd: int | None = None,
    ) -> None:
        """`listening`: the public socket, and the admin socket if there is one; closed when the drain begins.
        `metrics_fd`: the shared metrics; `vector_cache_fd`: the vector cache, if there is one. `worker_pools`: by
        generation. `on_message` is called with the messages of gateways that do not change a `Link`. `num_cores`: those
        that all gateways together may lease."""
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
        self.worker_pools = worker_pools
        self.files = system.files
        self.changed = asyncio.Event()
        """Set whenever a worker, a gateway, its link or the state of a model has changed."""
        self._num_gateways = num_gateways
        self._listening = listening
        self._metrics_fd = metrics_fd
        self._vector_cache_fds = [] if vector_cache_fd is None else [vector_cache_fd]
        self._metrics_spec = first.shared_metrics  # of all generations
        self._quarantine_key = secrets.token_hex(_QUARANTINE_KEY_BYTES)
        self._on_other_message = on_message
        self._system = system
        self._core_grants = CoreGrants(num_cores)
        self._drain: Drain | None = None
        self._is_draining = asyncio.Event()

    @property
    def ready_links(self) -> list[Link]:
        return [link for link in self.links.values() if link.is_ready]

    @property
    def healthy_links(self) -> list[Link]:
        now = loop_time()
        return [link for link in self.ready_links if now - link.heartbeat_at <= _HUNG_AFTER_S]

    async def until(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait until `is_true`, which is asked after each change. Raises TimeoutError, and what it raises."""
        async with asyncio.timeout(timeout_s):
            while not is_true():
                self.changed.clear()
                await self.changed.wait()

    def is_connected(self, worker_pool: WorkerPool) -> bool:
        """Whether the pool is complete, and each ready gateway, one at least, is connected to all of it and awaits no
        other model. If the pool's model is not loaded: whether each `is_prepared`."""
        if worker_pool.is_unloaded:
            return self.is_prepared(worker_pool)
        workers = {worker.incarnation for worker in worker_pool.ready.values()}
        links = self.ready_links
        is_served = all(link.connected >= workers and not link.awaited for link in links)
        return worker_pool.is_complete and bool(links) and is_served

    def is_prepared(self, worker_pool: WorkerPool) -> bool:
        """Whether each ready gateway, one at least, has prepared for the pool's generation, and awaits no other
        model."""
        links = self.ready_links
        return bool(links) and all(link.is_prepared(worker_pool.generation) and not link.awaited for link in links)

    def is_drained(self, generation: int) -> bool:
        known = (link.known[generation] for link in self.ready_links if link.is_prepared(generation))
        return all(each.is_drained for each in known)

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
            self.changed.set()
            if self._is_draining.is_set():
                log.info("%s %s", name, reason)
                return
            log.error("%s %s", name, reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.delay_after(reason, ready_for_s)):
                    await self._is_draining.wait()

    async def watch_heartbeats(self) -> None:
        looked_at = loop_time()
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now = loop_time()
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
        """Run one process to its end; returns how it ended, and for how many seconds it had been ready. Raises
        StartFailure when it reports that it cannot start, and has never been ready."""
        try:
            process = self._system.spawn(self._name(index), "gateway")
        except OSError as error:
            return f"cannot be started: {error}", None
        with process:
            (model, generation), *others = self.active.items()
            link = self.links[index] = Link(
                index, epoch, process, {model: generation}, {other for other, _ in others}, loop_time(),
                known={generation: _Known(is_prepared=True)},
            )  # fmt: skip
            try:
                reason = await self._start(link, generation, backoff)
                if reason is not None:
                    return reason, None
                ready_at = loop_time()
                self._on_ready(link)
                while (message := await process.receive()) is not None:
                    self._on_message(link, message)
                return await self._reap(link), loop_time() - ready_at
            finally:
                if self.links.get(index) is link:
                    del self.links[index]
                self._grant(self._core_grants.leave(link.life))
                self.changed.set()

    async def _start(self, link: Link, generation: int, backoff: Backoff) -> str | None:
        """Why it did not get ready; None when it did."""
        worker_pool = self.worker_pools[generation]
        link.sent_keys, link.sent_stage = self.keys, self.start_stage
        config = dump(replace(worker_pool.plan.gateway, keys=self.keys))
        start = GatewayStart(
            config, link.index, link.epoch, generation, self._quarantine_key, self.start_stage, len(self.active)
        )
        listening = [sock.fileno() for sock in self._listening]
        fds = [self._metrics_fd, worker_pool.zmq_listening(link.index), *self._vector_cache_fds, *listening]
        link.send(start, fds)
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
        """Side effect: the gauges that it had written are cleared."""
        reason = await link.process.ended()
        clear_gauges(self._metrics_fd, self._metrics_spec, link.index)
        return reason

    def _on_ready(self, link: Link) -> None:
        link.is_ready = True
        link.heartbeat_at = loop_time()
        self._core_grants.join(link.life)
        if self._drain is not None:
            link.send(self._drain)
        self.reconcile()

    def _on_message(self, link: Link, message: Message) -> None:
        link.heartbeat_at = loop_time()
        match message:
            case WorkerConnected():
                link.connected.add(message.incarnation)
            case Prepared(error="") | ModelDrained() | Retired():
                if (known := link.known.get(message.generation)) is not None:  # else it has been discarded meanwhile
                    known.is_prepared |= isinstance(message, Prepared)
                    known.is_drained |= isinstance(message, ModelDrained)
                    known.is_retiring &= not isinstance(message, Retired)
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

    def activate(self, generations: dict[str, int], keys: tuple[ApiKey, ...]) -> None:
        """Let new requests for each model go to its generation, with these keys. `generations`: of all models, in the
        order of their indices. A gateway that is connected to none of its workers serves the generation before until it
        is."""
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
        """Something has changed: send gateways what they have not been sent, and wake up what waits for changes."""
        self.changed.set()
        for link in self.ready_links:
            # Before it learns of workers: until then it serves no request, with whatever key.
            if link.sent_keys is not self.keys:
                link.sent_keys = self.keys
                link.send(NewKeys([asdict(key) for key in self.keys]))
            if self.start_stage is not None and link.sent_stage != self.start_stage:
                link.sent_stage = self.start_stage
                link.send(Progress(self.start_stage))
            for generation, worker_pool in self.worker_pools.items():
                if generation not in link.known:
                    link.known[generation] = _Known()
                    prepare = Prepare(generation, dump(replace(worker_pool.plan.gateway, keys=self.keys)))
                    link.send(prepare, [worker_pool.zmq_listening(link.index)])
                if link.known[generation].is_prepared:
                    self._send_about(worker_pool, link, link.known[generation])
            self._activate(link)

    def _send_about(self, worker_pool: WorkerPool, link: Link, known: _Known) -> None:
        """What the model is goes before its workers, and its state behind them."""
        generation = worker_pool.generation
        if worker_pool.identity is not None:
            link.tell(generation, worker_pool.identity)
        if worker_pool.changed_files or ModelFiles in known.sent:
            link.tell(generation, ModelFiles(generation, worker_pool.changed_files))
        for worker in worker_pool.ready.values():
            incarnation = worker.incarnation
            if incarnation not in link.sent_up:
                link.sent_up[incarnation] = generation
                known.sent.pop(ModelBroken, None)
                link.send(WorkerUp(generation, incarnation, worker.facts), [worker.arena_fd])
        if worker_pool.broken is not None:
            link.tell(generation, ModelBroken(generation, worker_pool.broken))
        state, before = worker_pool.state, known.sent.get(ModelIs)
        if state is not None and state != before:
            known.is_drained &= isinstance(before, ModelIs) and state.state == before.state
            known.sent[ModelIs] = state
            # The pause after a failed load may be over: a new gateway lets a request wait for what is left of it.
            is_old_failure = before is None and state.state == ModelState.FAILED
            link.send(replace(state, wait_s=0.0) if is_old_failure else state)

    def _activate(self, link: Link) -> None:
        """Let it serve each model with the active generation, once it is connected to a worker of it, or is prepared if
        the model is not loaded. A model that it does not serve yet needs no worker: its requests are refused as what
        they are, and not as those for an unknown model."""
        for model, generation in self.active.items():
            before = link.generations.get(model)
            if before == generation or not link.is_prepared(generation):
                continue
            workers = {worker.incarnation for worker in self.worker_pools[generation].ready.values()}
            if before is None or self.worker_pools[generation].is_unloaded or link.connected & workers:
                if before is not None:
                    link.known[before].is_retiring = True
                link.generations[model] = generation
                link.awaited.discard(model)
                link.send(Activate(generation))
        if link.generations.keys() > self.active.keys():  # only then: one may have been renamed
            for model in link.generations.keys() - self.active.keys():
                generation = link.generations.pop(model)
                link.known[generation].is_retiring = True
                link.send(Withdrawn(generation))

    def send_down(self, down: WorkerDown) -> None:
        for link in self.ready_links:
            if link.sent_up.pop(down.incarnation, None) is not None:
                link.connected.discard(down.incarnation)
                link.send(down)

    def withdraw_workers(self, generation: int, reason: str) -> None:
        for incarnation in {one for link in self.ready_links for one, its in link.sent_up.items() if its == generation}:
            self.send_down(WorkerDown(incarnation, reason, is_planned=True))

    def broadcast(self, message: Message, but: Link | None = None) -> None:
        """Send all ready gateways a message that one which starts later does not need."""
        for link in self.ready_links:
            if link is not but:
                link.send(message)

    def _grant(self, grants: Grants) -> None:
        for (index, _), num in grants:
            self.links[index].send(CoresGranted(num))

    def discard(self, generation: int) -> None:
        """Let every gateway forget a generation whose worker pool has been removed, and kill those that serve no
        other."""
        for link in list(self.links.values()):
            if generation in link.generations.values():
                log.error("%s still serves generation %d and is killed", link.process.name, generation)
                link.process.kill()
            elif link.known.pop(generation, None) is not None:
                link.send(Discard(generation))

    def serves(self, generation: int) -> bool:
        links = [link for link in self.links.values() if generation in link.known]
        return any(generation in link.generations.values() or link.known[generation].is_retiring for link in links)

    def drain(self, message: Drain) -> None:
        """Let all gateways drain. From now on one that ends is not restarted."""
        self._drain = message
        self._is_draining.set()
        self.broadcast(message)


def loop_time() -> float:
    return asyncio.get_running_loop().time()
