"""A model's tensors by name, mapped from its safetensors files, as numpy arrays.

Owns the mapping: nothing is read before it is used, all processes share the pages, and `release` gives the read ones
back. Knows no architecture. Called by `vecd.workers.engines.lean`.

A file must not be changed in place while it is mapped. To replace a model, write a new file and rename it.

Source of the format: https://github.com/huggingface/safetensors, "Format": the length of the header as eight bytes, a
JSON object with dtype, shape and data_offsets of each tensor, the data.
"""

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.workers.weights import new_name, read_header

_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""By the type's name in a header. numpy has no bfloat16; its bits are the upper half of a float32's."""

_OTHERS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "I8": np.dtype("i1"), "I16": np.dtype("<i2"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8")
}  # fmt: skip
"""Types that no layer of a transformer is stored in, for `rows` and `whole_numbers` alone."""


class Arrays(Mapping[str, NDArray[np.float32]]):
    """The floating-point tensors of some files. Values are float32: views of the file where it holds float32, otherwise
    converted at each access. Tables of rows may also hold other types: see `rows`."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Map the files. Raises ModelError for one that is not whole, FileNotFoundError for a missing one."""
        self._maps: list[mmap.mmap] = []
        self._stored: dict[str, tuple[str, NDArray[Any]]] = {}
        self._others: dict[str, tuple[str, NDArray[Any]]] = {}
        for path in paths:
            self._map(path)

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return _as_float32(*self._stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def rows(self, name: str, at: NDArray[np.int64]) -> NDArray[np.float32]:
        """The elements `at` of a tensor's first dimension, float32 [len(at), …]: only these are converted. Whole
        numbers are taken as they are. Raises KeyError, and IndexError outside the tensor."""
        kind, array = self._stored.get(name) or self._others[name]
        return _as_float32(kind, array.take(at, axis=0))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor of any type; None if there is none of this name."""
        found = self._stored.get(name) or self._others.get(name)
        return None if found is None else found[1].shape

    def whole_numbers(self, name: str) -> NDArray[np.int64]:
        """A copy of a tensor of whole numbers. Raises KeyError."""
        return self._others[name][1].astype(np.int64)

    def release(self) -> None:
        """Give back the memory of pages that have been read; an array's next access reads them again."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, path: Path) -> None:
        with path.open("rb") as file:
            read_header(path)  # checks the offsets
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._maps.append(mapped)
        start = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8:start])
        for name, tensor in header.items():
            kind = tensor.get("dtype")
            dtype = _NUMPY.get(kind, _OTHERS.get(kind))
            if dtype is None:  # the file's metadata, and types that no model needs
                continue
            begin, end = tensor["data_offsets"]
            count = (end - begin) // dtype.itemsize
            array = np.frombuffer(mapped, dtype, count, start + begin).reshape(tensor["shape"])
            (self._stored if kind in _NUMPY else self._others)[new_name(name)] = kind, array


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
