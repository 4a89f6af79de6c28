"""The files of a model, held open: what is read of them, whenever that is, is of the version that was opened.

Owns the reading, into memory of this process that no later change of a file reaches. Knows no model. Called by the
engines, whose tensors and graphs come from here. To replace a model, write a new file and rename it; another change of
a file that is still to be read is an error.

Source of the format: https://github.com/huggingface/safetensors, "Format": the length of the header as eight bytes, a
JSON object with dtype, shape and data_offsets of each tensor, the data.
"""

import json
import os
from collections.abc import Iterator
from mmap import MAP_PRIVATE, mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vecd.shm.card import ModelError
from vecd.workers.weights import new_name, read_header

_MUCH = 2**17


class ModelFile:
    def __init__(self, path: Path, *, in_memory: bool = False) -> None:
        """Open it. `in_memory`: read all of it now, and never look at it again. Raises OSError, and ModelError as
        `read`."""
        self._fd = -1
        self.path = path
        self._content: NDArray[np.uint8] | None = None
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
        """`count` bytes from `begin` on. Raises ModelError if the file has been written to since it was opened."""
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


def stored_tensors(file: ModelFile) -> Iterator[tuple[str, str, list[int], int, int]]:
    """Name, type, shape, first byte and number of bytes of each tensor; norms by their new names. Raises ModelError, in
    one line, for a file that is not whole."""
    read_header(file.path)  # checks the offsets
    start = 8 + int.from_bytes(file.read(0, 8).tobytes(), "little")
    for name, tensor in json.loads(file.read(8, start - 8).tobytes()).items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            yield new_name(name), tensor["dtype"], tensor["shape"], start + begin, end - begin
