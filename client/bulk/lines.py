"""Lines of a stream of bytes, and where each ends.

Owns the cutting, in memory that depends on the longest line allowed and not on the stream. Knows nothing of what
lines hold. Called by `vecd.client.bulk.readers`.
"""

from collections.abc import Callable, Iterator

_CHUNK_BYTES = 1 << 18


class Lines:
    """Iterates over lines without their line feed; None stands for one longer than `max_bytes`, which is not kept.

    `read(n)` gives at most n bytes, and none at the end. A last line without a line feed is a line, too.
    """

    def __init__(self, read: Callable[[int], bytes], max_bytes: int, offset: int = 0, line: int = 0) -> None:
        """The stream is at `offset`, behind `line` lines."""
        self.offset = offset
        """Behind the line that was given last."""
        self.line = line
        """How many lines are before that."""
        self._read = read
        self._max_bytes = max_bytes
        self._cut = self._cut_lines()

    def __iter__(self) -> Iterator[bytes | None]:
        """Always the same iterator: several loops, one after the other, get each line once."""
        return self._cut

    def _cut_lines(self) -> Iterator[bytes | None]:
        begun: list[bytes] = []
        num_begun = 0
        while chunk := self._read(_CHUNK_BYTES):
            first, *others = chunk.split(b"\n")
            num_begun += len(first)
            if num_begun <= self._max_bytes:
                begun.append(first)
            else:  # what is too long is counted, and forgotten
                begun.clear()
            if not others:
                continue
            yield self._give(b"".join(begun), num_begun, 1)
            last = others.pop()
            for line in others:
                yield self._give(line, len(line), 1)
            begun, num_begun = [last], len(last)
        if num_begun:
            yield self._give(b"".join(begun), num_begun, 0)

    def _give(self, line: bytes, num_bytes: int, num_feeds: int) -> bytes | None:
        self.offset += num_bytes + num_feeds
        self.line += 1
        return line if num_bytes <= self._max_bytes else None
