"""What rerankers are given to rank: queries and documents of exactly so many tokens, and the requests made of them.

Owns the texts, which are runs of words from the reference that CPython carries (`vecd.client.bench.texts`), and their
lengths; the same ones for the same seed. Called by `benchmarks.rerank` and `benchmarks.fairness`.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import orjson
from tokenizers import Tokenizer

from vecd.base.target import Target
from vecd.client.bench.texts import english_words
from vecd.client.http import render_request

QUERY_TOKENS = 12
NUM_DOCUMENTS = 32
"""In a request."""
PATH = "/v1/rerank"
"""All servers have it."""


@dataclass(frozen=True, slots=True)
class DocumentLengths:
    """Tokens of a document, without special ones: log-normal, drawn again outside `least`–`most`. A `sigma` of 0 makes
    all of them `median`."""

    median: float
    sigma: float
    least: int = 20
    most: int = 400

    def draw(self, rng: random.Random) -> int:
        while True:
            num_tokens = round(rng.lognormvariate(math.log(self.median), self.sigma))
            if self.least <= num_tokens <= self.most:
                return num_tokens


MIXED = DocumentLengths(76.214, 0.8)
"""100 tokens on average."""
EQUAL = DocumentLengths(100, 0.0)


@dataclass(frozen=True, slots=True)
class RerankBody:
    query: str
    documents: Sequence[str]

    def render(self, target: Target) -> bytes:
        """A whole HTTP request. Scores are asked for raw: one activation less to differ in."""
        body = {"query": self.query, "documents": list(self.documents), "raw_scores": True}
        return render_request(target, PATH, orjson.dumps(body), api_key=None)


class TextSource:
    """Texts of a given number of tokens, no two of which are the same."""

    def __init__(self, model: Path, seed: int) -> None:
        """`model`: the folder of one whose tokenizer never looks across blanks, as BERT's."""
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.rng = random.Random(seed)
        self._words = english_words()
        encodings = tokenizer.encode_batch(list(self._words), add_special_tokens=False)
        self._ends = np.array([0, *accumulate(len(encoding.ids) for encoding in encodings)])
        self._drawn: set[tuple[int, int]] = set()

    def draw(self, num_tokens: int) -> str:
        """Consecutive words, which end at exactly `num_tokens`."""
        while True:
            start = self.rng.randrange(len(self._words))
            end = int(np.searchsorted(self._ends, self._ends[start] + num_tokens))
            is_exact = end < len(self._ends) and self._ends[end] - self._ends[start] == num_tokens
            if is_exact and (start, end) not in self._drawn:
                self._drawn.add((start, end))
                return " ".join(self._words[start:end])

    def body(self, lengths: DocumentLengths, num_documents: int = NUM_DOCUMENTS) -> RerankBody:
        query = self.draw(QUERY_TOKENS)
        return RerankBody(query, [self.draw(lengths.draw(self.rng)) for _ in range(num_documents)])


def staggered(bodies: Sequence[RerankBody]) -> list[RerankBody]:
    """First requests, one for each client, from few documents to all of them: then responses come evenly spread, also
    from a server that serves all clients equally fast."""
    return [
        RerankBody(body.query, body.documents[: math.ceil(len(body.documents) * client / len(bodies))])
        for client, body in enumerate(bodies, 1)
    ]
