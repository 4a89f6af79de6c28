"""The worker's loop: a batch comes in, its rows are written, a reply goes out.

Owns a DEALER socket for each gateway and the answer to every message. Knows no model: that is the engine's. Called by
`vecd.workers.process.main` once the engine is warm; ends when the supervisor is gone.

Gateways take turns, a message each, so that none waits for more than one batch of every other. What one of them says is
about its own slots alone, and is answered on its own socket.

One thread. A batch whose rows are complete when the engine returns is answered before the next message is looked at;
so it is on a processor. On an accelerator a batch that has been begun is left alone while another is begun, if one
waits already, so that its way back overlaps the other's computing; if none waits, it is finished and answered at once.
At most two are under way, in two slots, whosever they are, and they are answered in their order.

Waiting has no deadline of its own, because both ways of being needed end it: a message, or the end of the control
channel.
"""

import logging
import time
import traceback
from collections import deque
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import zmq

from vecd.shm.arena import ArenaSpec
from vecd.shm.card import ModelCard
from vecd.shm.control import Channel
from vecd.shm.failure_code import FailureCode
from vecd.shm.views import Begun, Rows, SlotViews
from vecd.shm.wire import Alive, Batch, Done, Failed, Incarnation, Probe, ToGateway, WireError, decode_to_worker, encode
from vecd.workers.batch import BadBatch, read_batch
from vecd.workers.engine import Engine, Finish
from vecd.workers.out_of_memory import means_no_more_code, means_out_of_memory
from vecd.workers.process.kernel import give_memory_back

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
def connected(address_fds: Sequence[int], incarnation: Incarnation) -> Iterator[list["zmq.Socket[bytes]"]]:
    """A socket to whichever gateway listens behind each of `address_fds`, O_PATH descriptors of unix sockets.

    The paths that they are reached by name no file, so there is none to clean up. Closed without waiting.
    """
    context = zmq.Context()
    try:
        yield [_connected(context, fd, incarnation) for fd in address_fds]
    finally:
        context.destroy(linger=0)


def _connected(context: "zmq.Context[zmq.Socket[bytes]]", address_fd: int, who: Incarnation) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, who.identity)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_INTERVAL_MS)
    socket.connect(f"ipc:///proc/self/fd/{address_fd}")
    return socket


@dataclass(slots=True)
class _Peer:
    """A gateway, whichever of its lives."""

    socket: "zmq.Socket[bytes]"
    slots: Sequence[Rows]
    begun: Begun
    epoch: int = 0
    """Of its newest probe. A batch of an older one is of a dead life; its slot may have a new owner."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A batch under way. Keeps the message, whose memory the engine may still be reading."""

    peer: _Peer
    message: Batch
    num_rows: int
    started_ns: int
    num_padding_tokens: int
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
    ) -> None:
        """`sockets` and `slots` are by the gateway's index."""
        self._peers = deque(
            _Peer(socket, theirs.rows, theirs.begun) for socket, theirs in zip(sockets, slots, strict=True)
        )
        """In the order of their turns: the one who has waited longest is first."""
        self._channel = channel
        self._engine = engine
        self._arena = arena
        self._card = card
        self._begun: deque[_Begun] = deque()
        """In the order in which they came, and in which they are answered."""
        self._finished_ns = 0
        """When the last one was."""
        self._has_rested = True
        """Whether memory has been given back since the last batch."""

    def run(self) -> None:
        """Answer messages until the supervisor closes the control channel, or dies."""
        poller = zmq.Poller()
        for peer in self._peers:
            poller.register(peer.socket, zmq.POLLIN)
        poller.register(self._channel.fileno(), zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._patience_ms()))
            if self._channel.fileno() in ready and self._supervisor_is_gone():
                self._finish_all()
                return
            if (turn := self._next_of(ready)) is not None:
                self._receive(turn)
            elif self._begun:
                self._finish_all()
            elif not ready:
                give_memory_back()
                self._has_rested = True

    def _next_of(self, ready: Container[object]) -> _Peer | None:
        """Whose turn it is, of those who have sent something."""
        for _ in range(len(self._peers)):
            self._peers.rotate(-1)
            if self._peers[-1].socket in ready:
                return self._peers[-1]
        return None

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

    def _receive(self, peer: _Peer) -> None:
        """One batch, or none, and the probes before it.

        More batches are left for later turns, so that others have theirs, and the end of the supervisor is seen between
        two. Probes take no turn: a gateway that has just started sends many while others' batches are computed.
        """
        message = self._next_message(peer)
        probe: Probe | None = None
        while isinstance(message, Probe):
            probe, message = message, self._next_message(peer)
        if probe is not None:
            self._finish_all_of(peer)  # whoever hears Alive may take every slot for free
            peer.epoch = max(peer.epoch, probe.epoch)
            self._send(peer, Alive(probe.epoch))
        if message is None:
            return
        if message.epoch < peer.epoch:
            log.info("batch %d of epoch %d dropped, epoch %d began", message.number, message.epoch, peer.epoch)
        else:
            self._begin(peer, message)

    def _next_message(self, peer: _Peer) -> Probe | Batch | None:
        """None when nothing has come, or nothing that can be read."""
        try:
            return decode_to_worker(peer.socket.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            return None
        except WireError as error:
            log.error("a message that is not the gateway's: %s", error)
            return None

    def _begin(self, peer: _Peer, message: Batch) -> None:
        """Begin a batch; finish and answer those that need not, or must not, wait for another."""
        if any(begun.peer is peer and begun.message.slot == message.slot for begun in self._begun):
            self._finish_all_of(peer)  # never while the slot is being written
        self._has_rested = False
        started_ns = time.perf_counter_ns()
        try:
            batch = read_batch(message, self._arena, self._card)
            peer.begun[message.slot] = message.number
            num_padding_before = self._engine.num_padding_tokens
            finish = self._engine.begin(batch, peer.slots[message.slot])
        except Exception as error:
            failed = self._failed(message, error)
        else:
            num_padding_tokens = self._engine.num_padding_tokens - num_padding_before
            self._begun.append(_Begun(peer, message, batch.num_rows, started_ns, num_padding_tokens, finish))
            while self._begun and (len(self._begun) == _MAX_BEGUN or self._begun[0].finish.is_ready()):
                self._finish_first()
            return
        self._finish_all()
        self._reply(peer, message, failed)

    def _finish_all(self) -> None:
        while self._begun:
            self._finish_first()

    def _finish_all_of(self, peer: _Peer) -> None:
        """And what was begun before it, because they are finished in their order."""
        while any(begun.peer is peer for begun in self._begun):
            self._finish_first()

    def _finish_first(self) -> None:
        begun = self._begun.popleft()
        try:
            begun.finish()
        except Exception as error:
            reply: Done | Failed = self._failed(begun.message, error)
        else:
            reply = self._done(begun)
        self._finished_ns = time.perf_counter_ns()
        self._reply(begun.peer, begun.message, reply)

    def _reply(self, peer: _Peer, message: Batch, reply: Done | Failed) -> None:
        if message.slot < peer.begun.size:
            peer.begun[message.slot] = 0
        self._send(peer, reply)

    def _done(self, begun: _Begun) -> Done:
        # Not counting what it waited for the batch before it: the times of all batches add up to the clock's.
        since_ns = max(begun.started_ns, self._finished_ns)
        compute_us = (time.perf_counter_ns() - since_ns) // 1000
        message = begun.message
        return Done(
            message.epoch,
            message.number,
            message.slot,
            begun.num_rows,
            min(compute_us, _MAX_COMPUTE_US),
            begun.num_padding_tokens,
        )

    def _failed(self, message: Batch, error: Exception) -> Failed:
        """The answer to a batch that raised `error`, which is logged. Raises EngineLost if that is what it means."""
        if isinstance(error, BadBatch):
            log.error("batch %d refused: %s", message.number, error)
            code = FailureCode.BAD_MESSAGE
        elif _means_device_lost(error):
            raise EngineLost("its device takes no more work") from None
        elif means_no_more_code(error):
            raise EngineLost("memory did not suffice, and oneDNN will not make code in this process again") from None
        else:
            _log_without_content(message, error)
            code = FailureCode.OUT_OF_MEMORY if means_out_of_memory(error) else FailureCode.ENGINE_ERROR
        return Failed(message.epoch, message.number, message.slot, code)

    def _send(self, peer: _Peer, reply: ToGateway) -> None:
        try:
            peer.socket.send_multipart(encode(reply), zmq.DONTWAIT)
        except zmq.Again:
            # Thousands of replies that nobody reads: there is no gateway. Its successor asks anew.
            log.error("%s dropped: no gateway takes it", type(reply).__name__)


class EngineLost(Exception):
    """The engine can do no more, or not all, in this process. Ends the worker; its batches are sent to another."""


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
