"""The messages between the gateway and a worker, and their ZeroMQ frames.

Owns the format of a frame. Never a socket: `vecd.gateway.dispatch.dispatcher` and `vecd.workers.process.loop` send and
receive. Frames are fixed binary structs, never pickles, and every field is checked when it is read, because the peer
may be another version, or broken.

    gateway (ROUTER) → worker (DEALER)     Probe, Batch
    worker (DEALER) → gateway (ROUTER)     Alive, Done, Failed

`epoch` numbers the lives of a gateway: a worker drops batches of an epoch older than the newest probe's, and a
gateway ignores replies of another epoch than its own. `number` is unique within an epoch.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, TypeAlias

# The failure codes that a worker sends to the gateway.
#
# Processes send codes, never exceptions: to unpickle an exception is to execute code, and its message may quote one
# client's text to another. The worker logs the exception itself, under the batch number.


class FailureCode(IntEnum):
    ENGINE_ERROR = 1
    """The forward pass raised."""

    OUT_OF_MEMORY = 2
    """The forward pass ran out of memory; a smaller batch may succeed."""

    BAD_MESSAGE = 3
    """The worker could not read the batch: a bug, or two versions of vecd."""


_VERSION = 5
_HEADER = struct.Struct("<BBHIQ")  # kind, version, slot, epoch, number
_BATCH_SIZES = struct.Struct("<IIHQ")  # num_sequences, num_tokens, num_threads, scope
_DONE_TAIL = struct.Struct("<IIIH")  # num_rows, compute_us, num_padding_tokens, num_threads
_FAILED_TAIL = struct.Struct("<H")  # code


_BYTES_PER_INT32 = 4

SCOPE_BYTES = 8
NO_SCOPE, SCOPE_OF_ALL = range(2)


class WireError(Exception):
    """A frame that no peer of this version sends. Raised while decoding; the receiver logs it and goes on."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of one worker. A restarted worker keeps its index and gets the next life."""

    worker: int
    life: int

    @property
    def identity(self) -> bytes:
        """The ZeroMQ routing id. A new life must have a new one: ROUTER ignores a second peer of the same id."""
        return b"w%d.%d" % (self.worker, self.life)

    def __str__(self) -> str:
        return f"worker {self.worker} (life {self.life})"


# --- gateway → worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks a worker whether it is connected, and announces the gateway's epoch to it."""

    kind: ClassVar = 1
    epoch: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one forward pass, packed: token ids sit end to end, in the order of `lengths_bytes`."""

    kind: ClassVar = 2
    epoch: int
    number: int
    slot: int
    """Where the rows go, end to end from the slot's first row on."""
    num_sequences: int
    num_tokens: int
    lengths_bytes: bytes
    """int32, little-endian, shape [num_sequences]; each ≥ 1, their sum is num_tokens."""
    token_ids_bytes: bytes
    """int32, little-endian, shape [num_tokens]."""
    outputs_bytes: bytes = b""
    """uint8, shape [num_sequences]: an Output for each sequence. Empty: VECTORS of all."""
    num_threads: int = 0
    """Cores that are leased to the batch, up to 65,535; 0: as the worker was configured."""
    borders_bytes: bytes = b""
    """int32, little-endian, shape [num_sequences]: where the second part of each sequence begins, 0 if it has none;
    less than its length. The second part of a pair has token type 1, where the model has types. That of a sequence
    whose output is TOKEN_VECTORS or HYBRID is a query's expansion, which is not attended to. Empty: no sequence has a
    second part."""
    scope: int = NO_SCOPE
    """Of SCOPE_BYTES: what a worker keeps of the sequences serves batches of the same scope alone. A keyed hash of the
    tenant; NO_SCOPE: several tenants', nothing is kept; SCOPE_OF_ALL: tenants share."""


# --- worker → gateway -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alive:
    kind: ClassVar = 3
    epoch: int


@dataclass(frozen=True, slots=True)
class Done:
    """The rows of a batch stand in its slot."""

    kind: ClassVar = 4
    epoch: int
    number: int
    slot: int
    num_rows: int
    compute_us: int
    """Microseconds from reading the batch to its last row."""
    num_padding_tokens: int = 0
    num_threads: int = 0
    """Fewer than were leased where the engine has no more yet; 0: as the worker was configured."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A batch has no rows; the worker is still there."""

    kind: ClassVar = 5
    epoch: int
    number: int
    slot: int
    code: FailureCode


ToWorker: TypeAlias = Probe | Batch
ToGateway: TypeAlias = Alive | Done | Failed


def encode(message: ToWorker | ToGateway) -> list[bytes]:
    match message:
        case Probe() | Alive():
            return [_HEADER.pack(message.kind, _VERSION, 0, message.epoch, 0)]
    header = _HEADER.pack(message.kind, _VERSION, message.slot, message.epoch, message.number)
    match message:
        case Batch():
            sizes = _BATCH_SIZES.pack(message.num_sequences, message.num_tokens, message.num_threads, message.scope)
            frames = [header + sizes, message.lengths_bytes, message.token_ids_bytes]
            if message.borders_bytes:
                return [*frames, message.outputs_bytes, message.borders_bytes]
            return [*frames, message.outputs_bytes] if message.outputs_bytes else frames
        case Done():
            tail = (message.num_rows, message.compute_us, message.num_padding_tokens, message.num_threads)
            return [header + _DONE_TAIL.pack(*tail)]
        case Failed():
            return [header + _FAILED_TAIL.pack(message.code)]


def decode_to_worker(frames: Sequence[bytes]) -> ToWorker:
    """Raises WireError."""
    kind, slot, epoch, number, tail = _split(frames)
    match kind:
        case Batch.kind if len(frames) in (3, 4, 5) and len(tail) == _BATCH_SIZES.size:
            num_sequences, num_tokens, num_threads, scope = _BATCH_SIZES.unpack(tail)
            lengths, token_ids = frames[1:3]
            outputs, borders = (*frames[3:], b"", b"")[:2]
            if not 0 < num_sequences <= num_tokens:
                raise WireError(f"batch of {num_sequences} sequences and {num_tokens} tokens")
            if len(lengths) != num_sequences * _BYTES_PER_INT32 or len(token_ids) != num_tokens * _BYTES_PER_INT32:
                raise WireError(f"batch of {num_sequences} sequences, {num_tokens} tokens: frames of other sizes")
            if len(outputs) != num_sequences and (outputs or len(frames) == 4):
                raise WireError(f"batch of {num_sequences} sequences and {len(outputs)} outputs")
            if len(frames) == 5 and len(borders) != num_sequences * _BYTES_PER_INT32:
                raise WireError(f"batch of {num_sequences} sequences, and {len(borders)} bytes of borders")
            return Batch(
                epoch, number, slot, num_sequences, num_tokens, lengths, token_ids, outputs, num_threads, borders, scope
            )
        case Probe.kind if len(frames) == 1 and not tail:
            return Probe(epoch)
    raise WireError(f"kind {kind} with {len(frames)} frames is not for a worker")


def decode_to_gateway(frames: Sequence[bytes]) -> ToGateway:
    """The routing id taken off. Raises WireError."""
    kind, slot, epoch, number, tail = _split(frames)
    if len(frames) == 1:
        match kind:
            case Done.kind if len(tail) == _DONE_TAIL.size:
                return Done(epoch, number, slot, *_DONE_TAIL.unpack(tail))
            case Failed.kind if len(tail) == _FAILED_TAIL.size:
                (code,) = _FAILED_TAIL.unpack(tail)
                try:
                    return Failed(epoch, number, slot, FailureCode(code))
                except ValueError as error:
                    raise WireError(f"failure code {code}") from error
            case Alive.kind if not tail:
                return Alive(epoch)
    raise WireError(f"kind {kind} with {len(frames)} frames is not for the gateway")


def _split(frames: Sequence[bytes]) -> tuple[int, int, int, int, bytes]:
    if not frames or len(frames[0]) < _HEADER.size:
        raise WireError("no header")
    kind, version, slot, epoch, number = _HEADER.unpack_from(frames[0])
    if version != _VERSION:
        raise WireError(f"version {version}, not {_VERSION}")
    return kind, slot, epoch, number, frames[0][_HEADER.size :]
