"""A folder of outputs: one after the other is made from its input, and what is there already is left alone.

Owns which outputs are made, skipped or failed, copies of remote inputs, and unfinished remote outputs, which lie in a
working folder. An output itself is the work of `vecd.client.bulk.one_output`. Called by `vecd.client.bulk.command`.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

from vecd.client.bulk.errors import EmbedError, OtherIdentity, OutputLocked, RunEnded, ServerLost
from vecd.client.bulk.folder_identity import FolderIdentity
from vecd.client.bulk.inputs import InputSource, check_readable, copied_from, find_inputs
from vecd.client.bulk.one_output import OneOutput
from vecd.client.bulk.options import EmbedOptions
from vecd.client.bulk.output import OutputFiles, beside_final, journal_path
from vecd.client.bulk.service import EmbeddingService
from vecd.client.bulk.shards import Shard, list_shards
from vecd.client.bulk.storage import base_name, exists, fetch, is_remote, shown, store
from vecd.client.bulk.tasks import in_thread
from vecd.client.status_line import StatusLine

_NUM_LOOKS = 16
"""Questions to an object store at a time."""
_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""No other output could be written either."""


class OutputFolder:
    """`find_left`, then `run` if there are any."""

    def __init__(self, options: EmbedOptions, line: StatusLine) -> None:
        """Raises EmbedError when the inputs, their outputs or the manifest do not fit, OSError for a folder that cannot
        be made. Side effects: creates the folder of the outputs."""
        assert options.output_dir is not None
        self._options = options
        self._folder = options.output_dir
        self._line = line
        self._identity = FolderIdentity(self._folder)
        self._work = options.work_dir or Path(_user_cache(), "vecd", "embed")
        self._shards = self._list_shards()
        self._num_there = self._num_made = 0
        self._failed: dict[Shard, str] = {}
        self._locked: list[Shard] = []
        if not is_remote(self._folder):
            Path(self._folder).mkdir(parents=True, exist_ok=True)

    def _list_shards(self) -> list[Shard]:
        manifest = self._options.manifest
        if manifest is None or not is_remote(manifest):
            return list_shards(self._options, None if manifest is None else Path(manifest))
        self._work.mkdir(parents=True, exist_ok=True)
        copy = self._work / f"{_digest(manifest)}-{os.getpid()}.manifest"
        try:
            fetch(manifest, copy)
            return list_shards(self._options, copy)
        finally:
            copy.unlink(missing_ok=True)

    @property
    def is_complete(self) -> bool:
        return self._num_there + self._num_made == len(self._shards)

    def find_left(self) -> list[Shard]:
        """The outputs that are not complete. Raises EmbedError when this cannot be found out."""
        if self._options.restart:
            return self._shards
        with ThreadPoolExecutor(_NUM_LOOKS) as threads:
            found = list(threads.map(self._is_there, self._shards))
        self._num_there = sum(found)
        return [shard for shard, is_there in zip(self._shards, found, strict=True) if not is_there]

    def _is_there(self, shard: Shard) -> bool:
        """Whether it is complete, and nothing of an unfinished run is beside it."""
        return exists(shard.out) and (is_remote(shard.out) or not journal_path(Path(shard.out)).exists())

    async def run(self, service: EmbeddingService, left: Sequence[Shard]) -> None:
        """Make the outputs `left`. A bad input does not end it.

        Raises EmbedError when the server does not fit, before anything is made; RunEnded or OSError when no further
        output could be made.
        """
        service.identity = self._identity.load()
        try:
            await service.connect()
            if service.identity is not None:
                self._identity.keep(service.identity)
        except OtherIdentity as error:
            raise EmbedError(f"{error}. Outputs of two models do not mix: name another folder") from error
        for shard in left:
            await self._try(shard, service)
        # Those of other runs may be complete by now, or left behind by one that was killed.
        locked, self._locked = self._locked, []
        for shard in locked:
            if self._is_there(shard):
                self._num_there += 1
            else:
                await self._try(shard, service)

    async def _try(self, shard: Shard, service: EmbeddingService) -> None:
        """Raises ServerLost, and OSError when no further output could be written."""
        try:
            await self._make(shard, service)
        except OutputLocked:
            self._locked.append(shard)
        except ServerLost:
            raise
        except (EmbedError, RunEnded, ValueError) as error:  # ValueError: flags that do not go with this input
            self._failed[shard] = str(error)
        except OSError as error:
            if error.errno in _NO_MORE:
                raise
            self._failed[shard] = f"{error.filename}: {error.strerror}" if error.filename else str(error)

    async def _make(self, shard: Shard, service: EmbeddingService) -> None:
        is_remote_out = is_remote(shard.out)
        work = self._work / _digest(shard.out)
        out = work / os.path.basename(shard.out) if is_remote_out else Path(shard.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        source = str(work / "input" / base_name(shard.source)) if is_remote(shard.source) else shard.source
        options = self._options.of_output(source, out)
        with closing(OutputFiles(options)) as files:
            if not options.restart and self._is_there(shard):  # another run has made it just now
                self._num_there += 1
                return
            inputs = await in_thread(lambda: _read_inputs(options, shard.source, source), "input")
            try:
                output = OneOutput(options, inputs, files)
            except EmbedError:
                if options.restart or not self._is_there(shard):
                    raise
                self._num_there += 1  # another run was about to remove its journal at the look before
                return
            if not output.is_complete:
                num_done = self._num_there + self._num_made + len(self._failed)
                label = f"[{num_done + 1} of {len(self._shards)}] {inputs[0].name}: "
                await output.embed(service, self._line, label)
            if is_remote_out:
                await in_thread(lambda: self._check_identity(service), "identity")
            how = output.finish()
            if is_remote_out:
                await in_thread(lambda: _store(out, shard.out), "store")
            output.forget()
        shutil.rmtree(work, ignore_errors=True)
        self._num_made += 1
        if not options.quiet:
            self._line.say(f"{shown(shard.out)}: {how}")
        if rejected := output.describe_rejected(shown(shard.out)):
            self._line.say(f"{shown(shard.out)}: {rejected}")

    def _check_identity(self, service: EmbeddingService) -> None:
        if service.identity is not None:
            self._identity.check(service.identity)

    def tell_end(self) -> None:
        """Write a line for each output that failed, and the last one."""
        for shard, why in self._failed.items():
            source = shown(shard.source)
            self._line.say(f"failed: {source}: {why.removeprefix(f'{source}: ')}")
        num_done = self._num_there + self._num_made
        parts = [f"{self._num_made} made", f"{self._num_there} were there", f"{len(self._failed)} failed"]
        if self._locked:
            parts.append(f"{len(self._locked)} being made by another run")
        if num_left := len(self._shards) - num_done - len(self._failed) - len(self._locked):
            parts.append(f"{num_left} left")
        self._line.say(f"{num_done} of {len(self._shards)} outputs complete: {', '.join(parts)}")


def _read_inputs(options: EmbedOptions, source: str, path: str) -> list[InputSource]:
    """The input of one output, copied to `path` if it is remote. Raises EmbedError, OSError."""
    if source == path:
        inputs = find_inputs([path], options.format)
    else:
        copy = Path(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        fetch(source, copy)
        inputs = [copied_from(source, each) for each in find_inputs([path], options.format)]
    check_readable(inputs, options)
    return inputs


def _store(out: Path, url: str) -> None:
    """`out` last: where it is, the others are."""
    for path in beside_final(out):
        with suppress(FileNotFoundError):
            store(path, url + path.name.removeprefix(out.name))
    store(out, url)


def _digest(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:16]


def _user_cache() -> str:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return given if os.path.isabs(given) else os.path.expanduser("~/.cache")
