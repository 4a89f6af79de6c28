"""The collectors of scores, sparse vectors and vectors of tokens: what they keep of rows, whole or in parts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from tests.support.cards import CLASSIFIER, DENSE, HYBRID, LEXICAL, MULTI_VECTOR, SPARSE, TOKEN_CLASSIFIER
from vecd.gateway.encoding.fragments import Encoder, JsonRows
from vecd.gateway.encoding.hybrid import HybridRows
from vecd.gateway.encoding.scores import ScoreRows
from vecd.gateway.encoding.sparse import SparseRows
from vecd.gateway.encoding.token_rows import TokenRows
from vecd.gateway.types.request import Collector, EmbedRequest, Role, SparseOptions, Tokenizing
from vecd.shm.card import ModelCard
from vecd.shm.output import Output

IDS = [np.array([0, 5, 7, 9, 5, 2], dtype=np.int32), np.array([0, 7, 2], dtype=np.int32)]

weights_strategy = arrays(
    np.float32, st.integers(1, 12), elements=st.one_of(st.just(0.0), st.floats(0, 2, width=32).map(abs))
)


def collector_of(
    card: ModelCard, output: Output, token_ids: Sequence[NDArray[np.int32]] = (), num_inputs: int = 2, **fields: Any
) -> Collector:
    request = EmbedRequest(["text"] * num_inputs, output=output, **fields)
    [collector] = Encoder(card).make_collectors(request, token_ids)
    return collector


def rows_of(num_rows: int, width: int) -> NDArray[np.float32]:
    return np.random.default_rng(num_rows * width).standard_normal((num_rows, width)).astype(np.float32)


def put_in_parts(collector: Collector, index: int, rows: NDArray[np.float32], *ends: int, start: int = 0) -> None:
    """The rows from `start` on, each part in memory that is written over afterwards, as a slot is."""
    for end in (*ends, len(rows)):
        borrowed = rows[start:end].copy()
        collector.put_tokens(index, borrowed, len(rows) - end)
        borrowed[:] = np.nan
        start = end


def test_scores_are_kept_in_the_order_of_inputs() -> None:
    collector = collector_of(CLASSIFIER, Output.SCORES, num_inputs=4)
    assert isinstance(collector, ScoreRows)
    rows = rows_of(4, 3)
    for start, end in ((2, 4), (0, 1), (1, 2)):
        borrowed = rows[start:end].copy()
        collector.put(start, borrowed)
        borrowed[:] = np.nan
    assert collector.logits.dtype == np.float32
    assert np.array_equal(collector.logits, rows)


@pytest.mark.parametrize("ends", [(), (2,), (2, 3, 4, 5)])
def test_scores_of_tokens_are_all_kept(ends: tuple[int, ...]) -> None:
    """Those of one input come while those of another have come in part."""
    collector = collector_of(TOKEN_CLASSIFIER, Output.TOKEN_SCORES, IDS)
    assert isinstance(collector, TokenRows)
    first, second = rows_of(6, 3), rows_of(3, 3)
    collector.put_tokens(0, first[:1].copy(), 5)
    put_in_parts(collector, 1, second)
    put_in_parts(collector, 0, first, *ends, start=1)
    assert [len(matrix) for matrix in collector.matrices] == [6, 3]
    assert np.array_equal(collector.matrices[0], first)
    assert np.array_equal(collector.matrices[1], second)


@pytest.mark.parametrize("ends", [(), (1,), (2, 5)])
@pytest.mark.parametrize(
    ("role", "drops_first", "kept"),
    [
        (Role.DOCUMENT, False, [0, 2, 5]),
        (None, True, [2, 5]),
        (Role.QUERY, False, [0, 1, 2, 3, 4, 5]),
        (Role.QUERY, True, [1, 2, 3, 4, 5]),
    ],
)
def test_ignored_tokens_of_documents_have_no_vector(
    ends: tuple[int, ...], role: Role | None, drops_first: bool, kept: list[int]
) -> None:
    assert MULTI_VECTOR.tokens is not None
    card = replace(MULTI_VECTOR, tokens=replace(MULTI_VECTOR.tokens, drops_first=drops_first))
    token_ids: list[NDArray[np.int32]] = []
    collector = collector_of(card, Output.TOKEN_VECTORS, token_ids, tokenizing=Tokenizing(role=role))
    assert isinstance(collector, TokenRows)
    token_ids += IDS  # they are known when the collector has been made
    rows = rows_of(6, 4)
    put_in_parts(collector, 0, rows, *ends)
    assert np.array_equal(collector.matrices[0], rows[kept])
    assert collector.matrices[1].shape == (0, 4)


def test_queries_before_documents_keep_all_of_their_tokens() -> None:
    """As a request has them that ranks by MaxSim."""
    how = Tokenizing(role=Role.DOCUMENT, num_queries=1)
    collector = collector_of(MULTI_VECTOR, Output.TOKEN_VECTORS, [IDS[0], IDS[0]], tokenizing=how)
    assert isinstance(collector, TokenRows)
    rows = rows_of(6, 4)
    for index in (0, 1):
        put_in_parts(collector, index, rows)
    assert np.array_equal(collector.matrices[0], rows)
    assert np.array_equal(collector.matrices[1], rows[[0, 2, 5]])


def test_a_sparse_vector_has_the_weights_above_0_and_their_indices() -> None:
    collector = collector_of(SPARSE, Output.SPARSE, num_inputs=3)
    assert isinstance(collector, SparseRows)
    rows = np.zeros((3, 2500), dtype=np.float32)
    rows[0, [3, 2499, 0]] = [0.5, 2, 0.25]
    rows[2, 7] = 1
    collector.put(0, rows)
    rows[:] = np.nan
    indices, weights = collector.vectors[0]
    assert (indices.dtype, weights.dtype) == (np.dtype(np.int32), np.dtype(np.float32))
    assert (indices.tolist(), weights.tolist()) == ([0, 3, 2499], [0.25, 0.5, 2])
    assert [index.tolist() for index, _ in collector.vectors] == [[0, 3, 2499], [], [7]]


@settings(deadline=None)
@given(weights_strategy, st.one_of(st.none(), st.integers(1, 14)), st.sampled_from([0.0, 0.25, 1.5]))
def test_top_k_and_min_weight_leave_the_largest(
    weights: NDArray[np.float32], top_k: int | None, min_weight: float
) -> None:
    collector = SparseRows(1, SparseOptions(top_k, min_weight))
    collector.put(0, weights[None])
    kept = sorted((-weight, index) for index, weight in enumerate(weights.tolist()) if weight > min_weight)[:top_k]
    indices, values = collector.vectors[0]
    assert indices.tolist() == sorted(index for _, index in kept)
    assert values.tolist() == [weights[index] for index in indices]


@settings(deadline=None)
@given(weights_strategy, st.data())
def test_of_equal_tokens_the_largest_weight_counts(weights: NDArray[np.float32], data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 6), min_size=weights.size, max_size=weights.size))
    top_k = data.draw(st.one_of(st.none(), st.integers(1, 3)))
    end = data.draw(st.integers(1, weights.size))
    token_ids = [np.array(ids, dtype=np.int32)]
    collector = collector_of(LEXICAL, Output.LEXICAL, token_ids, num_inputs=1, sparse=SparseOptions(top_k))
    assert isinstance(collector, SparseRows)
    put_in_parts(collector, 0, weights[:, None], *([end] if end < weights.size else []))
    largest: dict[int, float] = {}
    for token_id, weight in zip(ids, weights.tolist(), strict=True):
        if weight > 0 and token_id not in (0, 2):
            largest[token_id] = max(weight, largest.get(token_id, 0))
    kept = sorted(largest, key=lambda token_id: (-largest[token_id], token_id))[:top_k]
    indices, values = collector.vectors[0]
    assert (indices.dtype, values.dtype) == (np.dtype(np.int32), np.dtype(np.float32))
    assert dict(zip(indices.tolist(), values.tolist(), strict=True)) == {each: largest[each] for each in kept}
    assert indices.tolist() == sorted(kept)


@pytest.mark.parametrize("ends", [(), (1,), (3, 4)])
def test_a_hybrid_row_is_taken_apart(ends: tuple[int, ...]) -> None:
    collector = collector_of(HYBRID, Output.HYBRID, IDS)
    assert isinstance(collector, HybridRows)
    rows = rows_of(6, 7)
    rows[:, -1] = [9, 0.5, 0.25, 0, 0.75, 9]
    other = rows_of(3, 7)
    other[:, -1] = [9, 1, 9]
    put_in_parts(collector, 0, rows, *ends)
    put_in_parts(collector, 1, other)
    assert np.array_equal(collector.dense, [rows[0, :6], other[0, :6]])
    vectors = [(indices.tolist(), weights.tolist()) for indices, weights in collector.sparse.vectors]
    assert vectors == [([5, 7], [0.75, 0.25]), ([7], [1])], "special tokens have none"
    assert np.array_equal(collector.tokens.matrices[0], rows[1:, :6]), "the first row is the model's vector"
    assert np.array_equal(collector.tokens.matrices[1], other[1:, :6])
    assert all(matrix.flags.c_contiguous for matrix in collector.tokens.matrices)


def test_vectors_are_collected_as_before() -> None:
    collector = collector_of(DENSE, Output.VECTORS)
    assert isinstance(collector, JsonRows)
