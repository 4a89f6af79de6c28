"""The makes of all outputs but plain vectors: what they keep of rows, whole or in parts and in any order."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from tests.support.cards import CLASSIFIER, DENSE, HYBRID, LEXICAL, MULTI_VECTOR, SPARSE, TOKEN_CLASSIFIER
from vecd.gateway.encoding import streams
from vecd.gateway.encoding.forms import Matrix, normalize
from vecd.gateway.encoding.result import Encoder
from vecd.gateway.encoding.sparse import SparseRows
from vecd.gateway.encoding.streams import LateChunkRows, MaxSimRows
from vecd.gateway.request import (
    Dtype,
    EmbedRequest,
    Encoding,
    Form,
    LateChunking,
    Make,
    Role,
    SparseOptions,
    Tokenizing,
)
from vecd.gateway.tokenization.late_chunks import LateChunks
from vecd.model.card import ModelCard
from vecd.model.steps import Step
from vecd.shm.output import Output

IDS = [np.array([0, 5, 7, 9, 5, 2], dtype=np.int32), np.array([0, 7, 2], dtype=np.int32)]

weights_strategy = arrays(
    np.float32, st.integers(1, 12), elements=st.one_of(st.just(0.0), st.floats(0, 2, width=32).map(abs))
)


def make_of(
    card: ModelCard, output: Output, token_ids: Sequence[NDArray[np.int32]] = (), num_inputs: int = 2, **fields: Any
) -> Make:
    request = EmbedRequest(["text"] * num_inputs, output=output, **fields)
    [make] = Encoder(card).makes(request, token_ids if isinstance(token_ids, list) else [])
    return make


def rows_of(num_rows: int, width: int) -> NDArray[np.float32]:
    return np.random.default_rng(num_rows * width).standard_normal((num_rows, width)).astype(np.float32)


def put(make: Make, index: int, rows: NDArray[np.float32], num_left: int) -> None:
    """In memory that is written over afterwards, as a slot is."""
    borrowed = rows.copy()
    make.put(index, borrowed, num_left)
    borrowed[:] = np.nan


def put_in_parts(make: Make, index: int, rows: NDArray[np.float32], *ends: int, start: int = 0) -> None:
    for end in (*ends, len(rows)):
        put(make, index, rows[start:end], len(rows) - end)
        start = end


def test_scores_are_kept_in_the_order_of_inputs() -> None:
    make = make_of(CLASSIFIER, Output.SCORES, num_inputs=4)
    assert isinstance(make, Matrix)
    rows = rows_of(4, 3)
    for start, end in ((2, 4), (0, 1), (1, 2)):
        borrowed = rows[start:end].copy()
        make.put(start, borrowed, 0)
        borrowed[:] = np.nan
    assert make.rows.dtype == np.float32
    assert np.array_equal(make.rows, rows)


@pytest.mark.parametrize("ends", [(), (2,), (2, 3, 4, 5)])
def test_scores_of_tokens_are_all_kept(ends: tuple[int, ...]) -> None:
    """Those of one input come while those of another have come in part."""
    make = make_of(TOKEN_CLASSIFIER, Output.TOKEN_SCORES, IDS)
    first, second = rows_of(6, 3), rows_of(3, 3)
    make.put(0, first[:1].copy(), 5)
    put_in_parts(make, 1, second)
    put_in_parts(make, 0, first, *ends, start=1)
    assert [len(matrix) for matrix in make.made] == [6, 3]
    assert np.array_equal(make.made[0], first)
    assert np.array_equal(make.made[1], second)


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
    make = make_of(card, Output.TOKEN_VECTORS, token_ids, tokenizing=Tokenizing(role=role))
    token_ids += IDS  # they are known when the make has been made
    rows = rows_of(6, 4)
    put_in_parts(make, 0, rows, *ends)
    assert np.array_equal(make.made[0], rows[kept])
    assert make.made[1].shape == (0, 4)


def test_queries_before_documents_keep_all_of_their_tokens() -> None:
    """As a request has them that ranks by MaxSim."""
    how = Tokenizing(role=Role.DOCUMENT, num_queries=1)
    make = make_of(MULTI_VECTOR, Output.TOKEN_VECTORS, [IDS[0], IDS[0]], tokenizing=how)
    rows = rows_of(6, 4)
    for index in (0, 1):
        put_in_parts(make, index, rows)
    assert np.array_equal(make.made[0], rows)
    assert np.array_equal(make.made[1], rows[[0, 2, 5]])


def test_a_sparse_vector_has_the_weights_above_0_and_their_indices() -> None:
    make = make_of(SPARSE, Output.SPARSE, num_inputs=3)
    rows = np.zeros((3, 2500), dtype=np.float32)
    rows[0, [3, 2499, 0]] = [0.5, 2, 0.25]
    rows[2, 7] = 1
    make.put(0, rows, 0)
    rows[:] = np.nan
    indices, weights = make.made[0]
    assert (indices.dtype, weights.dtype) == (np.dtype(np.int32), np.dtype(np.float32))
    assert (indices.tolist(), weights.tolist()) == ([0, 3, 2499], [0.25, 0.5, 2])
    assert [index.tolist() for index, _ in make.made] == [[0, 3, 2499], [], [7]]


@given(weights_strategy, st.one_of(st.none(), st.integers(1, 14)), st.sampled_from([0.0, 0.25, 1.5]))
def test_top_k_and_min_weight_leave_the_largest(
    weights: NDArray[np.float32], top_k: int | None, min_weight: float
) -> None:
    make = SparseRows(1, SparseOptions(top_k, min_weight))
    make.put(0, weights[None], 0)
    kept = sorted((-weight, index) for index, weight in enumerate(weights.tolist()) if weight > min_weight)[:top_k]
    indices, values = make.made[0]
    assert indices.tolist() == sorted(index for _, index in kept)
    assert values.tolist() == [weights[index] for index in indices]


@given(weights_strategy, st.data())
def test_of_equal_tokens_the_largest_weight_counts(weights: NDArray[np.float32], data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 6), min_size=weights.size, max_size=weights.size))
    top_k = data.draw(st.one_of(st.none(), st.integers(1, 3)))
    end = data.draw(st.integers(1, weights.size))
    token_ids = [np.array(ids, dtype=np.int32)]
    make = make_of(LEXICAL, Output.LEXICAL, token_ids, num_inputs=1, sparse=SparseOptions(top_k))
    put_in_parts(make, 0, weights[:, None], *([end] if end < weights.size else []))
    largest: dict[int, float] = {}
    for token_id, weight in zip(ids, weights.tolist(), strict=True):
        if weight > 0 and token_id not in (0, 2):
            largest[token_id] = max(weight, largest.get(token_id, 0))
    kept = sorted(largest, key=lambda token_id: (-largest[token_id], token_id))[:top_k]
    indices, values = make.made[0]
    assert (indices.dtype, values.dtype) == (np.dtype(np.int32), np.dtype(np.float32))
    assert dict(zip(indices.tolist(), values.tolist(), strict=True)) == {each: largest[each] for each in kept}
    assert indices.tolist() == sorted(kept)


@pytest.mark.parametrize("ends", [(), (1,), (3, 4)])
def test_a_hybrid_row_is_taken_apart(ends: tuple[int, ...]) -> None:
    assert HYBRID.tokens is not None
    card = replace(HYBRID, tokens=replace(HYBRID.tokens, drops_first=False))  # the first row is dropped all the same
    make = make_of(card, Output.HYBRID, IDS)
    rows = rows_of(6, 7)
    rows[:, -1] = [9, 0.5, 0.25, 0, 0.75, 9]
    other = rows_of(3, 7)
    other[:, -1] = [9, 1, 9]
    put_in_parts(make, 0, rows, *ends)
    put_in_parts(make, 1, other)
    assert np.array_equal(make.made.dense, [rows[0, :6], other[0, :6]])
    vectors = [(indices.tolist(), weights.tolist()) for indices, weights in make.made.sparse]
    assert vectors == [([5, 7], [0.75, 0.25]), ([7], [1])], "special tokens have none"
    assert np.array_equal(make.made.tokens[0], rows[1:, :6]), "the first row is the model's vector"
    assert np.array_equal(make.made.tokens[1], other[1:, :6])
    assert all(matrix.flags.c_contiguous for matrix in make.made.tokens)


# --- vectors of late chunks: the means of their rows, without those of a prompt ----------------------------------

NORMALIZED = replace(DENSE, steps=(Step("normalize"),))
WIDTH = DENSE.hidden_size
PLAIN = Form()


def chunks_with(rows: list[tuple[int, int]], num_rows: int, prompt: tuple[int, int] = (0, 0)) -> LateChunks:
    array = np.array(rows, np.int32)
    return LateChunks(array, array, prompt, num_rows, np.zeros(len(rows), np.bool_))


def late_make_of(card: ModelCard, chunks: list[LateChunks], form: Form = PLAIN, **fields: Any) -> LateChunkRows:
    request = EmbedRequest(["text"] * len(chunks), (form,), late=LateChunking(max_tokens=1), **fields)
    tokenizer: Any = object()
    [make] = Encoder(card, tokenizer=tokenizer).makes(request, [])
    assert isinstance(make, LateChunkRows)
    make.chunks += chunks
    return make


def vectors_of(make: LateChunkRows, index: int = 0) -> list[Any]:
    return [None if part is None else orjson.loads(part) for part in make.fragments(index)]


@given(st.data(), st.integers(1, 30))
def test_a_vector_is_the_mean_of_its_rows(data: st.DataObject, num_rows: int) -> None:
    begin = data.draw(st.integers(0, num_rows - 1))
    stop = data.draw(st.integers(begin, num_rows - 1))
    starts = st.one_of(st.just(0), st.integers(stop, num_rows - 1))
    drawn = data.draw(
        st.lists(starts.flatmap(lambda s: st.tuples(st.just(s), st.integers(max(s, stop) + 1, num_rows))))
    )
    chunks = [*drawn, (0, num_rows)]
    rows = rows_of(num_rows, WIDTH)
    make = late_make_of(DENSE, [chunks_with(chunks, num_rows, (begin, stop))])
    ends = data.draw(st.sets(st.integers(1, num_rows - 1)) if num_rows > 1 else st.just(set()))
    put_in_parts(make, 0, rows, *sorted(ends))
    is_kept = np.ones(num_rows, np.bool_)
    is_kept[begin:stop] = False
    for (start, end), vector in zip(chunks, vectors_of(make), strict=True):
        expected = rows[start:end][is_kept[start:end]].astype(np.float64).mean(axis=0)
        assert np.abs(np.array(vector) - expected).max() < 1e-6


def test_inputs_come_in_any_order_and_one_sum_is_kept_of_a_chunk() -> None:
    chunks = [chunks_with([(0, 50), (50, 100)], 100), chunks_with([(0, 2)], 2)]
    make = late_make_of(DENSE, chunks)
    first, second = rows_of(100, WIDTH), rows_of(2, WIDTH)
    make.put(0, first[:60], 40)
    put_in_parts(make, 1, second)
    make.put(0, first[60:], 0)
    assert np.allclose(vectors_of(make, 0), [first[:50].mean(0), first[50:].mean(0)], atol=1e-6)
    assert np.allclose(vectors_of(make, 1), [second.mean(0)], atol=1e-6)
    assert make.sums[0].sums.shape == (2, WIDTH)


def test_what_was_cut_off_has_no_vector() -> None:
    make = late_make_of(DENSE, [chunks_with([(0, 0), (0, 3), (0, 0)], 3)])
    put_in_parts(make, 0, rows_of(3, WIDTH))
    first, second, third = vectors_of(make)
    assert (first, third) == (None, None)
    assert np.allclose(second, rows_of(3, WIDTH).mean(0), atol=1e-6)
    nothing = late_make_of(DENSE, [chunks_with([(0, 0)], 3)])
    put_in_parts(nothing, 0, rows_of(3, WIDTH))
    assert vectors_of(nothing) == [None]


@pytest.mark.parametrize(
    ("card", "fields", "num", "length"),
    [
        (NORMALIZED, {}, WIDTH, 1),
        (NORMALIZED, {"output": Output.UNNORMALIZED}, WIDTH, None),
        (DENSE, {}, WIDTH, None),
        (DENSE, {"normalize": True}, WIDTH, 1),
        (NORMALIZED, {"dimensions": 4}, 4, 1),
    ],
)
def test_length_and_dimensions_are_those_of_vectors(card: ModelCard, fields: Any, num: int, length: int | None) -> None:
    rows = rows_of(5, WIDTH)
    make = late_make_of(card, [chunks_with([(0, 5)], 5)], **fields)
    put_in_parts(make, 0, rows)
    expected = rows.mean(0)[:num]
    if length:
        expected = expected / np.linalg.norm(expected)
    assert np.allclose(vectors_of(make), [expected], atol=1e-6)


def test_every_form_is_that_of_vectors() -> None:
    vectors = normalize(rows_of(5, WIDTH).mean(0, dtype=np.float64, keepdims=True).astype(np.float32))
    for form in (Form(Encoding.BASE64), Form(Encoding.BASE64, Dtype.FLOAT16, True), Form(dtype=Dtype.INT8)):
        make = late_make_of(NORMALIZED, [chunks_with([(0, 5)], 5)], form)
        put_in_parts(make, 0, rows_of(5, WIDTH))
        [plain] = Encoder(NORMALIZED).makes(EmbedRequest(["text"], (form,)), [])
        plain.put(0, vectors, 0)
        assert list(make.fragments(0)) == plain.made


# --- MaxSim: as of whole matrices, and rows are not kept ---------------------------------------------------------

IGNORED = 5
"""A token that has no vector in a document, as the card says."""


def max_sim_make_of(
    token_ids: Sequence[NDArray[np.int32]],
    num_queries: int,
    *,
    drops_first: bool = False,
    is_mean: bool = False,
    keep: Callable[[int], None] = lambda num_floats: None,
) -> MaxSimRows:
    assert MULTI_VECTOR.tokens is not None
    tokens = replace(MULTI_VECTOR.tokens, drops_first=drops_first, is_mean=is_mean)
    request = EmbedRequest(
        ["text"] * len(token_ids),
        output=Output.TOKEN_VECTORS,
        tokenizing=Tokenizing(role=Role.DOCUMENT, num_queries=num_queries),
        is_max_sim=True,
    )
    [make] = Encoder(replace(MULTI_VECTOR, tokens=tokens)).makes(request, list(token_ids), keep)
    assert isinstance(make, MaxSimRows)
    return make


def ids_of(*lists: list[int]) -> list[NDArray[np.int32]]:
    return [np.array(ids, dtype=np.int32) for ids in lists]


def expected_score(query: NDArray[np.float32], document: NDArray[np.float32], *, is_mean: bool) -> float:
    if not len(query) or not len(document):
        return 0.0
    greatest = [max(float(np.dot(each, row)) for row in document) for each in query.astype(np.float64)]
    return float(np.mean(greatest)) if is_mean else sum(greatest)


@settings(max_examples=60)
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
    kept_floats: list[int] = []
    make = max_sim_make_of(token_ids, num_queries, drops_first=drops_first, is_mean=is_mean, keep=kept_floats.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "MAX_SHORT_QUERY", most)
        while any(parts):
            of_input = data.draw(st.sampled_from([each for each in parts if each]))
            index, start, end = of_input.pop(0)  # the parts of one input come in order
            put(make, index, rows[index][start:end], len(rows[index]) - end)
            is_between = all(not each or each[0][1] == 0 for each in parts)
            if is_between and not make.num_queries_left and data.draw(st.booleans()):
                make.compare_held()
                assert not make.held
        scores = make.scores()
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
    assert make.scores() is scores, "nothing is counted twice"
    assert kept_floats == [] or len(kept_floats) == 1, "said once, when all queries have come"


def test_rows_of_documents_are_kept_until_their_query_has_come() -> None:
    token_ids = ids_of([1, 1], [1], [1] * 3, [1] * 3)
    rows = [np.full((len(ids), 4), 0.5, dtype=np.float32) for ids in token_ids]
    make = max_sim_make_of(token_ids, 2)
    put(make, 2, rows[2][:2], 1)
    put(make, 0, rows[0], 0)
    assert make.num_floats == 2 * 4 + 2 * 4
    put(make, 2, rows[2][2:], 0)
    put(make, 3, rows[3], 0)
    assert make.num_floats == 2 * 4 + 2 * 4 + 3 * 4, "the other query has not come"
    put(make, 1, rows[1], 0)
    assert make.scores().tolist() == [2.0, 1.0]
    assert make.num_floats == 3 * 4, "of the queries alone"
