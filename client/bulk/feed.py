"""Rows of all inputs in batches, read ahead by a thread.

Owns that thread, the sizes of batches, and the numbers of rows. Called by `vecd.client.bulk.run`.

A thread, because a pipe may block while responses have to be received and committed. It is a daemon: a process that
ends does not wait for a pipe.
"""

import asyncio
import hashlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from vecd.client.bulk.inputs import InputSource, RowShape, open_rows
from vecd.client.bulk.rows import InputError, InputRow, Position, RowBatch

_BATCHES_AHEAD = 2


class RequestSize(NamedTuple):
    """When a request is full. It has one row at least."""

    max_texts: int
    max_chars: int
    """Characters of all its texts."""


class Feed:
    """`get` one batch after the other; None is the end. To be made and used on the event loop."""

    def __init__(self, batches: Iterator[RowBatch]) -> None:
        """`batches` is iterated by the thread, which begins at once."""
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[RowBatch | Exception | None] = asyncio.Queue()
        self._room = threading.Semaphore(_BATCHES_AHEAD)
        self._batches = batches
        threading.Thread(target=self._read, name="feed", daemon=True).start()

    async def get(self) -> RowBatch | None:
        """Raises InputError, as reading does."""
        arrived = await self._arrived.get()
        self._room.release()
        if isinstance(arrived, Exception):
            raise arrived
        return arrived

    def _read(self) -> None:
        last: Exception | None = None
        try:
            for batch in self._batches:
                self._put(batch)
        except Exception as error:  # raised by `get`, where it ends the run
            last = error
        self._put(last)

    def _put(self, arrived: RowBatch | Exception | None) -> None:
        self._room.acquire()
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, arrived)


def read_batches(
    inputs: Sequence[InputSource], shape: RowShape, size: RequestSize, start: Position
) -> Iterator[RowBatch]:
    """All rows behind `start`. Raises InputError, also when the first rows of a stream are others than before."""
    first_row, bytes_before = start.row, sum(each.num_bytes for each in inputs[: start.input])
    for index in range(start.input, len(inputs)):
        each = inputs[index]
        # A stream cannot be opened at an offset: its rows are read again, and skipped.
        at = start if index == start.input and not each.is_stream else Position(input=index)
        with open_rows(each, shape, at) as (place, rows):
            rest = iter(rows)
            digest = _StreamDigest() if each.is_stream else None
            if digest is not None:
                digest.add(itertools.islice(rest, start.row))
                if start.digest and digest.value() != start.digest:
                    raise InputError(f"its first {start.row:,} rows are not those of the run that is to be resumed")
            while taken := _take(rest, size):
                if digest is not None:
                    digest.add(taken)
                value = "" if digest is None else digest.value()
                end = Position(index, place.offset, place.line, first_row + len(taken), value)
                yield RowBatch(taken, first_row, index, end, bytes_before + place.bytes_read)
                first_row += len(taken)
        bytes_before += each.num_bytes


def _take(rows: Iterator[InputRow], size: RequestSize) -> list[InputRow]:
    """The next batch. No row is read ahead, so that the reader's place is behind the last one."""
    taken: list[InputRow] = []
    num_chars = 0
    for row in rows:
        taken.append(row)
        num_chars += len(row.text or "")
        if len(taken) >= size.max_texts or num_chars >= size.max_chars:
            break
    return taken


class _StreamDigest:
    """A digest of all rows of a stream so far, by which the same stream is recognized."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, rows: Iterable[InputRow]) -> None:
        for row in rows:
            self._hash.update(b"-" if row.text is None else b"+%d:" % len(row.text) + row.text.encode())

    def value(self) -> str:
        return self._hash.hexdigest()
