"""What the engines are given to embed: the same token ids for each, cut into each one's own kind of batches.

Owns the three works and their texts, which are runs of words from the reference that CPython carries
(`vecd.client.bench.texts`). Runs no model. Called by `benchmarks.duels`; its texts also by `benchmarks.lives` and
`benchmarks.memory`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from vecd.client.bench.texts import Lengths, draw_texts
from vecd.workers.engine import PackedBatch

MIXED_WORDS = Lengths(80, 0.9)
"""Many short texts and a few long ones: a median of 53 words; the model cuts the longest off."""
_NUM_MIXED_TEXTS = 64
_NUM_LONG_TEXTS = 4
_LONG_TOKENS = 512
_SHORT_TOKENS = 12
_SEED = 0

TokenIds: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """Sequences that are embedded over and over."""

    name: str
    sequences: tuple[TokenIds, ...]
    batch_sizes: tuple[int, ...]
    """In which sequences per batch those that pad may have it; each takes its best."""
    is_latency: bool = False
    """Its figure is the time of one pass, not tokens per second."""

    @property
    def lengths(self) -> list[int]:
        return [len(sequence) for sequence in self.sequences]

    @property
    def num_tokens(self) -> int:
        """Real ones: padding is nobody's achievement."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Sequences of about the same length as a rectangle, B × the longest's tokens."""

    order: NDArray[np.intp]
    """[B]: which of the work's sequences each line is."""
    token_ids: NDArray[np.int64]
    """0 behind a sequence's end: BERT's [PAD]."""
    mask: NDArray[np.int64]
    """1 where there is a token."""


def make_works(tokenizer_file: Path, max_tokens: int) -> dict[str, Work]:
    """ "mixed", "single" and "long", by name. `max_tokens`: where the model cuts a text of the mixed lengths."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_padding()
    mixed = _tokenize(tokenizer, MIXED_WORDS, _NUM_MIXED_TEXTS, max_tokens)
    single = _tokenize(tokenizer, Lengths(_SHORT_TOKENS), 1, _SHORT_TOKENS)
    # Twice the model's own limit, but what its positions reach: the attention's share grows with the length.
    long = _tokenize(tokenizer, Lengths(_LONG_TOKENS), _NUM_LONG_TEXTS, _LONG_TOKENS)
    works = (
        Work("mixed", mixed, (1, 2, 4, 8, 16, 32)),
        Work("single", single, (1,), is_latency=True),
        Work("long", long, (1, 2, 4)),
    )
    return {work.name: work for work in works}


def packed_batches(sequences: Sequence[TokenIds], max_tokens: int) -> list[PackedBatch]:
    """In the order given, as they would arrive, and as many in each batch as `max_tokens` allows, at least one."""
    batches: list[list[TokenIds]] = []
    num_tokens = 0
    for sequence in sequences:
        if not batches or num_tokens + len(sequence) > max_tokens:
            batches.append([])
            num_tokens = 0
        batches[-1].append(sequence)
        num_tokens += len(sequence)
    return [_pack(batch) for batch in batches]


def padded_batches(sequences: Sequence[TokenIds], batch_size: int) -> list[PaddedBatch]:
    """Sorted by length, so that the least is padded."""
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
    starts = range(0, len(order), batch_size)
    return [_pad(sequences, order[start : start + batch_size]) for start in starts]


def _tokenize(tokenizer: Tokenizer, lengths: Lengths, num_texts: int, max_tokens: int) -> tuple[TokenIds, ...]:
    tokenizer.enable_truncation(max_tokens)
    encodings = tokenizer.encode_batch(draw_texts(num_texts, lengths, seed=_SEED))
    return tuple(tuple(encoding.ids) for encoding in encodings)


def _pack(sequences: Sequence[TokenIds]) -> PackedBatch:
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    return PackedBatch(lengths, np.array([token_id for sequence in sequences for token_id in sequence], np.int32))


def _pad(sequences: Sequence[TokenIds], order: Sequence[int]) -> PaddedBatch:
    longest = max(len(sequences[index]) for index in order)
    batch = PaddedBatch(
        np.array(order, np.intp), np.zeros((len(order), longest), np.int64), np.zeros((len(order), longest), np.int64)
    )
    for line, index in enumerate(order):
        sequence = sequences[index]
        batch.token_ids[line, : len(sequence)] = sequence
        batch.mask[line, : len(sequence)] = 1
    return batch
