"""Which tokens of a batch are computed once for all of its sequences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.workers.engine import PackedBatch
from vecd.workers.layout import arrange
from vecd.workers.prefix import MIN_SHARED_TOKENS, share_prefix


def batch_of(sequences: list[list[int]]) -> PackedBatch:
    lengths = np.array(list(map(len, sequences)), dtype=np.int32)
    return PackedBatch(lengths, np.concatenate(sequences).astype(np.int32))


@given(
    prefix=st.lists(st.integers(0, 3), min_size=0, max_size=40),
    ends=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=6),
)
def test_prefix_and_rest_are_the_sequences(prefix: list[int], ends: list[list[int]]) -> None:
    sequences = [prefix + end for end in ends]
    plain = arrange(batch_of(sequences))
    layout = share_prefix(plain)
    rebuilt = [
        [*layout.prefix.tolist(), *layout.token_ids[start : start + length].tolist()]
        for start, length in zip(layout.starts, layout.lengths, strict=True)
    ]
    assert rebuilt == [sequences[index] for index in layout.order]
    assert layout.lengths.min() >= 1
    assert [run.length for run in layout.runs for _ in range(run.count)] == layout.lengths.tolist()
    assert layout.runs[-1].stop == layout.token_ids.size
    assert layout.computed_ids().size == layout.computed_offsets().size == layout.prefix.size + layout.token_ids.size
    assert np.array_equal(layout.computed_offsets()[layout.prefix.size :], layout.offsets() + layout.prefix.size)
    if layout.prefix.size:
        assert layout.computed_ids().size < plain.token_ids.size


@pytest.mark.parametrize(
    ("sequences", "num_shared"),
    [
        ([[7] * 100 + [1, 2], [7] * 100 + [3]], 100),
        ([[7] * 100 + [1, 2], [7] * 100 + [1, 3]], 101),
        ([[7] * 100, [7] * 100 + [3]], 99),  # one token stays
        ([[7] * MIN_SHARED_TOKENS + [1], [7] * MIN_SHARED_TOKENS + [2]], MIN_SHARED_TOKENS),
        ([[7] * (MIN_SHARED_TOKENS - 1) + [1], [7] * (MIN_SHARED_TOKENS - 1) + [2]], 0),
        ([[7] * 20 + [1] * 200, [7] * 20 + [2]], 0),  # saves less than a tenth
        ([[7] * 100 + [1, 2]], 0),
        ([[7] * 100 + [1], [8] + [7] * 100], 0),
        ([[7] * 100 + [1], [7]], 0),
    ],
)
def test_a_prefix_is_shared_where_that_saves_enough(sequences: list[list[int]], num_shared: int) -> None:
    assert share_prefix(arrange(batch_of(sequences))).prefix.size == num_shared
