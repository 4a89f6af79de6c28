"""Many outputs in one folder or place of an object store: which there are to be, of which model, and which are left.

Owns the names of outputs, the manifest, the folder's identity, and the last lines about them. Starts no server.
"""

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import orjson

from vecd.base.status_line import StatusLine
from vecd.client.embed.files import OutputFiles, beside_final, journal_path
from vecd.client.embed.inputs import InputSource, check_readable, copied_from, file_key, find_inputs, known_format
from vecd.client.embed.options import EmbedError, EmbedOptions, OtherIdentity, OutputLocked, RunEnded, ServerLost, told
from vecd.client.embed.run import EmbedRun, in_thread
from vecd.client.embed.service import EmbeddingService, RunModel
from vecd.client.embed.storage import MAGIC, base_name, exists, expand, fetch, is_remote, join, shown, store

# --- the identity of the model whose results a folder has ---------------------------------------------------

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
        """Raises OtherIdentity when the file names another one: an object store lets two runs begin at once."""
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


# --- many inputs with an output each ------------------------------------------------------------------------

_NOT_DATA = (".", "_")
"""Beginnings of the names of files that lie beside data, as _SUCCESS does."""


class Shard(NamedTuple):
    """An input and its output: absolute paths, or URLs."""

    source: str
    out: str


def list_shards(options: EmbedOptions, manifest: Path | None) -> list[Shard]:
    """Those of this run, sorted by their inputs. `manifest`: the file to read, if there is one.

    Raises EmbedError when a named input does not exist, a line of the manifest cannot be read, two inputs have one
    output, or an output is an input or the manifest: with --restart, also by another name of the same file.
    """
    assert options.output_dir is not None
    folder = options.output_dir if is_remote(options.output_dir) else os.path.abspath(options.output_dir)
    named = [pair for path in options.files for pair in _name_outputs(path, folder, options)]
    if manifest is not None:
        try:
            lines = manifest.read_bytes().split(b"\n")
        except OSError as error:
            raise EmbedError(f"{manifest}: cannot be read: {error.strerror}") from error
        named += read_lines(lines, options)
    found = sorted({Shard(source, join(folder, name)) for source, name in named})
    if not found:
        raise EmbedError("there is no input: no file, and no line of a manifest, has one of the formats")
    sources: dict[str, str] = {}
    for source, out in found:
        if (other := sources.setdefault(out, source)) != source:
            raise EmbedError(
                f"{shown(other)} and {shown(source)} have one output, {shown(out)}: name it in a --manifest"
            )
    read = [*(source for source, _ in found), *([] if options.manifest is None else [_absolute(options.manifest)])]
    # What is there is replaced by --restart alone; to look at all files may take long.
    key = file_key if options.restart else str
    outs = {key(out) for _, out in found}
    if (both := next((each for each in read if key(each) in outs), None)) is not None:
        raise EmbedError(f"{shown(both)} is input and output")
    return found[options.shard.run :: options.shard.num_runs]


# --- names --------------------------------------------------------------------------------------------------


def output_name(name: str, options: EmbedOptions) -> str:
    """By the name of its input, both relative: the suffix of the output's format in place of the input's."""
    path = PurePosixPath(name)
    if path.suffix.lower() == ".gz":
        path = path.with_suffix("")
    if path.suffix and known_format(path.name, None)[0]:
        path = path.with_suffix("")
    return f"{path}.{options.output_format}"


def _name_outputs(path: str, folder: str, options: EmbedOptions) -> Iterator[tuple[str, str]]:
    base = _base(path)
    if known_format(f"out.{options.output_format}", options.format)[0] and _is_one_folder(path, folder):
        raise EmbedError(
            f"{shown(folder)} is also a folder of inputs, and the next run would take .{options.output_format} outputs "
            f"for inputs: name another --output-dir, also one in that folder"
        )
    for found in expand(path):
        source = _absolute(found)
        name = _below(source, base) or os.path.basename(source)
        is_named = source == _absolute(path)
        if not is_named and folder != base and _below(folder, base) and _below(source, folder):
            continue  # an output of an earlier run
        if is_named or _is_glob(path) or _is_data(name, options):
            yield source, output_name(base_name(source) if is_named else name, options)


def _is_data(name: str, options: EmbedOptions) -> bool:
    is_hidden = any(part.startswith(_NOT_DATA) for part in name.split("/"))
    return not is_hidden and bool(known_format(name, options.format)[0])


def _is_glob(path: str) -> bool:
    if path.startswith(("http://", "https://")):  # HTTP lists nothing, and a query begins with such a sign
        return False
    return MAGIC.search(path) is not None and (is_remote(path) or not os.path.exists(path))


def _is_one_folder(path: str, folder: str) -> bool:
    if is_remote(path) or is_remote(folder):
        return path.rstrip("/") == folder.rstrip("/")
    return os.path.realpath(path) == os.path.realpath(folder)


def _base(path: str) -> str:
    """The folder below which sub-folders are kept: the one that is named, or what comes before a glob's first sign."""
    if not _is_glob(path):
        return _absolute(path)
    before = MAGIC.split(path, maxsplit=1)[0]
    return _absolute(before.rpartition("/")[0] + "/" if "/" in before else ".")


def _absolute(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)


def _below(path: str, folder: str) -> str:
    """`path` relative to `folder`, or "" if it is not below it; with any slashes around them, as stores differ."""
    rest, base = (each.rpartition("://")[2].strip("/") for each in (path, folder))
    is_below = is_remote(path) == is_remote(folder) and rest.startswith(base + "/")
    return rest.removeprefix(base + "/") if is_below else ""


# --- the manifest -------------------------------------------------------------------------------------------


def read_lines(lines: Iterable[bytes], options: EmbedOptions) -> Iterator[tuple[str, str]]:
    for number, raw in enumerate(lines, 1):
        try:
            line = raw.decode().removeprefix("\ufeff").removesuffix("\r")
            if line.strip() and not line.startswith("#"):
                yield _read_line(line, options)
        except ValueError as error:
            why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error
            raise EmbedError(f"{shown(options.manifest or '')}, line {number}: {why}") from error


def _read_line(line: str, options: EmbedOptions) -> tuple[str, str]:
    """Raises ValueError."""
    source, *names = line.split("\t")
    if len(names) > 1:
        raise ValueError(f"{len(names) + 1} fields; a path, and the name of its output behind a tab, are all")
    if not source.strip() or "\0" in line:
        raise ValueError("the path is empty, or has a character that no path has")
    if not names:
        return _absolute(source), output_name(base_name(source), options)
    path = PurePosixPath(names[0])
    if not path.name or path.is_absolute() or ".." in path.parts or is_remote(names[0]):
        raise ValueError(f"{names[0]!r} is no name of an output: it is relative to --output-dir, and below it")
    suffix = f".{options.output_format}"
    return _absolute(source), str(path) if path.suffix == suffix else f"{path}{suffix}"


# --- a folder of outputs ------------------------------------------------------------------------------------

_NUM_LOOKS = 16
_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""No other output could be written either."""


class OutputFolder:
    """`find_left`, then `run` if there are any."""

    def __init__(self, options: EmbedOptions, line: StatusLine) -> None:
        """Raises EmbedError when inputs, outputs or manifest do not fit, OSError. Side effects: creates the folder."""
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
        self._model: RunModel
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
        return exists(shard.out) and (is_remote(shard.out) or not journal_path(Path(shard.out)).exists())

    async def run(self, service: EmbeddingService, left: Sequence[Shard]) -> None:
        """Make the outputs `left`. A bad input does not end it.

        Raises EmbedError when the server does not fit, before anything is made; RunEnded or OSError when no further
        output could be made.
        """
        try:
            self._model = await service.connect(self._identity.load())
            self._identity.keep(self._model.identity)
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
        except (EmbedError, RunEnded, ValueError, OSError) as error:  # ValueError: flags that do not go with this input
            if isinstance(error, OSError) and error.errno in _NO_MORE:
                raise
            self._failed[shard] = told(error)

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
                output = EmbedRun(options, inputs, files)
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
                await in_thread(lambda: self._identity.check(self._model.identity), "identity")
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

    def tell_end(self) -> None:
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
