"""MaxSim of rows that come in parts and in any order is that of whole matrices, and rows are not kept."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.cards import MULTI_VECTOR
from vecd.gateway.encoding import max_sim
from vecd.gateway.encoding.fragments import Encoder
from vecd.gateway.encoding.max_sim import MaxSimRows
from vecd.gateway.types.request import EmbedRequest, Role, Tokenizing
from vecd.shm.output import Output

Rows = NDArray[np.float32]
IGNORED = 5
"""A token that has no vector in a document, as the card says."""


def collector_of(
    token_ids: Sequence[NDArray[np.int32]], num_queries: int, *, drops_first: bool = False, is_mean: bool = False
) -> MaxSimRows:
    assert MULTI_VECTOR.tokens is not None
    tokens = replace(MULTI_VECTOR.tokens, drops_first=drops_first, is_mean=is_mean)
    request = EmbedRequest(
        ["text"] * len(token_ids),
        output=Output.TOKEN_VECTORS,
        tokenizing=Tokenizing(role=Role.DOCUMENT, num_queries=num_queries),
        is_max_sim=True,
    )
    [collector] = Encoder(replace(MULTI_VECTOR, tokens=tokens)).make_collectors(request, token_ids)
    assert isinstance(collector, MaxSimRows)
    return collector


def put(collector: MaxSimRows, index: int, rows: Rows, num_left: int) -> None:
    """In memory that is written over afterwards, as a slot is."""
    borrowed = rows.copy()
    collector.put_tokens(index, borrowed, num_left)
    borrowed[:] = np.nan


def ids_of(*lists: list[int]) -> list[NDArray[np.int32]]:
    return [np.array(ids, dtype=np.int32) for ids in lists]


def expected_score(query: Rows, document: Rows, *, is_mean: bool) -> float:
    if not len(query) or not len(document):
        return 0.0
    greatest = [max(float(np.dot(each, row)) for row in document) for each in query.astype(np.float64)]
    return float(np.mean(greatest)) if is_mean else sum(greatest)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.booleans(), st.booleans(), st.sampled_from([1, 3, 512]))
def test_rows_in_any_order_and_any_parts_have_the_scores_of_whole_matrices(
    data: st.DataObject, is_mean: bool, drops_first: bool, most: int
) -> None:
    """One query for all or one for each; `most` tokens in a query that is compared at once."""
    num_documents = data.draw(st.integers(1, 4))
    num_queries = data.draw(st.sampled_from([1, num_documents]))
    ids = st.lists(st.sampled_from([1, 2, IGNORED]), min_size=1, max_size=6)
    token_ids = ids_of(*[data.draw(ids) for _ in range(num_queries + num_documents)])
    matrices = [np.random.default_rng(index).standard_normal((len(each), 4)) for index, each in enumerate(token_ids)]
    rows = [matrix.astype(np.float32) for matrix in matrices]
    parts: list[list[tuple[int, int, int]]] = []
    for index, matrix in enumerate(rows):
        cuts = sorted({0, len(matrix), *data.draw(st.lists(st.integers(0, len(matrix)), max_size=3))})
        parts.append([(index, start, end) for start, end in pairwise(cuts)])
    collector = collector_of(token_ids, num_queries, drops_first=drops_first, is_mean=is_mean)
    collector.on_come = lambda: come.append(collector.num_queries_left)
    come: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(max_sim, "MAX_SHORT_QUERY", most)
        while any(parts):
            of_input = data.draw(st.sampled_from([each for each in parts if each]))
            index, start, end = of_input.pop(0)  # the parts of one input come in order
            put(collector, index, rows[index][start:end], len(rows[index]) - end)
            is_between = all(not each or each[0][1] == 0 for each in parts)
            if is_between and not collector.num_queries_left and data.draw(st.booleans()):
                collector.compare_held()
                assert not collector._held
        scores = collector.scores()
    kept = [
        matrix[(ids != IGNORED if index >= num_queries else ids >= 0) & (np.arange(len(ids)) >= drops_first)]
        for index, (ids, matrix) in enumerate(zip(token_ids, rows, strict=True))
    ]
    queries = kept[:num_queries] if num_queries > 1 else kept[:1] * num_documents
    expected = [
        expected_score(query, document, is_mean=is_mean)
        for query, document in zip(queries, kept[num_queries:], strict=True)
    ]
    assert scores.dtype == np.float64
    assert scores.tolist() == pytest.approx(expected, abs=1e-6, rel=1e-6)
    assert collector.scores() is scores, "nothing is counted twice"
    assert len(come) == collector.num_come == num_queries + num_documents
    assert (come[-1], come) == (0, sorted(come, reverse=True))


def test_rows_of_documents_are_kept_until_their_query_has_come() -> None:
    token_ids = ids_of([1, 1], [1], [1] * 3, [1] * 3)
    rows = [np.full((len(ids), 4), 0.5, dtype=np.float32) for ids in token_ids]
    collector = collector_of(token_ids, 2)
    put(collector, 2, rows[2][:2], 1)
    put(collector, 0, rows[0], 0)
    assert collector.num_floats == 2 * 4 + 2 * 4
    put(collector, 2, rows[2][2:], 0)
    put(collector, 3, rows[3], 0)
    assert collector.num_floats == 2 * 4 + 2 * 4 + 3 * 4, "the other query has not come"
    put(collector, 1, rows[1], 0)
    assert collector.scores().tolist() == [2.0, 1.0]
    assert collector.num_floats == 3 * 4, "of the queries alone"


def test_documents_behind_a_short_query_leave_nothing() -> None:
    token_ids = ids_of([1], *[[1] * 9] * 50)
    collector = collector_of(token_ids, 1)
    row = np.ones((1, 4), dtype=np.float32)
    put(collector, 0, row, 0)
    for index in range(1, 51):
        put(collector, index, np.tile(row, (4, 1)), 5)
        put(collector, index, np.tile(row, (5, 1)), 0)
        assert collector.num_floats == 4
    assert collector.scores().tolist() == [4.0] * 50


def test_no_row_is_one_of_an_input() -> None:
    with pytest.raises(ValueError, match="put_tokens"):
        collector_of(ids_of([1], [1]), 1).put(0, np.zeros((1, 4), dtype=np.float32))
