"""The control messages between the supervisor and its children: few, small, and carrying file descriptors.

Owns the messages and the channel they travel on: a pair of SOCK_SEQPACKET unix sockets made before the child
starts, so there is no name to find, no permission to get wrong and nothing to unlink. A message is one packet of
JSON; descriptors ride along (SCM_RIGHTS). The end of the stream means that the other side is dead.

    supervisor → gateway       GatewayListen (+ sockets), GatewayStart (+ sockets, shared metrics, vector cache),
                               WorkerUp (+ arena), WorkerDown, Drain,
                               Prepare (+ ZeroMQ socket), Activate, Withdrawn, Discard, ModelBroken, NewKeys,
                               Progress, Quarantined, InputDeaths, InputsCleared, CoresGranted, ModelIs, ModelIdentity,
                               ModelFiles
    gateway → supervisor       GatewayReady, ChildFailed, Heartbeat, WorkerConnected, WorkerStuck, Prepared, Retired,
                               ReloadAsked, Quarantined, InputDeaths, InputsCleared, CoresWanted, CoresHeld,
                               ModelWanted, ModelDrained, ModelUsed, ModelAsked, KeepAlive
    supervisor → fork server   ForkServerStart, ForkWorker (+ control, arena, ZeroMQ addresses)
    fork server → supervisor   ForkServerReady, WorkerForked (+ pidfd), ForkFailed, WorkerExited
    supervisor → zygote        ForkServerStart (+ control of a new fork server)
    new fork server → supervisor   ForkServerForked (+ pidfd)
    worker → supervisor        Progress, WorkerReady, ChildFailed

Batches never travel here: that is `vecd.shm.wire`.
"""

import errno
import json
import os
import select
import socket
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_MAX_PACKET_BYTES = 128 * 1024
"""A packet is at most this long; a longer message is a file, and the packet its descriptor. Linux's default send buffer
(net.core.wmem_default) takes 208 KiB."""
MAX_MESSAGE_BYTES = 16 * 2**20
_BY_FILE = b"file"
_RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
MAX_DESCRIPTORS = 80
"""The most that a message carries: one for each gateway there may be, and a few. Linux allows 253."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)
LOAD_TOKENS_PER_S = "load_tokens_per_s"
"""The key of a worker's fact: its speed when its model was loaded, above 0, by which waits are estimated until a batch
has been measured."""
THREAD_CHOICES = "thread_choices"
"""The key of a worker's fact: the numbers of threads that it can compute a batch with, the least first."""
SEND_TIMEOUT_MS = 1000
"""How long a message may wait for room in the other side's buffer."""
_CHILD_SEND_TIMEOUT_MS = 60_000
"""The same of a child: hundreds of workers that end at once fill the buffer of a supervisor that is busy."""


@dataclass(frozen=True, slots=True)
class Message:
    """One of the classes below."""


@dataclass(frozen=True, slots=True)
class GatewayListen(Message):
    """To the first gateway, before the model is known: answer on these sockets what the start is doing, until
    GatewayStart comes. Descriptors: the public listening socket, and the admin one if there is one."""

    stage: str
    """As in GatewayStart."""
    tls_cert: str | None
    """As in `vecd.gateway.types.config.GatewayConfig`, as the others."""
    tls_key: str | None
    max_body_bytes: int
    log_level: str
    log_format: str
    trusted_proxies: str
    proxy_protocol: bool


@dataclass(frozen=True, slots=True)
class GatewayStart(Message):
    """To a new gateway: its configuration. Descriptors: the shared metrics, its ZeroMQ listening socket, the vector
    cache if the configuration has one, the public listening socket, and the admin one if there is one."""

    config: dict[str, Any]
    """A `vecd.gateway.types.config.GatewayConfig` as plain JSON values, the same for each gateway."""
    gateway: int
    """Its index, 0 … num_gateways - 1."""
    epoch: int
    """Which of its lives this is, 1 for the first."""
    generation: int
    """Of the configuration."""
    quarantine_key: str
    """In hexadecimal, the same for each gateway: digests of inputs that end their workers are made with it, and those
    of the vector cache."""
    start_stage: str | None = None
    """What the server's start is doing; None once the server has been ready."""
    num_models: int = 1
    """Models that are served. The generations of all but this one come by Prepare: until as many are active, a name
    that the gateway does not know may be that of a model which is still to come."""


@dataclass(frozen=True, slots=True)
class WorkerUp(Message):
    """To every gateway: an incarnation is ready. Descriptor: its arena."""

    generation: int
    """Whose configuration it serves."""
    worker: int
    life: int
    facts: dict[str, Any]
    """What the worker said of itself when it was ready, for `/info`."""


@dataclass(frozen=True, slots=True)
class WorkerDown(Message):
    """To every gateway: an incarnation is dead; its batches are to be sent again and its arena dropped."""

    worker: int
    life: int
    reason: str
    has_crashed: bool = False
    """By a signal of the kernel for a fault of its own, and that no process has sent it."""
    is_planned: bool = False
    """The supervisor has ended it, after every gateway's ModelDrained. Counts as no death."""


@dataclass(frozen=True, slots=True)
class Drain(Message):
    """To every gateway: accept nothing new, answer what was accepted, exit 0 within the deadline."""

    deadline_s: float
    grace_s: float
    """In this time, which comes first, requests are served as before, but `/health` says 503."""


@dataclass(frozen=True, slots=True)
class Prepare(Message):
    """To every gateway: a new configuration; make ready for it beside the present one. Descriptor: its ZeroMQ listening
    socket."""

    generation: int
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Activate(Message):
    """To every gateway: new requests for the model of this generation are for this generation from now on."""

    generation: int


@dataclass(frozen=True, slots=True)
class Withdrawn(Message):
    """To every gateway: the model of this generation is no longer served. No new request is for it; Retired, once the
    last one is answered, and then Discard follow as after another generation's Activate."""

    generation: int


@dataclass(frozen=True, slots=True)
class Discard(Message):
    """To every gateway: forget a generation; nothing of it is being served any more, or may be."""

    generation: int


@dataclass(frozen=True, slots=True)
class ModelIs(Message):
    """To every gateway, after Prepare or GatewayStart and whenever it changes: the state of this generation's model.
    One that a gateway was not told of is ready, or becomes so with the server's start. The answer to "draining" is
    ModelDrained; then come WorkerDown for each worker, and the next state."""

    generation: int
    state: str
    """A `vecd.shm.residence.ModelState`."""
    reason: str = ""
    """Failed: why, in one line. Unloaded, parked or draining: one of UNLOAD_REASONS."""
    wait_s: float = 0.0
    """Loading, unloaded or parked: the expected seconds until it could be ready. Failed: those until the next try."""
    nbytes: int = 0
    """Memory that it has, or that it is expected to need."""
    num_loads: int = 0
    """Since the server began, as the others."""
    num_failed_loads: int = 0
    load_s: float = 0.0
    """Duration of the last load; 0 before the first."""
    num_unloads: dict[str, int] = field(default_factory=dict)
    """By reason, one of UNLOAD_REASONS; parkings, too."""


@dataclass(frozen=True, slots=True)
class ModelIdentity(Message):
    """To every gateway, once it is known, and whenever it changes: the identity of this generation's model, without the
    number format, which the workers say (`WorkerUp`)."""

    generation: int
    digest: str
    """32 hexadecimal digits; "" if they cannot be found out, for now or for good."""
    by_alias: dict[str, str] = field(default_factory=dict)
    """The same of each alias with request defaults."""
    problem: str = ""
    """Why there is no digest."""


@dataclass(frozen=True, slots=True)
class ModelFiles(Message):
    """To every gateway, whenever it changes, and before the news of a worker's death: which files of this generation's
    model are no longer those that were loaded. One that was not told of has the files that were loaded."""

    generation: int
    changed: str
    """In words, without a path; "" if there is none."""


UNLOAD_REASONS = ("idle", "memory", "operator", "client")
"""Why a model was unloaded or parked: its `keep_alive` was over; another one needed the memory; POST /admin/models;
`keep_alive: 0` of a client."""


@dataclass(frozen=True, slots=True)
class ModelWanted(Message):
    """From a gateway: a request waits for this generation's model, which is not ready. Sent once for each state."""

    generation: int


@dataclass(frozen=True, slots=True)
class ModelDrained(Message):
    """From a gateway: after "draining" nothing of this generation is at a worker any more, and nothing will be until
    another state has come."""

    generation: int


@dataclass(frozen=True, slots=True)
class ModelUsed(Message):
    """From a gateway, at most once a second: the use of this generation's model since the last such message. None comes
    while there is none."""

    generation: int
    compute_s: float
    """Seconds of cores."""
    num_requests: int
    """Those that are unanswered now."""


@dataclass(frozen=True, slots=True)
class ModelAsked(Message):
    """From a gateway: an operator wants this."""

    generation: int
    action: str
    """"load", "unload" or "park"."""


@dataclass(frozen=True, slots=True)
class KeepAlive(Message):
    """From a gateway: a client has set how long this generation's model stays after its last request, instead of the
    configured time. Sent only where that is allowed, and when it has changed."""

    generation: int
    seconds: float | None
    """None: for ever. 0: it is unloaded as soon as no request is left."""


@dataclass(frozen=True, slots=True)
class ModelBroken(Message):
    """To every gateway: no worker of this generation stays alive. Over as soon as one is up."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class InputDeaths(Message):
    """From a gateway, and to all others: a worker has died while it computed these inputs."""

    model: str
    """As in `Quarantined`, like the next."""
    digests: list[str]
    is_isolated: bool
    """There was nothing else in the batch."""
    has_crashed: bool
    """As in `WorkerDown`."""


@dataclass(frozen=True, slots=True)
class InputsCleared(Message):
    """From a gateway, and to all others: these inputs, with which workers had died, have been computed."""

    model: str
    """As in `Quarantined`, like the next."""
    digests: list[str]


@dataclass(frozen=True, slots=True)
class Quarantined(Message):
    """From a gateway, and to all others: an input has ended worker after worker, and is refused for a while."""

    model: str
    """Its name: of all its generations, and of no other model, whose workers the input may do no harm."""
    digest: str
    """In hexadecimal, made with the key that gateways share."""


@dataclass(frozen=True, slots=True)
class CoresWanted(Message):
    """From one of several gateways: on how many cores it could compute now. Sent when that changes, at most 20 times a
    second."""

    num: int


@dataclass(frozen=True, slots=True)
class CoresGranted(Message):
    """To one of several gateways: how many cores it may lease from now on; none before the first of these messages. An
    answer, CoresHeld, is needed if they are fewer than before."""

    num: int


@dataclass(frozen=True, slots=True)
class CoresHeld(Message):
    """From a gateway: its leases fit into its newest grant, which was smaller than the one before."""

    num: int
    """Those of the grant."""


@dataclass(frozen=True, slots=True)
class NewKeys(Message):
    """To every gateway: from now on these are the keys that callers may send."""

    keys: list[dict[str, Any]]
    """Each a `vecd.gateway.types.config.ApiKey` as plain JSON values."""


@dataclass(frozen=True, slots=True)
class GatewayReady(Message):
    """From a gateway: it listens."""


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """From a gateway, about once a second: its event loop turns."""


@dataclass(frozen=True, slots=True)
class WorkerConnected(Message):
    """From a gateway: an incarnation has answered its first probe."""

    worker: int
    life: int


@dataclass(frozen=True, slots=True)
class Prepared(Message):
    """From a gateway: it is ready for a generation, or says why it cannot be."""

    generation: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Retired(Message):
    """From a gateway: it has answered the last request of a generation that is no longer its model's active one."""

    generation: int


@dataclass(frozen=True, slots=True)
class ReloadAsked(Message):
    """From a gateway: an operator has asked it for what SIGHUP does."""


@dataclass(frozen=True, slots=True)
class WorkerStuck(Message):
    """From a gateway: an incarnation has let a batch's deadline pass. The supervisor kills it."""

    worker: int
    life: int


@dataclass(frozen=True, slots=True)
class ForkServerStart(Message):
    """To the fork server: what to import, and what to load, before the first fork. To a zygote before: import what this
    fork server needs, and fork it. Descriptor then: the fork server's control socket."""

    parent_pid: int
    """The supervisor's, whose death before the fork server asks to die with it would otherwise go unseen."""
    modules: list[str]
    config: dict[str, Any] | None = None
    """A `vecd.workers.config.WorkerConfig` as plain JSON values, whose engine the workers will share; None: each loads
    its own, because what is on an accelerator does not survive a fork."""
    selection_command: list[str] = field(default_factory=list)
    """The command line of `vecd.workers.process.selection_process.serve`, but for its descriptor."""
    log_level: str = "info"
    log_format: str = "text"


@dataclass(frozen=True, slots=True)
class ForkServerForked(Message):
    """From a fork server that a zygote has forked: it is the supervisor's child now. Descriptor: its pidfd. Or from the
    zygote, without one: it cannot be forked."""

    pid: int
    error: str = ""
    """Why it cannot be."""


@dataclass(frozen=True, slots=True)
class ForkServerReady(Message):
    """From the fork server: everything is imported; workers may be forked."""

    modules: list[str]
    """What could be imported."""


@dataclass(frozen=True, slots=True)
class ForkWorker(Message):
    """To the fork server. Descriptors: the worker's control socket, its arena, the ZeroMQ address (O_PATH) of
    each gateway."""

    worker: int
    life: int
    config: dict[str, Any]
    """A `vecd.workers.config.WorkerConfig` as plain JSON values."""


@dataclass(frozen=True, slots=True)
class WorkerForked(Message):
    """From the fork server. Descriptor: a pidfd of the new process."""

    worker: int
    life: int
    pid: int


@dataclass(frozen=True, slots=True)
class ForkFailed(Message):
    """From the fork server: a worker could not be forked."""

    worker: int
    life: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerExited(Message):
    """From the fork server: a worker was reaped."""

    pid: int
    status: int
    """As `os.waitstatus_to_exitcode` gives it: an exit code, or minus the signal's number."""


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """From a worker or the fork server: the stage of loading it begins. Passed on to every gateway until the server is
    ready for the first time."""

    stage: str


@dataclass(frozen=True, slots=True)
class WorkerReady(Message):
    """From a worker: the model is loaded, compared and warm."""

    facts: dict[str, Any]
    """JSON values: dtype, path ("packed" or "padded"), agreement figures, memory, LOAD_TOKENS_PER_S if it was measured.
    Shown in `/info`."""
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ChildFailed(Message):
    """From a child: it cannot start, and starting it again would not help."""

    message: str
    """One line for the operator: what is wrong, and where."""
    is_configuration: bool = False
    """A setting is wrong, and not the model or the machine."""


# In the order of definition: `slots=True` defines a class again, and the second one of a name is in use.
_KINDS = {kind.__name__: kind for kind in Message.__subclasses__()}


class Channel:
    """One end of a control connection. Owns the socket, and the descriptors of a message until it returns them."""

    def __init__(self, sock: socket.socket, send_timeout_ms: int = SEND_TIMEOUT_MS) -> None:
        self._sock = sock
        # A peer that does not read must not hold up the sender for ever: the send fails with BlockingIOError.
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", *divmod(send_timeout_ms * 1000, 10**6))
        )

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def from_fd(cls, fd: int) -> "Channel":
        """Take over a child's inherited descriptor."""
        return cls(socket.socket(fileno=fd), _CHILD_SEND_TIMEOUT_MS)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, fds: Sequence[int] = (), *, waits: bool = True) -> None:
        """Send one message. The caller keeps its own copies of `fds`, MAX_DESCRIPTORS at most.

        Raises OSError (BrokenPipeError, ConnectionResetError) when the other side is dead, BlockingIOError when it has
        not read for SEND_TIMEOUT_MS (_CHILD_SEND_TIMEOUT_MS where a child sends), or at all if this does not wait, and
        ValueError when the message is longer than MAX_MESSAGE_BYTES.
        """
        packet = json.dumps([type(message).__name__, asdict(message)]).encode()
        flags = 0 if waits else socket.MSG_DONTWAIT
        if len(packet) <= _MAX_PACKET_BYTES:
            socket.send_fds(self._sock, [packet], fds, flags)
            return
        if len(packet) > MAX_MESSAGE_BYTES:
            raise ValueError(f"control message of {len(packet)} bytes, at most {MAX_MESSAGE_BYTES}")
        fd = os.memfd_create("vecd-message", os.MFD_CLOEXEC)
        try:
            os.pwrite(fd, packet, 0)
            socket.send_fds(self._sock, [_BY_FILE], [*fds, fd], flags)
        finally:
            os.close(fd)

    def receive(self, timeout_s: float | None = None) -> tuple[Message, list[int]] | None:
        """Wait for one message; None when the other side is dead. The caller owns the descriptors.

        Raises TimeoutError when nothing came within `timeout_s`, BlockingIOError with a timeout of 0, and OSError
        when this process has no descriptor left for those of the message.
        """
        if timeout_s != 0:
            self._wait(timeout_s)
        try:
            packet, ancillary, flags, _address = self._sock.recvmsg(
                _MAX_PACKET_BYTES, _ANCILLARY_BYTES, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return None
        fds = [fd for level, kind, data in ancillary if (level, kind) == _RIGHTS for fd in array("i", data)]
        if flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            raise OSError(errno.EMFILE, "no file descriptor left for those of a control message")
        if not packet:
            return None
        if packet == _BY_FILE:
            with open(fds.pop(), "rb") as file:
                file.seek(0)
                packet = file.read()
        kind, fields = json.loads(packet)
        return _KINDS[kind](**fields), fds

    def _wait(self, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if not poll.poll(None if timeout_s is None else timeout_s * 1000):
            raise TimeoutError(f"no control message within {timeout_s:g} s")

    def close(self) -> None:
        self._sock.close()
