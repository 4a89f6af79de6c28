"""The journal of a run: its settings, inputs, model and last commit, so that a killed run can be resumed.

Owns the file `OUT.journal`. It is replaced as a whole, by rename, after all that it describes is on the disk. So it is
always true: rows that are in the output files, but not in the journal, are cut off when the run is resumed. Called by
`vecd.client.bulk.run` and `vecd.client.bulk.command`.
"""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import orjson

from vecd.client.bulk.errors import EmbedError
from vecd.client.bulk.rows import Position
from vecd.client.options import flag_name

_VERSION = 2
_FACTS = {"num_bytes": "size", "mtime_ns": "time of change", "head": "beginning"}


@dataclass(frozen=True, slots=True)
class Commit:
    """What is done for good."""

    position: Position = field(default_factory=Position)
    lengths: tuple[int, ...] = ()
    """Bytes of each output file, in the order of `OutputFiles`."""
    num_written: int = 0
    """Rows in the output."""
    num_rejected: int = 0
    num_tokens: int = 0
    is_complete: bool = False
    """All rows are in the files; only the final names are missing."""


@dataclass(frozen=True, slots=True)
class Journal:
    """Immutable; `save` replaces the last one."""

    asked: dict[str, Any]
    """The settings that change rows or vectors. A resumed run must have the same."""
    on_bad_row: str
    inputs: list[dict[str, Any]]
    """The `journal_fields` of each `vecd.client.bulk.inputs.InputSource`."""
    model: dict[str, Any] = field(default_factory=dict)
    """The fields of `vecd.client.bulk.service.ModelFingerprint`; empty before the run has met its server."""
    commit: Commit = field(default_factory=Commit)

    def save(self, path: Path) -> None:
        """Replace the journal atomically. Raises OSError."""
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
        """None when there is none. Raises EmbedError when it cannot be read."""
        try:
            fields = orjson.loads(path.read_bytes())
            if fields.pop("version") != _VERSION:
                raise EmbedError(f"{path} is of another version of vecd: --restart begins anew")
            commit = fields.pop("commit")
            commit |= {"position": Position(**commit["position"]), "lengths": tuple(commit["lengths"])}
            return cls(**fields, commit=Commit(**commit))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise EmbedError(f"{path} cannot be read ({type(error).__name__}): --restart begins anew") from error

    def check_same(self, other: Self) -> None:
        """Raises EmbedError when `other`, which would resume this run, has other settings or inputs."""
        if difference := self._difference(other):
            raise EmbedError(
                f"the unfinished run was another one: {difference}. Run it as it was, or begin anew by --restart"
            )

    def _difference(self, other: Self) -> str:
        for name in other.asked.keys() | self.asked.keys():
            if other.asked.get(name) != self.asked.get(name):
                return f"{flag_name(name)} was {self.asked.get(name)!r}, is {other.asked.get(name)!r}"
        if other.on_bad_row != self.on_bad_row and self.commit.num_rejected:
            return f"--on-bad-row was {self.on_bad_row}, is {other.on_bad_row}, and there have been bad rows"
        if len(other.inputs) != len(self.inputs):
            return f"it had {len(self.inputs)} inputs, now there are {len(other.inputs)}"
        for was, now in zip(self.inputs, other.inputs, strict=True):
            for name, value in was.items():
                if value != now[name]:
                    return f"{now['path']} has changed: its {_FACTS.get(name, name)} is another"
        return ""


def sync_folder(path: Path) -> None:
    """Make durable what was created, renamed or removed beside `path`."""
    with suppress(OSError):  # not every file system can
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
