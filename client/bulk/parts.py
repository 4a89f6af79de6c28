"""The files of an output while it is made: each only ever grows, and is cut back to what the journal knows.

Owns the open files and the lock, which is on the first of them. Knows nothing of what is in them. Called by
`vecd.client.bulk.output`.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class PartError(Exception):
    """Raised when the files of an unfinished run cannot be gone on with. The message says why."""


class Part:
    """One of them. Raises OSError when it cannot be opened or written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.num_bytes = os.fstat(self._fd).st_size

    def lock(self) -> bool:
        """False when somebody else has it, or has just put the file in its final place. Lasts until `close`."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except (BlockingIOError, FileNotFoundError):
            return False

    def cut(self, num_bytes: int) -> None:
        """Forget what is behind so many bytes. Raises PartError when there are not so many."""
        if self.num_bytes < num_bytes:
            raise PartError(
                f"{self.path} has {self.num_bytes:,} bytes, the journal knows of {num_bytes:,}: --restart begins anew"
            )
        os.ftruncate(self._fd, num_bytes)
        self.num_bytes = num_bytes

    def append(self, data: bytes | memoryview) -> None:
        """Whole, or OSError."""
        view = memoryview(data)
        while view:
            with self._named():
                num_written = os.pwrite(self._fd, view, self.num_bytes)
            self.num_bytes += num_written
            view = view[num_written:]

    def overwrite(self, data: bytes) -> None:
        """Its beginning."""
        with self._named():
            os.pwrite(self._fd, data, 0)

    def sync(self) -> None:
        with self._named():
            os.fsync(self._fd)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """A full disk says which file it is about."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
