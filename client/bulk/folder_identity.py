"""The identity of the model whose results a folder of outputs has: one for all runs that write there.

Owns the file .vecd-identity.json in the folder, which the first run makes, and which no run changes. Called by
`vecd.client.bulk.folder`.
"""

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import orjson

from vecd.client.bulk.errors import EmbedError, OtherIdentity
from vecd.client.bulk.storage import exists, fetch, is_remote, join, shown, store

NAME = ".vecd-identity.json"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""Of file systems without hard links, as FAT and some that a network or a user's program serves."""


class FolderIdentity:
    """Raises EmbedError when the file cannot be read or made."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._url = join(folder, NAME)
        self._is_remote = is_remote(folder)

    def load(self) -> str | None:
        """None before the first run has met its server."""
        try:
            if not self._is_remote:
                return self._read(Path(self._url))
            if not exists(self._url):
                return None
            with tempfile.TemporaryDirectory(prefix="vecd-embed-") as name:
                fetch(self._url, Path(name, NAME))
                return self._read(Path(name, NAME))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EmbedError(f"{shown(self._url)}: cannot be read: {error.strerror}") from error

    def _read(self, path: Path) -> str:
        try:
            identity = orjson.loads(path.read_bytes())["identity"]
        except (ValueError, LookupError, TypeError):
            identity = None
        if not isinstance(identity, str):
            raise EmbedError(f"{shown(self._url)}: names no identity of a model")
        return identity

    def keep(self, identity: str) -> None:
        """Make the file, if there is none. Raises OtherIdentity when it names another one."""
        content = orjson.dumps({"identity": identity}, option=orjson.OPT_APPEND_NEWLINE)
        if self.load() is None:
            if self._is_remote:
                with tempfile.TemporaryDirectory(prefix="vecd-embed-") as name:
                    Path(name, NAME).write_bytes(content)
                    store(Path(name, NAME), self._url)
            else:
                self._create(content)
        self.check(identity)

    def check(self, identity: str) -> None:
        """Raises OtherIdentity when the file names another one. An object store has no way to make a file only if there
        is none, so of two runs that begin at once one may find out later."""
        if (found := self.load()) not in (None, identity):
            raise OtherIdentity(f"{shown(self._folder)} has outputs of {found}, and this run is of {identity}")

    def _create(self, content: bytes) -> None:
        """As a whole, or not at all if another run is first; without hard links, another run may for a moment read an
        empty file, which is an error. Raises OSError."""
        with tempfile.NamedTemporaryFile(prefix=f"{NAME}.", dir=self._folder) as draft:
            draft.write(content)
            draft.flush()
            os.fchmod(draft.fileno(), 0o644)
            try:
                os.link(draft.name, self._url)
            except FileExistsError:
                pass
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with suppress(FileExistsError), open(self._url, "xb", buffering=0) as file:
                    file.write(content)
