"""The texts that `vecd check` compares: those that it has itself, and how many a model can afford."""

import itertools
import random
from collections.abc import Sequence

from vecd.client.bench.texts import Lengths, draw_text

MAX_TEXTS = 200
_AFFORDABLE = 5e11
"""Multiplications by weights for all texts together: about 10 s on a core."""
_LEAST_TOKENS = 500
_WORDS = (1, 8, 180, 3, 25, 400, 12, 50, 5, 100, 2, 35)
_AWKWARD = (
    "Ünïcödé, ﬁ ligatures and e\u0301 combining",
    "你好，世界。这是一个测试。",
    "🙂🙃 👩‍👩‍👧‍👦 🇪🇺",
    "https://example.org/a?b=c&d=%20#e f(x) = x**2; // 3.14159e-10",
    "   blanks \t and\n\nlines   ",
    "word" * 60,
)


def built_in_texts() -> list[str]:
    """Texts of 1 to 400 words, some unusual ones, and a long one; the same at every call."""
    rng = random.Random(0)
    return [*(draw_text(Lengths(count), rng) for count in _WORDS * 3), *_AWKWARD, draw_text(Lengths(1500), rng)]


def affordable(lengths: Sequence[int], num_parameters: int) -> int:
    """How many of the texts with these numbers of tokens, from the first on, a model of this size can afford."""
    most = max(_LEAST_TOKENS, int(_AFFORDABLE / max(1, num_parameters)))
    return max(1, sum(total <= most for total in itertools.accumulate(lengths[:MAX_TEXTS])))
