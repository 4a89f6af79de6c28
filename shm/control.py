"""The control messages between the supervisor and its children: few, small, and carrying file descriptors.

Owns the messages and the channel they travel on: a pair of SOCK_SEQPACKET unix sockets made before the child
starts, so there is no name to find, no permission to get wrong and nothing to unlink. A message is one packet of
JSON; descriptors ride along (SCM_RIGHTS). The end of the stream means that the other side is dead.

    supervisor → gateway       GatewayListen (+ sockets), GatewayStart (+ sockets, shared metrics, vector cache),
                               WorkerUp (+ arena), WorkerDown, Drain,
                               Prepare (+ ZeroMQ socket), Activate, Withdrawn, Discard, ModelBroken, NewKeys,
                               Progress, Quarantined, InputDeaths, InputsCleared, CoresGranted, ModelIs, ModelIdentity,
                               ModelFiles
    gateway → supervisor       Ready, ChildFailed, Heartbeat, WorkerConnected, WorkerStuck, Prepared, Retired,
                               ReloadAsked, Quarantined, InputDeaths, InputsCleared, CoresWanted, CoresHeld,
                               ModelWanted, ModelDrained, ModelUsed, ModelAsked, KeepAlive
    supervisor → fork server   ForkServerStart, ForkWorker (+ control, arena, ZeroMQ addresses)
    fork server → supervisor   Progress, Ready, ChildFailed
    supervisor → zygote        ForkServerStart (+ control of a new fork server)
    new fork server, worker → supervisor   Forked (+ pidfd)
    worker → supervisor        Progress, Ready, ChildFailed
    parent → job               JobOrder
    job → parent               Progress, JobFound, Ready, ChildFailed (`vecd.shm.job`)

Batches never travel here: that is `vecd.shm.wire`.
"""

import errno
import json
import math
import os
import re
import select
import socket
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, dataclass_transform

from vecd.base.files import JsonObject, load
from vecd.shm.wire import Incarnation

_MAX_PACKET_BYTES = 128 * 1024
"""A longer message is a file, and the packet its descriptor. Linux's default send buffer takes 208 KiB."""
_BY_FILE = b"file"
_RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
MAX_DESCRIPTORS = 80
"""One for each gateway there may be, and a few. Linux allows 253."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)
LOAD_TOKENS_PER_S = "load_tokens_per_s"
"""The key of a worker's fact: its speed when its model was loaded, above 0, which counts until a batch is measured."""
THREAD_CHOICES = "thread_choices"
"""The key of a worker's fact: the numbers of threads that it can compute a batch with, the least first."""
SEND_TIMEOUT_MS = 1000
_CHILD_SEND_TIMEOUT_MS = 60_000
"""Longer, because hundreds of workers that end at once fill the buffer of a supervisor that is busy."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message:
    """One of the classes below, which are frozen dataclasses."""

    __dataclass_fields__: ClassVar[JsonObject]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class GatewayListen(Message):
    """To the first gateway, before the model is known: answer what the start is doing, until GatewayStart comes.
    Descriptors: the public listening socket, and the admin one if there is one."""

    stage: str
    tls_cert: str | None
    """As in `vecd.gateway.config.GatewayConfig`, as the others."""
    tls_key: str | None
    max_body_bytes: int
    log_level: str
    log_format: str
    trusted_proxies: str


class GatewayStart(Message):
    """To a new gateway: its configuration. Descriptors: the shared metrics, its ZeroMQ listening socket, the vector
    cache if the configuration has one, the public listening socket, and the admin one if there is one."""

    config: JsonObject
    """A `vecd.gateway.config.GatewayConfig` as plain JSON values, the same for each gateway."""
    gateway: int
    epoch: int
    generation: int
    quarantine_key: str
    """In hexadecimal, the same for each gateway: digests of inputs that end their workers are made with it, and those
    of the vector cache."""
    start_stage: str | None = None
    """None once the server has been ready."""
    num_models: int = 1
    """The generations of all but this one come by Prepare: until then, a name that the gateway does not know may be
    that of a model which is still to come."""


class WorkerUp(Message):
    """To every gateway: an incarnation is ready. Descriptor: its arena."""

    generation: int
    incarnation: Incarnation
    facts: JsonObject
    """For `/info`."""


class WorkerDown(Message):
    """To every gateway: an incarnation is dead; its batches are to be sent again and its arena dropped."""

    incarnation: Incarnation
    reason: str
    has_crashed: bool | None = False
    """By a signal of the kernel for a fault of its own, and that no process has sent it. None: it had been stopped, and
    its death says nothing about its inputs."""
    is_planned: bool = False
    """The supervisor has ended it, after every gateway's ModelDrained. Counts as no death."""


class Drain(Message):
    """To every gateway: accept nothing new, answer what was accepted, exit 0 within the deadline."""

    deadline_s: float
    grace_s: float
    """In this time, which comes first, requests are served as before, but `/health` says 503."""


class Prepare(Message):
    """To every gateway: a new configuration; make ready for it beside the present one. Descriptor: its ZeroMQ listening
    socket."""

    generation: int
    config: JsonObject


class Activate(Message):
    """To every gateway: new requests for the model of this generation are for this generation from now on."""

    generation: int


class Withdrawn(Message):
    """To every gateway: the model of this generation is no longer served. Retired and then Discard follow, as after
    another generation's Activate."""

    generation: int


class Discard(Message):
    """To every gateway: forget a generation; nothing of it is being served any more, or may be."""

    generation: int


class ModelIs(Message):
    """To every gateway, after Prepare or GatewayStart and whenever it changes: the state of this generation's model.
    One that a gateway was not told of is ready, or becomes so with the server's start. The answer to "draining" is
    ModelDrained; then come WorkerDown for each worker, and the next state."""

    generation: int
    state: str
    """A `vecd.shm.control.ModelState`."""
    reason: str = ""
    """Failed: why, in one line. Unloaded or draining: one of UNLOAD_REASONS."""
    wait_s: float = 0.0
    """Loading or unloaded: the expected seconds until it could be ready. Failed: those until the next try."""
    nbytes: int = 0
    """Memory that it has, or that it is expected to need."""
    num_loads: int = 0
    """Since the server began, as the others."""
    num_failed_loads: int = 0
    load_s: float = 0.0
    """Duration of the last load; 0 before the first."""
    num_unloads: dict[str, int] = field(default_factory=dict)
    """By reason, one of UNLOAD_REASONS."""


class ModelIdentity(Message):
    """To every gateway, once it is known, and whenever it changes: the identity of this generation's model, without the
    number format."""

    generation: int
    digest: str
    """32 hexadecimal digits; "" if they cannot be found out, for now or for good."""
    by_alias: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    """Why there is no digest."""


class ModelFiles(Message):
    """To every gateway, whenever it changes, and before the news of a worker's death: which files of this generation's
    model are no longer those that were loaded. One that a gateway was not told of has those that were loaded."""

    generation: int
    changed: str
    """In words, without a path; "" if there is none."""


UNLOAD_REASONS = ("idle", "memory", "operator", "client")
"""Why a model was unloaded: its `keep_alive` was over; another model needed the memory; POST /admin/models;
`keep_alive: 0` of a client."""


class ModelWanted(Message):
    """From a gateway: a request waits for this generation's model, which is not ready. Sent once for each state."""

    generation: int


class ModelDrained(Message):
    """From a gateway: after "draining" nothing of this generation is at a worker any more, until another state has
    come."""

    generation: int


class ModelUsed(Message):
    """From a gateway, at most once a second: the use of this generation's model since the last one, if any."""

    generation: int
    compute_s: float
    num_requests: int
    """Those that are unanswered now."""


class ModelAsked(Message):
    """From a gateway: an operator wants this."""

    generation: int
    action: str
    """"load" or "unload"."""


class KeepAlive(Message):
    """From a gateway: a client has set how long this generation's model stays after its last request. Sent when it has
    changed."""

    generation: int
    seconds: float | None
    """None: for ever. 0: it is unloaded as soon as no request is left."""


class ModelBroken(Message):
    """To every gateway: no worker of this generation stays alive. Over as soon as one is up."""

    generation: int
    reason: str


class InputDeaths(Message):
    """From a gateway, and to all others: a worker has died while it computed these inputs."""

    model: str
    digests: list[str]
    is_isolated: bool
    """There was nothing else in the batch."""
    has_crashed: bool


class InputsCleared(Message):
    """From a gateway, and to all others: these inputs, with which workers had died, have been computed."""

    model: str
    digests: list[str]


class Quarantined(Message):
    """From a gateway, and to all others: an input has ended worker after worker, and is refused for a while."""

    model: str
    """Its name: of all its generations, and of no other model, whose workers the input may do no harm."""
    digest: str
    """In hexadecimal, made with the key that gateways share."""


class CoresWanted(Message):
    """From one of several gateways: on how many cores it could compute. Sent when that changes, at most 20 times a
    second."""

    num: int


class CoresGranted(Message):
    """To one of several gateways: how many cores it may lease from now on; none before the first of these messages.
    CoresHeld answers it if they are fewer than before."""

    num: int


class CoresHeld(Message):
    """From a gateway: its leases fit into its newest grant, which was smaller than the one before."""

    num: int


class NewKeys(Message):
    """To every gateway: from now on these are the keys that callers may send."""

    keys: list[JsonObject]


class Heartbeat(Message):
    """From a gateway, about once a second: its event loop turns."""


class WorkerConnected(Message):
    """From a gateway: an incarnation has answered its first probe."""

    incarnation: Incarnation


class Prepared(Message):
    """From a gateway: it is ready for a generation, or says why it cannot be."""

    generation: int
    error: str = ""


class Retired(Message):
    """From a gateway: it has answered the last request of a generation that is no longer its model's active one."""

    generation: int


class ReloadAsked(Message):
    """From a gateway: an operator has asked it for what SIGHUP does."""


class WorkerStuck(Message):
    """From a gateway: an incarnation has let a batch's deadline pass. The supervisor kills it."""

    incarnation: Incarnation


class ForkServerStart(Message):
    """To the fork server: what to import, and what to load, before the first fork. To a zygote before: import what this
    fork server needs, and fork it. Descriptor then: the fork server's control socket."""

    parent_pid: int
    """The supervisor's, whose death could otherwise go unseen."""
    modules: list[str]
    config: JsonObject | None = None
    """A `vecd.workers.config.WorkerConfig`, whose engine the workers will share; None: each loads its own, because what
    is on an accelerator does not survive a fork."""
    log_level: str = "info"
    log_format: str = "text"


class Forked(Message):
    """From a fork server or a worker that has been forked: it is the supervisor's child now. Descriptor: its pidfd.
    Without one, from the process that was to fork it: it cannot be forked."""

    pid: int
    error: str = ""


class ForkWorker(Message):
    """To the fork server. Descriptors: the worker's control socket, its arena, the ZeroMQ address (O_PATH) of
    each gateway."""

    incarnation: Incarnation
    config: JsonObject


class Progress(Message):
    """From a worker or the fork server. Passed on to every gateway until the server is ready for the first time."""

    stage: str


class Ready(Message):
    """From a child: a gateway listens, a fork server has loaded everything, a worker's model is loaded, compared and
    warm."""

    facts: JsonObject = field(default_factory=dict)
    """Of a worker: JSON values, shown in `/info`: dtype, path, agreement figures, memory, LOAD_TOKENS_PER_S if it was
    measured. Of a fork server: `modules`, which could be imported. Of a job: results."""
    warnings: list[str] = field(default_factory=list)


class JobOrder(Message):
    """To a job: carry this out. Answered by Ready or ChildFailed."""

    fields: JsonObject
    parent_pid: int
    """As in ForkServerStart."""


class JobFound(Message):
    """From a job: one of its results."""

    name: str
    value: Any


class ChildFailed(Message):
    """From a child: it cannot start, and starting it again would not help."""

    message: str
    is_configuration: bool = False


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
        return cls(socket.socket(fileno=fd), _CHILD_SEND_TIMEOUT_MS)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, fds: Sequence[int] = (), *, waits: bool = True) -> None:
        """Send one message. The caller keeps its own copies of `fds`, MAX_DESCRIPTORS at most.

        Raises OSError when the other side is dead, BlockingIOError when it has not read for SEND_TIMEOUT_MS
        (_CHILD_SEND_TIMEOUT_MS where a child sends), or at all if this does not wait.
        """
        # Without escapes, which take `json.loads` thrice as long: gateways read texts of a million characters.
        told = json.dumps([type(message).__name__, vars(message)], ensure_ascii=False, default=asdict)
        packet = told.encode(errors="surrogatepass")
        flags = 0 if waits else socket.MSG_DONTWAIT
        if len(packet) <= _MAX_PACKET_BYTES:
            socket.send_fds(self._sock, [packet], fds, flags)
            return
        fd = os.memfd_create("vecd-message", os.MFD_CLOEXEC)
        try:
            os.pwrite(fd, packet, 0)
            socket.send_fds(self._sock, [_BY_FILE], [*fds, fd], flags)
        finally:
            os.close(fd)

    def receive(self, timeout_s: float | None = None) -> tuple[Message, list[int]] | None:
        """Wait for one message; None when the other side is dead. The caller owns the descriptors. Raises TimeoutError
        when nothing came within `timeout_s`, BlockingIOError with a timeout of 0, and OSError without descriptors for
        those of the message."""
        if timeout_s != 0:
            self._wait(timeout_s)
        try:
            packet, ancillary, flags, _address = self._sock.recvmsg(
                _MAX_PACKET_BYTES, _ANCILLARY_BYTES, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            # The other side has died before it has read all. The kernel says so once, ahead of what it has sent.
            return self.receive(timeout_s)
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
        return load(_KINDS[kind], fields), fds

    def _wait(self, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if not poll.poll(None if timeout_s is None else timeout_s * 1000):
            raise TimeoutError(f"no control message within {timeout_s:g} s")

    def close(self) -> None:
        self._sock.close()


async def readable(fd: int) -> None:
    """Wait until there is something to read, or the other end is closed; of a pidfd, until the process ends."""
    import asyncio  # not in workers

    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(fd, wake)
    try:
        await future
    finally:
        loop.remove_reader(fd)


# Where a model's processes and weights are at the moment, and how long they stay.
#
# The supervisor changes states (`vecd.launch.residency`); gateways are told of each change
# (`vecd.shm.control.ModelIs`), and let requests wait for a model that is not ready.


class ModelState(StrEnum):
    UNLOADED = "unloaded"
    """No process, no weights. A request for it has it loaded."""
    LOADING = "loading"
    READY = "ready"
    """A worker has been ready since it was loaded; one that dies is restarted."""
    DRAINING = "draining"
    """No batch is sent any more. Once those in flight are answered, the workers end."""
    FAILED = "failed"
    """It could not be loaded, and is not tried again for a while."""


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_PART = re.compile(rf"({_NUMBER})({'|'.join(_UNITS_S)})", re.ASCII)
_DURATION = re.compile(rf"(?:{_PART.pattern})+", re.ASCII)
_MAX_CHARS = 32
_FOR_EVER_S = 9e9
"""285 years. A date that far away can still be written."""


def parse_keep_alive(value: object) -> float | None:
    """Seconds that a model stays after its last request, 0 or more; None: for ever. `value` is what Ollama's clients
    send: a number of seconds, also as a string, or a duration as Go writes it, "5m" or "1h30m"; a negative one, and one
    of centuries, means for ever. Raises ValueError, whose message says what it must be."""
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and len(value) <= _MAX_CHARS:
        text = value.strip()
        unsigned = text.removeprefix("-")
        if re.fullmatch(_NUMBER, unsigned, re.ASCII):
            seconds = float(text)
        elif _DURATION.fullmatch(unsigned):
            total = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(unsigned))
            seconds = -total if text.startswith("-") else total
    if math.isnan(seconds):
        raise ValueError("must be seconds or a duration like 5m; a negative one means for ever")
    return seconds if 0 <= seconds < _FOR_EVER_S else None


# Remove a unix socket's file, if it is still the same file.
#
# A server may end after another server has bound the same path again, and its clean-up must not remove the other's
# file. So a file is identified by its inode, read right after it was bound.

FileId: TypeAlias = tuple[int, int]


def file_id(path: str | Path) -> FileId | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove_if_ours(path: str | Path, ours: FileId | None) -> None:
    if ours is not None and file_id(path) == ours:
        with suppress(OSError):
            os.unlink(path)
