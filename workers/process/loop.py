"""The worker's loop: a batch comes in, its rows are written, a reply goes out.

Owns a DEALER socket for each gateway and the reply to every message. Knows no model, only an engine. Gateways take
turns, one message each, so that none waits for more than one batch of every other. A gateway's messages are about its
own slots, and the replies go to its own socket.

One thread. On a processor the rows are complete when the engine returns, and the reply is sent before the next message
is read. On an accelerator a running batch is left alone while the next one is begun, if one is waiting, so that its
copy overlaps the other's computation; if none is waiting, it is finished at once. At most two batches run, in two
slots, and replies keep their order. Waiting has no deadline, because both events that need the worker end it: a
message, and the end of the control channel.
"""

import logging
import time
import traceback
from collections import deque
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import zmq

from vecd.base.programs import return_free_memory
from vecd.model.card import ModelCard
from vecd.shm.arena import ArenaSpec
from vecd.shm.control import Channel
from vecd.shm.views import SlotViews
from vecd.shm.wire import (
    Alive,
    Batch,
    Done,
    Failed,
    FailureCode,
    Incarnation,
    Probe,
    ToGateway,
    WireError,
    decode_to_worker,
    encode,
)
from vecd.workers.batch import BadBatch, Engine, Finish, means_no_more_code, means_out_of_memory, read_batch

log = logging.getLogger("vecd.worker")

_RECONNECT_INTERVAL_MS = 20
"""The interval at which a worker tries to connect to a new gateway after the old one's death. Measured: 30 ms."""

_TRIM_AFTER_MS = 1000
"""Time without a batch until unused memory is returned to the kernel: the allocator keeps some 80 MB after batches of
all-MiniLM-L6-v2 in float32. Returning it after each batch would cost a tenth of the speed."""

_MAX_COMPUTE_US = 2**32 - 1  # the field has 32 bits

_MAX_RUNNING = 2
"""One batch computes while the rows of another are copied back."""


@contextmanager
def connected(address_fds: Sequence[int], incarnation: Incarnation) -> Iterator[list["zmq.Socket[bytes]"]]:
    """Sockets connected to the gateways that listen behind `address_fds`, O_PATH descriptors of unix sockets. Their
    paths are no files, so none has to be removed. The sockets are closed without waiting."""
    context = zmq.Context()
    try:
        sockets = []
        for fd in address_fds:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, incarnation.identity)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_INTERVAL_MS)
            socket.connect(f"ipc:///proc/self/fd/{fd}")
            sockets.append(socket)
        yield sockets
    finally:
        context.destroy(linger=0)


@dataclass(slots=True)
class _Peer:
    """A gateway; a restarted one is the same peer."""

    socket: "zmq.Socket[bytes]"
    slots: SlotViews
    epoch: int = 0
    """The epoch of its newest probe. A batch of an older epoch comes from a dead gateway, and its slot may have a new
    owner."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A batch that has been begun and not finished. Keeps the message, because the engine may still read its memory."""

    peer: _Peer
    message: Batch
    num_rows: int
    started_ns: int
    num_padding_tokens: int
    num_threads: int
    finish: Finish


class Loop:
    def __init__(
        self,
        sockets: Sequence["zmq.Socket[bytes]"],
        channel: Channel,
        engine: Engine,
        slots: Sequence[SlotViews],
        arena: ArenaSpec,
        card: ModelCard,
        *,
        trim_after_ms: int = _TRIM_AFTER_MS,
    ) -> None:
        """`sockets` and `slots` are by the gateway's index. `trim_after_ms` without a batch, memory is returned."""
        self._peers = deque(_Peer(*pair) for pair in zip(sockets, slots, strict=True))
        self._channel = channel
        self._engine = engine
        self._arena = arena
        self._card = card
        self._trim_after_ms = trim_after_ms
        self._running: deque[_Running] = deque()
        """In the order of arrival, which is the order of the replies."""
        self._finished_ns = 0
        self._has_trimmed = True

    def run(self) -> None:
        poller = zmq.Poller()
        for peer in self._peers:
            poller.register(peer.socket, zmq.POLLIN)
        poller.register(self._channel.fileno(), zmq.POLLIN)
        while True:
            idle_ms = None if self._has_trimmed else self._trim_after_ms
            ready = dict(poller.poll(0 if self._running else idle_ms))
            if self._channel.fileno() in ready and self._supervisor_is_gone():
                self._finish_all()
                return
            if (sender := self._next_peer(ready)) is not None:
                self._receive(sender)
            elif self._running:
                self._finish_all()
            elif not ready:
                return_free_memory()
                self._has_trimmed = True

    def _next_peer(self, ready: Container[object]) -> _Peer | None:
        for _ in range(len(self._peers)):
            self._peers.rotate(-1)
            if self._peers[-1].socket in ready:
                return self._peers[-1]
        return None

    def _supervisor_is_gone(self) -> bool:
        try:
            received = self._channel.receive(0)
        except BlockingIOError:
            return False
        if received is None:
            return True
        log.error("the supervisor sent %s, which is not for a worker", type(received[0]).__name__)
        return False

    def _receive(self, peer: _Peer) -> None:
        """Receive at most one batch, and all probes before it: a gateway that has just started sends many. Further
        batches wait for later turns, so that other gateways get theirs."""
        message = self._next_message(peer)
        probe: Probe | None = None
        while isinstance(message, Probe):
            probe, message = message, self._next_message(peer)
        if probe is not None:
            self._finish_all(peer)  # a gateway that receives Alive treats every slot as free
            peer.epoch = max(peer.epoch, probe.epoch)
            self._send(peer, Alive(probe.epoch))
        if message is None:
            return
        if message.epoch < peer.epoch:
            log.info("batch %d of epoch %d dropped, epoch %d began", message.number, message.epoch, peer.epoch)
        else:
            self._begin(peer, message)

    def _next_message(self, peer: _Peer) -> Probe | Batch | None:
        try:
            return decode_to_worker(peer.socket.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            return None
        except WireError as error:
            log.error("a message that is not the gateway's: %s", error)
            return None

    def _begin(self, peer: _Peer, message: Batch) -> None:
        if any(batch.peer is peer and batch.message.slot == message.slot for batch in self._running):
            self._finish_all(peer)  # never while the slot is being written
        self._has_trimmed = False
        started_ns = time.perf_counter_ns()
        try:
            batch = read_batch(message, self._arena, self._card)
            peer.slots.begun[message.slot] = message.number
            num_threads = self._engine.lease(message.num_threads)
            num_padding_before = self._engine.num_padding_tokens
            finish = self._engine.begin(batch, peer.slots.rows[message.slot])
        except Exception as error:
            failed = self._failed(message, error)
        else:
            num_padding_tokens = self._engine.num_padding_tokens - num_padding_before
            self._running.append(
                _Running(peer, message, batch.num_rows, started_ns, num_padding_tokens, num_threads, finish)
            )
            while self._running and (len(self._running) == _MAX_RUNNING or self._running[0].finish.is_ready()):
                self._finish_first()
            return
        self._finish_all()
        self._reply(peer, message, failed)

    def _finish_all(self, of: _Peer | None = None) -> None:
        """Of a peer, also those begun before its own, because batches finish in their order."""
        while any(of is None or batch.peer is of for batch in self._running):
            self._finish_first()

    def _finish_first(self) -> None:
        batch = self._running.popleft()
        try:
            batch.finish()
        except Exception as error:
            reply: Done | Failed = self._failed(batch.message, error)
        else:
            reply = self._done(batch)
            batch.peer.slots.num_done[0] += 1
        self._finished_ns = time.perf_counter_ns()
        self._reply(batch.peer, batch.message, reply)

    def _reply(self, peer: _Peer, message: Batch, reply: Done | Failed) -> None:
        begun = peer.slots.begun
        if message.slot < begun.size:
            begun[message.slot] = 0
        self._send(peer, reply)

    def _done(self, batch: _Running) -> Done:
        # Without its wait for the batch before it, so that the times of all batches add up to the clock's.
        since_ns = max(batch.started_ns, self._finished_ns)
        compute_us = (time.perf_counter_ns() - since_ns) // 1000
        message = batch.message
        return Done(
            message.epoch,
            message.number,
            message.slot,
            batch.num_rows,
            min(compute_us, _MAX_COMPUTE_US),
            batch.num_padding_tokens,
            batch.num_threads if message.num_threads else 0,
        )

    def _failed(self, message: Batch, error: Exception) -> Failed:
        """Raises EngineLost if the engine cannot go on."""
        if isinstance(error, BadBatch):
            log.error("batch %d refused: %s", message.number, error)
            code = FailureCode.BAD_MESSAGE
        elif type(error).__name__ == "AcceleratorError":
            # By name, because torch is not imported in a worker without a model. Its out-of-memory is another class.
            raise EngineLost("its device takes no more work") from None
        elif means_no_more_code(error):
            raise EngineLost("memory ran out, and oneDNN cannot compile kernels in this process again") from None
        else:
            # torch quotes values in its messages, and values are token ids.
            log.error(
                "batch %d (%d sequences, %d tokens) failed: %s\n%s",
                message.number,
                message.num_sequences,
                message.num_tokens,
                type(error).__name__,
                "".join(traceback.format_tb(error.__traceback__)),
            )
            code = FailureCode.OUT_OF_MEMORY if means_out_of_memory(error) else FailureCode.ENGINE_ERROR
        return Failed(message.epoch, message.number, message.slot, code)

    def _send(self, peer: _Peer, reply: ToGateway) -> None:
        try:
            peer.socket.send_multipart(encode(reply), zmq.DONTWAIT)
        except zmq.Again:
            # Thousands of unread replies: there is no gateway. A new one probes again.
            log.error("%s dropped: no gateway takes it", type(reply).__name__)


class EngineLost(Exception):
    """The engine cannot go on in this process. Ends the worker; the gateway sends its batches to another."""
