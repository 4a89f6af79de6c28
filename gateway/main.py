"""The gateway's life: start → listen → serve → drain → stop.

Owns the event loop and the control channel to the supervisor, and wires the parts together. Called by `launch.child`
in a process of its own, which never imports torch.
"""

import asyncio
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import uvloop

from gateway.admission import Admission
from gateway.app import App
from gateway.board import Board
from gateway.config import GatewayConfig
from gateway.dispatch import Dispatcher
from gateway.http1 import Limits
from gateway.memory import keep_freed_memory
from gateway.request import Priority
from gateway.scheduler import Scheduler
from gateway.server import Server, Timeouts
from gateway.tokenizer import Tokenizer
from shm.board import Gauge, Histogram
from shm.card import ModelError
from shm.control import (
    Channel,
    ChildFailed,
    Drain,
    GatewayReady,
    GatewayStart,
    WorkerDown,
    WorkerStuck,
    WorkerUp,
)
from shm.socketfile import FileId, file_id, remove_if_ours
from shm.view import map_arena
from shm.wire import Incarnation

log = logging.getLogger("vecd.gateway")

_START_TIMEOUT_S = 10.0
_GC_THRESHOLD = 50_000
_SWITCH_INTERVAL_S = 0.0005
_BUSY_TICK_S, _IDLE_TICK_S = 0.02, 0.25
_PUBLISH_S = 0.2
_LAST_ANSWERS_S = 1.0
"""So long before the drain's deadline, what is not answered yet is told that it will not be."""


def run(channel: Channel) -> int:
    """Serve until told to drain; returns the exit code. `channel` is the inherited end of the control connection."""
    # The terminal's Ctrl-C reaches the whole process group; only the supervisor acts on it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    received = channel.receive(_START_TIMEOUT_S)
    if received is None:
        return 0
    start, (listening_fd, zmq_fd, board_fd) = received
    assert isinstance(start, GatewayStart)
    config = GatewayConfig.from_json(start.config)
    name = "gateway" if config.num_gateways == 1 else f"gateway-{start.gateway}"
    logging.basicConfig(level=config.log_level.upper(), format=f"%(asctime)s {name} %(levelname)s %(message)s")
    board = Board.mapped(board_fd, config.board, start.gateway)
    os.close(board_fd)
    _end_with_supervisor(channel, config.uds, file_id(config.uds) if config.uds else None)
    try:
        gateway = Gateway(config, start.epoch, channel, board)
    except ModelError as error:
        channel.send(ChildFailed(str(error)))
        return 3
    keep_freed_memory()
    # Of the threads that parse and tokenize, some steps are plain Python: the loop must not wait 5 ms for the GIL.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # What has been set up stays; and a body of millions of values must not be walked through again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 50, 100)
    return uvloop.run(gateway.serve(socket.socket(fileno=listening_fd), zmq_fd))


class Gateway:
    def __init__(self, config: GatewayConfig, epoch: int, channel: Channel, board: Board) -> None:
        self._config = config
        self._board = board
        self._channel = channel
        self._tokenizer = Tokenizer(config.card, config.max_tokens, config.token_ids)
        self._scheduler = Scheduler(config.max_batch_tokens, config.arena.rows_per_slot, config.max_tokens)
        self._dispatcher = Dispatcher(
            scheduler=self._scheduler,
            epoch=epoch,
            max_batch_tokens=config.max_batch_tokens,
            batch_timeout_s=config.batch_timeout_s,
            on_stuck=lambda who: channel.send(WorkerStuck(who.worker, who.life)),
            board=board,
        )
        self._admission = Admission(
            max_requests=config.share(config.max_requests),
            max_wait_s=config.max_wait_s,
            short_tokens=self._scheduler.quantum,
            tokens_waiting=self._tokens_waiting,
            tokens_ahead=self._tokens_ahead,
            tokens_per_s=lambda: self._dispatcher.tokens_per_s,
        )
        self._app = App(
            config,
            admission=self._admission,
            tokenizer=self._tokenizer,
            scheduler=self._scheduler,
            dispatcher=self._dispatcher,
            board=board,
        )
        self._server = Server(
            self._app,
            limits=Limits(max_body_bytes=config.max_body_bytes),
            timeouts=Timeouts(),
            on_answer=board.add_answer,
            is_ahead=self._is_ahead if config.num_gateways > 1 else None,
            max_connections=config.share(config.max_connections),
        )
        board.poll(
            {
                Gauge.REQUESTS: lambda: self._admission.num_requests,
                Gauge.QUEUED_SEQUENCES: lambda: self._scheduler.queued_sequences,
                Gauge.QUEUED_TOKENS: lambda: self._scheduler.queued_tokens,
                Gauge.IN_FLIGHT_TOKENS: lambda: self._dispatcher.in_flight_tokens,
                Gauge.CONNECTIONS: lambda: self._server.num_connections,
                Gauge.WORKERS: lambda: sum(link.is_usable for link in self._dispatcher.links),
            }
        )

    def _tokens_waiting(self) -> int:
        """At most: other gateways have as much as this one, if they take turns with it."""
        return (self._scheduler.queued_tokens + self._dispatcher.in_flight_tokens) * self._config.num_gateways

    def _tokens_ahead(self, num_tokens: int, priority: Priority) -> int:
        """What workers do before a new request's turn: what is queued before it here, and as much for each gateway that
        takes turns with this one, if that has so much."""
        ours = self._scheduler.tokens_ahead(num_tokens, priority, self._dispatcher.tokens_per_s)
        ours += self._dispatcher.in_flight_tokens
        theirs = self._board.others(Gauge.QUEUED_TOKENS) if self._config.num_gateways > 1 else []
        return ours + sum(min(ours, tokens) for tokens in theirs)

    def _is_ahead(self) -> bool:
        """Whether a gateway that serves has fewer connections than this one; by more than an eighth, if they are many.

        Side effect: the others are told of ours, because each goes by what the others have at the moment.
        """
        ours, others = self._server.num_connections, self._board.others(Gauge.CONNECTIONS)
        self._board.set(Gauge.CONNECTIONS, ours)
        serving = self._board.others(Gauge.WORKERS)
        fewest = min((theirs for theirs, num in zip(others, serving, strict=True) if num), default=ours)
        return ours > fewest + fewest // 8

    async def serve(self, listening: socket.socket, zmq_fd: int) -> int:
        loop = asyncio.get_running_loop()
        self._drained: asyncio.Future[bool] = loop.create_future()
        self._dispatcher.start(zmq_fd)
        await self._server.start(listening)
        loop.add_reader(self._channel.fileno(), self._read_control)
        self._watch = LoopWatch(self._board, loop, lambda: self._server.num_requests_in_flight > 0)
        self._channel.send(GatewayReady())
        everything_answered = await self._drained
        loop.remove_reader(self._channel.fileno())
        self._watch.stop()
        self._dispatcher.stop()
        if not everything_answered:
            log.warning("the drain's deadline has passed: connections that waited for an answer were cut")
        return 0

    def _read_control(self) -> None:
        with suppress(BlockingIOError):
            while (received := self._channel.receive(0)) is not None:
                message, fds = received
                try:
                    self._on_control(message, fds)
                except Exception:
                    # A message half understood is worse than a new gateway, which is told everything again.
                    log.exception("control message %s", type(message).__name__)
                    os._exit(70)
                finally:
                    for fd in fds:
                        os.close(fd)
            # The supervisor is gone; the watching thread ends this process.
            asyncio.get_running_loop().remove_reader(self._channel.fileno())

    def _on_control(self, message: object, fds: list[int]) -> None:
        match message:
            case WorkerUp():
                slots = map_arena(fds[0], self._config.arena, writable=False)[self._board.gateway]
                self._board.worker_up(message.worker, message.life)
                self._dispatcher.worker_up(Incarnation(message.worker, message.life), slots, message.facts)
            case WorkerDown():
                self._dispatcher.worker_down(Incarnation(message.worker, message.life), message.reason)
            case Drain():
                self._app.is_draining = True
                self._draining = asyncio.ensure_future(self._drain(message.deadline_s))

    async def _drain(self, deadline_s: float) -> None:
        last_answers_s = min(_LAST_ANSWERS_S, deadline_s / 4)
        asyncio.get_running_loop().call_later(deadline_s - last_answers_s, self._app.give_up)
        try:
            self._drained.set_result(await self._server.drain(deadline_s))
        except Exception as error:
            self._drained.set_exception(error)


class LoopWatch:
    """Records how late the event loop comes to what is due, and publishes the board's polled gauges.

    Looks often while requests are being answered, and seldom while none is: to wake a process that sleeps costs much
    more than to be one more thing that its loop does. Measured: of a core, an idle gateway takes 1 % to look 50 times a
    second and 0.1 % to look 4 times.
    """

    def __init__(self, board: Board, loop: asyncio.AbstractEventLoop, is_busy: Callable[[], bool]) -> None:
        """Call on the running loop."""
        self._board = board
        self._loop = loop
        self._is_busy = is_busy
        self._published_at = 0.0
        self._tick_in(_BUSY_TICK_S)

    def stop(self) -> None:
        self._timer.cancel()

    def _tick_in(self, seconds: float) -> None:
        self._due = time.perf_counter() + seconds
        self._timer = self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        now = time.perf_counter()
        self._board.observe(Histogram.LOOP_LAG, max(0.0, now - self._due))
        self._tick_in(_BUSY_TICK_S if self._is_busy() else _IDLE_TICK_S)
        if now - self._published_at >= _PUBLISH_S:
            self._published_at = now
            self._board.publish()


def _end_with_supervisor(channel: Channel, uds: str | None, uds_id: FileId | None) -> None:
    """End this process when the supervisor dies, even while the event loop is blocked.

    Its death hangs up the control channel, which a thread waits for. Nothing is left behind: the unix socket's file is
    the only thing with a name.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLRDHUP)
        poll.poll()
        if uds is not None:
            remove_if_ours(uds, uds_id)
        os._exit(1)

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()
