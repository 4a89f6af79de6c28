"""Rows of all inputs, in batches, read ahead by a thread of its own.

Owns that thread, the sizes of batches, and the numbers of rows. Called by `vecd.client.bulk.run`.

A thread, because a pipe gives its next line when it pleases, and meanwhile answers have to be received and committed.
It is a daemon: a process that ends does not wait for a pipe.
"""

import asyncio
import hashlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from vecd.client.bulk.inputs import Input, Shape, open_reader
from vecd.client.bulk.rows import Batch, InputError, Item, Position, Row

_BATCHES_AHEAD = 2


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How much goes into one request: one row at least."""

    max_texts: int
    max_chars: int
    """Of all its texts."""


class Feed:
    """`get` one batch after the other; None is the end. To be made, and asked, on the event loop."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        """`batches` is iterated by the thread, which begins at once."""
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Batch | Exception | None] = asyncio.Queue()
        self._room = threading.Semaphore(_BATCHES_AHEAD)
        self._batches = batches
        threading.Thread(target=self._read, name="feed", daemon=True).start()

    async def get(self) -> Batch | None:
        """Raises what reading raised: InputError."""
        arrived = await self._arrived.get()
        self._room.release()
        if isinstance(arrived, Exception):
            raise arrived
        return arrived

    def _read(self) -> None:
        last: Exception | None = None
        try:
            for batch in self._batches:
                self._give(batch)
        except Exception as error:  # told to whoever waits for rows, who ends the run by it
            last = error
        self._give(last)

    def _give(self, arrived: Batch | Exception | None) -> None:
        self._room.acquire()
        with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, arrived)


def read_batches(inputs: Sequence[Input], shape: Shape, size: BatchSize, start: Position) -> Iterator[Batch]:
    """All rows behind `start`. Raises InputError, also when a stream's first rows are not what they were."""
    number, bytes_before = start.row, sum(each.num_bytes for each in inputs[: start.input])
    for index in range(start.input, len(inputs)):
        each = inputs[index]
        # A stream has no places to go to: its rows are read again, and skipped.
        at = start if index == start.input and not each.is_stream else Position(input=index)
        with open_reader(each, shape, at) as reader:
            digest = _Digest() if each.is_stream else None
            items = iter(reader)
            if digest is not None:
                _skip(items, digest, start)
            for rows in _cut(items, size, index, number):
                number += len(rows)
                if digest is not None:
                    digest.add(row.item for row in rows)
                told = "" if digest is None else digest.told
                end = Position(index, reader.offset, reader.line, number, told)
                yield Batch(rows, end, bytes_before + reader.bytes_read)
        bytes_before += each.num_bytes


def _cut(items: Iterator[Item], size: BatchSize, index: int, number: int) -> Iterator[list[Row]]:
    """Rows a batch at a time. What `items` says of its place is right whenever a batch is given."""
    while rows := _next_rows(items, size, index, number):
        number += len(rows)
        yield rows


def _next_rows(items: Iterator[Item], size: BatchSize, index: int, number: int) -> list[Row]:
    rows: list[Row] = []
    num_chars = 0
    for item in items:
        rows.append(Row(number + len(rows), index, item))
        num_chars += len(item.text or "")
        if len(rows) >= size.max_texts or num_chars >= size.max_chars:
            break
    return rows


class _Digest:
    """Of all rows of a stream so far: whether it is the same one again cannot be told by anything else."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, items: Iterable[Item]) -> None:
        for item in items:
            self._hash.update(b"-" if item.text is None else b"+%d:" % len(item.text) + item.text.encode())

    @property
    def told(self) -> str:
        return self._hash.hexdigest()


def _skip(items: Iterator[Item], digest: _Digest, start: Position) -> None:
    """Read again, of a stream, the rows that are done. Raises InputError when it has others."""
    digest.add(itertools.islice(items, start.row))
    if start.digest and digest.told != start.digest:
        raise InputError(f"its first {start.row:,} rows are not those of the run that is to go on")
