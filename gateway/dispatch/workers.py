"""The workers as one gateway sees them: the ZeroMQ connection, and the record of each worker's life.

Owns the ROUTER socket, and the types of slots and batches under way. Decides nothing: the dispatcher does.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from vecd.base.tasks import ZMQ_THREADS, require_threads
from vecd.gateway.dispatch.known import Copy
from vecd.gateway.scheduling.cost import CostModel
from vecd.gateway.scheduling.queue import QueuedSequence
from vecd.shm.views import SlotViews
from vecd.shm.wire import Incarnation, Probe, ToGateway, ToWorker, WireError, decode_to_gateway, encode

_PROBE_INTERVAL_S = 0.02

# As members of their enumerations, flags take 0.7 µs at each "|" and "&".
_NOW, _NOW_AND_MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)


class Transport:
    def __init__(self, epoch: int, on_message: Callable[[bytes, ToGateway | WireError], None]) -> None:
        """`on_message` is called on the event loop, with the sender's routing id, for each message of this epoch, and
        with an error for frames that are no message of this version."""
        self._epoch = epoch
        self._on_message = on_message
        self._is_stopped = False

    def start(self, listening_fd: int) -> None:
        """Take over the ZeroMQ listening socket. Call on the running event loop. Raises NoTasks."""
        require_threads(ZMQ_THREADS)
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.USE_FD, listening_fd)
        # The path is not used: the socket behind listening_fd has been bound, and its name removed, already.
        self._socket.bind("ipc://vecd")
        self._loop.add_reader(self._socket.fileno(), self.receive_all)

    def stop(self) -> None:
        self._is_stopped = True
        self._loop.remove_reader(self._socket.fileno())
        self._context.destroy(linger=0)

    def send(self, identity: bytes, message: ToWorker) -> bool:
        """Send without waiting. Returns whether the peer is connected and its buffer had room."""
        *frames, last = encode(message)
        try:
            for frame in (identity, *frames):
                self._socket.send(frame, _NOW_AND_MORE)
            self._socket.send(last, _NOW)
        except zmq.ZMQError:
            return False
        finally:
            # A send, failed or not, may swallow the wake-up of a message that has arrived meanwhile: without another
            # look that message would wait for ever.
            if self.has_message():
                self._loop.call_soon(self.receive_all)
        return True

    def probe(self, identity: bytes, is_needed: Callable[[], bool]) -> None:
        """Send a probe now and every 20 ms for as long as `is_needed()`: a worker connects in its own time."""
        if self._is_stopped or not is_needed():
            return
        self.send(identity, Probe(self._epoch))
        self._loop.call_later(_PROBE_INTERVAL_S, self.probe, identity, is_needed)

    def has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def receive_all(self) -> None:
        """Read until nothing is left: the descriptor is edge-triggered."""
        while not self._is_stopped and self.has_message():
            try:
                identity, *frames = self._socket.recv_multipart(_NOW)
            except zmq.Again:
                return
            self._receive(identity, frames)

    def _receive(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            message = decode_to_gateway(frames)
        except WireError as error:
            self._on_message(identity, error)
            return
        if message.epoch == self._epoch:  # else it answers the gateway before this one
            self._on_message(identity, message)


@dataclass(slots=True)
class InFlight:
    """A batch that a worker has, or has answered."""

    number: int
    slot: int
    sequences: list[QueuedSequence]
    num_tokens: int
    row_ends: list[int] | range
    """The end of each sequence's rows in the slot, exclusive."""
    started_at: float
    """When it was sent, or when the batch ahead of it was answered: its deadline counts from here."""
    sent_at: float
    num_threads: int = 0
    """0 where the worker's threads are fixed."""
    charged_s: float = 0.0
    """Predicted seconds × cores that its model was charged for; 0 while there is one model."""
    answered_at: float = 0.0
    num_encoded: int = 0
    """Rows that have been handed to their requests; beyond `num_rows`, copies."""
    copies: list[Copy] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return self.row_ends[-1]


@dataclass(slots=True)
class WorkerLink:
    """The gateway's record of one incarnation."""

    incarnation: Incarnation
    slots: SlotViews
    facts: dict[str, Any]
    cost_model: CostModel
    free_slots: list[int] = field(default_factory=list)
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    """By batch number, oldest first: a worker takes batches in the order in which they were sent."""
    is_connected: bool = False
    """It has answered this gateway's probe."""
    is_stuck: bool = False
    """The supervisor has been told, and will kill it."""
    has_answered: bool = False
    """It has done a batch."""
    thread_choices: tuple[int, ...] = ()
    """Numbers of threads, the least first; fewer than two if there is no choice: batches are then sent without one."""
    leased: int = 0
    """Cores that its batch in flight has."""
    num_failures: int = 0
    """Batches of one sequence that it has failed on since its last success."""
    up_at: float = field(default_factory=time.monotonic)

    @property
    def fewest_threads(self) -> int:
        """0 where there is no choice."""
        return self.thread_choices[0] if len(self.thread_choices) > 1 else 0

    @property
    def is_usable(self) -> bool:
        return self.is_connected and not self.is_stuck

    @property
    def is_idle(self) -> bool:
        return self.is_usable and not self.in_flight and bool(self.free_slots)
