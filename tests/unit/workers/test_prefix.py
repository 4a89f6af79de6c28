"""Which tokens of a batch are computed once for all of its sequences, and which not even once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.shm.wire import NO_SCOPE, SCOPE_OF_ALL
from vecd.workers.batch import PackedBatch, arrange
from vecd.workers.prefix import MIN_SHARED_TOKENS, PrefixCache


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
    layout, _ = PrefixCache[None](0).share(plain, SCOPE_OF_ALL)
    rebuilt = [
        [*layout.prefix.tolist(), *layout.token_ids[start : start + length].tolist()]
        for start, length in zip(layout.starts, layout.lengths, strict=True)
    ]
    assert rebuilt == [sequences[index] for index in layout.first_rows]
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
        ([[7] * 100 + [1, 2], [7] * 100 + [1, 3]], 101),
        ([[7] * 100, [7] * 100 + [3]], 99),  # one token stays
        ([[7] * MIN_SHARED_TOKENS + [1], [7] * MIN_SHARED_TOKENS + [2]], MIN_SHARED_TOKENS),
        ([[7] * (MIN_SHARED_TOKENS - 1) + [1], [7] * (MIN_SHARED_TOKENS - 1) + [2]], 0),
        ([[7] * 20 + [1] * 200, [7] * 20 + [2]], 0),  # saves less than a tenth
        ([[7] * 100 + [1, 2]], 0),
        ([[7] * 100 + [1], [8] + [7] * 100], 0),
    ],
)
def test_a_prefix_is_shared_where_that_saves_enough(sequences: list[list[int]], num_shared: int) -> None:
    layout, _ = PrefixCache[None](0).share(arrange(batch_of(sequences)), SCOPE_OF_ALL)
    assert layout.prefix.size == num_shared


QUERIES = [[start + at % 3 for at in range(length)] for start, length in ((0, 40), (0, 20), (5, 17), (9, 60))]


class Cached:
    """A cache whose states are the token ids themselves, so that wrong states show."""

    def __init__(self, max_tokens: int) -> None:
        self.cache: PrefixCache[list[int]] = PrefixCache(max_tokens)

    def computed(self, sequences: list[list[int]], scope: int = SCOPE_OF_ALL) -> tuple[int, int]:
        """Compute a batch: how many tokens are known, and how many more are computed once."""
        plain = arrange(batch_of(sequences))
        layout, known = self.cache.share(plain, scope)
        before = [*(known or [])[: layout.num_known], *layout.prefix.tolist()]
        assert len(before) == layout.num_shared
        rest = [layout.token_ids[start:][:length] for start, length in zip(layout.starts, layout.lengths, strict=True)]
        assert [before + ids.tolist() for ids in rest] == [sequences[index] for index in layout.first_rows]
        assert layout.lengths.min() >= 1
        if self.cache.takes(layout):
            self.cache.keep(plain.token_ids[: layout.num_shared], before, scope)
        return layout.num_known, layout.prefix.size


@given(
    max_tokens=st.integers(0, 150),
    batches=st.lists(
        st.lists(
            st.tuples(st.sampled_from(QUERIES), st.lists(st.integers(0, 3), min_size=1, max_size=30)),
            min_size=1,
            max_size=4,
        ),
        max_size=20,
    ),
)
def test_what_is_kept_is_right_and_bounded(max_tokens: int, batches: list[list[tuple[list[int], list[int]]]]) -> None:
    cached = Cached(max_tokens)
    for pairs in batches:
        cached.computed([query + document for query, document in pairs])
        assert cached.cache.num_tokens <= max_tokens


def test_a_prefix_is_known_from_the_third_sequence_that_comes_alone() -> None:
    cached = Cached(200)
    first, second = [7] * 80, [7] * 60 + [8] * 20
    assert [cached.computed([first + [9] * 20 + [document]]) for document in range(4)] == [
        (0, 0),
        (0, 100),
        (100, 0),
        (100, 0),
    ]
    cached = Cached(200)
    turns = [cached.computed([query + [document] * 40]) for document in range(10, 14) for query in (first, second)]
    assert turns == [(0, 0), (0, 60), (60, 20), (60, 20), (80, 0), (80, 0), (80, 0), (80, 0)]


def test_a_prefix_is_known_from_the_second_batch_of_several() -> None:
    cached = Cached(200)
    batches = [[[7] * 80 + [document + at] * 40 for at in range(3)] for document in (10, 20, 30)]
    assert [cached.computed(batch) for batch in batches] == [(0, 80), (80, 0), (80, 0)]
    assert cached.computed([[7] * 60 + [8] * 40]) == (60, 0)  # another query, with the same template
    assert cached.computed([[7] * 80 + [1] * 40, [7] * 60 + [8] * 40]) == (60, 0)  # of both requests


def test_the_same_sequence_again_tells_no_prefix() -> None:
    cached = Cached(200)
    assert [cached.computed([[7] * 80 + [1]]) for _ in range(3)] == [(0, 0)] * 3


def test_the_prefix_of_the_longest_unused_is_dropped() -> None:
    cached = Cached(100)
    for number in (1, 2, 1, 3):  # 40 tokens each
        cached.computed([[number] * 40 + [10], [number] * 40 + [11]])
    assert [cached.computed([[number] * 40 + [12]])[0] for number in (1, 2, 3)] == [40, 0, 40]


def test_a_prefix_beyond_the_limit_is_computed_once_in_its_batch_alone() -> None:
    cached = Cached(30)
    batch = [[7] * 40 + [10], [7] * 40 + [11]]
    assert [cached.computed(batch) for _ in range(2)] == [(0, 40), (0, 40)]
    assert cached.cache.num_tokens == 0
    assert [cached.computed([[7] * 40 + [document]]) for document in (12, 13, 14)] == [(0, 0), (0, 30), (30, 0)]


def test_a_prefix_serves_its_tenant_alone() -> None:
    cached, pairs = Cached(200), [[7] * 80 + [10], [7] * 80 + [11]]
    assert [cached.computed(pairs, scope) for scope in (5, 6, 5)] == [(0, 80), (0, 80), (80, 0)]
    assert [cached.computed([[8] * 80 + [scope]], scope) for scope in (5, 6)] == [(0, 0)] * 2  # not even met


def test_sequences_of_several_tenants_share_nothing() -> None:
    cached, pairs = Cached(200), [[7] * 80 + [10], [7] * 80 + [11]]
    assert [cached.computed(pairs, NO_SCOPE) for _ in range(2)] == [(0, 0)] * 2
    assert cached.cache.num_tokens == 0
