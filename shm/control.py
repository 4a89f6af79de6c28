"""The control messages between the supervisor and its children: few, small, and carrying file descriptors.

Owns the messages and the channel they travel on: a pair of SOCK_SEQPACKET unix sockets made before the child
starts, so there is no name to find, no permission to get wrong and nothing to unlink. A message is one packet of
JSON; descriptors ride along (SCM_RIGHTS). The end of the stream means that the other side is dead.

    supervisor → gateway       GatewayStart, WorkerUp (+ arena), WorkerDown, Drain
    gateway → supervisor       GatewayReady, ChildFailed, WorkerStuck
    supervisor → fork server   ForkServerStart, ForkWorker (+ control, arena, ZeroMQ address)
    fork server → supervisor   ForkServerReady, WorkerForked (+ pidfd), WorkerExited
    worker → supervisor        Progress, WorkerReady, ChildFailed

Batches never travel here: that is `shm.wire`.
"""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

MAX_MESSAGE_BYTES = 128 * 1024
"""A packet is at most this long. Linux's default send buffer (net.core.wmem_default) takes 208 KiB."""
_MAX_FDS = 8


@dataclass(frozen=True, slots=True)
class GatewayStart:
    """To a new gateway: its configuration. Descriptors: the listening socket, the ZeroMQ listening socket."""

    config: dict[str, Any]
    """A `gateway.config.GatewayConfig` as plain JSON values."""
    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """To the gateway: an incarnation is ready. Descriptor: its arena."""

    worker: int
    life: int
    facts: dict[str, Any]
    """What the worker said of itself when it was ready, for `/info`."""


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """To the gateway: an incarnation is dead; its batches are to be sent again and its arena dropped."""

    worker: int
    life: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """To the gateway: accept nothing new, answer what was accepted, exit 0 within the deadline."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class GatewayReady:
    """From the gateway: it listens."""


@dataclass(frozen=True, slots=True)
class WorkerStuck:
    """From the gateway: an incarnation has let a batch's deadline pass. The supervisor kills it."""

    worker: int
    life: int


@dataclass(frozen=True, slots=True)
class ForkServerStart:
    """To the fork server: what to import before the first fork."""

    modules: list[str]


@dataclass(frozen=True, slots=True)
class ForkServerReady:
    """From the fork server: everything is imported; workers may be forked."""

    modules: list[str]
    """What could be imported."""


@dataclass(frozen=True, slots=True)
class ForkWorker:
    """To the fork server. Descriptors: the worker's control socket, its arena, the ZeroMQ address (O_PATH)."""

    worker: int
    life: int
    config: dict[str, Any]
    """A `workers.config.WorkerConfig` as plain JSON values."""


@dataclass(frozen=True, slots=True)
class WorkerForked:
    """From the fork server. Descriptor: a pidfd of the new process."""

    worker: int
    life: int
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """From the fork server: a worker was reaped."""

    pid: int
    status: int
    """As `os.waitstatus_to_exitcode` gives it: an exit code, or minus the signal's number."""


@dataclass(frozen=True, slots=True)
class Progress:
    """From a worker: the stage of loading it begins."""

    stage: str


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """From a worker: the model is loaded, compared and warm."""

    facts: dict[str, Any]
    """JSON values: dtype, path ("packed" or "padded"), agreement figures, memory. Shown in `/info`."""
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ChildFailed:
    """From a child: it cannot start, and starting it again would not help."""

    message: str
    """One line for the operator: what is wrong, and where."""


Message: TypeAlias = (
    GatewayStart | WorkerUp | WorkerDown | Drain | GatewayReady | WorkerStuck
    | ForkServerStart | ForkServerReady | ForkWorker | WorkerForked | WorkerExited
    | Progress | WorkerReady | ChildFailed
)  # fmt: skip

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        GatewayStart, WorkerUp, WorkerDown, Drain, GatewayReady, WorkerStuck,
        ForkServerStart, ForkServerReady, ForkWorker, WorkerForked, WorkerExited,
        Progress, WorkerReady, ChildFailed,
    )
}  # fmt: skip


class Channel:
    """One end of a control connection. Owns the socket, and the descriptors of a message until it returns them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def from_fd(cls, fd: int) -> "Channel":
        """Take over an inherited descriptor."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send one message. The caller keeps its own copies of `fds`.

        Raises OSError (BrokenPipeError, ConnectionResetError) when the other side is dead, and ValueError when the
        message is longer than MAX_MESSAGE_BYTES.
        """
        packet = json.dumps([type(message).__name__, asdict(message)]).encode()
        if len(packet) > MAX_MESSAGE_BYTES:
            raise ValueError(f"control message of {len(packet)} bytes, at most {MAX_MESSAGE_BYTES}")
        socket.send_fds(self._sock, [packet], fds)

    def receive(self, timeout_s: float | None = None) -> tuple[Message, list[int]] | None:
        """Wait for one message; None when the other side is dead. The caller owns the descriptors.

        Raises TimeoutError when nothing came within `timeout_s`, BlockingIOError with a timeout of 0.
        """
        self._sock.settimeout(timeout_s)
        try:
            packet, fds, _flags, _address = socket.recv_fds(self._sock, MAX_MESSAGE_BYTES, _MAX_FDS)
        except ConnectionResetError:
            return None
        if not packet:
            return None
        for fd in fds:
            os.set_inheritable(fd, False)
        kind, fields = json.loads(packet)
        return _KINDS[kind](**fields), fds

    def close(self) -> None:
        self._sock.close()
