"""The ZeroMQ connection between one gateway and the workers of one generation.

Owns the ROUTER socket, its context, and what becomes of a frame: messages are encoded and decoded here, and those of
another epoch are dropped. Knows no worker, batch or slot: a peer is a routing id. The transport is never evidence of a
worker's life or death; the supervisor tells that. Called by `vecd.gateway.dispatch.dispatcher`.
"""

import asyncio
from collections.abc import Callable

import zmq

from vecd.shm.tasks import ZMQ_THREADS, require_threads
from vecd.shm.wire import Probe, ToGateway, ToWorker, WireError, decode_to_gateway, encode

_PROBE_INTERVAL_S = 0.02

# As members of their enumerations, flags take 0.7 µs at each "|" and "&".
_NOW, _NOW_AND_MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)


class Transport:
    def __init__(
        self,
        epoch: int,
        *,
        on_message: Callable[[bytes, ToGateway], None],
        on_unreadable: Callable[[bytes, WireError], None],
    ) -> None:
        """`on_message` is called with the sender's routing id and each message of this epoch, `on_unreadable` with the
        routing id and the reason when frames are no message of this version. Both are called on the event loop."""
        self._epoch = epoch
        self._on_message = on_message
        self._on_unreadable = on_unreadable
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
        """Close the socket. Probes end, and later calls of `receive_all` do nothing."""
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
            self._on_unreadable(identity, error)
            return
        if message.epoch == self._epoch:  # else it answers the gateway before this one
            self._on_message(identity, message)
