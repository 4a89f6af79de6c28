"""What is read of the inputs: rows, and how far they have been read. Called by all of `client.bulk`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class InputError(Exception):
    """Raised when an input cannot be read, or not any further, or is not the one it was. The message names it."""


class Item(NamedTuple):
    """A row as a reader finds it."""

    line: int
    """Where it begins, from 1; in a parquet file, its number there."""
    text: str | None
    """None: there is none that could be embedded."""
    reason: str = ""
    """Why there is none. Never quotes the row."""
    kept: tuple[Any, ...] = ()
    """The values of --keep; None for those that the row does not have."""


class Reader(Protocol):
    """One input, opened at some place. To be iterated once, from one thread."""

    @property
    def offset(self) -> int:
        """Of what comes behind the last item: uncompressed bytes, or rows of a parquet file. Opening there goes on
        with the next one."""

    @property
    def line(self) -> int:
        """Lines before that place, or rows."""

    def __iter__(self) -> Iterator[Item]:
        """Raises InputError."""

    @property
    def bytes_read(self) -> int:
        """Of the file as it lies on the disk, for telling how far it is."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two rows of all inputs."""

    input: int = 0
    """Which of them, from 0."""
    offset: int = 0
    line: int = 0
    """Both as the reader of that input has them."""
    row: int = 0
    """Rows before it, in all inputs."""
    digest: str = ""
    """Of all texts before it; of inputs that cannot be opened at an offset."""


class Row(NamedTuple):
    """An item by its number among the rows of all inputs, from 0."""

    number: int
    input: int
    item: Item


@dataclass(slots=True)
class Batch:
    """Consecutive rows: what one request is made of."""

    rows: list[Row]
    end: Position
    """Behind the last of them."""
    bytes_read: int
    """Of all inputs, when they were read."""

    def texts(self) -> list[str]:
        """Of the rows that have one, in order."""
        return [row.item.text for row in self.rows if row.item.text is not None]
