from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.servers import bundled_model
from benchmarks.targets import EQUAL_LENGTHS, equal_name
from benchmarks.workload import Work, make_works, packed_batches, padded_batches, texts_of
from vecd.shm.card import ModelCard, read_card

SEQUENCES = [tuple(range(1, length + 1)) for length in (5, 2, 9, 1, 4)]


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return read_card(Path(bundled_model()))


@pytest.fixture(scope="module")
def works(card: ModelCard) -> dict[str, Work]:
    return {work.name: work for work in make_works(card)}


def test_packed_batches_hold_every_sequence_in_order() -> None:
    batches = packed_batches(SEQUENCES, 8)
    assert [batch.lengths.tolist() for batch in batches] == [[5, 2], [9], [1, 4]]
    tokens = np.concatenate([batch.token_ids for batch in batches]).tolist()
    assert tokens == [token_id for sequence in SEQUENCES for token_id in sequence]


def test_padded_batches_are_sorted_and_say_where_each_sequence_is() -> None:
    batches = padded_batches(SEQUENCES, 2)
    assert [batch.token_ids.shape for batch in batches] == [(2, 2), (2, 5), (1, 9)]
    for batch in batches:
        for index, token_ids, mask in zip(batch.order, batch.token_ids, batch.mask, strict=True):
            length = len(SEQUENCES[index])
            assert tuple(token_ids[:length]) == SEQUENCES[index]
            assert mask.tolist() == [1] * length + [0] * (len(mask) - length)
            assert not token_ids[length:].any()


def test_every_sequence_is_in_a_padded_batch() -> None:
    order = np.concatenate([batch.order for batch in padded_batches(SEQUENCES, 3)])
    assert sorted(order.tolist()) == list(range(len(SEQUENCES)))
    assert all(len(SEQUENCES[a]) <= len(SEQUENCES[b]) for a, b in pairwise(order.tolist()))


def test_mixed_lengths_are_mixed_and_within_the_limit(works: dict[str, Work]) -> None:
    lengths = works["mixed"].lengths
    assert max(lengths) <= 256
    assert min(lengths) < 30
    assert len(set(lengths)) > 20


def test_the_others_have_the_lengths_they_are_named_for(works: dict[str, Work]) -> None:
    for num_texts, num_tokens in EQUAL_LENGTHS:
        work = works[equal_name(num_texts, num_tokens)]
        assert work.lengths == [num_tokens] * num_texts
        assert len(set(work.sequences)) == num_texts
        assert work.is_latency == (num_texts == 1)
    assert works["long"].lengths == [512] * 4


def test_a_large_model_gets_fewer_texts_and_no_batch_size_beyond_them(card: ModelCard) -> None:
    works = {work.name: work for work in make_works(replace(card, weights_bytes=10**9))}
    assert (len(works["mixed"].sequences), works["mixed"].batch_sizes) == (16, (1, 2, 4, 8, 16))
    assert (len(works["long"].sequences), works["long"].batch_sizes) == (1, (1,))
    assert len(works[equal_name(32, 12)].sequences) == 32


def test_texts_have_exactly_the_tokens_asked_for(card: ModelCard) -> None:
    tokenizer = Tokenizer.from_file(card.tokenizer_file)
    tokenizer.no_padding()
    texts = texts_of(card, 64, 59)
    assert {len(encoding.ids) for encoding in tokenizer.encode_batch(texts)} == {59}
    assert len(texts) == 64


def test_cut_sequences_are_still_framed(works: dict[str, Work]) -> None:
    cls, sep = 101, 102
    assert {(s[0], s[-1]) for work in works.values() for s in work.sequences} == {(cls, sep)}
