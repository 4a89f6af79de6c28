"""Remove a unix socket's file, if it is still the same file.

A server may end after another server has bound the same path again, and its clean-up must not remove the other's file.
So a file is identified by its inode, read right after it was bound. Called by the supervisor and the gateway.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

FileId: TypeAlias = tuple[int, int]
"""Device and inode."""


def file_id(path: str | Path) -> FileId | None:
    """The id of a file; None when there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove_if_ours(path: str | Path, ours: FileId | None) -> None:
    if ours is not None and file_id(path) == ours:
        with suppress(OSError):
            os.unlink(path)
