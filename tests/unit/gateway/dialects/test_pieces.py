"""Responses with something for each token are written in pieces: how much of one text is looked at between two."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import orjson
import pytest

from tests.support.arrays import COLBERT, NER, SPLADE
from tests.support.asking import PLAIN, ask, changed, embedded_of
from vecd.gateway.api.operation import ParsedEmbed
from vecd.gateway.app.app import render_steps
from vecd.gateway.app.routes import Claim
from vecd.gateway.dialects import openai, tei, vllm
from vecd.gateway.encoding.forms import Matrix, conversion
from vecd.gateway.encoding.labels import AGGREGATIONS, TOKENS_PER_STEP
from vecd.gateway.encoding.result import encode_base64, encode_float, matrix_pieces
from vecd.gateway.request import Dtype, EmbedRequest, Encoding, FloatRows, Form, Response
from vecd.gateway.tokenization.fair_pool import Threads
from vecd.gateway.tokenization.tokenizer import TokenVocabulary

PREDICT, SPARSE = tei.DIALECT.operations["POST /predict"], tei.DIALECT.operations["POST /embed_sparse"]
CLASSIFY, POOLING = vllm.DIALECT.operations["POST /classify"], vllm.DIALECT.operations["POST /pooling"]
EMBEDDINGS = openai.DIALECT.operations["POST /v1/embeddings"]
ZERO_SHOT = openai.DIALECT.operations["POST /v1/classify"]
NUM = 1_000


def pieces_of(asked: ParsedEmbed, made: Any, **changes: Any) -> Iterator[bytes]:
    body = asked.render(embedded_of(made, **changes)).body
    assert not isinstance(body, bytes | list)
    return map(bytes, body)


def seen_vocabulary(seen: list[int]) -> TokenVocabulary:
    """One that notes whose strings are asked for."""

    def text_of(token_id: int) -> str:
        seen.append(token_id)
        return f"t{token_id}"

    return TokenVocabulary(text_of)


def token_rows(width: int) -> list[FloatRows]:
    return [np.random.default_rng(1).normal(size=(NUM, width)).astype(np.float32)]


AT = np.arange(NUM, dtype=np.int32)
TOKENS: dict[str, Any] = {"token_ids": (AT,), "offsets": (np.stack([AT, AT + 1], axis=1),)}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("operation", "field"), [(PREDICT, "inputs"), (CLASSIFY, "input")])
@pytest.mark.parametrize("is_one_span", [False, True])
def test_entities_are_found_so_many_tokens_at_a_time(operation, field, aggregation, is_one_span):
    seen: list[int] = []
    model_info = changed(NER, vocabulary=seen_vocabulary(seen))
    body = {field: "x" * NUM, "aggregation_strategy": aggregation, "ignore_labels": []}
    collected = token_rows(3)
    if is_one_span:
        collected[0][:] = (9, 0, 0)
    asked = ask(operation, body, model_info=model_info)
    assert asked.is_large
    num_scores = num_before = most = 0
    for piece in pieces_of(asked, collected, **TOKENS):
        most, num_before = max(most, len(seen) - num_before), len(seen)
        num_scores += piece.count(b'"score"')
        assert piece.count(b'"score"') <= TOKENS_PER_STEP + 1
    assert (most, len(seen)) == (TOKENS_PER_STEP, NUM)
    if aggregation == "none" or is_one_span:
        assert num_scores == (NUM if aggregation == "none" else 1)


def test_ignored_labels_are_not_looked_through_for_each_token():
    num_compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

    ignored = [Name(index) for index in range(NUM)]
    body = {"inputs": "x" * NUM, "aggregation_strategy": "none", "ignore_labels": ignored}
    pieces = list(pieces_of(ask(PREDICT, body, model_info=NER), token_rows(3), **TOKENS))
    assert b"".join(pieces).count(b'"entity"') == NUM
    assert num_compared < NUM


@pytest.mark.parametrize(
    ("operation", "body", "model_info", "width"),
    [
        (POOLING, {"task": "token_classify"}, NER, 3),
        (POOLING, {"task": "token_classify", "encoding_format": "base64"}, NER, 3),
        (POOLING, {"task": "token_embed", "encoding_format": "base64"}, COLBERT, 2),
        (EMBEDDINGS, {"output": "multi-vector"}, COLBERT, 2),
    ],
)
def test_rows_are_written_so_many_at_a_time(operation, body, model_info, width):
    asked = ask(operation, {"input": "a", **body}, model_info=model_info)
    assert asked.is_large
    pieces = list(pieces_of(asked, token_rows(width)))
    assert max(piece.count(b"[") for piece in pieces) <= TOKENS_PER_STEP + 1
    assert len([piece for piece in pieces if len(piece) > 100]) >= NUM // TOKENS_PER_STEP
    orjson.loads(b"".join(pieces))


@pytest.mark.parametrize("width", [1, 7, 128, 1024, 40_000])
@pytest.mark.parametrize("encoding", [Encoding.FLOAT, Encoding.BASE64])
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT16, Dtype.INT8])
def test_pieces_of_a_matrix_make_what_its_rows_make_together(width, encoding, dtype):
    """And a piece of wide rows has fewer."""
    form = Form(encoding, dtype)
    matrix = np.random.default_rng(1).uniform(-0.1, 0.1, size=(500 if width < 1024 else 12, width)).astype(np.float32)
    rows = matrix
    for convert in conversion(form, width):
        rows = convert(rows)
    if encoding is Encoding.FLOAT:
        whole = b"[" + b",".join(encode_float(rows)) + b"]"
    else:
        [whole] = encode_base64(rows.reshape(1, -1))
    pieces = list(matrix_pieces(matrix, form))
    assert b"".join(pieces) == whole
    most = max(3, min(TOKENS_PER_STEP, 32 * 1024 // width))
    assert len(pieces) - 1 >= len(matrix) / most


def test_weights_of_a_sparse_vector_are_written_so_many_at_a_time():
    seen: list[int] = []
    model_info = changed(SPLADE, vocab_size=NUM, vocabulary=seen_vocabulary(seen))
    vectors = [(AT, np.arange(1, NUM + 1, dtype=np.float32))]
    for operation, body in (
        (SPARSE, {"inputs": "a"}),
        (EMBEDDINGS, {"input": "a", "output": "sparse", "return_tokens": True}),
        (EMBEDDINGS, {"input": "a", "output": "sparse", "sparse_format": "map"}),
    ):
        num_before = len(seen)
        for piece in pieces_of(ask(operation, body, model_info=model_info), vectors):
            assert piece.count(b",") <= 2 * TOKENS_PER_STEP
            assert len(seen) - num_before <= TOKENS_PER_STEP
            num_before = len(seen)
    large = ask(SPARSE, {"inputs": "a" * 5_000}, model_info=changed(model_info, max_tokens=8192))
    assert large.is_large, "a long text may have as many weights as characters"


def test_labels_of_zero_shot_are_written_so_many_at_a_time():
    names = [f"n{index}" for index in range(NUM)]
    asked = ask(ZERO_SHOT, {"input": ["a", "b"], "labels": names}, model_info=changed(PLAIN, max_inputs=2 * NUM))
    matrix = Matrix(NUM + 2, 2)
    matrix.put(0, np.random.default_rng(1).normal(size=(NUM + 2, 2)).astype(np.float32), 0)
    pieces = list(pieces_of(asked, matrix))
    assert max(piece.count(b'"label"') for piece in pieces) == TOKENS_PER_STEP
    first, second = orjson.loads(b"".join(pieces))["data"]
    assert [item["label"] for item in second["predictions"]] == names
    assert first["score"] == max(item["score"] for item in first["predictions"])


async def test_whoever_tokenizes_waits_for_one_step_of_large_responses():
    """Not for the whole of two that began before."""
    threads, seen = Threads(1, turn_s=0.0), list[str]()  # a turn is one step

    def render(name: str, embedded: Any) -> Response:
        def pieces() -> Iterator[bytes]:
            for _ in range(NUM):
                seen.append(name)
                yield b"1"

        return Response(200, pieces())

    def respond(name: str) -> "asyncio.Task[Response]":
        work = ParsedEmbed(EmbedRequest(["a"]), partial(render, name), is_large=True)
        steps = render_steps(work, Claim(tei.DIALECT, SPARSE), PLAIN, embedded_of())
        return asyncio.ensure_future(threads.run(steps, "a"))

    responses = [respond("first"), respond("second")]
    try:
        await asyncio.sleep(0)
        await threads.call(lambda: seen.append("tokens"), "b")
        assert seen.index("tokens") <= 4
        for response in await asyncio.gather(*responses):
            assert response.body == [b"1"] * NUM
    finally:
        threads.close()
