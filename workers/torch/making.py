"""Makes safetensors of what no reader knows as it is, in a process of its own.

Owns the table of readers, and the writing: one at a time, by a rename, tensor by tensor, so that memory does not grow
with the model. The file is written here, and not by the library, which refuses tensors that share memory and copies all
tensors at once. Knows no format that is read.

Source of the format: https://github.com/huggingface/safetensors, "Format".
"""

import fcntl
import importlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from vecd.base.files import JsonMapping, JsonObject, write_json
from vecd.model.files import ModelError, made_with
from vecd.shm.job import Report
from vecd.workers.torch.checkpoint import TYPES

NAMES = {dtype: name for name, dtype in TYPES.items()}

READERS = {
    "pickles": "vecd.workers.torch.pickles",
    "adapters": "vecd.workers.torch.adapters",
    "gguf": "vecd.workers.torch.gguf",
    "quantized": "vecd.workers.torch.quantized",
}
"""By how a file is made: the module whose function `read(sources, options)` gives its `Content`. Raises ModelError."""


class Planned(NamedTuple):
    """A tensor that is made when it is written, and not kept. It may be made with more digits than `dtype` has."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Content(NamedTuple):
    tensors: Mapping[str, Planned]
    files: Mapping[str, JsonObject] = {}
    """Settings by their paths beside the file; they take the place of those that the model has there."""


def work(report: Report, orders: Mapping[str, JsonMapping]) -> None:
    """The job "make"."""
    report("converting")
    make_all(orders)


def make_all(orders: Mapping[str, JsonMapping]) -> None:
    """Write each file, a key of `orders`, as its order says: `how`, a key of READERS, `sources` and `options`. Another
    process that writes to the same folder is waited for, and what it has written is left. Raises ModelError, in one
    line."""
    for target, order in orders.items():
        path = Path(target)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with (path.parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if made_with(path) is None:
                    _make(path, order["how"], list(map(Path, order["sources"])), order["options"])
        except OSError as error:
            raise ModelError(f"{path.parent}: the converted weights cannot be written: {error.strerror}") from None


def _make(path: Path, how: str, sources: Sequence[Path], options: JsonMapping) -> None:
    content: Content = importlib.import_module(READERS[how]).read(sources, options)
    partial = path.parent / "partial"  # the lock is held: one that was left behind is no one's
    try:
        _write(partial, content.tensors)
        write_json(path.with_suffix(".json"), dict(content.files))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write(path: Path, tensors: Mapping[str, Planned]) -> None:
    """Raises ModelError if the disk has no room, and OSError."""
    header: JsonObject = {"__metadata__": {"format": "pt"}}  # without which transformers refuses it
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so each is aligned
    end = 0
    for name in names:
        dtype, shape, _ = tensors[name]
        start, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    free = shutil.disk_usage(path.parent).free
    if end > free:
        raise ModelError(f"{path.parent}: the converted weights have {end:,} bytes, and {free:,} are free")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            dtype, shape, make = tensors[name]
            tensor = make().to(dtype)
            assert tensor.shape == shape, name
            file.write(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
