"""The gateways: started, watched, replaced when they die, and told what they must know.

Owns a keeper for each gateway, the links to those that run, and what each of them has been told of which generation of
the configuration. What has to be told is worked out anew whenever anything has changed (`tell`), so that a gateway that
starts in the middle of a reload ends up knowing what the others know. Called by `supervisor`.

A new generation, and what one gateway is told (→) and says (←) of it:

    → Prepare   ← Prepared   → WorkerUp …   ← WorkerMet …   → Activate
    ← Retired, of the one before   → Discard, of the one before
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from vecd.gateway.types.config import ApiKey
from vecd.launch.base.exit_codes import StartFailure
from vecd.launch.processes.backoff import Backoff
from vecd.launch.processes.children import Process, killed_after, spawn
from vecd.launch.processes.worker_pool import WorkerPool
from vecd.shm.control import (
    Activate,
    ChildFailed,
    Discard,
    Drain,
    GatewayReady,
    GatewayStart,
    Message,
    ModelBroken,
    NewKeys,
    Prepare,
    Prepared,
    Retired,
    WorkerDown,
    WorkerMet,
    WorkerUp,
)
from vecd.shm.shared_metrics import SharedMetricsSpec, clear_gauges
from vecd.shm.wire import Incarnation

log = logging.getLogger("vecd.supervisor")

_START_TIMEOUT_S = 60.0
_HUNG_AFTER_S = 10.0
"""Without a beat. A gateway sends one a second, whatever it has to do: nothing holds its loop up for long."""
_WATCH_INTERVAL_S = 1.0


@dataclass(slots=True)
class Link:
    """A gateway that runs, and what it knows."""

    index: int
    process: Process
    generation: int
    """The one that it serves new requests with."""
    is_ready: bool = False
    known: set[int] = field(default_factory=set)
    """Generations that it has been told of."""
    prepared: set[int] = field(default_factory=set)
    retiring: set[int] = field(default_factory=set)
    """Generations that still have requests of before the change."""
    told_up: set[Incarnation] = field(default_factory=set)
    told_keys: tuple[ApiKey, ...] = ()
    told_broken: dict[int, str] = field(default_factory=dict)
    met: set[Incarnation] = field(default_factory=set)
    heard_at: float = field(default_factory=time.monotonic)
    is_condemned: bool = False


@dataclass(slots=True)
class Sockets:
    """What every life of every gateway is given."""

    listening: list[socket.socket]
    """The public socket, and the admin socket if there is one. Closed when the drain begins."""
    shared_metrics: int
    board_spec: SharedMetricsSpec


class GatewayPool:
    def __init__(
        self,
        num_gateways: int,
        sockets: Sockets,
        quarantine_key: str,
        keys: tuple[ApiKey, ...],
        worker_pools: Mapping[int, WorkerPool],
        on_message: Callable[[Link, Message], None],
        on_change: Callable[[], None],
    ) -> None:
        """`crews`, by generation, is looked at whenever something is told. `on_message` hears what gateways say, but
        for what is kept in `Link`; `on_change` is called when that, or who runs, has changed."""
        self.links: dict[int, Link] = {}
        """By the gateway's index; also those that are starting."""
        self.active = min(worker_pools)
        """The generation that new requests are for."""
        self.keys = keys
        """That callers may send, whatever a generation's own configuration says."""
        self.num_deaths = 0
        """Of gateways, in all."""
        self._num_gateways = num_gateways
        self._sockets = sockets
        self._quarantine_key = quarantine_key
        self._crews = worker_pools
        self._on_message = on_message
        self._on_change = on_change
        self._drain: Drain | None = None
        self._is_draining = asyncio.Event()

    @property
    def ready_links(self) -> list[Link]:
        return [link for link in self.links.values() if link.is_ready]

    @property
    def heard_links(self) -> list[Link]:
        """Of those that are ready, those that have beaten lately."""
        now = time.monotonic()
        return [link for link in self.ready_links if now - link.heard_at <= _HUNG_AFTER_S]

    def has_met(self, worker_pool: WorkerPool) -> bool:
        """Whether the crew is complete, and every gateway that is ready, of which there is one, has met all of it."""
        everybody = {worker.incarnation for worker in worker_pool.ready.values()}
        links = self.ready_links
        return worker_pool.is_complete and bool(links) and all(link.met >= everybody for link in links)

    # --- keepers --------------------------------------------------------------------------------------------

    async def keep(self, index: int) -> None:
        """Keep a gateway alive until it has drained, or until cancelled. Raises StartFailure when it cannot start or
        keeps dying, if it has never been ready."""
        name = self._name(index)
        backoff = Backoff(name)
        epoch = 0
        while not self._is_draining.is_set():
            epoch += 1
            reason, ready_for_s = await self._live(index, epoch, backoff)
            self.num_deaths += 1
            self._on_change()
            if self._is_draining.is_set():
                log.info("%s %s", name, reason)
                return
            log.error("%s %s", name, reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.delay_after(reason, ready_for_s)):
                    await self._is_draining.wait()

    async def watch(self) -> None:
        """Until cancelled, kill gateways that live but do nothing any more."""
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now = time.monotonic()
            was_away = now - looked_at > 2 * _WATCH_INTERVAL_S  # this process was stopped: nobody could be heard
            looked_at = now
            for link in list(self.links.values()):
                if was_away:
                    link.heard_at = now
                elif link.is_ready and not link.is_condemned and now - link.heard_at > _HUNG_AFTER_S:
                    log.error("%s has not been heard of for %.0f s and is killed", link.process.name, _HUNG_AFTER_S)
                    link.is_condemned = True
                    link.process.abort()

    def _name(self, index: int) -> str:
        return "the gateway" if self._num_gateways == 1 else f"gateway {index}"

    async def _live(self, index: int, epoch: int, backoff: Backoff) -> tuple[str, float | None]:
        """One life of a gateway; returns how it ended, and for how many seconds it had been ready.

        Raises StartFailure when it says that it cannot start, and has never been ready.
        """
        try:
            process = spawn(self._name(index), "gateway")
        except OSError as error:
            return f"cannot be started: {error}", None
        with killed_after(process):
            link = self.links[index] = Link(index, process, self.active, known={self.active}, prepared={self.active})
            try:
                reason = await self._start(link, epoch, backoff)
                if reason is not None:
                    return reason, None
                ready_at = time.monotonic()
                self._is_ready(link)
                while (message := await process.receive()) is not None:
                    self._hear(link, message)
                return await self._ended(link), time.monotonic() - ready_at
            finally:
                if self.links.get(index) is link:
                    del self.links[index]
                self._on_change()

    async def _start(self, link: Link, epoch: int, backoff: Backoff) -> str | None:
        """Why it did not get ready; None when it did."""
        worker_pool = self._crews[link.generation]
        link.told_keys = self.keys
        config = replace(worker_pool.plan.gateway, keys=self.keys).to_json()
        start = GatewayStart(config, link.index, epoch, link.generation, self._quarantine_key)
        listening = [sock.fileno() for sock in self._sockets.listening]
        send_or_kill(
            link.process, start, [self._sockets.shared_metrics, worker_pool.zmq_listening(link.index), *listening]
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                ready = await link.process.receive()
        except TimeoutError:
            link.process.kill()
            await self._ended(link)
            return f"was not ready within {_START_TIMEOUT_S:g} s"
        if isinstance(ready, ChildFailed) and not backoff.has_been_ready:
            raise StartFailure(ready.message)
        if isinstance(ready, ChildFailed):
            await self._ended(link)
            return f"cannot start: {ready.message}"
        if ready is None:
            return await self._ended(link)
        assert isinstance(ready, GatewayReady)
        return None

    def _is_ready(self, link: Link) -> None:
        link.is_ready = True
        link.heard_at = time.monotonic()
        if self._drain is not None:
            send_or_kill(link.process, self._drain)
        self.tell()
        self._on_change()

    async def _ended(self, link: Link) -> str:
        """Wait until it has; says how. Side effect: the board says no longer what the gateway had."""
        reason = await link.process.ended()
        clear_gauges(self._sockets.shared_metrics, self._sockets.board_spec, link.index)
        return reason

    def _hear(self, link: Link, message: Message) -> None:
        link.heard_at = time.monotonic()
        match message:
            case WorkerMet():
                link.met.add(Incarnation(message.worker, message.life))
            case Prepared(error=""):
                link.prepared.add(message.generation)
            case Retired():
                link.retiring.discard(message.generation)
            case _:
                self._on_message(link, message)
                return
        self.tell()
        self._on_change()

    # --- telling --------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Tell every gateway what it does not know yet of the crews and the keys."""
        for link in self.ready_links:
            # Before it hears of workers: until then it answers nobody, with whichever key.
            if link.told_keys is not self.keys:
                link.told_keys = self.keys
                send_or_kill(link.process, NewKeys([asdict(key) for key in self.keys]))
            for generation, worker_pool in self._crews.items():
                if generation not in link.known:
                    link.known.add(generation)
                    prepare = Prepare(generation, replace(worker_pool.plan.gateway, keys=self.keys).to_json())
                    send_or_kill(link.process, prepare, [worker_pool.zmq_listening(link.index)])
                if generation in link.prepared:
                    self._tell_of(worker_pool, link)
            self._tell_active(link)

    def _tell_of(self, worker_pool: WorkerPool, link: Link) -> None:
        for worker in worker_pool.ready.values():
            who = worker.incarnation
            if who not in link.told_up:
                link.told_up.add(who)
                link.told_broken.pop(worker_pool.generation, None)
                up = WorkerUp(worker_pool.generation, who.worker, who.life, worker.facts)
                send_or_kill(link.process, up, [worker.arena_fd])
        if worker_pool.broken is not None and link.told_broken.get(worker_pool.generation) != worker_pool.broken:
            link.told_broken[worker_pool.generation] = worker_pool.broken
            send_or_kill(link.process, ModelBroken(worker_pool.generation, worker_pool.broken))

    def _tell_active(self, link: Link) -> None:
        """Once it can serve with the active generation, not before."""
        if link.generation == self.active:
            return
        theirs = {worker.incarnation for worker in self._crews[self.active].ready.values()}
        if link.met & theirs:
            link.retiring.add(link.generation)
            link.generation = self.active
            send_or_kill(link.process, Activate(self.active))

    def tell_down(self, incarnation: Incarnation, reason: str, *, has_crashed: bool) -> None:
        for link in self.ready_links:
            if incarnation in link.told_up:
                link.told_up.discard(incarnation)
                link.met.discard(incarnation)
                send_or_kill(link.process, WorkerDown(incarnation.worker, incarnation.life, reason, has_crashed))

    def tell_all(self, message: Message, but: Link | None = None) -> None:
        """Something that a gateway which starts later, or is starting, can do without."""
        for link in self.ready_links:
            if link is not but:
                send_or_kill(link.process, message)

    def discard(self, generation: int) -> None:
        """Let every gateway forget a generation, and end those that have nothing else. Its crew is to be taken from the
        crews first."""
        for link in list(self.links.values()):
            if link.generation == generation:
                log.error("%s serves what is no longer served, and is killed", link.process.name)
                link.process.kill()
            elif generation in link.known:
                link.known.discard(generation)
                link.prepared.discard(generation)
                link.retiring.discard(generation)
                send_or_kill(link.process, Discard(generation))

    def uses(self, generation: int) -> bool:
        """Whether any gateway has requests that this generation must answer, or sends it new ones."""
        return any(link.generation == generation or generation in link.retiring for link in self.links.values())

    def drain(self, order: Drain) -> None:
        """From now on a gateway that ends is not started again."""
        self._drain = order
        self._is_draining.set()
        self.tell_all(order)


def send_or_kill(process: Process, message: Message, fds: Sequence[int] = ()) -> None:
    """Tell a child what it must not miss: one that does not listen is killed, and its successor told everything."""
    try:
        process.channel.send(message, fds)
    except BlockingIOError:
        log.error("%s does not read its control messages and is killed", process.name)
        process.kill()
    except OSError as error:
        if not isinstance(error, ConnectionError):  # else it has just died, which its keeper is about to see
            log.error("%s cannot be told, and is killed: %s", process.name, error)
        process.kill()
