"""Many outputs in one folder or place of an object store: which there are to be, of which model, and which are left.

Owns the names of outputs, the manifest, the folder's identity, and the last lines about them. Starts no server.
"""

import errno
import hashlib
import os
import shutil
import tempfile
from collections import Counter
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
from vecd.client.embed.service import EmbeddingService
from vecd.client.embed.storage import base_name, base_of, exists, expand, fetch, is_glob, is_remote, join, shown, store

# --- the identity of the model whose results a folder has ---------------------------------------------------

NAME = ".vecd-identity.json"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""Of file systems without hard links, as FAT and some that a network or a user's program serves."""


def read_small(path: str) -> bytes | None:
    """The content of a file, or of an object of a store; None if there is none. Raises EmbedError, RunEnded when it
    cannot be read."""
    if is_remote(path):
        if not exists(path):
            return None
        with tempfile.TemporaryDirectory(prefix="vecd-embed-") as folder:
            fetch(path, copy := Path(folder, "copy"))
            return copy.read_bytes()
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EmbedError(f"{path}: cannot be read: {error.strerror}") from error


def load_identity(folder: str) -> str | None:
    """None before the first run has met its server. Raises EmbedError, RunEnded when it cannot be read."""
    url = join(folder, NAME)
    if (content := read_small(url)) is None:
        return None
    try:
        return str(orjson.loads(content)["identity"])
    except (ValueError, LookupError, TypeError) as error:
        raise EmbedError(f"{shown(url)}: names no identity of a model") from error


def check_identity(folder: str, identity: str) -> None:
    """Raises OtherIdentity when the folder is of another one: an object store lets two runs begin at once."""
    if (found := load_identity(folder)) not in (None, identity):
        raise OtherIdentity(f"{shown(folder)} has outputs of {found}, and this run is of {identity}")


def keep_identity(folder: str, identity: str) -> None:
    """Make it that of the folder, if it has none: as a whole, or not at all if another run is first. Without hard
    links, another run may for a moment read an empty file, which is an error. Raises OSError, and as `check_identity`.
    """
    url, place = join(folder, NAME), None if is_remote(folder) else folder
    with tempfile.NamedTemporaryFile(prefix=f"{NAME}.", dir=place) as draft:
        draft.write(content := orjson.dumps({"identity": identity}, option=orjson.OPT_APPEND_NEWLINE))
        draft.flush()
        if load_identity(folder) is not None:
            pass
        elif is_remote(folder):
            store(Path(draft.name), url)
        else:
            os.fchmod(draft.fileno(), 0o644)
            try:
                os.link(draft.name, url)
            except FileExistsError:
                pass
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with suppress(FileExistsError), open(url, "xb", buffering=0) as file:
                    file.write(content)
    check_identity(folder, identity)


# --- many inputs with an output each ------------------------------------------------------------------------

_NOT_DATA = (".", "_")
"""Beginnings of the names of files that lie beside data, as _SUCCESS does."""


class Shard(NamedTuple):
    """An input and its output: absolute paths, or URLs."""

    source: str
    out: str


def list_shards(options: EmbedOptions) -> list[Shard]:
    """Those of this run, sorted by their inputs.

    Raises EmbedError when a named input does not exist, a line of the manifest cannot be read, two inputs have one
    output, or an output is an input or the manifest: with --restart, also by another name of the same file.
    """
    assert options.output_dir is not None
    folder, manifest = _absolute(options.output_dir), options.manifest
    named = [pair for path in options.files for pair in _name_outputs(path, folder, options)]
    if manifest is not None:
        if (content := read_small(manifest)) is None:
            raise EmbedError(f"{shown(manifest)}: cannot be read: {os.strerror(errno.ENOENT)}")
        named += read_lines(content.split(b"\n"), options)
    found = sorted({Shard(source, join(folder, name)) for source, name in named})
    if not found:
        raise EmbedError("there is no input: no file, and no line of a manifest, has one of the formats")
    sources: dict[str, str] = {}
    for source, out in found:
        if (other := sources.setdefault(out, source)) != source:
            raise EmbedError(
                f"{shown(other)} and {shown(source)} have one output, {shown(out)}: name it in a --manifest"
            )
    read = [*(source for source, _ in found), *([] if manifest is None else [_absolute(manifest)])]
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
    base = base_of(path)
    if known_format(f"out.{options.output_format}", options.format)[0] and _is_one_folder(path, folder):
        raise EmbedError(
            f"{shown(folder)} is also a folder of inputs, and the next run would take .{options.output_format} outputs "
            f"for inputs: name another --output-dir, also one in that folder"
        )
    for source, name in expand(path):
        if not name:
            yield source, output_name(base_name(source), options)
        elif folder != base and _below(folder, base) and _below(source, folder):
            continue  # an output of an earlier run
        elif is_glob(path) or _is_data(name, options):
            yield source, output_name(name, options)


def _is_data(name: str, options: EmbedOptions) -> bool:
    is_hidden = any(part.startswith(_NOT_DATA) for part in name.split("/"))
    return not is_hidden and bool(known_format(name, options.format)[0])


def _is_one_folder(path: str, folder: str) -> bool:
    if is_remote(path) or is_remote(folder):
        return path.rstrip("/") == folder.rstrip("/")
    return os.path.realpath(path) == os.path.realpath(folder)


def _absolute(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)


def _below(path: str, folder: str) -> bool:
    """Whether `path` is below `folder`, with any slashes around them, as stores differ."""
    rest, base = (each.rpartition("://")[2].strip("/") for each in (path, folder))
    return is_remote(path) == is_remote(folder) and rest.startswith(base + "/")


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
_MADE, _THERE, _FAILED, _LOCKED, _LEFT = "made", "were there", "failed", "being made by another run", "left"
"""What has become of an output."""


class OutputFolder:
    """`find_left`, then `run` if there are any."""

    def __init__(self, options: EmbedOptions, line: StatusLine) -> None:
        """Raises EmbedError when inputs, outputs or manifest do not fit, OSError. Side effects: creates the folder."""
        assert options.output_dir is not None
        self._options = options
        self._folder = options.output_dir
        self._line = line
        self._work = options.work_dir or Path(_user_cache(), "vecd", "embed")
        self._fates = dict.fromkeys(list_shards(options), _LEFT)
        self._reasons: dict[Shard, str] = {}
        """Why outputs failed."""
        self._identity = ""
        if not is_remote(self._folder):
            Path(self._folder).mkdir(parents=True, exist_ok=True)

    def find_left(self) -> list[Shard]:
        """The outputs that are not complete. Raises EmbedError when this cannot be found out."""
        shards = list(self._fates)
        if self._options.restart:
            return shards
        with ThreadPoolExecutor(_NUM_LOOKS) as threads:
            found = list(threads.map(_is_there, shards))
        self._fates |= {shard: _THERE for shard, is_there in zip(shards, found, strict=True) if is_there}
        return [shard for shard, fate in self._fates.items() if fate == _LEFT]

    async def run(self, service: EmbeddingService, left: Sequence[Shard]) -> None:
        """Make the outputs `left`. A bad input does not end it.

        Raises EmbedError when the server does not fit, before anything is made; RunEnded or OSError when no further
        output could be made.
        """
        try:
            self._identity = (await service.connect(load_identity(self._folder))).identity
            keep_identity(self._folder, self._identity)
        except OtherIdentity as error:
            raise EmbedError(f"{error}. Outputs of two models do not mix: name another folder") from error
        for shard in left:
            self._fates[shard] = await self._try(shard, service)
        # Those of other runs may be complete by now, or left behind by one that was killed.
        for shard in [shard for shard in left if self._fates[shard] == _LOCKED]:
            self._fates[shard] = _LEFT
            self._fates[shard] = _THERE if _is_there(shard) else await self._try(shard, service)

    async def _try(self, shard: Shard, service: EmbeddingService) -> str:
        """What has become of the output. Raises ServerLost, and OSError when no further output could be written."""
        try:
            return await self._make(shard, service)
        except OutputLocked:
            return _LOCKED
        except ServerLost:
            raise
        except (EmbedError, RunEnded, ValueError, OSError) as error:  # ValueError: flags that do not go with this input
            if isinstance(error, OSError) and error.errno in _NO_MORE:
                raise
            self._reasons[shard] = told(error)
            return _FAILED

    async def _make(self, shard: Shard, service: EmbeddingService) -> str:
        is_remote_out, name = is_remote(shard.out), shown(shard.out)
        work = self._work / hashlib.sha256(shard.out.encode()).hexdigest()[:16]
        out = work / os.path.basename(shard.out) if is_remote_out else Path(shard.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        source = str(work / "input" / base_name(shard.source)) if is_remote(shard.source) else shard.source
        options = self._options.of_output(source, out)
        with closing(OutputFiles(options)) as files:
            if not options.restart and _is_there(shard):  # another run has made it just now
                return _THERE
            inputs = await in_thread(lambda: _read_inputs(options, shard.source, source), "input")
            try:
                files.resume(inputs)
            except EmbedError:
                if options.restart or not _is_there(shard):
                    raise
                return _THERE  # another run was about to remove its journal at the look before
            if not files.is_complete:
                num_done = sum(fate not in (_LEFT, _LOCKED) for fate in self._fates.values())
                label = f"[{num_done + 1} of {len(self._fates)}] {inputs[0].name}: "
                await EmbedRun(options, inputs, files, service, self._line, label).embed()
            if is_remote_out:
                await in_thread(lambda: check_identity(self._folder, self._identity), "identity")
            how = files.finish()
            if is_remote_out:
                await in_thread(lambda: _store(out, shard.out), "store")
            files.forget()
        shutil.rmtree(work, ignore_errors=True)
        if not options.quiet:
            self._line.say(f"{name}: {how}")
        if rejected := files.describe_rejected(name):
            self._line.say(f"{name}: {rejected}")
        return _MADE

    def tell_end(self) -> bool:
        """Say what has become of the outputs. Returns whether all are complete."""
        for shard, why in self._reasons.items():
            source = shown(shard.source)
            self._line.say(f"failed: {source}: {why.removeprefix(f'{source}: ')}")
        counts = Counter(self._fates.values())
        num_done = counts[_MADE] + counts[_THERE]
        parts = [f"{counts[fate]} {fate}" for fate in (_MADE, _THERE, _FAILED)]
        parts += [f"{counts[fate]} {fate}" for fate in (_LOCKED, _LEFT) if counts[fate]]
        self._line.say(f"{num_done} of {len(self._fates)} outputs complete: {', '.join(parts)}")
        return num_done == len(self._fates)


def _is_there(shard: Shard) -> bool:
    return exists(shard.out) and (is_remote(shard.out) or not journal_path(Path(shard.out)).exists())


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


def _user_cache() -> str:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return given if os.path.isabs(given) else os.path.expanduser("~/.cache")
