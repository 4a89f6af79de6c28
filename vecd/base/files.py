"""JSON: files that are written in whole and read, and dataclasses that travel as JSON values.

Owns the rename.
"""

import errno
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from stat import S_ISREG
from types import NoneType, UnionType
from typing import Any, BinaryIO, Self, TypeAlias, get_args, get_origin, get_type_hints

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


class JsonFields:
    """The base of dataclasses whose fields are JSON values, tuples and dataclasses of such, or None in their place."""

    __slots__ = ()

    def to_json(self) -> JsonObject:
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, fields: JsonMapping) -> Self:
        made: Self = _of_kind(cls, fields)
        return made


_kinds_of = cache(get_type_hints)


def _of_kind(kind: Any, value: Any) -> Any:
    if isinstance(kind, UnionType):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    if value is None:
        return None
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = _kinds_of(kind)
        return kind(**{name: _of_kind(kinds.get(name), field) for name, field in value.items()})
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        kinds_in = [first] * len(value) if others == [...] else [first, *others]
        return tuple(map(_of_kind, kinds_in, value))
    return value
