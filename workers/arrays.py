"""A model's files held open, and their tensors by name as numpy arrays.

Owns the reading, into memory of this process that no later change of a file reaches, and the conversion. Knows no
architecture.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from mmap import MAP_PRIVATE, mmap
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from vecd.model.card import ModelError, one_line
from vecd.model.files import StoredTensor, tensors_in

# The files of a model, held open: what is read of them, whenever that is, is of the version that was opened.
#
# To replace a model, write a new file and rename it; another change of a file that is still to be read is an error.

_MUCH = 2**17


class ModelFile:
    def __init__(self, path: Path, *, in_memory: bool = False) -> None:
        """`in_memory`: read all of it now, and never look at it again. Raises ModelError, for a missing file, too."""
        self._fd = -1
        self.path = path
        self._content: NDArray[np.uint8] | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ModelError(f"{path}: file missing") from None
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {one_line(error)}") from None
        self._opened = os.fstat(self._fd)
        self.size = self._opened.st_size
        if in_memory:
            self._content = self.read(0, self.size)
            os.close(self._fd)  # workers need not inherit it
            self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, begin: int, count: int) -> NDArray[np.uint8]:
        """Raises ModelError if the file has been written to since it was opened."""
        if self._content is not None:
            return self._content[begin : begin + count]
        # Not the allocator's where it is much: that would keep the memory once it is no longer needed.
        read = np.frombuffer(mmap(-1, count, MAP_PRIVATE) if count >= _MUCH else bytearray(count), dtype=np.uint8)
        rest, done = read.data, 0
        while done < count and (num := os.preadv(self._fd, [rest[done:]], begin + done)):
            done += num
        if done < count or self._is_changed():
            raise ModelError(f"{self.path}: the file has changed since it was opened; replace files by a rename")
        return read

    def _is_changed(self) -> bool:
        now, then = os.fstat(self._fd), self._opened
        # The time of change, which no program can set, is also another one when the file loses a name.
        times = ((each.st_mtime_ns, each.st_ctime_ns * (now.st_nlink == then.st_nlink)) for each in (now, then))
        return now.st_size != then.st_size or len({*times}) > 1


_FLOATS = ("F32", "F16", "BF16")
"""The others are for `table` and `whole_numbers` alone."""
_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "F64": np.dtype("<f8"), "I8": np.dtype("i1"), "I16": np.dtype("<i2"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8")
}  # fmt: skip
"""By the type's name in a header. numpy has no bfloat16; its bits are the upper half of a float32's."""


class StoredTensors:
    def __init__(self, paths: Iterable[Path], *, in_memory: bool = False) -> None:
        """`in_memory`: read the files now; otherwise they stay open. Raises ModelError for one that is missing or not
        whole. All reading raises ModelError for a file that has changed since."""
        self._places: dict[str, tuple[ModelFile, StoredTensor]] = {}
        for path in paths:
            file = ModelFile(path, in_memory=in_memory)
            self._places |= {
                _new_name(name): (file, tensor) for name, tensor in tensors_in(path, file.size, file.read).items()
            }

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """What the headers say of all of them."""
        return {name: tensor for name, (_, tensor) in self._places.items()}


def _new_name(name: str) -> str:
    """BERT's first files call the weight and the bias of a norm gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


class Arrays(StoredTensors, Mapping[str, NDArray[np.float32]]):
    """The floating-point tensors of some files, float32, read at each access, if the last one's array is gone."""

    def __init__(self, paths: Iterable[Path], *, in_memory: bool = False) -> None:
        super().__init__(paths, in_memory=in_memory)
        self._floats = dict.fromkeys(name for name, (_, tensor) in self._places.items() if tensor.kind in _FLOATS)
        self._in_use: WeakValueDictionary[str, NDArray[np.float32]] = WeakValueDictionary()

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        array = self._in_use.get(name)
        if array is None:
            array = self._in_use[name] = np.asarray(_as_float32(*self._stored(name)))
            array.flags.writeable = False  # others may have it, too
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._floats

    def __iter__(self) -> Iterator[str]:
        return iter(self._floats)

    def __len__(self) -> int:
        return len(self._floats)

    def table(self, name: str) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
        """A tensor as it is stored, of whole numbers, too: gives the elements of its first dimension by their numbers,
        float32 [numbers, …]. Raises KeyError here, and the function IndexError outside the tensor."""
        kind, array = self._stored(name)
        return lambda at: _as_float32(kind, array.take(at, axis=0))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor of any type that numpy has; None if there is none of this name."""
        _, tensor = self._places.get(name, (None, None))
        return None if tensor is None or tensor.kind not in _NUMPY else tensor.shape

    def whole_numbers(self, name: str) -> NDArray[np.int64]:
        """Raises KeyError."""
        return self._stored(name)[1].astype(np.int64)

    def _stored(self, name: str) -> tuple[str, NDArray[Any]]:
        file, tensor = self._places[name]
        return tensor.kind, file.read(tensor.begin, tensor.nbytes).view(_NUMPY[tensor.kind]).reshape(tensor.shape)


def _as_float32(kind: str, array: NDArray[Any]) -> NDArray[np.float32]:
    if kind == "BF16":
        return (array.astype("<u4") << np.uint32(16)).view("<f4")
    if kind == "F16":
        return _from_float16(array)
    return array.astype("<f4", copy=False)


def _from_float16(array: NDArray[np.float16]) -> NDArray[np.float32]:
    # numpy converts one number after the other, which takes five times as long. Here sign, exponent and fraction are
    # moved to their places in a float32, and the product corrects the exponent's bias, 15 instead of 127.
    bits = array.view("<i2").astype("<i4")
    bits <<= 13
    bits &= ~0x70001FFF
    floats = bits.view("<f4")
    floats *= np.float32(2.0**112)
    if floats.min(initial=0) > -_FIRST_TOO_LARGE and floats.max(initial=0) < _FIRST_TOO_LARGE:
        return floats
    return array.astype("<f4")  # infinity and nan have an exponent of their own


_FIRST_TOO_LARGE = 65536.0
