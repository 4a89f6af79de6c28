"""Labels of tokens to labels of words and spans, as Hugging Face's pipeline for token classification does it. Pure.

Owns the five ways of aggregation. Knows no tokenizer: the caller passes the text, the offsets of its tokens and their
strings. Called by `vecd.gateway.api.dialects.labels`. Source of the rules: `TokenClassificationPipeline` of
transformers 5. Differences: `word` of a span is its part of the text, not what the tokenizer's decoder makes of the
tokens; a token continues a word if it has the vocabulary's prefix, and not if its length differs from that of its
part of the text, which is also so where the tokenizer changes characters.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

AGGREGATIONS = ("none", "simple", "first", "max", "average")
"""How labels of tokens become labels of spans: not at all; neighbours of one label; and the same where the tokens of a
word have the label of its first token, of the token with the highest score, or of their mean scores."""

OUTSIDE = "O"
"""The label of tokens that belong to nothing, which is left out of the result."""

Scores = NDArray[np.floating[Any]]


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
    scores: Scores,
    offsets: NDArray[np.int32],
    tokens: Sequence[str],
    text: str,
    labels: Sequence[str],
    aggregation: str = "none",
    *,
    subword_prefix: str = "",
    ignored: Sequence[str] = (OUTSIDE,),
) -> list[Entity]:
    """The entities of a text, in its order, without those that have one of the `ignored` labels.

    `scores`: [T, k], probabilities, one row for each token. `offsets`: [T, 2], begin and end of each token in
    characters of the text, -1 for special tokens, which have no label. `tokens`: their strings, as in the vocabulary.
    `labels`: k names. `aggregation`: one of AGGREGATIONS. `subword_prefix`: what begins the string of a token that
    continues a word, "##" in BERT's vocabulary; "" where words are recognized by the blanks between them.
    """
    own = [
        _Word(scores[index], index, tokens[index], int(start), int(end))
        for index, (start, end) in enumerate(offsets)
        if start >= 0
    ]
    if aggregation == "none":
        found = [_token_entity(word, labels) for word in own]
    else:
        if aggregation != "simple":
            merge = _MERGE[aggregation]
            own = [_merged(words, merge) for words in _words_of(own, text, subword_prefix)]
        found = [_span_entity(words, text, labels) for words in _spans_of(own, labels)]
    return [entity for entity in found if entity.label not in ignored]


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


def _words_of(tokens: Sequence[_Word], text: str, subword_prefix: str) -> Iterator[list[_Word]]:
    words: list[_Word] = []
    for token in tokens:
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


def _spans_of(words: Sequence[_Word], labels: Sequence[str]) -> Iterator[list[_Word]]:
    """Neighbours of the same name, of which none but the first begins a span."""
    number, last = 0, ""
    numbered = []
    for word in words:
        begins, name = _tag(word.label(labels))
        number += begins or name != last
        last = name
        numbered.append((number, word))
    for _, span in groupby(numbered, key=lambda pair: pair[0]):
        yield [word for _, word in span]


def _span_entity(words: Sequence[_Word], text: str, labels: Sequence[str]) -> Entity:
    score = float(np.mean([word.scores.max() for word in words]))
    start, end = words[0].start, words[-1].end
    label = words[0].label(labels).split("-", 1)[-1]
    return Entity(label, score, None, text[start:end].strip(), start, end)
