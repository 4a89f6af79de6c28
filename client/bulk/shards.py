"""Many inputs with an output each: which they are, and which of them are those of one of several runs.

Owns the names of outputs and the manifest. Opens no input. Called by `vecd.client.bulk.folder`.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from vecd.client.bulk.errors import EmbedError
from vecd.client.bulk.inputs import file_key, known_format
from vecd.client.bulk.options import EmbedOptions
from vecd.client.bulk.storage import base_name, expand, is_remote, join, shown

_GLOB = "*?["
_NOT_DATA = (".", "_")
"""Beginnings of the names of files that lie beside data, as _SUCCESS does."""


class Shard(NamedTuple):
    """An input and its output: absolute paths, or URLs."""

    source: str
    out: str


def list_shards(options: EmbedOptions, manifest: Path | None) -> list[Shard]:
    """Those of this run, sorted by their inputs. `manifest`: the file to read, if there is one.

    Raises EmbedError when an input that is named here does not exist, a line of the manifest cannot be read, two inputs
    have one output, or an output is an input or the manifest: with --restart, also by another name of the same file.
    """
    assert options.output_dir is not None
    folder = options.output_dir if is_remote(options.output_dir) else os.path.abspath(options.output_dir)
    named = [pair for path in options.files for pair in _name_outputs(path, folder, options)]
    if manifest is not None:
        named += _read_manifest(manifest, options)
    found = sorted({Shard(source, join(folder, name)) for source, name in named})
    if not found:
        raise EmbedError("there is no input: no file, and no line of a manifest, has one of the formats")
    _check_distinct(found)
    read = [*(source for source, _ in found), *([] if options.manifest is None else [_absolute(options.manifest)])]
    # What is there is replaced by --restart alone; to look at all files may take long.
    key = file_key if options.restart else str
    outs = {key(out) for _, out in found}
    if (both := next((each for each in read if key(each) in outs), None)) is not None:
        raise EmbedError(f"{shown(both)} is input and output")
    return found[options.shard.run :: options.shard.num_runs]


def _check_distinct(shards: Sequence[Shard]) -> None:
    sources: dict[str, str] = {}
    for source, out in shards:
        if (other := sources.setdefault(out, source)) != source:
            raise EmbedError(
                f"{shown(other)} and {shown(source)} have one output, {shown(out)}: name it in a --manifest"
            )


# --- names --------------------------------------------------------------------------------------------------


def output_name(name: str, options: EmbedOptions) -> str:
    """The name of an output by that of its input, both relative: without the suffixes of formats and packing, and with
    that of the output's format."""
    path = PurePosixPath(name)
    if path.suffix.lower() == ".gz":
        path = path.with_suffix("")
    if path.suffix and known_format(path.name, None)[0]:
        path = path.with_suffix("")
    return f"{path}.{options.output_format}"


def _name_outputs(path: str, folder: str, options: EmbedOptions) -> Iterator[tuple[str, str]]:
    """The inputs that a file, folder or glob of the command line names, and the names of their outputs."""
    base = _base(path)
    if known_format(f"out.{options.output_format}", options.format)[0] and _is_one_folder(path, folder):
        raise EmbedError(
            f"{shown(folder)} is also a folder of inputs, and the next run would take .{options.output_format} outputs "
            f"for inputs: name another --output-dir, also one in that folder"
        )
    for found in expand(path):
        source = _absolute(found)
        name = _below(source, base)
        is_named = source == _absolute(path)
        if not is_named and folder != base and _is_below(folder, base) and _is_below(source, folder):
            continue  # an output of an earlier run
        if is_named or _is_glob(path) or _is_data(name, options):
            yield source, output_name(base_name(source) if is_named else name, options)


def _is_data(name: str, options: EmbedOptions) -> bool:
    """Whether a file of a named folder is meant, too."""
    is_hidden = any(part.startswith(_NOT_DATA) for part in name.split("/"))
    return not is_hidden and bool(known_format(name, options.format)[0])


def _is_glob(path: str) -> bool:
    if path.startswith(("http://", "https://")):  # HTTP lists nothing, and a query begins with such a sign
        return False
    return any(sign in path for sign in _GLOB) and (is_remote(path) or not os.path.exists(path))


def _is_one_folder(path: str, folder: str) -> bool:
    if is_remote(path) or is_remote(folder):
        return path.rstrip("/") == folder.rstrip("/")
    return os.path.realpath(path) == os.path.realpath(folder)


def _base(path: str) -> str:
    """The folder below which sub-folders are kept: the one that is named, or what comes before a glob's first sign."""
    if not _is_glob(path):
        return _absolute(path)
    first = min(path.find(sign) for sign in _GLOB if sign in path)
    return _absolute(path[:first].rpartition("/")[0] + "/" if "/" in path[:first] else ".")


def _absolute(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)


def _below(path: str, folder: str) -> str:
    """`path` relative to `folder`, or its last part if it is not below it."""
    return _rest(path).removeprefix(_rest(folder) + "/") if _is_below(path, folder) else os.path.basename(path)


def _is_below(path: str, folder: str) -> bool:
    return is_remote(path) == is_remote(folder) and _rest(path).startswith(_rest(folder) + "/")


def _rest(path: str) -> str:
    """Without the slashes around it, which a store may write in its own way."""
    return path.rpartition("://")[2].strip("/")


# --- the manifest -------------------------------------------------------------------------------------------


def _read_manifest(path: Path, options: EmbedOptions) -> Iterator[tuple[str, str]]:
    """Raises EmbedError with the number of the first line that cannot be read."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise EmbedError(f"{path}: cannot be read: {error.strerror}") from error
    return read_lines(lines, options)


def read_lines(lines: Iterable[bytes], options: EmbedOptions) -> Iterator[tuple[str, str]]:
    """The inputs that the lines of a manifest name, and the names of their outputs. Raises EmbedError."""
    for number, raw in enumerate(lines, 1):
        try:
            pair = _read_line(raw, options)
        except ValueError as error:
            why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error
            raise EmbedError(f"{shown(options.manifest or '')}, line {number}: {why}") from error
        if pair is not None:
            yield pair


def _read_line(raw: bytes, options: EmbedOptions) -> tuple[str, str] | None:
    """None for a blank line and a comment. Raises ValueError."""
    line = raw.decode().removeprefix("\ufeff").removesuffix("\r")
    if not line.strip() or line.startswith("#"):
        return None
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
