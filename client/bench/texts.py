"""Texts to embed: runs of words from the reference that every CPython carries, or the lines of a file.

Owns the texts and their lengths; deterministic for a seed on one Python version. Opens no socket.
"""

import functools
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path

import orjson

_MAX_FILE_BYTES = 1 << 28
"""The texts and the requests made of them are all kept in memory."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many words a text has: exactly `mean`, or with `sigma`, the deviation of their logarithm, lognormally many
    with that mean, which are many short texts and a few long ones, as in real traffic."""

    mean: float
    sigma: float | None = None

    def draw(self, rng: random.Random) -> int:
        if self.sigma is None:
            return round(self.mean)
        # A lognormal's mean is exp(mu + sigma² / 2), so this mu makes `mean` the mean and not the median.
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, round(rng.lognormvariate(mu, self.sigma)))

    def __str__(self) -> str:
        return f"{self.mean} words" if self.sigma is None else f"lognormal {self.mean:g} words (sigma {self.sigma:g})"


def parse_lengths(value: str) -> Lengths:
    """Read "10" or "lognormal:70,0.8". Raises ValueError when it is neither, or not positive."""
    try:
        if value.isdecimal():
            lengths = Lengths(int(value))
        else:
            mean, sigma = (float(part) for part in value.removeprefix("lognormal:").split(","))
            lengths = Lengths(mean, sigma)
    except ValueError:
        lengths = Lengths(0)
    if not (0 < lengths.mean < math.inf and 0 <= (lengths.sigma or 0.0) < math.inf):
        raise ValueError("is neither a number of words nor lognormal:MEAN,SIGMA of positive numbers")
    return lengths


@functools.cache
def english_words() -> tuple[str, ...]:
    """About 60,000 words in reading order, with the punctuation that sticks to them."""
    from pydoc_data.topics import topics  # half a megabyte: loaded when needed

    prose = " ".join(topics[name] for name in sorted(topics))
    return tuple(re.findall(r"[A-Za-z][A-Za-z'-]*[.,;:]?", prose))


def draw_text(lengths: Lengths, rng: random.Random) -> str:
    """A run of consecutive words. One longer than the reference is cut to its whole length."""
    words = english_words()
    num_words = min(lengths.draw(rng), len(words))
    start = rng.randrange(len(words) - num_words + 1)
    return " ".join(words[start : start + num_words])


def draw_texts(num_texts: int, lengths: Lengths, seed: int) -> list[str]:
    """`num_texts` texts: the same ones for the same arguments."""
    rng = random.Random(seed)
    return [draw_text(lengths, rng) for _ in range(num_texts)]


def read_texts(path: Path) -> list[str]:
    """The texts of a file, in its order: one a line, or each line's "text" when the first line is a JSON object.

    Blank lines are left out. Raises ValueError with what is wrong with the file.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"{path} is larger than {_MAX_FILE_BYTES >> 20} MiB")
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start}") from error
    if not lines:
        raise ValueError(f"{path} has no text")
    if not _is_object(lines[0]):
        return [line.rstrip("\r") for line in lines]
    return [_text_of(line, f"{path}, object {number}") for number, line in enumerate(lines, 1)]


def _is_object(line: str) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except ValueError:
        return False


def _text_of(line: str, place: str) -> str:
    try:
        text = orjson.loads(line)["text"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f'{place}: not a JSON object with a "text"') from error
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'{place}: its "text" is no text')
    return text


def shuffle_texts(texts: list[str], num_texts: int, seed: int) -> list[str]:
    """`num_texts` of `texts`: each once before any comes twice, in an order that is the same for the same arguments."""
    shuffled = list(texts)
    random.Random(seed).shuffle(shuffled)
    return [shuffled[i % len(shuffled)] for i in range(num_texts)]
