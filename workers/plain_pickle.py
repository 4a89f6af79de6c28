"""Reads the tensors of a state dict that torch has saved, without running anything of the file.

Owns a machine for the few opcodes of pickle that such a state dict consists of, and the bounds of what it reads. It
imports nothing that a file names: a name outside `_NAMES` is refused, and the names within it are symbols here. Needs
no torch. Called by `vecd.workers.linear_file`, for heads that exist only in this format (BGE-M3's `sparse_linear.pt`).

The file is a zip archive, stored without compression, with `<root>/data.pkl` and `<root>/data/<key>` for each storage.

Sources: `pickletools` in CPython for the opcodes, `torch/serialization.py` and `torch/_utils.py` for what torch writes.
"""

import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_FILE_BYTES = 256 << 20
"""Larger files are not read. The heads that are saved like this have a few megabytes."""

_MAX_PICKLE_BYTES = 1 << 20
_MAX_OPCODES = 100_000
_MAX_ENTRIES = 1000
_MAX_AXES = 8


class PickleError(Exception):
    """The file is not a plain state dict. The message says what was found, in one line."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A name that the file uses. Never looked up."""

    text: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str
    size: int
    """Numbers, not bytes."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_DTYPES = {"torch.FloatStorage": "<f4", "torch.HalfStorage": "<f2", "torch.BFloat16Storage": "<u2"}
"""bfloat16 is read as the upper half of a float32."""
_NAMES = frozenset({"collections.OrderedDict", "torch._utils._rebuild_tensor_v2", *_DTYPES})


def load_state_dict(path: Path) -> dict[str, NDArray[np.float32]]:
    """The tensors of the file by name, as float32. Owns their memory.

    Raises PickleError when the file is anything but a state dict of float tensors, OSError when it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise PickleError(f"it has more than {MAX_FILE_BYTES:,} bytes")
    entries = _entries(content)
    roots = [name.removesuffix("data.pkl") for name in entries if PurePosixPath(name).name == "data.pkl"]
    if len(roots) != 1:
        raise PickleError(f"it has {len(roots)} entries with the name data.pkl, instead of one")
    if entries.get(roots[0] + "byteorder", b"little") != b"little":
        raise PickleError("its numbers are not little-endian")
    pickled = entries[roots[0] + "data.pkl"]
    if len(pickled) > _MAX_PICKLE_BYTES:
        raise PickleError(f"its data.pkl has more than {_MAX_PICKLE_BYTES:,} bytes")
    found = _Machine(bytes(pickled)).run()
    if type(found) is not dict:
        raise PickleError("it holds no dictionary of tensors")
    tensors: dict[str, NDArray[np.float32]] = {}
    num_bytes = 0
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, _Tensor):
            raise PickleError(f"{_shown(name)} is not a tensor with a name")
        tensors[name] = _read(tensor, entries.get(f"{roots[0]}data/{tensor.storage.key}"))
        num_bytes += tensors[name].nbytes  # two tensors may share a storage
        if num_bytes > 2 * MAX_FILE_BYTES:
            raise PickleError("its tensors are larger than the file")
    return tensors


def _read(tensor: _Tensor, stored: memoryview | None) -> NDArray[np.float32]:
    storage = tensor.storage
    if stored is None:
        raise PickleError(f"its storage {storage.key!r:.80} is missing")
    dtype = np.dtype(storage.dtype)
    if storage.size * dtype.itemsize != len(stored):
        raise PickleError(f"its storage {storage.key!r:.80} has {len(stored)} bytes, not {storage.size} numbers")
    # The last number that the tensor reads. An axis of length 0 reads none.
    last = tensor.offset + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.strides, strict=True))
    if 0 in tensor.shape or last >= storage.size:
        raise PickleError(f"a tensor of shape {list(tensor.shape)} does not lie within its {storage.size} numbers")
    # Contiguous, so that strides of 0 make no tensor larger than what is stored.
    expected = tuple(int(np.prod(tensor.shape[axis + 1 :], dtype=np.int64)) for axis in range(len(tensor.shape)))
    if any(
        step != usual and length > 1 for step, usual, length in zip(tensor.strides, expected, tensor.shape, strict=True)
    ):
        raise PickleError(f"a tensor of shape {list(tensor.shape)} has strides {list(tensor.strides)}")
    numbers = np.frombuffer(stored, dtype)[tensor.offset : last + 1].reshape(tensor.shape)
    if storage.dtype == "<u2":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)


# --- the archive ------------------------------------------------------------------------------------------------


def _entries(content: bytes) -> dict[str, memoryview]:
    """The entries of the archive by name. Borrow `content`."""
    if content.count(_CENTRAL_HEADER) > _MAX_ENTRIES:  # before the library makes an object of each
        raise PickleError(f"it has more than {_MAX_ENTRIES} entries")
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error, UnicodeError) as error:
        raise PickleError(f"it is not a zip archive, as torch writes since 1.6: {error}") from None
    entries: dict[str, memoryview] = {}
    end_of_last = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        name = PurePosixPath(info.filename)
        if name.is_absolute() or ".." in name.parts or "\\" in info.filename or info.filename in entries:
            raise PickleError(f"its entry {info.filename!r:.80} has a name that torch does not write")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise PickleError(f"its entry {info.filename!r:.80} is compressed or encrypted")
        start, end = _extent(content, info)
        if info.header_offset < end_of_last:
            raise PickleError(f"its entry {info.filename!r:.80} overlaps another one")
        end_of_last = end
        entries[info.filename] = memoryview(content)[start:end]
    return entries


_CENTRAL_HEADER = b"PK\x01\x02"
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def _extent(content: bytes, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Where the bytes of an entry are. The local header says how long its names are; its sizes are not used."""
    header = content[info.header_offset : info.header_offset + _LOCAL_HEADER.size]
    if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
        raise PickleError(f"its entry {info.filename!r:.80} has no header")
    _, len_name, len_extra = _LOCAL_HEADER.unpack(header)
    start = info.header_offset + _LOCAL_HEADER.size + len_name + len_extra
    end: int = start + info.file_size
    if end > len(content):
        raise PickleError(f"its entry {info.filename!r:.80} is cut off")
    return start, end


# --- the pickle -------------------------------------------------------------------------------------------------

_MARK = object()


class _Machine:
    """Runs the opcodes that a state dict of tensors consists of, and refuses every other one."""

    def __init__(self, pickled: bytes) -> None:
        self._bytes = pickled
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(_MAX_OPCODES):
            opcode = self._take(1)[0]
            if opcode == _STOP:
                if len(self._stack) != 1:
                    raise PickleError("its pickle ends with values left over")
                return self._pop()
            action = _ACTIONS.get(opcode)
            if action is None:
                raise PickleError(f"its pickle has the opcode 0x{opcode:02x}, which a state dict has no use for")
            action(self)
        raise PickleError(f"its pickle has more than {_MAX_OPCODES:,} opcodes")

    # What the opcodes are made of.

    def _take(self, count: int) -> bytes:
        taken = self._bytes[self._at : self._at + count]
        if len(taken) < count:
            raise PickleError("its pickle is cut off")
        self._at += count
        return taken

    def _number(self, count: int) -> int:
        return int.from_bytes(self._take(count), "little")

    def _line(self) -> bytes:
        end = self._bytes.find(b"\n", self._at)
        if end < 0:
            raise PickleError("its pickle is cut off")
        line, self._at = self._bytes[self._at : end], end + 1
        return line

    def _text(self, count: int) -> str:
        return _decoded(self._take(count))

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise PickleError("its pickle takes a value that is not there")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise PickleError("its pickle takes values without a mark")

    def _pop_several(self, count: int) -> tuple[Any, ...]:
        return tuple(reversed([self._pop() for _ in range(count)]))

    # The opcodes that are more than a value.

    def _memoize(self, index: int) -> None:
        value = self._pop()
        self._push(value)
        self._memo[index] = value

    def _recall(self, index: int) -> None:
        if index not in self._memo:
            raise PickleError("its pickle recalls what it has not stored")
        self._push(self._memo[index])

    def _name(self, module: Any, name: Any) -> None:
        text = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else ""
        if text not in _NAMES:
            raise PickleError(f"its pickle names {text!r:.80}, which vecd refuses: it could run code")
        self._push(_Name(text))

    def _stack_name(self) -> None:
        module, name = self._pop_several(2)
        self._name(module, name)

    def _set_items(self, values: list[Any]) -> None:
        target = self._pop()
        self._push(target)
        if type(target) is not dict or len(values) % 2:
            raise PickleError("its pickle fills something that is no dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str):
                raise PickleError(f"its dictionary has the key {_shown(key)}")
            target[key] = value

    def _load_storage(self) -> None:
        """The persistent id of a storage: ("storage", type, key, location, number of elements)."""
        match self._pop():
            case ("storage", _Name(dtype), str(key), str(), int(size)) if dtype in _DTYPES and size >= 0:
                self._push(_Storage(_DTYPES[dtype], key, size))
            case other:
                raise PickleError(f"its pickle loads {_shown(other)}, which is no storage of floats")

    def _call(self) -> None:
        function, arguments = self._pop_several(2)
        match function, arguments:
            case _Name("collections.OrderedDict"), ():
                self._push({})
            case _Name("torch._utils._rebuild_tensor_v2"), (_Storage() as storage, offset, shape, strides, bool(), *_):
                whole = [offset, *_numbers(shape), *_numbers(strides)]
                if any(type(number) is not int or not 0 <= number < 2**40 for number in whole):
                    raise PickleError("a tensor's offset, shape and strides are not whole numbers")
                if len(shape) != len(strides) or len(shape) > _MAX_AXES:
                    raise PickleError(f"a tensor has {len(shape)} lengths and {len(strides)} strides")
                self._push(_Tensor(storage, offset, shape, strides))
            case _:
                raise PickleError(f"its pickle calls {_shown(function)}, which a state dict does not")

    def _build(self) -> None:
        """The attributes of the state dict, `_metadata`, which hold no tensor. They are dropped."""
        target, _ = self._pop_several(2)
        if type(target) is not dict:
            raise PickleError("its pickle sets attributes of something that is no dictionary")
        self._push(target)


def _numbers(values: Any) -> tuple[Any, ...]:
    if type(values) is not tuple:
        raise PickleError("a tensor's shape or strides are no tuple")
    return values


def _shown(value: Any) -> str:
    """For a message. Not the whole of a tuple, which may be nested without end."""
    if isinstance(value, tuple):
        value = next((part for part in value if isinstance(part, _Name)), "a tuple")
    if isinstance(value, _Name):
        return value.text
    return f"{value!r:.80}" if isinstance(value, str | int | None) else f"a {type(value).__name__.strip('_')}"


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise PickleError("its pickle has a text that is not UTF-8") from None


def _refuse_protocol(machine: _Machine) -> None:
    protocol = machine._number(1)
    if protocol > 5:
        raise PickleError(f"its pickle has protocol {protocol}")


def _drop(*_: Any) -> None:
    pass


_STOP = ord(".")

_ACTIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _refuse_protocol,  # PROTO
    0x95: lambda machine: _drop(machine._number(8)),  # FRAME
    ord("("): lambda machine: machine._push(_MARK),
    ord("}"): lambda machine: machine._push({}),
    ord(")"): lambda machine: machine._push(()),
    ord("t"): lambda machine: machine._push(tuple(machine._pop_to_mark())),
    0x85: lambda machine: machine._push(machine._pop_several(1)),  # TUPLE1
    0x86: lambda machine: machine._push(machine._pop_several(2)),
    0x87: lambda machine: machine._push(machine._pop_several(3)),
    ord("N"): lambda machine: machine._push(None),
    0x88: lambda machine: machine._push(True),  # NEWTRUE
    0x89: lambda machine: machine._push(False),
    ord("K"): lambda machine: machine._push(machine._number(1)),  # BININT1
    ord("M"): lambda machine: machine._push(machine._number(2)),
    ord("J"): lambda machine: machine._push(int.from_bytes(machine._take(4), "little", signed=True)),
    0x8A: lambda machine: machine._push(int.from_bytes(machine._take(machine._number(1)), "little", signed=True)),
    ord("X"): lambda machine: machine._push(machine._text(machine._number(4))),  # BINUNICODE
    0x8C: lambda machine: machine._push(machine._text(machine._number(1))),  # SHORT_BINUNICODE
    ord("q"): lambda machine: machine._memoize(machine._number(1)),  # BINPUT
    ord("r"): lambda machine: machine._memoize(machine._number(4)),
    0x94: lambda machine: machine._memoize(len(machine._memo)),  # MEMOIZE
    ord("h"): lambda machine: machine._recall(machine._number(1)),  # BINGET
    ord("j"): lambda machine: machine._recall(machine._number(4)),
    ord("c"): lambda machine: machine._name(_decoded(machine._line()), _decoded(machine._line())),  # GLOBAL
    0x93: _Machine._stack_name,  # STACK_GLOBAL
    ord("s"): lambda machine: machine._set_items(list(machine._pop_several(2))),  # SETITEM
    ord("u"): lambda machine: machine._set_items(machine._pop_to_mark()),
    ord("Q"): _Machine._load_storage,  # BINPERSID
    ord("R"): _Machine._call,  # REDUCE
    ord("b"): _Machine._build,
}
"""Each opcode that is allowed. Not among them: INST, OBJ, NEWOBJ and EXT1, which make objects of classes."""
