"""Texts as people send them: from documentation that every CPython carries, and the awkward kinds."""

import random
from pydoc_data.topics import topics

from tests.support.canaries import WORD

AWKWARD = [
    "",
    " ",
    "a",
    "\n\n\t",
    "🙂🙃 👩‍👩‍👧‍👦 🇪🇺",
    "你好，世界。这是一个测试。",
    "日本語のテキストと English mixed と数字 123",
    "한국어 문장입니다.",
    "Ünïcödé ﬁ ligatures and \u202eright-to-left\u202c",
    "שלום עולם مرحبا بالعالم",
    "word" * 500,
    "[CLS] [SEP] [MASK] <s> </s>",
    "\x00\x01\x02 control \x7f",
    "e\u0301 combining, \u200b zero width, \ufeff mark",
    "https://example.org/a?b=c&d=%20#e f(x) = x**2; // 3.14159e-10",
]


def make_texts(num_texts: int, seed: int = 0) -> list[str]:
    """`num_texts` distinct-ish texts: mostly of 3 to 150 words, a few long, one of 10,000 words, and the awkward.

    All but the awkward begin with a canary, for which servers' logs are searched.
    """
    words = " ".join(topics[name] for name in sorted(topics)).split()
    rng = random.Random(seed)

    def cut(num_words: int) -> str:
        start = rng.randrange(len(words) - num_words)
        return " ".join([WORD, *words[start : start + num_words]])

    texts = [*AWKWARD, cut(10_000), cut(2_000), cut(1_000)]
    texts += [cut(max(1, min(600, int(rng.lognormvariate(2.8, 1.0))))) for _ in range(num_texts - len(texts))]
    rng.shuffle(texts)
    return texts[:num_texts]
