"""JSON: files that are written in whole and read, and dataclasses that travel as JSON values.

Owns the rename.
"""

import errno
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from stat import S_ISREG
from types import NoneType, UnionType
from typing import Any, BinaryIO, TypeAlias, Union, get_args, get_origin, get_type_hints

JsonObject: TypeAlias = dict[str, Any]
JsonMapping: TypeAlias = Mapping[str, Any]
"""An object that its reader does not change."""


def write_json(path: Path, value: Any, mode: int = 0o600) -> None:
    """As `write_whole`."""
    write_whole(path, json.dumps(value).encode(), mode)


def write_whole(path: Path, content: bytes, mode: int = 0o600, *, is_synced: bool = False) -> None:
    """Write by a rename, so no reader sees half a file; makes the folder. `mode`: who may read it. `is_synced`: also
    after a loss of power. Raises OSError, and leaves nothing behind then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


def read_json(path: Path, max_bytes: int = -1) -> Any:
    """At most `max_bytes` of it, if that is not negative. Raises OSError as `open_regular`, and ValueError or
    RecursionError for another content."""
    with open_regular(path) as file:
        return json.loads(file.read(max_bytes))


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file to read it. Raises OSError, also for what is no file, such as a FIFO, which nothing waits for."""
    file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


# --- dataclasses as JSON values ---------------------------------------------------------------------------------


def dump(value: Any) -> Any:
    """A dataclass whose fields are JSON values, paths, tuples, dicts and dataclasses, as JSON values. A field
    of another kind has two functions in its metadata, `dump` and `load`."""
    if is_dataclass(value):
        return {each.name: each.metadata.get("dump", dump)(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple | list):
        return [dump(each) for each in value]
    if isinstance(value, dict):
        return {name: dump(each) for name, each in value.items()}
    return str(value) if isinstance(value, Path) else value


_kinds_of = cache(get_type_hints)


def load(kind: Any, value: Any) -> Any:
    """What `dump` had, by its annotation. Raises KeyError, TypeError or ValueError for what is not from there."""
    if get_origin(kind) in (UnionType, Union):
        if value is None:
            return None
        kind = next(each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        kinds_in = [first] * len(value) if others == [...] else [first, *others]
        return tuple(map(load, kinds_in, value))
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return Path(value) if kind is Path else value
    if not isinstance(value, dict):
        raise TypeError(f"no object: {value!r:.80}")
    kinds, loads = _kinds_of(kind), {each.name: each.metadata.get("load") for each in fields(kind)}
    return kind(**{name: (loads[name] or partial(load, kinds[name]))(part) for name, part in value.items()})
