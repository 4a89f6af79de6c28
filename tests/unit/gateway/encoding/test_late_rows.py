"""Vectors of late chunks: the means of their rows, in whatever parts these come, without those of a prompt."""

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.cards import DENSE
from vecd.gateway.encoding.fragments import Encoder
from vecd.gateway.encoding.late_rows import LateChunkRows
from vecd.gateway.encoding.quantization import normalize
from vecd.gateway.tokenization.late_chunks import LateChunks
from vecd.gateway.types.errors import BadRequest
from vecd.gateway.types.request import Dtype, EmbedRequest, Encoding, Form, LateChunking
from vecd.shm.card import ModelCard
from vecd.shm.heads import Step
from vecd.shm.output import Output

NORMALIZED = replace(DENSE, steps=(Step("normalize"),))
WIDTH = DENSE.hidden_size
PLAIN = Form()


def chunks_with(rows: list[tuple[int, int]], num_rows: int, prompt: tuple[int, int] = (0, 0)) -> LateChunks:
    array = np.array(rows, np.int32)
    return LateChunks(array, array, prompt, num_rows, np.zeros(len(rows), np.bool_))


def collector_of(card: ModelCard, chunks: list[LateChunks], form: Form = PLAIN, **fields: Any) -> LateChunkRows:
    request = EmbedRequest(["text"] * len(chunks), (form,), late=LateChunking(max_tokens=1), **fields)
    [collector] = Encoder(card).make_collectors(request, (), chunks)
    assert isinstance(collector, LateChunkRows)
    return collector


def rows_of(num_rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(num_rows).standard_normal((num_rows, WIDTH)).astype(np.float32)


def put(collector: LateChunkRows, index: int, rows: NDArray[np.float32], ends: list[int]) -> None:
    """Each part in memory that is written over afterwards, as a slot is."""
    start = 0
    for end in (*ends, len(rows)):
        borrowed = rows[start:end].copy()
        collector.put_tokens(index, borrowed, len(rows) - end)
        borrowed[:] = np.nan
        start = end


def vectors_of(collector: LateChunkRows, index: int = 0) -> list[Any]:
    return [None if part is None else orjson.loads(part) for part in collector.fragments(index)]


@settings(deadline=None)
@given(st.data(), st.integers(1, 30))
def test_a_vector_is_the_mean_of_its_rows(data: st.DataObject, num_rows: int) -> None:
    begin = data.draw(st.integers(0, num_rows - 1))
    stop = data.draw(st.integers(begin, num_rows - 1))
    starts = st.one_of(st.just(0), st.integers(stop, num_rows - 1))
    drawn = data.draw(
        st.lists(starts.flatmap(lambda s: st.tuples(st.just(s), st.integers(max(s, stop) + 1, num_rows))))
    )
    chunks = [*drawn, (0, num_rows)]
    rows = rows_of(num_rows)
    collector = collector_of(DENSE, [chunks_with(chunks, num_rows, (begin, stop))])
    ends = data.draw(st.sets(st.integers(1, num_rows - 1)) if num_rows > 1 else st.just(set()))
    put(collector, 0, rows, sorted(ends))
    is_kept = np.ones(num_rows, np.bool_)
    is_kept[begin:stop] = False
    for (start, end), vector in zip(chunks, vectors_of(collector), strict=True):
        expected = rows[start:end][is_kept[start:end]].astype(np.float64).mean(axis=0)
        assert np.abs(np.array(vector) - expected).max() < 1e-6


def test_inputs_come_in_any_order_and_one_sum_is_kept_of_a_chunk() -> None:
    chunks = [chunks_with([(0, 50), (50, 100)], 100), chunks_with([(0, 2)], 2)]
    collector = collector_of(DENSE, chunks)
    first, second = rows_of(100), rows_of(2)
    collector.put_tokens(0, first[:60], 40)
    put(collector, 1, second, [])
    collector.put_tokens(0, first[60:], 0)
    assert np.allclose(vectors_of(collector, 0), [first[:50].mean(0), first[50:].mean(0)], atol=1e-6)
    assert np.allclose(vectors_of(collector, 1), [second.mean(0)], atol=1e-6)
    assert collector._sums[0].sums.shape == (2, WIDTH)
    with pytest.raises(ValueError, match="put_tokens"):
        collector.put(0, first)


def test_what_was_cut_off_has_no_vector() -> None:
    collector = collector_of(DENSE, [chunks_with([(0, 0), (0, 3), (0, 0)], 3)])
    put(collector, 0, rows_of(3), [])
    first, second, third = vectors_of(collector)
    assert (first, third) == (None, None)
    assert np.allclose(second, rows_of(3).mean(0), atol=1e-6)
    nothing = collector_of(DENSE, [chunks_with([(0, 0)], 3)])
    put(nothing, 0, rows_of(3), [])
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
    rows = rows_of(5)
    collector = collector_of(card, [chunks_with([(0, 5)], 5)], **fields)
    put(collector, 0, rows, [])
    expected = rows.mean(0)[:num]
    if length:
        expected = expected / np.linalg.norm(expected)
    assert np.allclose(vectors_of(collector), [expected], atol=1e-6)


def test_every_form_is_that_of_vectors() -> None:
    vectors = normalize(rows_of(5).mean(0, dtype=np.float64, keepdims=True).astype(np.float32))
    for form in (Form(Encoding.BASE64), Form(Encoding.BASE64, Dtype.FLOAT16, True), Form(dtype=Dtype.INT8)):
        collector = collector_of(NORMALIZED, [chunks_with([(0, 5)], 5)], form)
        put(collector, 0, rows_of(5), [])
        [plain] = Encoder(NORMALIZED).make_collectors(EmbedRequest(["text"], (form,)))
        plain.put(0, vectors)
        assert list(collector.fragments(0)) == plain.fragments  # type: ignore[attr-defined]


def test_a_vector_that_does_not_fit_is_refused() -> None:
    collector = collector_of(DENSE, [chunks_with([(0, 1)], 1)], Form(dtype=Dtype.FLOAT16))
    put(collector, 0, np.full((1, WIDTH), 1e6, np.float32), [])
    with pytest.raises(BadRequest):
        list(collector.fragments(0))
