"""What the engines are given to embed: the same token ids for each, cut into each one's own kind of batches.

Owns the works and their texts, which are runs of words from the reference that CPython carries
(`vecd.client.bench.texts`). Runs no model. Called by `benchmarks.duels`; its texts also by `benchmarks.lives` and
`benchmarks.memory`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.targets import EQUAL_LENGTHS, equal_name
from vecd.client.bench.texts import Lengths, draw_texts
from vecd.model.card import ModelCard
from vecd.workers.batch import PackedBatch

MIXED_WORDS = Lengths(80, 0.9)
"""Many short texts and a few long ones: a median of 53 words; the model cuts the longest off."""
_NUM_MIXED_TEXTS = 64
_NUM_LONG_TEXTS = 4
_LONG_TOKENS = 512
_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_LARGE_BYTES = 200_000_000
_LARGE_SHARE = 4
"""A larger model gets this part of the texts: with all of them one pass of BERT-base takes 10 to 20 s."""
_SEED = 0

TokenIds: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """Sequences that are embedded over and over."""

    section: str
    """Of `benchmarks.engine.SECTIONS`."""
    name: str
    """In `benchmarks.targets`."""
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


def is_large(card: ModelCard) -> bool:
    """Whether the model gets less to do, so that a measurement ends in minutes."""
    return card.weights_bytes > _LARGE_BYTES


def make_works(card: ModelCard) -> list[Work]:
    """The works of equal lengths, which packing cannot help, then "mixed" and "long". Texts of the mixed lengths are
    cut where the model cuts them."""
    tokenizer = Tokenizer.from_file(card.tokenizer_file)
    tokenizer.no_padding()
    share = _LARGE_SHARE if is_large(card) else 1
    works = [_equal(tokenizer, num_texts, num_tokens) for num_texts, num_tokens in EQUAL_LENGTHS]
    num_mixed = _NUM_MIXED_TEXTS // share
    mixed = _tokenize(tokenizer, MIXED_WORDS, num_mixed, card.max_tokens)
    works.append(Work("mixed", "mixed", mixed, tuple(size for size in _BATCH_SIZES if size <= num_mixed)))
    # More than MiniLM's own limit, but what its positions reach: the attention's share grows with the length.
    num_long = _NUM_LONG_TEXTS // share
    long = _tokenize(tokenizer, Lengths(_LONG_TOKENS), num_long, _LONG_TOKENS)
    works.append(Work("mixed", "long", long, tuple(size for size in (1, 2, 4) if size <= num_long)))
    return works


def texts_of(card: ModelCard, num_texts: int, num_tokens: int) -> list[str]:
    """Texts that the model's tokenizer makes exactly so many tokens of, special ones included."""
    tokenizer = Tokenizer.from_file(card.tokenizer_file)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    found: list[str] = []
    for seed in range(1000):
        drawn = draw_texts(256, Lengths(max(1, num_tokens * 3 // 4), 0.2), seed)
        encodings = tokenizer.encode_batch(drawn)
        found += [text for text, of_text in zip(drawn, encodings, strict=True) if len(of_text.ids) == num_tokens]
        if len(found) >= num_texts:
            return found[:num_texts]
    raise ValueError(f"this tokenizer makes {num_tokens} tokens of hardly any text")


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


def _equal(tokenizer: Tokenizer, num_texts: int, num_tokens: int) -> Work:
    """Sequences that differ, and have the same length."""
    sequences = _tokenize(tokenizer, Lengths(num_tokens), num_texts, num_tokens)
    sizes = tuple(size for size in _BATCH_SIZES if size <= num_texts)
    return Work("equal", equal_name(num_texts, num_tokens), sequences, sizes, is_latency=num_texts == 1)


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
