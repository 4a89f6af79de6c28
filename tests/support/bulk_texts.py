"""Many real lines: the documentation and the sources that every CPython carries."""

import random
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

MIN_CHARS, MAX_CHARS, MIN_WORDS = 12, 40, 2


def real_lines(num_lines: int) -> list[str]:
    """Distinct short lines, of `MIN_CHARS` to `MAX_CHARS` characters and at least `MIN_WORDS` words, always in the same
    order: first those of `pydoc_data.topics`, then those of the standard library's modules, by path."""
    lines = list(islice(dict.fromkeys(_lines()), num_lines))
    assert len(lines) == num_lines, f"there are only {len(lines)}"
    return lines


def long_and_short_lines(num_lines: int) -> list[str]:
    """Distinct lines of 12 to about 800 characters: each is one to twenty of `real_lines`."""
    pick = random.Random(num_lines)
    counts = pick.choices((1, 2, 5, 20), (6, 2, 1, 1), k=num_lines)
    lines = iter(real_lines(sum(counts)))
    return [" ".join(islice(lines, count)) for count in counts]


def _lines() -> Iterator[str]:
    for text in _texts():
        for line in map(str.strip, text.splitlines()):
            if MIN_CHARS <= len(line) <= MAX_CHARS and len(line.split()) >= MIN_WORDS and line.isprintable():
                yield line


def _texts() -> Iterator[str]:
    yield from (topics[name] for name in sorted(topics))
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="ignore")
