"""Token vectors of multi-vector models and BGE-M3, on every path, against sentence-transformers and by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from torch.nn import functional
from transformers import AutoModel

from tests.support.checkpoints import FLOATS_OF_FUSED, assert_same_vectors, engine_of, worker_config
from tests.support.multi_vector_checkpoints import (
    DOCUMENTS,
    QUERIES,
    TOKEN_DIM,
    VOCABULARY,
    features_of,
    projection,
    save_bge_m3,
    save_own,
    save_pylate,
    save_stanford,
)
from vecd.model.card import ModelError, read_card
from vecd.shm.output import Output
from vecd.workers.batch import PackedBatch
from vecd.workers.parity import compare, random_batch, vectors_of, vectors_one_by_one
from vecd.workers.select import select
from vecd.workers.torch.loading import load_model
from vecd.workers.torch.reference import token_rows

CPU = torch.device("cpu")

Sequence = tuple[NDArray[np.int32], int, NDArray[np.float32]]
"""Token ids, how many of them are attended to, and the vector of each."""


def batch_of(sequences: list[Sequence], output: Output = Output.TOKEN_VECTORS) -> PackedBatch:
    lengths = np.array([ids.size for ids, _, _ in sequences], dtype=np.int32)
    borders = np.array([attended % ids.size for ids, attended, _ in sequences], dtype=np.int32)
    token_ids = np.concatenate([ids for ids, _, _ in sequences])
    outputs = np.full(lengths.size, output, dtype=np.uint8)
    return PackedBatch(lengths, token_ids, outputs, borders if borders.any() else None)


def sequences_of(folder: Path) -> list[Sequence]:
    encoder = MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)
    queries = [features_of(encoder, text, "query") for text in QUERIES]
    return [*queries, *(features_of(encoder, text, "document") for text in DOCUMENTS)]


def assert_on_every_path(folder: Path, sequences: list[Sequence], paths: tuple[str, ...]) -> None:
    """Each sequence has its vectors, alone and in company."""
    expected = np.concatenate([vectors for _, _, vectors in sequences])
    batch = batch_of(sequences)
    for path in paths:
        engine = engine_of(folder, path, "float32")
        assert_same_vectors(vectors_of(engine, batch, TOKEN_DIM), expected)
        assert_same_vectors(vectors_one_by_one(engine, batch, TOKEN_DIM), expected)


PATHS = ("padded", "packed", "fused", "lean")
NOT_PACKED = ("padded", "fused", "lean")
"""MPNet's attention is its own."""


@pytest.mark.parametrize(
    ("family", "attends"),
    [
        ("bert", False),
        ("bert", True),
        ("qwen3", False),
        ("mpnet", False),
        pytest.param("modernbert", False, marks=pytest.mark.full),
        pytest.param("xlm-roberta", False, marks=pytest.mark.full),
    ],
)
def test_the_vectors_of_pylate_models(family: str, attends: bool, tmp_path: Path) -> None:
    folder = save_pylate(tmp_path, family, attend_to_expansion_tokens=attends)
    sequences = sequences_of(folder)
    attended = [(ids.size, count) for ids, count, _ in sequences[:2]]
    assert attended == ([(16, 16)] * 2 if attends else [(16, 4), (16, 8)])
    assert_on_every_path(folder, sequences, NOT_PACKED if family == "mpnet" else PATHS)


@pytest.mark.parametrize(
    ("strategy", "attend", "family"),
    [
        ("fixed", False, "bert"),
        ("min", True, "modernbert"),
        pytest.param("fixed", True, "modernbert", marks=pytest.mark.full),
        pytest.param("min", False, "modernbert", marks=pytest.mark.full),
        pytest.param("min", False, "xlm-roberta", marks=pytest.mark.full),
    ],
)
def test_the_vectors_of_sentence_transformers_models(strategy: str, attend: bool, family: str, tmp_path: Path) -> None:
    expansion = {"strategy": strategy, "length": 12, "attend": attend}
    folder = save_own(tmp_path, family, query_expansion=expansion, document_length=30)
    assert_on_every_path(folder, sequences_of(folder), PATHS)


@pytest.mark.parametrize(
    "steps",
    [
        (projection(32, 16, activation=torch.nn.GELU(), bias=True), projection(16)),
        (projection(32, 32, use_residual=True), projection(32, TOKEN_DIM, use_residual=True)),
    ],
)
def test_several_projections_with_residuals(steps: tuple[Any, ...], tmp_path: Path) -> None:
    folder = save_own(tmp_path, "bert", *steps)
    assert_on_every_path(folder, sequences_of(folder), PATHS)


@pytest.mark.parametrize("attends", [False, True])
def test_the_vectors_of_stanford_models(attends: bool, tmp_path: Path) -> None:
    """By hand, and by sentence-transformers."""
    folder = save_stanford(tmp_path, attend_to_mask_tokens=attends)
    sequences = sequences_of(folder)
    model = AutoModel.from_pretrained(folder)
    weight = load_file(folder / "model.safetensors")["linear.weight"]
    for token_ids, attended, vectors in sequences:
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        mask = (torch.arange(ids.shape[1]) < attended).long()[None]
        with torch.inference_mode():
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state[0]
            expected = functional.normalize(hidden @ weight.T, dim=-1).numpy()
        assert_same_vectors(vectors, expected)
    assert_on_every_path(folder, sequences, PATHS)


def test_expansion_changes_nothing_but_itself(tmp_path: Path) -> None:
    """Tokens before the border have the vectors that they have without what is behind it."""
    folder = save_pylate(tmp_path, "bert")
    token_ids = np.arange(9, 29, dtype=np.int32)
    whole = batch_of([(token_ids, 7, np.empty(0, dtype=np.float32))])
    alone = batch_of([(token_ids[:7], 7, np.empty(0, dtype=np.float32))])
    other = batch_of([(np.concatenate([token_ids[:7], token_ids[7:][::-1]]), 7, np.empty(0, dtype=np.float32))])
    for path in PATHS:
        engine = engine_of(folder, path, "float32")
        found = vectors_of(engine, whole, TOKEN_DIM)
        assert_same_vectors(found[:7], vectors_of(engine, alone, TOKEN_DIM))
        assert_same_vectors(found[:7], vectors_of(engine, other, TOKEN_DIM)[:7])
        unbound = PackedBatch(whole.lengths, whole.token_ids, whole.outputs)
        assert np.abs(found - vectors_of(engine, unbound, TOKEN_DIM)).max() > 1e-2


@pytest.mark.parametrize("dtype", FLOATS_OF_FUSED)
@pytest.mark.parametrize(
    "family", ["bert", "modernbert", *(pytest.param(each, marks=pytest.mark.full) for each in ("mpnet", "qwen3"))]
)
def test_long_sequences_with_tokens_that_are_not_attended_to(family: str, dtype: str, tmp_path: Path) -> None:
    """Equal lengths with other borders, and lengths that the fused path divides or computes with other kernels."""
    folder = save_pylate(tmp_path, family)
    lengths = np.array([290, 20, 290, 20, 200, 20, 1, 290], dtype=np.int32)
    borders = np.array([270, 0, 0, 12, 150, 19, 0, 280], dtype=np.int32)
    token_ids = np.random.default_rng(0).integers(5, len(VOCABULARY), lengths.sum(), dtype=np.int32)
    outputs = np.full(lengths.size, Output.TOKEN_VECTORS, dtype=np.uint8)
    batch = PackedBatch(lengths, token_ids, outputs, borders)
    card = read_card(folder)
    expected = token_rows(worker_config(folder), "float32", lambda name: load_model(card, name, CPU), batch)
    other = "padded" if family == "mpnet" else "packed"
    for path, its_dtype in ((other, "float32"), ("fused", dtype), ("lean", "float32")):
        found = vectors_of(engine_of(folder, path, its_dtype), batch, TOKEN_DIM)
        assert_same_vectors(found, expected, its_dtype)


@pytest.mark.parametrize("make", [save_pylate, save_own])
@pytest.mark.parametrize("dtype", FLOATS_OF_FUSED)
def test_an_engine_is_selected_by_the_reference(dtype: str, make: Callable[..., Path], tmp_path: Path) -> None:
    folder = make(tmp_path, "bert")
    selection, engine = select(worker_config(folder, dtype=dtype), lambda stage: None)
    assert (selection.path, selection.dtype) == ("lean" if dtype == "float32" else "fused", dtype)
    assert engine.facts["path"] == selection.path


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_the_lean_engine_computes_queries_with_two_threads_and_in_int8(family: str, tmp_path: Path) -> None:
    folder = save_pylate(tmp_path, family)
    batch = batch_of(sequences_of(folder))
    engine = engine_of(folder, "lean", "float32")
    expected = vectors_of(engine, batch, TOKEN_DIM)
    engine.use_threads(2)
    assert_same_vectors(vectors_of(engine, batch, TOKEN_DIM), expected)
    quantized = vectors_of(engine_of(folder, "lean", "int8"), batch, TOKEN_DIM)
    assert compare(quantized, expected).min_cosine > 0.99
    assert np.abs(quantized - expected).max() > 1e-4, "nothing was quantized"


# --- BGE-M3 -----------------------------------------------------------------------------------------------------


def bge_m3_rows(folder: Path, token_ids: NDArray[np.int32]) -> tuple[NDArray[np.float32], ...]:
    """By hand, from the definition: the dense vector, the weight of each token, and its vector."""
    model = AutoModel.from_pretrained(folder)
    states = {name: load_file(folder / f"{name}.safetensors") for name in ("sparse_linear", "colbert_linear")}
    with torch.inference_mode():
        hidden = model(input_ids=torch.from_numpy(token_ids.astype(np.int64))[None]).last_hidden_state[0]
        dense = functional.normalize(hidden[0], dim=-1)
        weights = torch.relu(hidden @ states["sparse_linear"]["weight"].T.float() + states["sparse_linear"]["bias"])
        vectors = hidden @ states["colbert_linear"]["weight"].T.float() + states["colbert_linear"]["bias"]
        return dense.numpy(), weights[:, 0].numpy(), functional.normalize(vectors, dim=-1).numpy()


def mixed_batch(lengths: list[int], outputs: list[Output]) -> PackedBatch:
    token_ids = np.random.default_rng(0).integers(5, len(VOCABULARY), sum(lengths), dtype=np.int32)
    return PackedBatch(np.array(lengths, dtype=np.int32), token_ids, np.array(outputs, dtype=np.uint8))


def test_the_rows_of_bge_m3(tmp_path: Path) -> None:
    folder = save_bge_m3(tmp_path)
    outputs = [Output.HYBRID, Output.VECTORS, Output.TOKEN_VECTORS, Output.LEXICAL, Output.HYBRID, Output.TOKENS]
    batch = mixed_batch([7, 3, 7, 12, 1, 4], outputs)
    dense_alone = SentenceTransformer(str(folder), device="cpu")
    for path in PATHS:
        rows = vectors_of(engine_of(folder, path, "float32"), batch, 33)
        for index, output in enumerate(outputs):
            part = batch.part(index, index + 1)
            found = rows[batch.first_rows[index] :][: part.num_rows]
            dense, weights, vectors = bge_m3_rows(folder, part.token_ids)
            match output:
                case Output.HYBRID:
                    assert_same_vectors(found[0], np.append(dense, np.float32(0)))
                    np.testing.assert_allclose(found[1:, :32], vectors[1:], atol=1e-5)
                    np.testing.assert_allclose(found[1:, 32], weights[1:], atol=1e-5)
                case Output.VECTORS:
                    assert_same_vectors(found[0, :32], dense)
                    ids = torch.from_numpy(part.token_ids.astype(np.int64))[None]
                    features = dense_alone({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
                    assert_same_vectors(found[:, :32], features["sentence_embedding"].detach().numpy())
                case Output.TOKEN_VECTORS:
                    assert_same_vectors(found[:, :32], vectors)
                    assert not found[:, 32:].any()
                case Output.LEXICAL:
                    np.testing.assert_allclose(found[:, 0], weights, atol=1e-5)
                    assert (found[:, 0] == 0).any()
                    assert (found[:, 0] > 0).any()
                    assert not found[:, 1:].any()


@pytest.mark.parametrize("dtype", FLOATS_OF_FUSED)
def test_bge_m3_is_selected_by_all_its_rows(dtype: str, tmp_path: Path) -> None:
    folder = save_bge_m3(tmp_path)
    config = worker_config(folder, dtype=dtype)
    assert config.card.main_output is Output.HYBRID
    selection, _ = select(config, lambda stage: None)
    assert (selection.path, selection.dtype) == ("lean" if dtype == "float32" else "fused", dtype)
    assert random_batch(config.card, (5, 1)).borders is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_heads_in_16_bits_are_computed_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    batch = mixed_batch([7, 3], [Output.HYBRID] * 2)
    folder = save_bge_m3(tmp_path, dtype)
    rows = [vectors_of(engine_of(folder, path, "float32"), batch, 33) for path in ("packed", "lean")]
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)


def test_a_head_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_bge_m3(tmp_path)
    save_file(torch.nn.Linear(16, 1).state_dict(), folder / "sparse_linear.safetensors")
    for path in ("packed", "lean"):
        with pytest.raises(ModelError, match=r"sparse_linear\.safetensors: weight is \[1, 16\], should be \[1, 32\]"):
            engine_of(folder, path, "float32")
