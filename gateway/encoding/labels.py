"""Labels: from logits to scores and an order, and from labels of tokens to those of words and spans. Pure.

Knows no tokenizer: the caller passes the text, the offsets of its tokens and their strings.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

AGGREGATIONS = ("none", "simple", "first", "max", "average")
"""How labels of tokens become labels of spans: not at all; neighbours of one label; and the same where the tokens of a
word have the label of its first token, of the token with the highest score, or of their mean scores."""

OUTSIDE = "O"
"""The label of tokens that belong to nothing, which is left out of the result."""

TOKENS_PER_STEP = 200
"""Tokens whose labels are looked at, or whose rows are written, before other work may have its turn: 1 to 2 ms."""

TokenScores = NDArray[np.floating[Any]]
Step = tuple[TokenScores, NDArray[np.int32], Sequence[str]]
"""Of some tokens: [T, k], probabilities, one row for each; [T, 2], begin and end of each in characters of the text, -1
for special tokens, which have no label; and their strings, as in the vocabulary."""


class Entity(NamedTuple):
    label: str
    score: float
    position: int | None
    """Of the token in its sequence, special tokens included; None for a span."""
    word: str
    start: int
    """In characters of the text, as `end`."""
    end: int


class _Word(NamedTuple):
    """A token, or the tokens of a word."""

    scores: TokenScores
    """[k], of which the highest counts."""
    position: int
    token: str
    start: int
    end: int

    def label(self, labels: Sequence[str]) -> str:
        return labels[int(self.scores.argmax())]


def find_entities(
    steps: Iterable[Step],
    text: str,
    labels: Sequence[str],
    aggregation: str = "none",
    *,
    subword_prefix: str = "",
    ignored: Collection[str] = (OUTSIDE,),
) -> Iterator[list[Entity]]:
    """The entities of a text, in its order, without those that have one of the `ignored` labels: a list for each step,
    of those that end in it, and one more.

    `labels`: k names. `aggregation`: one of AGGREGATIONS. `subword_prefix`: what begins the string of a token that
    continues a word, "##" in BERT's vocabulary; "" where words are recognized by the blanks between them.
    """
    own = _tokens_of(steps)
    if aggregation in _MERGE:
        own = _words_of(own, text, subword_prefix, _MERGE[aggregation])
    if aggregation != "none":
        found = _spans_of(own, text, labels)
    else:
        found = (word and Entity(word.label(labels), float(word.scores.max()), *word[1:]) for word in own)
    entities: list[Entity] = []
    for entity in found:
        if entity is None:
            yield entities
            entities = []
        elif entity.label not in ignored:
            entities.append(entity)
    yield entities


def _tokens_of(steps: Iterable[Step]) -> Iterator[_Word | None]:
    """The tokens that have a label; None at the end of each step, as in all that is made of this."""
    position = 0
    for scores, offsets, tokens in steps:
        for row, (start, end), token in zip(scores, offsets.tolist(), tokens, strict=True):
            if start >= 0:
                yield _Word(row, position, token, start, end)
            position += 1
        yield None


_MERGE: dict[str, Callable[[TokenScores], TokenScores]] = {
    "first": lambda rows: rows[0],
    "max": lambda rows: rows[int(rows.max(axis=1).argmax())],
    "average": lambda rows: rows.mean(axis=0),
}


def _merged(words: Sequence[_Word], merge: Callable[[TokenScores], TokenScores]) -> _Word:
    scores = merge(np.stack([word.scores for word in words]))
    return words[0]._replace(scores=scores, end=words[-1].end)


def _words_of(
    tokens: Iterable[_Word | None], text: str, subword_prefix: str, merge: Callable[[TokenScores], TokenScores]
) -> Iterator[_Word | None]:
    words: list[_Word] = []
    for token in tokens:
        if token is None:
            yield None
            continue
        if words and not _continues(token, text, subword_prefix):
            yield _merged(words, merge)
            words = []
        words.append(token)
    if words:
        yield _merged(words, merge)


def _continues(token: _Word, text: str, subword_prefix: str) -> bool:
    """Whether a token is a later part of a word."""
    if subword_prefix:
        return token.token.startswith(subword_prefix) and token.token != subword_prefix
    return token.start > 0 and " " not in text[token.start - 1 : token.start + 1]


def _spans_of(words: Iterable[_Word | None], text: str, labels: Sequence[str]) -> Iterator[Entity | None]:
    """Neighbours of the same name, of which none but the first begins a span."""
    span: list[_Word] = []
    highest: list[float] = []
    """Of each word."""
    last = ""
    for word in words:
        if word is None:
            yield None
            continue
        label = word.label(labels)
        name = label[2:] if label.startswith(("B-", "I-")) else label
        if span and (label.startswith("B-") or name != last):
            yield _span_entity(span, highest, text, labels)
            span, highest = [], []
        last = name
        span.append(word)
        highest.append(word.scores.max())
    if span:
        yield _span_entity(span, highest, text, labels)


def _span_entity(words: Sequence[_Word], highest: Sequence[float], text: str, labels: Sequence[str]) -> Entity:
    start, end = words[0].start, words[-1].end
    label = words[0].label(labels).split("-", 1)[-1]
    return Entity(label, float(np.mean(highest)), None, text[start:end].strip(), start, end)


# --- scores of texts --------------------------------------------------------------------------------------------

# Computed in float64, because a sigmoid in half or single precision gives 1.0 to many documents. The order is that of
# the logits, so no rounding of an activation can change it.

Scores: TypeAlias = NDArray[np.float64]
Logits: TypeAlias = NDArray[np.floating[Any]]


def sigmoid(logits: Logits) -> Scores:
    """The exponent is never positive, so nothing overflows, and small scores keep all their digits."""
    values = logits.astype(np.float64)
    small = np.exp(-np.abs(values))
    scores: Scores = np.where(values >= 0, 1.0, small) / (1.0 + small)
    return scores


def softmax(logits: Logits) -> Scores:
    """Over the last axis."""
    values = logits.astype(np.float64)
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    scores: Scores = powers / powers.sum(axis=-1, keepdims=True)
    return scores


ACTIVATIONS: Mapping[str, Callable[[Logits], Scores]] = {
    "identity": lambda logits: logits.astype(np.float64),
    "sigmoid": sigmoid,
    "softmax": softmax,
    "tanh": lambda logits: np.tanh(logits.astype(np.float64)),
}
"""By the names of `vecd.model.steps.SCORE_ACTIVATIONS`. Each takes logits [..., k], and returns as many scores."""


def relevance_logits(logits: Logits) -> Scores:
    """One logit for each row of [N, k], with k of 1 or 2. Of two labels, "not relevant" and "relevant", it is the
    logarithm of the odds of the second: its sigmoid is the softmax's second column, which LangChain takes, too."""
    values = logits.astype(np.float64)
    odds: Scores = values[:, -1] if values.shape[1] == 1 else values[:, 1] - values[:, 0]
    return odds


def relevance_of(logits: Scores, activation: str) -> Scores:
    """Scores for the logits [N] of `relevance_logits`. The softmax over a single logit would be 1.0 for every document;
    where a model names it, the sigmoid is meant."""
    return ACTIVATIONS["sigmoid" if activation == "softmax" else activation](logits)


def ranked(logits: Scores, num: int | None = None) -> list[int]:
    """The indices of the `num` greatest logits, the greatest first; equal ones in their own order. None: of all."""
    order: list[int] = np.argsort(-logits, kind="stable")[:num].tolist()
    return order
