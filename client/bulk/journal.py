"""What of a run is done for good: written down so that a run that was killed goes on where it was.

Owns the journal file, `OUT.journal`: what was asked, of which inputs, of which model, and the last commit. It is
replaced whole, by rename, after everything that it tells of is on the disk. So it is always true: rows that it does
not know of may be in the parts of the output, and are cut off again. Called by `vecd.client.bulk.run` and
`vecd.client.bulk.command`.
"""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import orjson

from vecd.client.bulk.rows import Position

_VERSION = 1


class JournalError(Exception):
    """Raised when a journal is none, or of another run than the one that is to go on. The message says how to go on."""


@dataclass(frozen=True, slots=True)
class Commit:
    """How far a run is."""

    position: Position
    lengths: tuple[int, ...] = ()
    """Bytes of each part of the output that are there for good, in `Output`'s order."""
    num_written: int = 0
    """Rows of the output."""
    num_rejected: int = 0
    num_tokens: int = 0
    is_complete: bool = False
    """All rows are in the parts: only the final files are to be made of them."""


@dataclass(frozen=True, slots=True)
class Journal:
    """Immutable; `save` puts it in the place of the last one."""

    asked: dict[str, Any]
    """What changes rows or vectors: a run that goes on must ask the same."""
    on_bad_row: str
    inputs: list[dict[str, Any]]
    model: dict[str, Any]
    """As `vecd.client.bulk.service.Model` tells of itself."""
    commit: Commit

    def with_commit(self, commit: Commit) -> Self:
        return replace(self, commit=commit)

    def save(self, path: Path) -> None:
        """Atomically: whoever reads meanwhile, or afterwards, has the last journal or this one. Raises OSError."""
        draft = path.with_name(path.name + ".new")
        try:
            with draft.open("wb") as file:
                file.write(orjson.dumps({"version": _VERSION, **asdict(self)}, option=orjson.OPT_INDENT_2))
                file.flush()
                os.fsync(file.fileno())
            draft.rename(path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        sync_folder(path)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """None when there is none. Raises JournalError when it cannot be read."""
        try:
            fields = orjson.loads(path.read_bytes())
            if fields.pop("version") != _VERSION:
                raise JournalError(f"{path} is of another version of vecd: --restart begins anew")
            told = fields.pop("commit")
            position = Position(**told.pop("position"))
            commit = Commit(**{**told, "position": position, "lengths": tuple(told["lengths"])})
            return cls(**fields, commit=commit)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise JournalError(f"{path} cannot be read ({type(error).__name__}): --restart begins anew") from error

    def check_same(self, asked: dict[str, Any], on_bad_row: str, inputs: list[dict[str, Any]]) -> None:
        """Raises JournalError when the run that is to go on was another one."""
        for name in asked.keys() | self.asked.keys():
            if asked.get(name) != self.asked.get(name):
                raise _other(f"{_flag(name)} was {self.asked.get(name)!r}, is {asked.get(name)!r}")
        if on_bad_row != self.on_bad_row and self.commit.num_rejected:
            raise _other(f"--on-bad-row was {self.on_bad_row}, is {on_bad_row}, and there have been bad rows")
        if len(inputs) != len(self.inputs):
            raise _other(f"it had {len(self.inputs)} inputs, now there are {len(inputs)}")
        for one, other in zip(self.inputs, inputs, strict=True):
            for name, value in one.items():
                if value != other[name]:
                    raise _other(f"{other['path']} has changed: its {_FACTS.get(name, name)} is another")


_FACTS = {"num_bytes": "size", "mtime_ns": "time of change", "head": "beginning"}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _other(what: str) -> JournalError:
    return JournalError(f"the unfinished run was another one: {what}. Run it as it was, or begin anew by --restart")


def sync_folder(path: Path) -> None:
    """Make what was made, renamed or removed beside `path` last."""
    with suppress(OSError):  # not every file system can
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
