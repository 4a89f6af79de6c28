"""Texts to embed, without shipping any: runs of words from the reference that every CPython carries.

Owns what is sent and how long it is; deterministic for a seed on one Python version. Opens no socket. Called
by `client.bench` and `benchmarks.compare`.
"""

import functools
import math
import random
import re
from dataclasses import dataclass
from typing import Protocol


class Lengths(Protocol):
    """How many words the next text has."""

    def draw(self, rng: random.Random) -> int:
        """At least 1."""


@dataclass(frozen=True, slots=True)
class FixedWords:
    """Every text has `num_words`."""

    num_words: int

    def draw(self, rng: random.Random) -> int:
        return self.num_words

    def __str__(self) -> str:
        return f"{self.num_words} words"


@dataclass(frozen=True, slots=True)
class LognormalWords:
    """Many short texts and a few long ones, as in real traffic: `mean` words, `sigma` of their logarithm."""

    mean: float
    sigma: float

    def draw(self, rng: random.Random) -> int:
        # A lognormal's mean is exp(mu + sigma² / 2), so this mu makes `mean` the mean and not the median.
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, round(rng.lognormvariate(mu, self.sigma)))

    def __str__(self) -> str:
        return f"lognormal {self.mean:g} words (sigma {self.sigma:g})"


def parse_lengths(value: str) -> Lengths:
    """Read "10" or "lognormal:70,0.8". Raises ValueError when it is neither, or not positive."""
    if value.isdecimal():
        lengths: Lengths = FixedWords(int(value))
        is_positive = int(value) > 0
    else:
        mean, sigma = (float(part) for part in value.removeprefix("lognormal:").split(","))
        lengths = LognormalWords(mean, sigma)
        is_positive = 0 < mean < math.inf and 0 <= sigma < math.inf
    if not is_positive:
        raise ValueError(f"not positive: {value}")
    return lengths


@functools.cache
def english_words() -> tuple[str, ...]:
    """About 60,000 words in reading order, with the punctuation that sticks to them."""
    from pydoc_data.topics import topics  # half a megabyte: loaded when asked for

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
