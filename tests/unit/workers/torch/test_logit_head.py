"""Scores of causal language models by one or two tokens, on every path, against sentence-transformers on the same
files."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder
from torch import Tensor

from tests.support.checkpoints import change_weights, engine_of, sequences_of, worker_config
from tests.support.llm_checkpoints import save_causal, save_reranker
from vecd.model.card import ModelError, read_card
from vecd.model.steps import PairTemplate
from vecd.shm.output import Output
from vecd.shm.wire import NO_SCOPE
from vecd.workers.batch import Engine, Layout, PackedBatch
from vecd.workers.parity import random_batch, vectors_of
from vecd.workers.prefix import PrefixCache, probe
from vecd.workers.torch import transformer
from vecd.workers.torch.checkpoint import KeysValues, PrefixStates
from vecd.workers.torch.fused import load_fused
from vecd.workers.torch.heads import load_heads
from vecd.workers.torch.reference import reference_rows
from vecd.workers.torch.transformer import Forward, TransformerEngine, build_engine

LENGTHS = (5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny reranker, once for each set of arguments."""
    made: dict[Any, Path] = {}

    def make(family: str, no: str | None = "no", **settings: Any) -> Path:
        key = (family, no, *settings.items())
        if key not in made:
            plain = save_causal(tmp_path_factory.mktemp("causal"), family, **settings)
            made[key] = save_reranker(tmp_path_factory.mktemp("reranker"), plain, no=no)
        return made[key]

    return make


def scores_of_sentence_transformers(folder: Path, batch: PackedBatch) -> NDArray[np.float32]:
    model: Any = CrossEncoder(str(folder), device="cpu", local_files_only=True).eval()
    scores = []
    with torch.inference_mode():
        for ids in sequences_of(batch):
            token_ids = torch.from_numpy(ids.astype(np.int64))[None]
            features: dict[str, Any] = {
                "input_ids": token_ids,
                "attention_mask": torch.ones_like(token_ids),
                "logits_to_keep": 1,
            }
            for module in model:
                features = module(features)
            scores.append(features["scores"][0].numpy())
    return np.array(scores, dtype=np.float32)


@pytest.mark.parametrize(
    ("family", "no", "path"),
    [
        ("qwen3", "no", "fused"),
        ("qwen3", None, "padded"),
        ("mistral", "no", "packed"),
        ("gemma2", "no", "padded"),
        pytest.param("qwen2", "no", "fused", marks=pytest.mark.full),
        pytest.param("gemma", None, "packed", marks=pytest.mark.full),
    ],
)
def test_scores_are_sentence_transformers_own(
    family: str, no: str | None, path: str, reranker: Callable[..., Path]
) -> None:
    folder = reranker(family, no)
    card = read_card(folder)
    batch = random_batch(card, LENGTHS)
    found = vectors_of(engine_of(folder, path), batch, card.row_dim)
    expected = scores_of_sentence_transformers(folder, batch)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-5)
    reference = reference_rows(worker_config(folder), "float32", pytest.fail, batch)
    np.testing.assert_allclose(reference, expected, atol=1e-6)


def test_a_tied_output_layer_need_not_be_in_the_file(reranker: Callable[..., Path]) -> None:
    folder = reranker("qwen3", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    card = read_card(folder)
    batch = random_batch(card, LENGTHS)
    found = vectors_of(engine_of(folder, "fused"), batch, 1)
    np.testing.assert_allclose(found, scores_of_sentence_transformers(folder, batch), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("lm_head.weight"), "the weights lack lm_head.weight"),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(100, 32)}), r"lm_head.weight is \[100, 32\]"),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(264, 8)}), r"lm_head.weight is \[264, 8\]"),
    ],
)
def test_an_output_layer_without_the_rows_is_refused(
    change: Callable[[dict[str, torch.Tensor]], Any], message: str, tmp_path: Path, reranker: Callable[..., Path]
) -> None:
    folder = change_weights(shutil.copytree(reranker("qwen3"), tmp_path / "changed"), change)
    with pytest.raises(ModelError, match=message):
        load_heads(read_card(folder), torch.device("cpu"))


def pairs_of_one_query(num_shared: int, lengths: tuple[int, ...]) -> PackedBatch:
    """Sequences that begin with the same tokens, in no order of length, and with equal lengths among them."""
    random = np.random.default_rng(1)
    shared = random.integers(0, 264, num_shared, dtype=np.int32)
    sequences = [np.concatenate((shared, random.integers(0, 264, length, dtype=np.int32))) for length in lengths]
    outputs = np.full(len(lengths), Output.SCORES, dtype=np.uint8)
    return PackedBatch(np.array(list(map(len, sequences)), np.int32), np.concatenate(sequences), outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_shared", "family", "path", "settings"),
    [
        (16, "qwen3", "fused", {}),
        (100, "qwen3", "packed", {}),
        (16, "mistral", "packed", {}),  # with a window of 24 tokens
        (37, "mistral", "packed", {}),
        (37, "qwen3", "packed", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
        pytest.param(100, "qwen3", "fused", {}, marks=pytest.mark.full),
        pytest.param(37, "qwen2", "fused", {}, marks=pytest.mark.full),
        pytest.param(37, "gemma", "packed", {}, marks=pytest.mark.full),
    ],
)
def test_a_shared_prefix_changes_no_score(
    num_shared: int, family: str, path: str, settings: dict[str, Any], reranker: Callable[..., Path]
) -> None:
    folder = reranker(family, **settings)
    batch = pairs_of_one_query(num_shared, (9, 1, 40, 9, 3, 60, 9))
    expected = vectors_of(engine_of(folder, path), batch, 1)
    engine, computed = sharing(folder, path)
    found = vectors_of(engine, batch, 1)
    assert computed == [num_shared + 131]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(found, scores_of_sentence_transformers(folder, batch), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "path"),
    [("qwen3", "fused"), ("mistral", "packed"), pytest.param("gemma", "packed", marks=pytest.mark.full)],
)
def test_a_prefix_of_earlier_batches_changes_no_score(
    family: str, path: str, reranker: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of one, of several, and of two requests, whose queries have a template in common."""
    keep, num_kept = PrefixCache.keep, 0

    def check_and_keep(cache: PrefixCache[Any], token_ids: Any, states: Any, scope: int) -> None:
        nonlocal num_kept
        for tensor in (tensor for layer in states for tensor in layer):
            assert tensor.shape[2] == token_ids.size
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, "it keeps a batch alive"
        num_kept += 1
        keep(cache, token_ids, states, scope)

    monkeypatch.setattr(PrefixCache, "keep", check_and_keep)
    folder = reranker(family)
    random = np.random.default_rng(2)
    template, *queries = (random.integers(0, 264, length, dtype=np.int32) for length in (40, 12, 21))
    sequences = [
        np.concatenate((template, queries[of], random.integers(0, 264, length, dtype=np.int32)))
        for of, length in ((0, 9), (0, 30), (0, 5), (0, 9), (0, 1), (1, 9), (0, 9), (1, 20), (1, 3), (1, 3), (0, 8))
    ]
    outputs = np.full(len(sequences), Output.SCORES, dtype=np.uint8)
    batch = PackedBatch(np.array(list(map(len, sequences)), np.int32), np.concatenate(sequences), outputs)
    expected = scores_of_sentence_transformers(folder, batch)
    engine, computed = sharing(folder, path)
    borders = (0, 1, 2, 3, 5, 7, 8, 9, 11)
    found = [vectors_of(engine, batch.part(first, last), 1) for first, last in pairwise(borders)]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5)
    # Two of the first query are computed whole; then it is known, and the template for the other query, too. The second
    # of that query that is alone adds its tokens. Batches of both queries have the template in common.
    assert computed == [61, 82, 5, 9 + 1, 21 + 9 + 12 + 9, 21 + 20, 21 + 3, 21 + 3 + 12 + 8]
    assert num_kept > 1


def test_the_query_of_one_tenant_is_computed_again_for_another(reranker: Callable[..., Path]) -> None:
    folder = reranker("qwen3")
    batch = pairs_of_one_query(60, (9, 5, 7))
    engine, computed = sharing(folder, "fused")
    for scope in (5, 5, 6, NO_SCOPE):
        vectors_of(engine, replace(batch, scope=scope), 1)
    assert computed == [60 + 21, 21, 60 + 21, 3 * 60 + 21]


@pytest.mark.parametrize("path", ["fused", "packed"])
def test_prefixes_are_not_shared_where_known_ones_are_wrong(
    path: str, reranker: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_the_first_layer(self: PrefixStates, keys: Tensor, values: Tensor) -> KeysValues:
        self._layer = 0
        return of_next_layer(self, keys, values)

    of_next_layer = PrefixStates.of_next_layer
    folder, batch = reranker("qwen3"), pairs_of_one_query(40, (9, 3))
    for error, num_tokens in ((of_the_first_layer, 92), (of_next_layer, 52)):
        with monkeypatch.context() as patched:
            patched.setattr(PrefixStates, "of_next_layer", error)
            engine, computed = sharing(folder, path)
            vectors_of(engine, batch, 1)
        assert computed == [num_tokens]


class Counting:
    """Notes how many tokens are computed."""

    num_padding_tokens = 0

    def __init__(self, forward: Forward, computed: list[int]) -> None:
        self._forward, self._computed = forward, computed
        self.path, self.can_share = forward.path, forward.can_share

    def __call__(self, layout: Layout, prefix: PrefixStates | None = None) -> Tensor:
        self._computed.append(layout.computed_ids().size)
        return self._forward(layout, prefix)


def sharing(folder: Path, path: str) -> tuple[Engine, list[int]]:
    """An engine that shares prefixes, if it may, and the numbers of tokens that it computes from then on."""
    computed: list[int] = []

    def counting(forward: Forward, *arguments: Any) -> TransformerEngine:
        return TransformerEngine(Counting(forward, computed), *arguments)

    with mock.patch.object(transformer, "TransformerEngine", counting):
        engine = engine_of(folder, path)
    assert isinstance(engine, TransformerEngine)
    engine.share_prefixes(probe(read_card(folder)))
    computed.clear()
    return engine, computed


@pytest.mark.parametrize(("family", "path"), [("mistral", "fused"), ("qwen3", "padded"), ("gemma3_text", "packed")])
def test_a_prefix_is_shared_only_where_it_is_right(family: str, path: str, reranker: Callable[..., Path]) -> None:
    """The window of the fused path, rectangles with padding, and tokens that see later ones."""
    settings = {"use_bidirectional_attention": True, "query_pre_attn_scalar": 8} if family == "gemma3_text" else {}
    folder, batch = reranker(family, **settings), pairs_of_one_query(40, (9, 1, 40, 9, 3))
    engine, _ = sharing(folder, path)
    np.testing.assert_array_equal(vectors_of(engine, batch, 1), vectors_of(engine_of(folder, path), batch, 1))


def test_a_reranker_s_prefixes_are_shared_from_the_start(reranker: Callable[..., Path]) -> None:
    folder = reranker("qwen3")
    card = read_card(folder)
    assert card.score is not None
    score = replace(card.score, pair_template=PairTemplate("a", "b", "c"))
    computed: list[int] = []
    batch = pairs_of_one_query(40, (9, 3))
    for each, num_tokens in ((card, 92), (replace(card, score=score), 52)):
        with mock.patch.object(transformer, "load_fused", lambda *of: Counting(load_fused(*of), computed)):
            engine = build_engine(replace(worker_config(folder), card=each), "fused", "float32")
        vectors_of(engine, batch, 1)
        assert computed[-1] == num_tokens
