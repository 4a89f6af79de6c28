"""The worker's loop: a batch comes in, its rows are written, a reply goes out.

Owns the DEALER socket and the answer to every message. Knows no model: that is the engine's. Called by `workers.main`
once the engine is warm; ends when the supervisor is gone.

One thread, one batch at a time: while the engine computes, messages wait in ZeroMQ. Waiting has no deadline of its own,
because both ways of being needed end it: a message, or the end of the control channel.
"""

import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import zmq

from shm.arena import ArenaSpec
from shm.card import ModelCard
from shm.control import Channel
from shm.failure import FailureCode
from shm.view import Rows
from shm.wire import Alive, Batch, Done, Failed, Incarnation, Probe, ToGateway, WireError, decode_to_worker, encode
from workers.batch import BadBatch, read_batch
from workers.engine import Engine

log = logging.getLogger("vecd.worker")

_RECONNECT_INTERVAL_MS = 20
"""How soon after a gateway's death its successor is looked for, and again. Measured: back in 30 ms."""

_MAX_COMPUTE_US = 2**32 - 1  # the field has 32 bits


@contextmanager
def connected(address_fd: int, incarnation: Incarnation) -> Iterator["zmq.Socket[bytes]"]:
    """A socket to whichever gateway listens behind `address_fd`, an O_PATH descriptor of a unix socket.

    The path that it is reached by names no file, so there is none to clean up. Closed without waiting.
    """
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, incarnation.identity)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_INTERVAL_MS)
    socket.connect(f"ipc:///proc/self/fd/{address_fd}")
    try:
        yield socket
    finally:
        context.destroy(linger=0)


class Loop:
    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        channel: Channel,
        engine: Engine,
        slots: Sequence[Rows],
        arena: ArenaSpec,
        card: ModelCard,
    ) -> None:
        self._socket = socket
        self._channel = channel
        self._engine = engine
        self._slots = slots
        self._arena = arena
        self._card = card
        self._epoch = 0
        """Of the newest probe. A batch of an older one is of a dead gateway; its slot may have a new owner."""

    def run(self) -> None:
        """Answer messages until the supervisor closes the control channel, or dies."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._channel.fileno(), zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._channel.fileno() in ready and self._supervisor_is_gone():
                return
            if self._socket in ready:
                self._receive()

    def _supervisor_is_gone(self) -> bool:
        try:
            received = self._channel.receive(0)
        except BlockingIOError:
            return False
        if received is None:
            return True
        log.error("the supervisor sent %s, which is not for a worker", type(received[0]).__name__)
        return False

    def _receive(self) -> None:
        """One message. More are left for later turns, so that the end of the supervisor is seen between batches."""
        try:
            message = decode_to_worker(self._socket.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            return
        except WireError as error:
            log.error("a message that is not the gateway's: %s", error)
            return
        match message:
            case Probe(epoch):
                self._epoch = max(self._epoch, epoch)
                self._send(Alive(epoch))
            case Batch(epoch) if epoch < self._epoch:
                log.info("batch %d of epoch %d dropped, epoch %d began", message.number, epoch, self._epoch)
            case Batch():
                self._send(self._compute(message))

    def _compute(self, message: Batch) -> Done | Failed:
        started_ns = time.perf_counter_ns()
        try:
            batch = read_batch(message, self._arena, self._card)
            self._engine.embed(batch, self._slots[message.slot])
        except BadBatch as error:
            log.error("batch %d refused: %s", message.number, error)
            return self._failed(message, FailureCode.BAD_MESSAGE)
        except Exception as error:
            if _means_device_lost(error):
                raise DeviceLost from None
            _log_without_content(message, error)
            return self._failed(message, _code_of(error))
        compute_us = (time.perf_counter_ns() - started_ns) // 1000
        return Done(
            message.epoch, message.number, message.slot, message.num_sequences, min(compute_us, _MAX_COMPUTE_US)
        )

    def _failed(self, message: Batch, code: FailureCode) -> Failed:
        return Failed(message.epoch, message.number, message.slot, code)

    def _send(self, reply: ToGateway) -> None:
        try:
            self._socket.send_multipart(encode(reply), zmq.DONTWAIT)
        except zmq.Again:
            # Thousands of replies that nobody reads: there is no gateway. Its successor asks anew.
            log.error("%s dropped: no gateway takes it", type(reply).__name__)


class DeviceLost(Exception):
    """The accelerator refuses all further work of this process. Ends the worker; its batch is sent to another."""


def _means_device_lost(error: Exception) -> bool:
    # By name, because torch is not imported in a worker without a model. Torch's own out-of-memory is another class.
    return type(error).__name__ == "AcceleratorError"


def _code_of(error: Exception) -> FailureCode:
    names = {cls.__name__ for cls in type(error).__mro__}
    # Torch on a CPU has no class for it. Source: c10/core/impl/alloc_cpu.cpp, "DefaultCPUAllocator: …".
    if names & {"MemoryError", "OutOfMemoryError"} or "DefaultCPUAllocator" in str(error):
        return FailureCode.OUT_OF_MEMORY
    return FailureCode.ENGINE_ERROR


def _log_without_content(message: Batch, error: Exception) -> None:
    """Where it failed, but not what it says: torch quotes values in its messages, and values are token ids."""
    log.error(
        "batch %d (%d sequences, %d tokens) failed: %s\n%s",
        message.number,
        message.num_sequences,
        message.num_tokens,
        type(error).__name__,
        "".join(traceback.format_tb(error.__traceback__)),
    )
