"""A model's tensors by name, read from its safetensors files as numpy arrays.

Owns their conversion. Knows no architecture. Called by `vecd.workers.engines.lean` and `vecd.workers.engines.static`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from vecd.workers.model_file import ModelFile, stored_tensors

_FLOATS = ("F32", "F16", "BF16")
"""Types that a layer of a transformer is stored in. The others are for `table` and `whole_numbers` alone."""
_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "F64": np.dtype("<f8"), "I8": np.dtype("i1"), "I16": np.dtype("<i2"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8")
}  # fmt: skip
"""By the type's name in a header. numpy has no bfloat16; its bits are the upper half of a float32's."""


class Arrays(Mapping[str, NDArray[np.float32]]):
    """The floating-point tensors of some files, float32, read at each access, if the last one's array is gone. Tables
    of rows may also hold other types: see `table`."""

    def __init__(self, paths: Iterable[Path], *, in_memory: bool = False) -> None:
        """`in_memory`: read the files now; otherwise they stay open. Raises ModelError for one that is not whole,
        FileNotFoundError for a missing one. All reading raises ModelError for a file that has changed since."""
        self._places: dict[str, tuple[ModelFile, str, list[int], int, int]] = {}
        for path in paths:
            file = ModelFile(path, in_memory=in_memory)
            self._places |= {name: (file, *place) for name, *place in stored_tensors(file)}  # type: ignore[misc]
        self._floats = dict.fromkeys(name for name, (_, kind, *_) in self._places.items() if kind in _FLOATS)
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
        """A tensor as it is stored: gives the elements of its first dimension by their numbers, float32 [numbers, …],
        whole numbers as they are. Raises KeyError here, and the function IndexError outside the tensor."""
        kind, array = self._stored(name)
        return lambda at: _as_float32(kind, array.take(at, axis=0))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor of any type that numpy has; None if there is none of this name."""
        place = self._places.get(name)
        return None if place is None or place[1] not in _NUMPY else tuple(place[2])

    def whole_numbers(self, name: str) -> NDArray[np.int64]:
        """A copy of a tensor of whole numbers. Raises KeyError."""
        return self._stored(name)[1].astype(np.int64)

    def _stored(self, name: str) -> tuple[str, NDArray[Any]]:
        file, kind, shape, begin, count = self._places[name]
        return kind, file.read(begin, count).view(_NUMPY[kind]).reshape(shape)


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
"""2^16, which float16's exponent of infinity and nan would be."""
