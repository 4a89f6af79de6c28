"""What a worker refuses to compute."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from vecd.shm.arena import ArenaSpec
from vecd.shm.card import ModelCard
from vecd.shm.output import Output
from vecd.shm.wire import Batch
from vecd.workers.batch import BadBatch, read_batch

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


def test_outputs_are_read_and_rows_counted() -> None:
    batch = read_batch(message([2, 1], [0, 9, 5], outputs=[TOKENS, RAW]), ARENA, CARD)
    assert batch.outputs is not None
    assert batch.outputs.tolist() == [TOKENS, RAW]
    assert batch.rows_of_each.tolist() == [2, 1]
    assert batch.num_rows == 3


def test_without_outputs_each_sequence_has_a_row() -> None:
    batch = read_batch(message([2, 1], [0, 9, 5]), ARENA, CARD)
    assert batch.outputs is None
    assert batch.rows_of_each.tolist() == [1, 1]
    assert batch.num_rows == 2


@pytest.mark.parametrize(
    ("outputs", "card", "why"),
    [
        ([VECTORS, len(Output)], CARD, f"output {len(Output)}, there are {len(Output)}"),
        ([VECTORS, Output.SCORES], CARD, "the model has no scores"),
        ([255, VECTORS], CARD, "output 255"),
        ([VECTORS, TOKENS], CARD, "4 rows, a slot has 3"),
        ([TOKENS, VECTORS], NARROW, "the model has no tokens"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(outputs: list[int], card: ModelCard, why: str) -> None:
    with pytest.raises(BadBatch, match=why):
        read_batch(message([2, 3], [0, 1, 2, 3, 4], outputs=outputs), ARENA, card)


def test_a_vector_without_its_norm_fits_whatever_the_size_of_a_token_s_state() -> None:
    assert read_batch(message([2, 3], [0, 1, 2, 3, 4], outputs=[RAW, VECTORS]), ARENA, NARROW).num_rows == 2
