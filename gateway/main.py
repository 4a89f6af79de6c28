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
import threading
from contextlib import suppress

import uvloop

from gateway.admission import Admission
from gateway.app import App
from gateway.config import GatewayConfig
from gateway.dispatch import Dispatcher
from gateway.http1 import Limits
from gateway.scheduler import Scheduler
from gateway.server import Server, Timeouts
from gateway.tokenizer import Tokenizer
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
from shm.view import map_slots
from shm.wire import Incarnation

log = logging.getLogger("vecd.gateway")

_START_TIMEOUT_S = 10.0
_GC_THRESHOLD = 50_000
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
    start, (listening_fd, zmq_fd) = received
    assert isinstance(start, GatewayStart)
    config = GatewayConfig.from_json(start.config)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s gateway %(levelname)s %(message)s")
    _end_with_supervisor(channel, config.uds, file_id(config.uds) if config.uds else None)
    try:
        gateway = Gateway(config, start.epoch, channel)
    except ModelError as error:
        channel.send(ChildFailed(str(error)))
        return 3
    # What has been set up stays; and a body of millions of values must not be walked through again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 50, 100)
    return uvloop.run(gateway.serve(socket.socket(fileno=listening_fd), zmq_fd))


class Gateway:
    def __init__(self, config: GatewayConfig, epoch: int, channel: Channel) -> None:
        self._config = config
        self._channel = channel
        self._tokenizer = Tokenizer(config.card, config.max_tokens, config.token_ids)
        self._scheduler = Scheduler(config.max_batch_tokens, config.arena.rows_per_slot)
        self._admission = Admission(config.max_requests, config.max_queued_tokens)
        self._dispatcher = Dispatcher(
            scheduler=self._scheduler,
            epoch=epoch,
            batch_timeout_s=config.batch_timeout_s,
            on_stuck=lambda who: channel.send(WorkerStuck(who.worker, who.life)),
            on_rate=self._admission.observe_rate,
        )
        self._app = App(
            config,
            admission=self._admission,
            tokenizer=self._tokenizer,
            scheduler=self._scheduler,
            dispatcher=self._dispatcher,
        )
        self._server = Server(
            self._app,
            limits=Limits(max_body_bytes=config.max_body_bytes),
            timeouts=Timeouts(),
            max_connections=config.max_connections,
        )

    async def serve(self, listening: socket.socket, zmq_fd: int) -> int:
        loop = asyncio.get_running_loop()
        self._drained: asyncio.Future[bool] = loop.create_future()
        self._dispatcher.start(zmq_fd)
        await self._server.start(listening)
        loop.add_reader(self._channel.fileno(), self._read_control)
        self._channel.send(GatewayReady())
        everything_answered = await self._drained
        loop.remove_reader(self._channel.fileno())
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
                slots = map_slots(fds[0], self._config.arena, writable=False)
                self._dispatcher.worker_up(Incarnation(message.worker, message.life), slots, message.facts)
            case WorkerDown():
                self._dispatcher.worker_down(Incarnation(message.worker, message.life), message.reason)
            case Drain():
                self._app.is_draining = True
                self._draining = asyncio.ensure_future(self._drain(message.deadline_s))

    async def _drain(self, deadline_s: float) -> None:
        asyncio.get_running_loop().call_later(max(0.0, deadline_s - _LAST_ANSWERS_S), self._app.give_up)
        try:
            self._drained.set_result(await self._server.drain(deadline_s))
        except Exception as error:
            self._drained.set_exception(error)


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
