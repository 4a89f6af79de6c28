"""What a worker refuses to compute, batches sorted by length, and what becomes of one that memory is too small for."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vecd.model.card import ModelCard
from vecd.shm.arena import ArenaSpec
from vecd.shm.output import Output
from vecd.shm.wire import Batch
from vecd.workers.batch import (
    BadBatch,
    PackedBatch,
    Run,
    arrange,
    halves,
    means_no_more_code,
    means_out_of_memory,
    passes,
    read_batch,
)

ARENA = ArenaSpec(num_slots=2, rows_per_slot=3, dim=4)
CARD = ModelCard("", "", "bert", 4, 4, 5, 10, ("mean",), (), False, "")
NARROW = replace(CARD, hidden_size=5)
VECTORS, RAW, TOKENS = Output.VECTORS, Output.UNNORMALIZED, Output.TOKENS


def message(lengths: list[int], token_ids: list[int], slot: int = 0, outputs: Sequence[int] = ()) -> Batch:
    return Batch(
        epoch=1,
        number=1,
        slot=slot,
        num_sequences=len(lengths),
        num_tokens=len(token_ids),
        lengths_bytes=np.array(lengths, dtype="<i4").tobytes(),
        token_ids_bytes=np.array(token_ids, dtype="<i4").tobytes(),
        outputs_bytes=bytes(outputs),
    )


def test_a_good_batch_is_read_without_a_copy() -> None:
    batch = read_batch(message([2, 1], [0, 9, 5], slot=1), ARENA, CARD)
    assert batch.lengths.tolist() == [2, 1]
    assert batch.token_ids.tolist() == [0, 9, 5]
    assert not batch.token_ids.flags.owndata
    assert (batch.outputs, batch.rows_of_each.tolist(), batch.num_rows) == (None, [1, 1], 2)
    batch = read_batch(message([2, 1], [0, 9, 5], outputs=[TOKENS, RAW]), ARENA, CARD)
    assert batch.outputs is not None
    assert (batch.outputs.tolist(), batch.rows_of_each.tolist(), batch.num_rows) == ([TOKENS, RAW], [2, 1], 3)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (message([1], [1], slot=2), "slot 2"),
        (message([1, 1, 1, 1], [1, 2, 3, 4]), "4 sequences"),
        (message([0, 2], [1, 2]), "without tokens"),
        (message([-1, 3], [1, 2]), "without tokens"),
        (message([6], [1, 1, 1, 1, 1, 1]), "6 tokens"),
        (message([2, 2], [1, 2, 3]), "4 tokens in all, but 3"),
        (message([2**31 - 1, 2**31 - 1], [1, 2]), "tokens, the model takes 5"),
        (message([2], [1, 10]), "outside the vocabulary"),
        (message([2], [-1, 1]), "outside the vocabulary"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(bad: Batch, why: str) -> None:
    with pytest.raises(BadBatch, match=why):
        read_batch(bad, ARENA, CARD)


@pytest.mark.parametrize(
    ("outputs", "card", "why"),
    [
        ([VECTORS, len(Output)], CARD, f"output {len(Output)}, there are {len(Output)}"),
        ([VECTORS, Output.SCORES], CARD, "the model has no scores"),
        ([VECTORS, TOKENS], CARD, "4 rows, a slot has 3"),
        ([TOKENS, VECTORS], NARROW, "the model has no tokens"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(outputs: list[int], card: ModelCard, why: str) -> None:
    with pytest.raises(BadBatch, match=why):
        read_batch(message([2, 3], [0, 1, 2, 3, 4], outputs=outputs), ARENA, card)


def test_a_vector_without_its_norm_fits_whatever_the_size_of_a_token_s_state() -> None:
    assert read_batch(message([2, 3], [0, 1, 2, 3, 4], outputs=[RAW, VECTORS]), ARENA, NARROW).num_rows == 2


def batch_of(sequences: list[list[int]]) -> PackedBatch:
    return PackedBatch(
        np.array([len(ids) for ids in sequences], dtype=np.int32),
        np.array([token for ids in sequences for token in ids], dtype=np.int32),
    )


sequences_strategy = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=9), min_size=1, max_size=20)


@settings(deadline=None)
@given(sequences_strategy, st.integers(0, 3))
def test_a_layout_holds_every_sequence_sorted_by_length(sequences: list[list[int]], pad: int) -> None:
    layout = arrange(batch_of(sequences))
    assert sorted(layout.first_rows) == list(range(len(sequences)))
    for place, start, length in zip(layout.first_rows, layout.starts, layout.lengths, strict=True):
        assert layout.token_ids[start : start + length].tolist() == sequences[place]
    assert layout.runs[0].start == 0
    assert layout.runs[-1].stop == sum(map(len, sequences))
    for run, following in zip(layout.runs, layout.runs[1:], strict=False):
        assert run.stop == following.start
        assert run.length < following.length
    assert [run.length for run in layout.runs for _ in range(run.count)] == sorted(map(len, sequences))
    assert layout.offsets().tolist() == [place for ids in sorted(sequences, key=len) for place in range(len(ids))]
    positions = []
    for ids in sorted(sequences, key=len):
        position = pad
        for token in ids:
            position += token != pad
            positions.append(pad if token == pad else position)
    assert layout.positions_after(pad).tolist() == positions


@pytest.mark.parametrize(("padding_id", "lasts"), [(None, [0, 2, 5]), (9, [0, 1, 4])])
def test_the_last_token_is_no_padding_unless_there_is_nothing_else(padding_id: int | None, lasts: list[int]) -> None:
    assert arrange(batch_of([[1], [9, 9], [1, 2, 9]])).last_tokens(padding_id).tolist() == lasts


def test_the_second_part_is_of_a_pair_or_an_expansion() -> None:
    outputs = [Output.SCORES, Output.TOKEN_VECTORS, Output.TOKEN_VECTORS, Output.HYBRID, Output.SCORES]
    batch = replace(
        batch_of([[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3], [5, 6, 7, 8], [1]]),
        outputs=np.array(outputs, dtype=np.uint8),
        borders=np.array([3, 2, 0, 1, 0], dtype=np.int32),
    )
    layout = arrange(batch)
    assert layout.first_rows.tolist() == [12, 5, 0, 1, 8]
    assert layout.borders is not None
    assert layout.borders.tolist() == [0, 0, 3, 0, 0]
    assert layout.token_types().tolist() == [0, 0, 0, 0, 0, 0, 0, 1, *[0] * 8]
    assert layout.attended is not None
    assert layout.attended.tolist() == [1, 3, 4, 2, 1]
    assert [run.attended for run in layout.runs] == [(), (), (4, 2, 1)]
    assert layout.runs[2].attended_keys()[:, 0, 0].tolist() == [
        [True, True, True, True],
        [True, True, False, False],
        [True, False, False, False],
    ]
    parts = list(passes(layout, 5))
    assert [run.attended for part in parts for run in part.runs] == [(), (), (), (2,), (1,)]
    alone = arrange(batch.part(1, 2))
    assert alone.runs == [Run(0, 1, 4, (2,))]
    assert arrange(batch.part(0, 1)).attended is None


def no_memory_for_torch() -> Exception:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 58)
    return raised.value


@pytest.mark.parametrize(
    ("error", "expected", "is_lost"),
    [
        (MemoryError(), True, False),
        (torch.OutOfMemoryError("CUDA out of memory."), True, False),
        (no_memory_for_torch(), True, False),
        (RuntimeError("shapes"), False, False),
        (torch.AcceleratorError("device-side assert"), False, False),
        (RuntimeError("could not create a primitive"), False, True),
    ],
)
def test_what_means_out_of_memory_and_that_no_product_will_be_compiled(
    error: Exception, expected: bool, is_lost: bool
) -> None:
    assert means_out_of_memory(error) is expected
    assert means_no_more_code(error) is is_lost


@given(st.lists(st.integers(1, 500), min_size=2, max_size=40), st.booleans())
def test_halves_are_the_whole_batch_and_as_even_as_whole_sequences_allow(lengths: list[int], is_mixed: bool) -> None:
    num_tokens = sum(lengths)
    outputs = (np.arange(len(lengths)) % len(Output)).astype(np.uint8) if is_mixed else None
    batch = PackedBatch(np.array(lengths, dtype=np.int32), np.arange(num_tokens, dtype=np.int32), outputs)
    first, second = halves(batch)
    assert [*first.lengths, *second.lengths] == lengths
    assert [*first.token_ids, *second.token_ids] == list(range(num_tokens))
    assert first.num_rows + second.num_rows == batch.num_rows
    if outputs is None:
        assert first.outputs is second.outputs is None
    else:
        assert first.outputs is not None
        assert second.outputs is not None
        assert [*first.outputs, *second.outputs] == outputs.tolist()
    for half in (first, second):
        assert half.lengths.size >= 1
        assert half.token_ids.size == half.lengths.sum()
    best = min(abs(2 * sum(lengths[:count]) - num_tokens) for count in range(1, len(lengths)))
    assert abs(first.token_ids.size - second.token_ids.size) == best
