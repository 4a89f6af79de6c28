"""Files of bulk runs in places that are named by URLs, or here. Local files alone so far.

Owns no state. Called by `vecd.client.bulk.shards` and `vecd.client.bulk.folder`.
"""

import glob
import os
import shutil
from pathlib import Path

from vecd.client.bulk.errors import EmbedError


def is_remote(path: str) -> bool:
    """Whether it has a scheme, as s3://bucket/key has."""
    return "://" in path


def expand(path: str) -> list[str]:
    """The files of a file, folder or glob, sorted. Raises EmbedError when there are none."""
    _only_local(path)
    if os.path.isdir(path):
        found = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    else:
        found = [path] if os.path.exists(path) else [name for name in glob.glob(path, recursive=True) if name != path]
        found = [name for name in found if not os.path.isdir(name)]
    if not found:
        raise EmbedError(f"{path}: there is no such file")
    return sorted(found)


def fetch(url: str, target: Path) -> None:
    """Copy the file to `target`. Raises EmbedError."""
    _only_local(url)
    shutil.copyfile(url, target)


def store(source: Path, url: str) -> None:
    """Copy `source` to the place, where it appears whole or not at all. Raises EmbedError."""
    _only_local(url)
    draft = f"{url}.draft"
    shutil.copyfile(source, draft)
    os.replace(draft, url)


def exists(url: str) -> bool:
    """Raises EmbedError when this cannot be found out."""
    _only_local(url)
    return os.path.exists(url)


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if is_remote(folder) else os.path.join(folder, name)


def _only_local(path: str) -> None:
    if is_remote(path):
        raise EmbedError(f"{path}: only local files can be read and written")
