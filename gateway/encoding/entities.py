"""Labels of tokens to labels of words and spans, as Hugging Face's pipeline for token classification does it. Pure.

Owns the five ways of aggregation, which go through the tokens of a text step by step. Knows no tokenizer: the caller
passes the text, the offsets of its tokens and their strings. Called by `vecd.gateway.api.dialects.labels`. Source of
the rules: `TokenClassificationPipeline` of transformers 5. Differences: `word` of a span is its part of the text, not
what the tokenizer's decoder makes of the tokens; a token continues a word if it has the vocabulary's prefix, and not if
its length differs from that of its part of the text, which is also so where the tokenizer changes characters.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

AGGREGATIONS = ("none", "simple", "first", "max", "average")
"""How labels of tokens become labels of spans: not at all; neighbours of one label; and the same where the tokens of a
word have the label of its first token, of the token with the highest score, or of their mean scores."""

OUTSIDE = "O"
"""The label of tokens that belong to nothing, which is left out of the result."""

TOKENS_PER_STEP = 200
"""Tokens whose labels are looked at, or whose rows are written, before other work may have its turn: 1 to 2 ms."""

Scores = NDArray[np.floating[Any]]
Step = tuple[Scores, NDArray[np.int32], Sequence[str]]
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

    scores: Scores
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
    found: Iterator[Entity | None]
    if aggregation == "none":
        found = (None if word is None else _token_entity(word, labels) for word in own)
    else:
        if aggregation != "simple":
            merge = _MERGE[aggregation]
            words_of = _words_of(own, text, subword_prefix)
            own = (None if words is None else _merged(words, merge) for words in words_of)
        found = _spans_of(own, text, labels)
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


def _token_entity(word: _Word, labels: Sequence[str]) -> Entity:
    return Entity(word.label(labels), float(word.scores.max()), word.position, word.token, word.start, word.end)


# --- words ------------------------------------------------------------------------------------------------------


def _first(rows: Scores) -> Scores:
    row: Scores = rows[0]
    return row


def _highest(rows: Scores) -> Scores:
    row: Scores = rows[int(rows.max(axis=1).argmax())]
    return row


def _mean(rows: Scores) -> Scores:
    mean: Scores = rows.mean(axis=0)
    return mean


_MERGE: dict[str, Callable[[Scores], Scores]] = {"first": _first, "max": _highest, "average": _mean}


def _merged(words: Sequence[_Word], merge: Callable[[Scores], Scores]) -> _Word:
    scores = merge(np.stack([word.scores for word in words]))
    return words[0]._replace(scores=scores, end=words[-1].end)


def _words_of(tokens: Iterable[_Word | None], text: str, subword_prefix: str) -> Iterator[list[_Word] | None]:
    words: list[_Word] = []
    for token in tokens:
        if token is None:
            yield None
            continue
        if words and not _continues(token, text, subword_prefix):
            yield words
            words = []
        words.append(token)
    if words:
        yield words


def _continues(token: _Word, text: str, subword_prefix: str) -> bool:
    """Whether a token is a later part of a word."""
    if subword_prefix:
        return token.token.startswith(subword_prefix) and token.token != subword_prefix
    return token.start > 0 and " " not in text[token.start - 1 : token.start + 1]


# --- spans ------------------------------------------------------------------------------------------------------


def _tag(label: str) -> tuple[bool, str]:
    """Whether a label begins a span, and its name without "B-" and "I-"."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


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
        begins, name = _tag(word.label(labels))
        if span and (begins or name != last):
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
