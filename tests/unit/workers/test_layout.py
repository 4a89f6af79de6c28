"""Sorting by length, and the way back."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vecd.shm.output import Output
from vecd.workers.engine import PackedBatch
from vecd.workers.layout import Run, arrange, passes


def batch_of(sequences: list[list[int]]) -> PackedBatch:
    return PackedBatch(
        np.array([len(ids) for ids in sequences], dtype=np.int32),
        np.array([token for ids in sequences for token in ids], dtype=np.int32),
    )


sequences_strategy = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=9), min_size=1, max_size=20)


@settings(deadline=None)
@given(sequences_strategy)
def test_every_sequence_is_where_the_layout_says(sequences: list[list[int]]) -> None:
    layout = arrange(batch_of(sequences))
    assert sorted(layout.order) == list(range(len(sequences)))
    for place, start, length in zip(layout.order, layout.starts, layout.lengths, strict=True):
        assert layout.token_ids[start : start + length].tolist() == sequences[place]


@settings(deadline=None)
@given(sequences_strategy)
def test_runs_cover_the_tokens_in_order_and_hold_one_length_each(sequences: list[list[int]]) -> None:
    layout = arrange(batch_of(sequences))
    assert layout.runs[0].start == 0
    assert layout.runs[-1].stop == sum(map(len, sequences))
    for run, following in zip(layout.runs, layout.runs[1:], strict=False):
        assert run.stop == following.start
        assert run.length < following.length
    assert [run.length for run in layout.runs for _ in range(run.count)] == sorted(map(len, sequences))


@settings(deadline=None)
@given(sequences_strategy)
def test_offsets_count_from_zero_in_every_sequence(sequences: list[list[int]]) -> None:
    layout = arrange(batch_of(sequences))
    assert layout.offsets().tolist() == [place for ids in sorted(sequences, key=len) for place in range(len(ids))]


@settings(deadline=None)
@given(sequences_strategy, st.integers(0, 3))
def test_positions_after_padding_skip_padding_tokens(sequences: list[list[int]], pad: int) -> None:
    expected = []
    for ids in sorted(sequences, key=len):
        position = pad
        for token in ids:
            position += token != pad
            expected.append(pad if token == pad else position)
    assert arrange(batch_of(sequences)).positions_after(pad).tolist() == expected


def test_the_second_part_is_of_a_pair_or_an_expansion() -> None:
    outputs = [Output.SCORES, Output.TOKEN_VECTORS, Output.TOKEN_VECTORS, Output.HYBRID, Output.SCORES]
    batch = replace(
        batch_of([[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3], [5, 6, 7, 8], [1]]),
        outputs=np.array(outputs, dtype=np.uint8),
        borders=np.array([3, 2, 0, 1, 0], dtype=np.int32),
    )
    layout = arrange(batch)
    assert layout.order.tolist() == [4, 2, 0, 1, 3]
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
