"""Models that are not, or not only, for dense vectors, as dialects see them, and responses with rows of theirs."""

from typing import Any

import numpy as np
import orjson

from tests.support.asking import PLAIN, body_of, changed, embedded_of, reports_of
from vecd.gateway.api.operation import ParsedEmbed
from vecd.gateway.tokenization.tokenizer import TokenVocabulary
from vecd.model.steps import ScoreHead, SparseHead, TokenHead

WORDS = ("[PAD]", "[CLS]", "[SEP]", "ada", "love", "##lace", "paris")
VOCABULARY = TokenVocabulary(lambda token_id: WORDS[token_id] if token_id < len(WORDS) else None, "##")

MOODS = changed(
    PLAIN,
    capabilities=("classify",),
    num_labels=3,
    score=ScoreHead(("sad", "glad", "mad"), "softmax", "cls"),
)
TOXIC = changed(MOODS, score=ScoreHead(("toxic", "insult", "threat"), "sigmoid", "cls"))
RERANKER = changed(
    MOODS, capabilities=("rerank", "classify"), num_labels=1, score=ScoreHead(("LABEL_0",), "identity", "cls")
)
NER = changed(
    PLAIN,
    capabilities=("token-classify",),
    num_labels=3,
    score=ScoreHead(("O", "B-PER", "I-PER"), "softmax"),
    vocabulary=VOCABULARY,
)
SPLADE = changed(
    PLAIN,
    capabilities=("sparse",),
    vocab_size=7,
    sparse=SparseHead(()),
    vocabulary=VOCABULARY,
)
COLBERT = changed(
    PLAIN,
    capabilities=("multi-vector",),
    token_dim=2,
    dim=2,
    tokens=TokenHead(()),
)
M3 = changed(
    SPLADE,
    capabilities=("dense", "sparse", "multi-vector"),
    dim=2,
    hidden_size=2,
    token_dim=2,
    sparse=SparseHead((), is_lexical=True),
    tokens=TokenHead(()),
)


def render(asked: ParsedEmbed, collector: Any, num_inputs: int = 1, **changes: Any) -> bytes:
    """The body of the response with what this has collected. `changes`: of the `Embedded`."""
    reports = reports_of(asked, num_inputs)
    return body_of(asked.render(embedded_of(collector, **{"reports": reports, **changes})))


def rendered(asked: ParsedEmbed, collector: Any, num_inputs: int = 1, **changes: Any) -> Any:
    return orjson.loads(render(asked, collector, num_inputs, **changes))


def rows(*values: Any) -> np.ndarray:
    return np.array(values, np.float32)
