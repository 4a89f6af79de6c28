"""Watches the file of keys, and reads the keys again when it has changed.

Owns what was last seen of the file. Called by `vecd.supervisor`, as one coroutine for the life of the server.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from vecd.gateway.types.config import ApiKey
from vecd.launch.base.exit_codes import ConfigurationError
from vecd.launch.config.keys import load_keys
from vecd.launch.config.settings import Settings
from vecd.launch.processes.file_access import FileAccess, FilesHang

log = logging.getLogger("vecd.supervisor")

_INTERVAL_S = 2.0


class KeysWatch:
    def __init__(
        self,
        files: FileAccess,
        current_settings: Callable[[], Settings],
        on_keys: Callable[[tuple[ApiKey, ...]], None],
    ) -> None:
        """`current_settings` names the file, which a reload may replace by another. `on_keys` is called with all keys
        each time that they have been read again."""
        self._files = files
        self._current_settings = current_settings
        self._on_keys = on_keys
        self._seen: tuple[Settings, tuple[int, ...]] | None = None
        """The version of the file that was read last, and the settings that named the file."""

    async def run(self) -> None:
        """Look at the file every two seconds, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Read the keys again if their file has changed. A file that cannot be used, or hangs, changes nothing."""
        settings = self._current_settings()
        path = settings.keys_file
        if path is None:
            return
        try:
            version = await self._files.call(str(path), lambda: _version(path))
            if self._seen is not None and self._seen[0] is settings and self._seen[1] == version:
                return
            self._seen = settings, version
            keys = await self._files.call(str(path), lambda: load_keys(settings))
        except FilesHang:  # which is logged
            self._seen = None
        except ConfigurationError as error:
            for problem in error.problems:
                log.error("keys not read again, nothing has changed: %s", problem)
        except Exception as error:  # whatever a file may hold; a message might quote it
            log.error("keys not read again, nothing has changed: unexpected %s", type(error).__name__)
        else:
            if self._current_settings() is settings:  # else a reload has brought keys of its own meanwhile
                self._on_keys(keys)


def _version(path: Path) -> tuple[int, ...]:
    """What differs when the file does; empty if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
