"""A file of an unfinished output: it only grows, and is cut back to the length in the journal.

Owns the open file and its lock. Knows nothing of its content. Called by
`vecd.client.bulk.output`.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class OutputError(Exception):
    """Raised when the files of an unfinished run cannot be used. The message says why."""


class OutputFile:
    """Raises OSError when it cannot be opened or written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.num_bytes = os.fstat(self._fd).st_size

    def lock(self) -> bool:
        """False when another process has the lock, or has just renamed the file. Lasts until `close`."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except (BlockingIOError, FileNotFoundError):
            return False

    def cut(self, num_bytes: int) -> None:
        """Cut the file to `num_bytes`. Raises OutputError when it is shorter."""
        if self.num_bytes < num_bytes:
            raise OutputError(
                f"{self.path} has {self.num_bytes:,} bytes, the journal knows of {num_bytes:,}: --restart begins anew"
            )
        os.ftruncate(self._fd, num_bytes)
        self.num_bytes = num_bytes

    def append(self, data: bytes | memoryview) -> None:
        """Write all of `data`. Raises OSError."""
        view = memoryview(data)
        while view:
            with self._named():
                num_written = os.pwrite(self._fd, view, self.num_bytes)
            self.num_bytes += num_written
            view = view[num_written:]

    def overwrite(self, data: bytes) -> None:
        """Write `data` over the beginning of the file."""
        with self._named():
            os.pwrite(self._fd, data, 0)

    def sync(self) -> None:
        with self._named():
            os.fsync(self._fd)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the file in an OSError, such as that of a full disk."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """May be repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
