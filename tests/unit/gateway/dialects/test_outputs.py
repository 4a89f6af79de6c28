"""Routes that give sparse vectors, vectors of tokens, or several kinds at once."""

import base64
import struct
from typing import Any

import numpy as np
import pytest

from tests.support.arrays import COLBERT, M3, SPLADE, render, rendered, rows
from tests.support.asking import PLAIN, ask, changed, refusal
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects import openai, tei, vllm
from vecd.gateway.encoding.sparse import SparseVector
from vecd.gateway.encoding.streams import Hybrid
from vecd.gateway.errors import BadRequest, WrongModel
from vecd.gateway.request import EmbedRequest, FloatRows, Role
from vecd.shm.output import Output

EMBEDDINGS = openai.DIALECT.operations["POST /v1/embeddings"]
MULTI_VECTOR = openai.DIALECT.operations["POST /v1/multi-vector"]
EMBED_SPARSE = tei.DIALECT.operations["POST /embed_sparse"]
POOLING = vllm.DIALECT.operations["POST /pooling"]


def sparse_rows(*vectors: dict[int, float]) -> list[SparseVector]:
    ordered = [sorted(weights.items()) for weights in vectors]
    return [
        (np.array([token_id for token_id, _ in each], np.int32), np.array([weight for _, weight in each], np.float32))
        for each in ordered
    ]


def token_rows(*matrices: Any) -> list[FloatRows]:
    return [rows(*matrix) if len(matrix) else np.empty((0, 2), np.float32) for matrix in matrices]


def hybrid_rows() -> Hybrid:
    return Hybrid(rows([0.6, 0.8]), sparse_rows({3: 0.5}), token_rows([[3, 4], [0, 2]]))


def requested(model_info: ModelInfo, **fields: Any) -> EmbedRequest:
    return ask(EMBEDDINGS, {"input": "a", **fields}, model_info=model_info).request


# --- text-embeddings-inference's --------------------------------------------------------------------------------


def test_sparse_vectors_to_the_byte():
    """In the order of indices; a vector may be empty; weights are the shortest numbers of their float32."""
    asked = ask(EMBED_SPARSE, {"inputs": ["a", "b", "c"]}, model_info=SPLADE)
    assert (asked.request.output, asked.request.inputs) == (Output.SPARSE, ["a", "b", "c"])
    body = render(asked, sparse_rows({5: 0.1, 3: 1.0}, {}, {4: 2.5}), 3)
    assert body == b'[[{"index":3,"value":1.0},{"index":5,"value":0.1}],[],[{"index":4,"value":2.5}]]'


def test_a_model_without_sparse_vectors_says_what_it_is_for():
    with pytest.raises(WrongModel, match="it cannot make sparse vectors"):
        ask(EMBED_SPARSE, {"inputs": "a"}, model_info=COLBERT)


# --- OpenAI's shape ---------------------------------------------------------------------------------------------


def test_sparse_items_with_tokens_and_as_maps():
    vectors = sparse_rows({5: 0.1, 3: 1.0, 7: 2.0})
    asked = ask(EMBEDDINGS, {"input": "a", "output": ["sparse"], "return_tokens": True}, model_info=SPLADE)
    [item] = rendered(asked, vectors)["data"]
    assert item["sparse"] == {"indices": [3, 5, 7], "values": [1.0, 0.1, 2.0], "tokens": ["ada", "##lace", ""]}
    asked = ask(EMBEDDINGS, {"input": "a", "output": "sparse", "sparse_format": "map"}, model_info=SPLADE)
    assert rendered(asked, vectors)["data"][0]["sparse"] == {"ada": 1.0, "##lace": 0.1}, "7 has no string"


def test_vectors_of_tokens():
    asked = ask(EMBEDDINGS, {"input": ["a", "b"], "return_multivector": True, "report": True}, model_info=COLBERT)
    assert (asked.request.output, asked.request.normalize, asked.is_large) == (Output.TOKEN_VECTORS, True, True)
    assert ask(MULTI_VECTOR, {"input": ["a", "b"], "report": True}, model_info=COLBERT).request == asked.request
    first, second = rendered(asked, token_rows([[3, 4], [0, 2]], []), 2)["data"]
    assert first["embeddings"] == [[pytest.approx(0.6), pytest.approx(0.8)], [0.0, 1.0]]
    assert (second["index"], second["embeddings"]) == (1, [])


@pytest.mark.parametrize(
    ("fields", "layout", "expected"),
    [
        ({"normalize": False, "encoding_format": "base64"}, "<4f", (0.6, 0.8, 0, 1)),
        ({"normalize": False, "output_dtype": "float16", "encoding_format": "base64"}, "<4e", (0.6, 0.8, 0, 1)),
        ({"output_dtype": "int8", "encoding_format": "base64"}, "4b", (76, 102, 0, 127)),
    ],
)
def test_vectors_of_tokens_in_other_forms(fields, layout, expected):
    asked = ask(EMBEDDINGS, {"input": "a", "output": "multi-vector", **fields}, model_info=COLBERT)
    [item] = rendered(asked, token_rows([[0.6, 0.8], [0, 1]]))["data"]
    assert struct.unpack(layout, base64.b64decode(item["embeddings"])) == pytest.approx(expected, abs=1e-3)


def test_all_kinds_in_one_response():
    fields = {"input": "a", "output": ["dense", "sparse", "multi-vector"]}
    asked = ask(EMBEDDINGS, fields, model_info=M3)
    assert asked.request.output is Output.HYBRID
    [item] = rendered(asked, hybrid_rows())["data"]
    assert list(item) == ["object", "index", "embedding", "sparse", "embeddings"]
    assert item["embedding"] == [pytest.approx(0.6), pytest.approx(0.8)]
    assert item["sparse"] == {"indices": [3], "values": [0.5]}
    assert item["embeddings"] == [[pytest.approx(0.6), pytest.approx(0.8)], [0.0, 1.0]]
    asked = ask(EMBEDDINGS, {**fields, "output": ["sparse", "dense"], "encoding_format": "base64"}, model_info=M3)
    [item] = rendered(asked, hybrid_rows())["data"]
    assert list(item) == ["object", "index", "embedding", "sparse"]
    assert struct.unpack("<2f", base64.b64decode(item["embedding"])) == pytest.approx((0.6, 0.8))


def test_a_dense_vector_of_another_length_among_several_kinds():
    other = changed(M3, steps=())
    fields = {"input": "a", "output": ["dense", "sparse"]}
    collected = hybrid_rows()
    collected.dense[0] = [3, 4]
    for wanted, expected in (({}, [3, 4]), ({"normalize": True}, [0.6, 0.8]), ({"normalize": False}, [3, 4])):
        [item] = rendered(ask(EMBEDDINGS, {**fields, **wanted}, model_info=other), collected)["data"]
        assert item["embedding"] == pytest.approx(expected)
    with pytest.raises(BadRequest, match="int8 is for vectors of length 1"):
        ask(EMBEDDINGS, {**fields, "output_dtype": "int8"}, model_info=other)
    ask(EMBEDDINGS, {**fields, "output_dtype": "int8", "normalize": True}, model_info=other)


@pytest.mark.parametrize(
    ("model_info", "fields", "param", "says"),
    [
        (SPLADE, {}, "output", "makes no dense vectors; set 'output' to one of its own: sparse"),
        (PLAIN, {"output": "sparse"}, "output", "makes no sparse vectors; set 'output' to one of its own: dense"),
        (M3, {"output": []}, "output", "must have one kind of vectors at least"),
        (M3, {"output": "dense", "return_multivector": True}, "return_multivector", "contradict"),
        (M3, {"output": "sparse", "dimensions": 2}, "dimensions", "is for dense vectors"),
        (COLBERT, {"output": "multi-vector", "dimensions": 1}, "dimensions", "has 2 dimensions"),
        (M3, {"output": "sparse", "output_dtype": "int8"}, "output_dtype", "are float32 alone"),
        (M3, {"output": "sparse", "encoding_format": "npy"}, "encoding_format", "must be 'float' or 'base64'"),
        (M3, {"output": ["dense", "sparse"], "output_dtype": "binary"}, "output_dtype", "a multiple of 8"),
        (M3, {"output": ["dense", "multi-vector"], "normalized": False}, "normalized", "a dense vector has length 1"),
    ],
)
def test_no_kind_is_guessed_and_wrong_options_are_named(model_info, fields, param, says):
    error = refusal(EMBEDDINGS, {"input": "a", **fields}, model_info)
    assert (error.param, error.status) == (param, 400)
    assert says in error.message


# --- vLLM's -----------------------------------------------------------------------------------------------------


def test_pooling_gives_the_projected_vectors_of_a_multi_vector_model():
    for fields in ({}, {"task": "token_embed"}):
        asked = ask(POOLING, {"input": "a", "embedding_mode": "query", **fields}, model_info=COLBERT)
        assert asked.request.output is Output.TOKEN_VECTORS
        assert (asked.request.normalize, asked.request.tokenizing.role) == (True, Role.QUERY)
        [item] = rendered(asked, token_rows([[3, 4]]))["data"]
        assert item == {"object": "pooling", "index": 0, "data": [[pytest.approx(0.6), pytest.approx(0.8)]]}
    asked = ask(POOLING, {"input": "a", "use_activation": False}, model_info=COLBERT)
    assert rendered(asked, token_rows([[3, 4]]))["data"][0]["data"] == [[3.0, 4.0]]
    assert ask(POOLING, {"input": "a", "task": "token_embed"}, model_info=M3).request.output is Output.TOKEN_VECTORS
    assert ask(POOLING, {"input": "a"}, model_info=M3).request.output is Output.VECTORS
