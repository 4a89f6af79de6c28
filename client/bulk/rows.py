"""Rows of the inputs, and how far the inputs have been read. Used by all of `vecd.client.bulk`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class InputError(Exception):
    """Raised when an input cannot be read, or has changed. The message names it."""


class InputRow(NamedTuple):
    """One row of an input."""

    line: int
    """Where it begins, from 1; in a parquet file, the number of the row."""
    text: str | None
    """None for a row that cannot be embedded."""
    reason: str = ""
    """Why it cannot. Never quotes the row."""
    kept: tuple[Any, ...] = ()
    """The values of --keep; None for fields that the row does not have."""


class InputPlace(Protocol):
    """How far an input has been read: behind the last row that its reader has returned."""

    @property
    def offset(self) -> int:
        """Uncompressed bytes, or rows of a parquet file. A reader opened at this offset returns the next row."""

    @property
    def line(self) -> int:
        """Lines, or rows of a parquet file."""

    @property
    def bytes_read(self) -> int:
        """Bytes of the file on the disk, for the progress."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two rows of all inputs."""

    input: int = 0
    """Index of the input."""
    offset: int = 0
    """`offset` and `line` of `InputPlace` in that input."""
    line: int = 0
    row: int = 0
    """Rows before it, in all inputs."""
    digest: str = ""
    """Digest of all texts before it, for inputs that cannot be opened at an offset."""


@dataclass(slots=True)
class RowBatch:
    """Consecutive rows of one input, for one request."""

    rows: Sequence[InputRow]
    first_row: int
    """Number of the first one among the rows of all inputs, from 0."""
    input: int
    """Index of the input."""
    end: Position
    """Behind the last row."""
    bytes_read: int
    """Bytes of all inputs that had been read with these rows."""

    def texts(self) -> list[str]:
        """The texts of the rows that have one, in order."""
        return [row.text for row in self.rows if row.text is not None]
