"""Decoders, most with the mask of an encoder, in every engine: hidden states are those of transformers' own class."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import (
    Checkpoints,
    assert_same_vectors,
    embed,
    engine_of,
    random_batch,
    reference,
    worker_config,
)
from tests.support.published import decoders
from tests.support.tokenizing import tokenize
from vecd.gateway.request import Pair
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model import architecture
from vecd.model.architecture import native_config
from vecd.model.card import ModelError, read_card
from vecd.workers.description import NotDescribed, RotaryScaling, frequencies_of
from vecd.workers.load import load_engine
from vecd.workers.parity import digest_of

_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 64}
# As old files have it, and as new ones.
_OLD_ROPE = {"rope_theta": 500.0, "rope_scaling": _LLAMA3}
_NEW_ROPE = {"rope_parameters": {**_LLAMA3, "rope_theta": 500.0}}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_GROUPED, **_NEW_ROPE}),
    "llama-biased-both-ways": (
        "llama",
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "is_causal": False, **_OLD_ROPE},
    ),
    "qwen2-both-ways": ("qwen2", {"is_causal": False}),
    "qwen3-both-ways": ("qwen3", {"is_causal": False}),
    "mistral-both-ways": ("mistral", {"is_causal": False}),  # its window counts both sides
    "gemma3-both-ways": ("gemma3_text", {"is_causal": False, "use_bidirectional_attention": False}),
    "gemma3-twice": ("gemma3_text", {"is_causal": False}),
    "gemma2": ("gemma2", {**_GROUPED, "attn_logit_softcapping": None}),
    "gemma2-capped-both-ways": ("gemma2", {**_GROUPED, "attn_logit_softcapping": 0.5, "is_causal": False}),
    "eurobert": ("eurobert", {"num_key_value_heads": 2}),
}
_MISSING = {(name, "fused") for name, (family, _) in _CASES.items() if family.startswith("gemma")} | {
    (name, "lean") for name, (family, _) in _CASES.items() if family == "gemma2"
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    checkpoints = Checkpoints(tmp_path_factory.mktemp)
    return cache(lambda name: checkpoints(_CASES[name][0], **_CASES[name][1]))


@pytest.mark.parametrize("path", ["lean", "fused", "packed"])
@pytest.mark.parametrize("name", _CASES)
def test_vectors_are_those_of_transformers(folder_of: Any, name: str, path: str) -> None:
    folder = folder_of(name)
    if (name, path) in _MISSING:
        with pytest.raises(NotDescribed):
            engine_of(folder, path)
        return
    batch = random_batch([5, 1, 60, 3, 30, 12, 5])
    assert_same_vectors(embed(engine_of(folder, path), batch), reference(folder, batch))


@pytest.mark.parametrize("family", ["qwen3", "mistral"])  # without a window, and with one
def test_a_setting_that_transformers_ignores_counts(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """transformers 5.23 reads `use_bidirectional_attention` in Gemma 3 alone."""
    make = Checkpoints(tmp_path_factory.mktemp)
    batch = random_batch([5, 30])
    expected = reference(make(family, is_causal=False), batch)
    folder = make(family, use_bidirectional_attention=True)
    for path in ("lean", "fused", "packed", "padded"):
        assert_same_vectors(embed(engine_of(folder, path), batch), expected)


def test_the_reference_of_a_version_that_ignored_it_does_not_count(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is remembered by the digest, in the cache directory and beside the model."""
    card = read_card(Checkpoints(tmp_path_factory.mktemp)("qwen3", use_bidirectional_attention=True))
    digest = digest_of(card)
    assert card.difference_elsewhere == "ignores use_bidirectional_attention of config.json"
    monkeypatch.setattr(architecture, "_IGNORING_BIDIRECTIONAL", ())
    assert digest_of(card) != digest


@pytest.mark.parametrize(
    ("rope", "why"),
    [({"rope_type": "yarn", "factor": 2.0}, "yarn"), ({"rope_type": "default", "partial_rotary_factor": 0.5}, "part")],
)
def test_other_rotations_are_not_described(
    tmp_path_factory: pytest.TempPathFactory, rope: dict[str, Any], why: str
) -> None:
    make = Checkpoints(tmp_path_factory.mktemp)
    with pytest.raises(NotDescribed, match=why):
        engine_of(make("llama", rope_parameters={"rope_theta": 500.0, **rope}), "lean")


def test_the_rotation_of_a_eurobert_that_does_not_state_it() -> None:
    """Its own code has 250,000, and transformers' class 10,000."""
    stated = {"model_type": "eurobert", "auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel"}}
    assert [(native_config(config) or {})["rope_theta"] for config in (stated, {**stated, "rope_theta": 5.0})] == [
        250_000.0,
        5.0,
    ]


def test_frequencies_between_the_two_borders_are_mixed() -> None:
    plain = frequencies_of(500.0, RotaryScaling(), 16)
    turns = 64 * plain / (2 * np.pi)
    kept = np.clip((turns - 1) / 3, 0, 1)
    assert ((kept > 0) & (kept < 1)).any()
    assert {0, 1} <= set(kept.tolist())
    found = frequencies_of(500.0, RotaryScaling(8.0, 64, 1.0, 4.0), 16)
    np.testing.assert_allclose(found, plain * (kept + (1 - kept) / 8), rtol=1e-6)
    np.testing.assert_allclose(frequencies_of(500.0, RotaryScaling(8.0), 16), plain / 8, rtol=1e-6)


# --- the end of a text ------------------------------------------------------------------------------------------

_TEXTS = ["hello world", " ", "", "中文漢字，日本語 🙂", "a <|im_end|> b <|endoftext|>", "x " * 300]


@pytest.fixture
def gte_qwen2(tmp_path: Path) -> Path:
    next(each for each in decoders.LAYOUTS if "gte-Qwen2" in each.name).save(tmp_path)
    return tmp_path


def test_a_text_ends_as_its_own_class_of_tokenizers_ends_it(gte_qwen2: Path) -> None:
    """As the page of gte-Qwen2's class reads: the text, then the end; what is too long is cut before that."""
    card = read_card(gte_qwen2)
    tokenizer = Tokenizer(card, card.max_tokens, "model")
    theirs = tokenizers.Tokenizer.from_file(card.tokenizer_file)
    [end] = theirs.encode("<|endoftext|>").ids
    for text in _TEXTS:
        ours = np.frombuffer(tokenize(tokenizer, [text])[0].token_ids, dtype=np.int32).tolist()
        assert ours == [*theirs.encode(text).ids[: card.max_tokens - 1], end]


def test_an_end_that_is_no_token_is_refused(gte_qwen2: Path) -> None:
    path = gte_qwen2 / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<other>"))
    card = read_card(gte_qwen2)
    with pytest.raises(ModelError, match="eos_token '<other>' is no token"):
        Tokenizer(card, card.max_tokens, "model")


# --- Nemotron's reranker ----------------------------------------------------------------------------------------


@pytest.fixture
def nemotron(tmp_path: Path) -> Path:
    next(each for each in decoders.LAYOUTS if "nemotron-rerank" in each.name).save(tmp_path)
    return tmp_path


def test_a_pair_is_put_as_its_card_says(nemotron: Path) -> None:
    card = read_card(nemotron)
    assert (card.pooling_of_output, card.shares_beginnings) == ("mean", False)
    theirs = tokenizers.Tokenizer.from_file(card.tokenizer_file)
    pair = Pair("what is a cat", "a small animal, 中文")
    [found] = tokenize(Tokenizer(card, card.max_tokens, "model"), [pair])
    expected = theirs.encode(f"question:{pair.query} \n \n passage:{pair.document}").ids
    assert np.frombuffer(found.token_ids, dtype=np.int32).tolist() == expected


@pytest.mark.parametrize("temperature", [0, -1.0, "hot"])
def test_a_temperature_that_cannot_be_is_refused(nemotron: Path, temperature: Any) -> None:
    config = json.loads((nemotron / "config.json").read_text(encoding="utf-8"))
    (nemotron / "config.json").write_text(json.dumps({**config, "temperature": temperature}))
    with pytest.raises(ModelError, match="temperature is"):
        read_card(nemotron)


def test_its_head_has_no_class_to_be_compared_with(nemotron: Path) -> None:
    engine = load_engine(worker_config(nemotron), lambda stage: None)
    assert engine.facts["compared_with"] == "vecd's own padded path"


# --- Qwen3 as a sparse model ------------------------------------------------------------------------------------


def test_a_causal_head_is_the_output_layer(tmp_path: Path) -> None:
    layout = next(each for each in decoders.LAYOUTS if "splade-code" in each.name)
    layout.save(tmp_path)
    assert _decoder_of(tmp_path) == "model.embed_tokens"
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert _decoder_of(tmp_path) == "lm_head"
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    for changes in ({"auto_map": {"AutoModelForMaskedLM": "splade.Qwen3ForMaskedLM"}}, {"is_causal": True}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ModelError, match="asks for Python code"):
            read_card(tmp_path)


def _decoder_of(folder: Path) -> str:
    head = read_card(folder).sparse
    assert head is not None
    [decoder] = head.steps
    return decoder.tensor
