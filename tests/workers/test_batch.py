"""What a worker refuses to compute."""

import numpy as np
import pytest

from shm.arena import ArenaSpec
from shm.card import ModelCard
from shm.wire import Batch
from workers.batch import BadBatch, read_batch

ARENA = ArenaSpec(num_slots=2, rows_per_slot=3, dim=4)
CARD = ModelCard("", "", "bert", 4, 4, 5, 10, ("mean",), (), False, "")


def message(lengths: list[int], token_ids: list[int], slot: int = 0) -> Batch:
    return Batch(
        epoch=1,
        number=1,
        slot=slot,
        num_sequences=len(lengths),
        num_tokens=len(token_ids),
        lengths_bytes=np.array(lengths, dtype="<i4").tobytes(),
        token_ids_bytes=np.array(token_ids, dtype="<i4").tobytes(),
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
