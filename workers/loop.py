"""The worker's loop: a batch comes in, its rows are written, a reply goes out.

Owns the DEALER socket and the answer to every message. Knows no model: that is the engine's. Called by `workers.main`
once the engine is warm; ends when the supervisor is gone.

One thread. A batch whose rows are complete when the engine returns is answered before the next message is looked at;
so it is on a processor. On an accelerator a batch that has been begun is left alone while another is begun, if one
waits already, so that its way back overlaps the other's computing; if none waits, it is finished and answered at once.
At most two are under way, one in each slot, and they are answered in their order.

Waiting has no deadline of its own, because both ways of being needed end it: a message, or the end of the control
channel.
"""

import logging
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import zmq

from shm.arena import ArenaSpec
from shm.card import ModelCard
from shm.control import Channel
from shm.failure import FailureCode
from shm.view import Rows
from shm.wire import Alive, Batch, Done, Failed, Incarnation, Probe, ToGateway, WireError, decode_to_worker, encode
from workers.batch import BadBatch, read_batch
from workers.engine import Engine, Finish
from workers.process import give_memory_back
from workers.shortage import means_out_of_memory

log = logging.getLogger("vecd.worker")

_RECONNECT_INTERVAL_MS = 20
"""How soon after a gateway's death its successor is looked for, and again. Measured: back in 30 ms."""

_REST_AFTER_MS = 1000
"""Without a batch, until memory is given back: the allocator keeps some 80 MB of what batches of all-MiniLM-L6-v2 in
float32 used in passing. Not after each batch: asking the kernel for it again costs a tenth of the speed."""

_MAX_COMPUTE_US = 2**32 - 1  # the field has 32 bits

_MAX_BEGUN = 2
"""Batches under way: one computes, one is on its way back."""


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


@dataclass(frozen=True, slots=True)
class _Begun:
    """A batch under way. Keeps the message, whose memory the engine may still be reading."""

    message: Batch
    started_ns: int
    finish: Finish


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
        self._begun: deque[_Begun] = deque()
        """In the order in which they came, and in which they are answered."""
        self._finished_ns = 0
        """When the last one was."""
        self._has_rested = True
        """Whether memory has been given back since the last batch."""

    def run(self) -> None:
        """Answer messages until the supervisor closes the control channel, or dies."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._channel.fileno(), zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._patience_ms()))
            if self._channel.fileno() in ready and self._supervisor_is_gone():
                self._finish_all()
                return
            if self._socket in ready:
                self._receive()
            elif self._begun:
                self._finish_all()
            elif not ready:
                give_memory_back()
                self._has_rested = True

    def _patience_ms(self) -> int | None:
        if self._begun:
            return 0
        return None if self._has_rested else _REST_AFTER_MS

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
                self._finish_all()  # whoever hears Alive may take every slot for free
                self._epoch = max(self._epoch, epoch)
                self._send(Alive(epoch))
            case Batch(epoch) if epoch < self._epoch:
                log.info("batch %d of epoch %d dropped, epoch %d began", message.number, epoch, self._epoch)
            case Batch():
                self._begin(message)

    def _begin(self, message: Batch) -> None:
        """Begin a batch; finish and answer those that need not, or must not, wait for another."""
        if any(begun.message.slot == message.slot for begun in self._begun):
            self._finish_all()  # never while the slot is being written
        self._has_rested = False
        started_ns = time.perf_counter_ns()
        try:
            batch = read_batch(message, self._arena, self._card)
            finish = self._engine.begin(batch, self._slots[message.slot])
        except Exception as error:
            failed = self._failed(message, error)
        else:
            self._begun.append(_Begun(message, started_ns, finish))
            while self._begun and (len(self._begun) == _MAX_BEGUN or self._begun[0].finish.is_ready()):
                self._finish_first()
            return
        self._finish_all()
        self._send(failed)

    def _finish_all(self) -> None:
        while self._begun:
            self._finish_first()

    def _finish_first(self) -> None:
        begun = self._begun.popleft()
        try:
            begun.finish()
        except Exception as error:
            reply: ToGateway = self._failed(begun.message, error)
        else:
            reply = self._done(begun)
        self._finished_ns = time.perf_counter_ns()
        self._send(reply)

    def _done(self, begun: _Begun) -> Done:
        # Not counting what it waited for the batch before it: the times of all batches add up to the clock's.
        since_ns = max(begun.started_ns, self._finished_ns)
        compute_us = (time.perf_counter_ns() - since_ns) // 1000
        message = begun.message
        return Done(
            message.epoch, message.number, message.slot, message.num_sequences, min(compute_us, _MAX_COMPUTE_US)
        )

    def _failed(self, message: Batch, error: Exception) -> Failed:
        """The answer to a batch that raised `error`, which is logged. Raises DeviceLost if that is what it means."""
        if isinstance(error, BadBatch):
            log.error("batch %d refused: %s", message.number, error)
            code = FailureCode.BAD_MESSAGE
        elif _means_device_lost(error):
            raise DeviceLost from None
        else:
            _log_without_content(message, error)
            code = FailureCode.OUT_OF_MEMORY if means_out_of_memory(error) else FailureCode.ENGINE_ERROR
        return Failed(message.epoch, message.number, message.slot, code)

    def _send(self, reply: ToGateway) -> None:
        try:
            self._socket.send_multipart(encode(reply), zmq.DONTWAIT)
        except zmq.Again:
            # Thousands of replies that nobody reads: there is no gateway. Its successor asks anew.
            log.error("%s dropped: no gateway takes it", type(reply).__name__)


class DeviceLost(Exception):
    """The accelerator refuses all further work of this process. Ends the worker; its batches are sent to another."""


def _means_device_lost(error: Exception) -> bool:
    # By name, because torch is not imported in a worker without a model. Torch's own out-of-memory is another class.
    return type(error).__name__ == "AcceleratorError"


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
