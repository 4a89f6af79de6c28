"""The SHA-256 digests of large files, remembered while the files do not change.

Owns the folder `digests` in the cache directory.
"""

import hashlib
import json
import logging
import time
from contextlib import suppress
from pathlib import Path

from vecd.base.files import read_json, write_json

log = logging.getLogger("vecd.supervisor")

MIN_AGE_S = 2.0
"""A file that was changed later than this before it was read may be changed again within the clock's tick, and then
have the same times: its digest is not remembered."""
_MAX_FILE_BYTES = 200


def digest_of_file(path: Path, cache_folder: Path) -> str:
    """Raises OSError. Side effect: the digest is remembered, if the cache directory can be written."""
    stamp = stamp_of(path)
    key = hashlib.sha256(json.dumps({"path": str(path), "stamp": stamp}, sort_keys=True).encode()).hexdigest()
    remembered = cache_folder / "digests" / f"{key[:32]}.json"
    with suppress(OSError, KeyError, TypeError, ValueError, RecursionError):
        return str(read_json(remembered, _MAX_FILE_BYTES)["sha256"])
    is_old = time.time() - max(path.stat().st_mtime, path.stat().st_ctime) > MIN_AGE_S
    digest = digest_of_content(path)
    if is_old and stamp_of(path) == stamp:
        try:
            write_json(remembered, {"sha256": digest})
        except OSError as error:
            log.warning("the digest of %s cannot be remembered: %s", path, error)
    return digest


def stamp_of(path: Path) -> tuple[int, ...]:
    """Values that change when the file does. No program can set the inode's change time."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def digest_of_content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
