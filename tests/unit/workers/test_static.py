"""The static engine, with the gateway's tokenizer, beside sentence-transformers' StaticEmbedding and Model2Vec."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, StaticEmbedding
from tokenizers import Tokenizer as FastTokenizer

from tests.support.checkpoints import worker_config
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import ModelCard, ModelError, read_card
from vecd.shm.control import LOAD_TOKENS_PER_S
from vecd.shm.output import Output
from vecd.workers.batch import PackedBatch
from vecd.workers.load import expected_path, load_engine
from vecd.workers.parity import vectors_of
from vecd.workers.static import StaticEngine

V, H = 30522, 24
UNKNOWN = "\U0001f642"
"""A text of the unknown token alone, for the tests' tokenizer."""
TEXTS = ["A short text.", "", f"naïve café 中文 {UNKNOWN} [SEP] end", "word " * 700, " ", "a", UNKNOWN]


@pytest.fixture(scope="module")
def fast(minilm_folder: Path) -> FastTokenizer:
    """It puts [CLS] and [SEP] around a text, which static embeddings must not have."""
    tokenizer = FastTokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@pytest.fixture
def model2vec(tmp_path: Path, fast: FastTokenizer) -> Callable[..., Path]:
    """Saves a folder as Model2Vec does."""

    def save(tensors: dict[str, torch.Tensor], **config: Any) -> Path:
        save_file(tensors, tmp_path / "model.safetensors")
        fast.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "model2vec", **config}))
        return tmp_path

    return save


def tokenized(card: ModelCard, texts: list[str]) -> PackedBatch:
    """The sequences of the texts, as the gateway makes them."""

    async def runs() -> list[Any]:
        return [item async for run in Tokenizer(card, card.max_tokens, "auto").tokenize(texts) for item in run]

    items = asyncio.run(runs())
    ids = np.frombuffer(b"".join(item.token_ids for item in items), dtype="<i4")
    return PackedBatch(np.array([item.num_tokens for item in items], dtype=np.int32), ids)


def served(folder: Path, texts: list[str]) -> NDArray[np.float32]:
    card = read_card(folder)
    return vectors_of(StaticEngine(card), tokenized(card, texts), card.dim)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_vectors_are_those_of_static_embedding(stored: torch.dtype, fast: FastTokenizer, tmp_path: Path) -> None:
    table = torch.randn(V, H).to(stored)
    SentenceTransformer(modules=[StaticEmbedding(fast, table), Normalize()], device="cpu").save(str(tmp_path))
    card = read_card(tmp_path)
    assert (card.model_type, card.dim, card.vocab_size, card.is_normalized) == ("static", H, V + 1, True)
    model = SentenceTransformer(str(tmp_path), device="cpu").double()  # float32 loses 1e-5 in the long text
    np.testing.assert_allclose(served(tmp_path, TEXTS), model.encode(TEXTS), atol=1e-6, rtol=0)


def test_steps_follow_and_the_tokenizer_s_own_limit_counts(fast: FastTokenizer, tmp_path: Path) -> None:
    fast = FastTokenizer.from_str(fast.to_str())
    fast.enable_truncation(100)
    SentenceTransformer(modules=[StaticEmbedding(fast, embedding_dim=H), Dense(H, 10)], device="cpu").save(
        str(tmp_path)
    )
    assert read_card(tmp_path).max_tokens == 100
    model = SentenceTransformer(str(tmp_path), device="cpu").double()
    np.testing.assert_allclose(served(tmp_path, TEXTS), model.encode(TEXTS), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("normalize", "is_quantized"), [(True, False), (False, True)])
def test_vectors_are_those_of_model2vec(
    normalize: bool, is_quantized: bool, model2vec: Callable[..., Path], fast: FastTokenizer
) -> None:
    """The expected vectors follow `StaticModel.tokenize` and `_encode_batch` of model2vec 0.10."""
    rows, mapping, weights = torch.randn(500 if is_quantized else V, H), torch.randint(500, (V,)), torch.rand(V)
    tensors = {"embeddings": rows}
    if is_quantized:
        tensors |= {"mapping": mapping, "weights": weights}
    table = rows[mapping] * weights[:, None] if is_quantized else rows
    expected = np.zeros((len(TEXTS), H), dtype=np.float32)
    for row, text in zip(expected, TEXTS, strict=True):
        ids = fast.encode(text, add_special_tokens=False).ids[:512]
        ids = [token_id for token_id in ids if token_id != fast.token_to_id("[UNK]")]
        row[:] = table[ids].numpy().mean(axis=0, dtype=np.float64) if ids else 0
    if normalize:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True) + 1e-32
    folder = model2vec(tensors, normalize=normalize)
    assert read_card(folder).max_tokens == 512
    # Rows of length 1 within 1e-6; others relative to their largest element.
    np.testing.assert_allclose(served(folder, TEXTS), expected, atol=1e-6 * max(1.0, np.abs(expected).max()), rtol=0)
    assert not expected[[1, 4, 6]].any(), "these texts have no tokens that count"


def test_outputs_and_neighbours(model2vec: Callable[..., Path]) -> None:
    table = torch.randn(V, H)
    card = read_card(model2vec({"embeddings": table}, normalize=True))
    lengths, ids = np.array([2, 1, 3], dtype=np.int32), np.array([7, 100, V, 5, 6, 7], dtype=np.int32)
    outputs = np.array([Output.TOKENS, Output.VECTORS, Output.UNNORMALIZED], dtype=np.uint8)
    rows = vectors_of(StaticEngine(card), PackedBatch(lengths, ids, outputs), card.dim)
    unknown, none = np.zeros(H), np.zeros(H)
    expected = [table[7].numpy(), unknown, none, table[[5, 6, 7]].numpy().mean(axis=0)]
    np.testing.assert_allclose(rows, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_a_text_has_the_same_bits_in_every_batch(stored: torch.dtype, model2vec: Callable[..., Path]) -> None:
    card = read_card(model2vec({"embeddings": torch.randn(V, H).to(stored)}, normalize=True))
    engine, random = StaticEngine(card), np.random.default_rng(7)
    lengths = np.array([1, 3, 15, 16, 255, 256, 257, 512], dtype=np.int32)
    texts = [random.integers(V, size=length, dtype=np.int32) for length in lengths]
    together = vectors_of(engine, PackedBatch(lengths, np.concatenate(texts)), card.dim)
    for text, expected in zip(texts, together, strict=True):
        alone = vectors_of(engine, PackedBatch(np.array([text.size], dtype=np.int32), text), card.dim)
        assert np.array_equal(alone[0], expected), text.size


def test_it_is_the_engine_of_such_a_model(model2vec: Callable[..., Path]) -> None:
    config = worker_config(model2vec({"embeddings": torch.randn(V, H)}, normalize=True), dtype="bfloat16")
    assert expected_path(config) == "static"
    engine = load_engine(config, lambda stage: None)
    assert (engine.facts["path"], engine.facts["dtype"]) == ("static", "float32")
    assert engine.facts[LOAD_TOKENS_PER_S] > 0
    assert engine.warnings == ["bfloat16 is not available: static embeddings are computed in float32"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"embeddings": torch.zeros(9, H)}, "has 30522 tokens, and model.safetensors has rows for 9"),
        ({"table": torch.zeros(V, H)}, "has no table of embeddings"),
        ({"embeddings": torch.zeros(9, H), "mapping": torch.full((V,), 9)}, "mapping names rows outside the table"),
        ({"embeddings": torch.zeros(V, H), "weights": torch.zeros(9)}, r"weights is \[9\], should be \[30522\]"),
        ({"embeddings": torch.zeros(V, H, dtype=torch.bool)}, "a type that is not supported"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tensors: dict[str, torch.Tensor], message: str, model2vec: Callable[..., Path]
) -> None:
    folder = model2vec(tensors)
    with pytest.raises(ModelError, match=message) as error:
        StaticEngine(read_card(folder))
    assert str(error.value).startswith(str(folder))


@pytest.mark.parametrize("content", ['{"model": {"vocab": {"a": "b"}}}', '{"truncation": 3}', '{"model": [1]}', "[]"])
def test_a_broken_tokenizer_is_no_bug(content: str, model2vec: Callable[..., Path]) -> None:
    folder = model2vec({"embeddings": torch.zeros(V, H)})
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: "):
        read_card(folder)
