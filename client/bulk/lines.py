"""Lines of a stream of bytes, and where each ends.

Owns the splitting, in memory that depends on the longest line allowed and not on the stream. Called by
`vecd.client.bulk.readers`.
"""

from collections.abc import Callable, Iterator

_CHUNK_BYTES = 1 << 18


class Lines:
    """Iterates over lines without their line feed; None stands for one longer than `max_bytes`, which is not kept.

    `read(n)` returns at most n bytes, and none at the end. The last line may lack its line feed. `tell` returns how
    many bytes of the file have been read, if that is not the same as the offset.
    """

    def __init__(
        self,
        read: Callable[[int], bytes],
        max_bytes: int,
        offset: int = 0,
        line: int = 0,
        tell: Callable[[], int] | None = None,
    ) -> None:
        """The stream is at `offset`, behind `line` lines."""
        self.offset = offset
        """Behind the last line returned."""
        self.line = line
        """Number of lines up to there."""
        self._read = read
        self._max_bytes = max_bytes
        self._tell = tell
        self._lines = self._split()

    @property
    def bytes_read(self) -> int:
        return self.offset if self._tell is None else self._tell()

    def __iter__(self) -> Iterator[bytes | None]:
        """Always the same iterator: a second loop continues where the first one ended."""
        return self._lines

    def _split(self) -> Iterator[bytes | None]:
        begun: list[bytes] = []
        num_begun = 0
        while chunk := self._read(_CHUNK_BYTES):
            first, *others = chunk.split(b"\n")
            num_begun += len(first)
            if num_begun <= self._max_bytes:
                begun.append(first)
            else:  # the bytes of a line that is too long are counted, and dropped
                begun.clear()
            if not others:
                continue
            yield self._count(b"".join(begun), num_begun, 1)
            last = others.pop()
            for line in others:
                yield self._count(line, len(line), 1)
            begun, num_begun = [last], len(last)
        if num_begun:
            yield self._count(b"".join(begun), num_begun, 0)

    def _count(self, line: bytes, num_bytes: int, num_feeds: int) -> bytes | None:
        self.offset += num_bytes + num_feeds
        self.line += 1
        return line if num_bytes <= self._max_bytes else None
