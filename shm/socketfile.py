"""Removes a unix socket's file, and only that one.

Whoever listens on a path may end after another server has bound the same path anew; its clean-up must not take the
other's file away. So a file is known by its inode, taken right after it was bound. Called by the supervisor and the
gateway.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

FileId: TypeAlias = tuple[int, int]
"""Device and inode."""


def file_id(path: str | Path) -> FileId | None:
    """None when there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove_if_ours(path: str | Path, ours: FileId | None) -> None:
    if ours is not None and file_id(path) == ours:
        with suppress(OSError):
            os.unlink(path)
