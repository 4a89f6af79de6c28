"""SPLADE models: the weights of the vocabulary are those of sentence-transformers, on every path, for every head."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.support.checkpoints import (
    VOCAB_SIZE,
    assert_same_vectors,
    batch_of,
    random_batch,
    sequences_of,
    skip_without,
)
from tests.support.sparse_checkpoints import (
    SparseReference,
    asking_for_weights,
    save_masked_words,
    save_splade,
    sparse_config,
    sparse_engine,
    weights_of,
)
from vecd.gateway.encoding.sparse import SparseRows, read_query_weights
from vecd.gateway.request import SparseOptions
from vecd.model.card import ModelError, read_card
from vecd.workers import heads
from vecd.workers.select import select
from vecd.workers.torch.reference import reference_rows

LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]
FAMILIES = ["bert", "roberta", "xlm-roberta", "camembert", "mpnet", "distilbert", "electra", "modernbert"]
_HEADS = [("max", "relu"), ("max", "log1p_relu"), ("sum", "relu"), ("sum", "log1p_relu")]


@pytest.fixture(scope="module")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, ...], Path] = {}

    def make(family: str = "bert", pooling: str = "max", activation: str = "relu") -> Path:
        key = (family, pooling, activation)
        if key not in made:
            folder = tmp_path_factory.mktemp("-".join(key))
            made[key] = save_splade(folder, family, pooling=pooling, activation=activation)
        return made[key]

    return make


@pytest.mark.parametrize(
    ("family", "pooling", "activation"), [(family, *_HEADS[at % 4]) for at, family in enumerate(FAMILIES)]
)
def test_weights_are_the_reference_s(
    family: str, pooling: str, activation: str, splade: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "FLOATS_OF_A_SLICE", 50 * 40)  # several slices of 120 words, and of the longest sequence
    folder = splade(family, pooling, activation)
    config, batch = sparse_config(folder), random_batch(LENGTHS)
    expected = SparseReference(folder)(batch)
    assert (expected > 0).any()
    assert (expected == 0).any()
    monkeypatch.setattr(heads, "WORDS_OF_A_SLICE", 50)
    for path in ("padded", "lean"):
        found = weights_of(sparse_engine(folder, path), config, batch)
        assert_same_vectors(found, expected)


@pytest.mark.parametrize("path", ["lean", "fused", "packed", "padded", "unpadded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("pooling", "activation"), [_HEADS[0], _HEADS[3]])
def test_weights_are_the_reference_s_on_every_path(
    path: str, dtype: str, pooling: str, activation: str, splade: Callable[..., Path]
) -> None:
    if path == "fused":
        skip_without(dtype)
    if path == "lean" and dtype != "float32":
        pytest.skip("the lean engine computes float32")
    folder = splade("bert", pooling, activation)
    config, batch = sparse_config(folder), random_batch(LENGTHS)
    found = weights_of(sparse_engine(folder, path, dtype), config, batch)
    assert_same_vectors(found, SparseReference(folder)(batch), dtype)


@pytest.mark.parametrize("path", ["lean", "fused", "packed", "padded"])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_a_text_has_the_same_weights_alone_and_in_company(
    path: str, pooling: str, splade: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the slices of the vocabulary are others: their size follows the number of tokens."""
    if path == "fused":
        skip_without("float32")
    monkeypatch.setattr(heads, "WORDS_OF_A_SLICE", 50)
    monkeypatch.setattr(heads, "FLOATS_OF_A_SLICE", 20 * 50)
    folder = splade("bert", pooling)
    config, engine, batch = sparse_config(folder), sparse_engine(folder, path), random_batch(LENGTHS)
    together = weights_of(engine, config, batch)
    alone = np.concatenate([weights_of(engine, config, batch_of([ids])) for ids in sequences_of(batch)])
    assert float(np.abs(together - alone).max()) <= 1e-5 * max(1.0, float(np.abs(alone).max()))


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_several_threads_give_the_same_weights(pooling: str, splade: Callable[..., Path]) -> None:
    folder = splade("modernbert", pooling)
    config, engine, batch = sparse_config(folder), sparse_engine(folder, "lean"), random_batch(LENGTHS)
    expected = weights_of(engine, config, batch)
    assert engine.allow_leases(2, may_copy_weights=True) == (1, 2)
    assert engine.facts["wide_session_bytes"] == engine.facts["converted_bytes"]
    deadline = time.monotonic() + 60
    while engine.lease(2) != 2:
        assert time.monotonic() < deadline, "there is no wide session"
        time.sleep(0.01)
    assert_same_vectors(weights_of(engine, config, batch), expected)
    engine.lease(0)
    engine.use_threads(2)
    assert_same_vectors(weights_of(engine, config, batch), expected)


def test_the_reference_of_the_selection_is_sentence_transformers(splade: Callable[..., Path]) -> None:
    for pooling, activation in _HEADS:
        folder = splade("bert", pooling, activation)
        config, batch = sparse_config(folder), random_batch(LENGTHS)
        rows = reference_rows(config, "float32", pytest.fail, asking_for_weights(batch, config))
        assert rows.shape == (len(LENGTHS), config.card.row_dim)
        assert_same_vectors(rows[:, : config.card.vocab_size], SparseReference(folder)(batch))


def test_a_model_without_modules_is_splade_max(tmp_path: Path) -> None:
    folder = save_masked_words(tmp_path / "plain")
    config, batch = sparse_config(folder), random_batch(LENGTHS)
    found = weights_of(sparse_engine(folder, "padded"), config, batch)
    assert_same_vectors(found, SparseReference(folder)(batch))


def test_a_decoder_that_is_not_tied_is_its_own(tmp_path: Path) -> None:
    folder = save_splade(tmp_path, tie_word_embeddings=False)
    config, batch = sparse_config(folder), random_batch(LENGTHS)
    assert config.card.sparse is not None
    assert config.card.sparse.steps[2].tensor == "cls.predictions.decoder"
    found = weights_of(sparse_engine(folder, "padded"), config, batch)
    assert_same_vectors(found, SparseReference(folder)(batch))


def test_an_engine_is_selected_by_its_weights(splade: Callable[..., Path]) -> None:
    selection, _ = select(sparse_config(splade()), lambda stage: None)
    assert (selection.path, selection.dtype) == ("lean", "float32")
    assert selection.warnings == []
    assert selection.parity["max_abs_diff"] <= 1e-5 * max(1.0, float(selection.reference.max()))


def test_no_engine_is_selected_with_other_weights(splade: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error: the head forgets its logarithm."""
    monkeypatch.setattr(heads.SpladeHead, "activated", lambda self, logits: logits * (logits > 0))
    with pytest.raises(ModelError, match="not the reference model's"):
        select(sparse_config(splade()), lambda stage: None)


@pytest.mark.parametrize("as_json", [False, True], ids=["safetensors", "idf.json"])
def test_queries_of_static_weights_are_the_reference_s(as_json: bool, tmp_path: Path) -> None:
    weights = torch.rand(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    weights[5:20] = 0
    folder = save_splade(tmp_path, query_weights=weights)
    card = read_card(folder)
    assert card.capabilities == ("sparse",)
    assert card.sparse is not None
    tokenizer = Tokenizer.from_file(card.tokenizer_file)
    if as_json:
        words = {tokenizer.id_to_token(index): float(weight) for index, weight in enumerate(weights)}
        module = (folder / card.sparse.query_weights).parent
        (module / "idf.json").write_text(json.dumps(words))
        (module / "config.json").write_text(json.dumps({"frozen": True, "path": str(module / "idf.json")}))
        (module / "model.safetensors").unlink()
        card = read_card(folder)
    found = read_query_weights(card, tokenizer.token_to_id)
    assert found is not None
    reference = SparseReference(folder)
    for query in ("w2 w30 w30 w7 w119", "nothing", "w40"):
        ids = np.array(tokenizer.encode(query, add_special_tokens=False).ids, dtype=np.int32)
        made = SparseRows(1, SparseOptions(), [ids])
        made.put_whole(0, found.of_tokens(ids))
        [(indices, values)] = made.made
        row = np.zeros(card.vocab_size, dtype=np.float32)
        row[indices] = values
        np.testing.assert_array_equal(row, reference.of_ids(ids, task="query"))


def test_documents_of_a_router_are_the_reference_s(tmp_path: Path) -> None:
    folder = save_splade(tmp_path, "distilbert", activation="log1p_relu", query_weights=torch.ones(VOCAB_SIZE))
    config, batch = sparse_config(folder), random_batch(LENGTHS)
    found = weights_of(sparse_engine(folder, "packed"), config, batch)
    assert_same_vectors(found, SparseReference(folder)(batch))
