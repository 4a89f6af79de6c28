"""Watches the file of keys, and reads the keys again when it has changed.

Called by `vecd.supervisor`, as one coroutine for the life of the server.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vecd.gateway.types.config import ApiKey
from vecd.launch.base.exit_codes import ConfigurationError
from vecd.launch.config.keys import load_keys
from vecd.launch.config.settings import Settings
from vecd.launch.processes.file_access import FileAccess, FilesHang

log = logging.getLogger("vecd.supervisor")

_INTERVAL_S = 2.0


async def watch_keys(
    files: FileAccess, current_settings: Callable[[], Settings], on_keys: Callable[[tuple[ApiKey, ...]], None]
) -> None:
    """Until cancelled, look at the file every two seconds. One that cannot be used, or hangs, changes nothing.

    `current_settings` names the file, which a reload may replace by another. `on_keys` is called with all keys each
    time that they have been read again.
    """
    seen: tuple[Settings, tuple[int, ...]] | None = None  # the settings that named the file, and the version last read
    while True:
        await asyncio.sleep(_INTERVAL_S)
        settings = current_settings()
        path = settings.keys_file
        if path is None:
            continue
        try:
            version = await files.call(str(path), partial(_version, path))
            if seen is not None and seen[0] is settings and seen[1] == version:
                continue
            seen = settings, version
            keys = await files.call(str(path), partial(load_keys, settings))
        except FilesHang:  # which is logged
            seen = None
        except ConfigurationError as error:
            for problem in error.problems:
                log.error("keys not read again, nothing has changed: %s", problem)
        except Exception as error:  # whatever a file may hold; a message might quote it
            log.error("keys not read again, nothing has changed: unexpected %s", type(error).__name__)
        else:
            if current_settings() is settings:  # else a reload has brought keys of its own meanwhile
                on_keys(keys)


def _version(path: Path) -> tuple[int, ...]:
    """What differs when the file does; empty if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
