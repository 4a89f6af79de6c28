"""Every family in every way that it can be run, against transformers with sentence-transformers' pooling."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from tests.support.checkpoints import (
    FLOATS_OF_FUSED,
    MAX_TOKENS,
    Checkpoints,
    Reference,
    assert_same_vectors,
    batch_of,
    embed,
    engine_of,
    random_batch,
    skip_without,
    worker_config,
)
from tests.support.soak.form import in_full
from vecd.model.card import read_card
from vecd.workers.batch import Engine, PackedBatch
from vecd.workers.description import NotDescribed
from vecd.workers.load import load_engine
from vecd.workers.onnx.engine import LeanEngine
from vecd.workers.torch import fused
from vecd.workers.torch.fused import load_fused

ONE_TOKEN = [1]
LONGEST = [MAX_TOKENS]
MIXED = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]
BATCHES = (ONE_TOKEN, [1] * 5, LONGEST, [MAX_TOKENS] * 2, MIXED)

GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
BERT_RELATIVES = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "electra")
FUSED = (*BERT_RELATIVES, "modernbert", "t5", "deberta-v2", "qwen2", "qwen3", "mistral")
FAMILIES: list[tuple[str, str, tuple[str, ...]]] = [
    ("bert", "mean", ("lean", "fused", "packed", "padded")),
    ("roberta", "cls", ("lean", "fused", "packed", "padded")),
    ("xlm-roberta", "mean", ("lean", "fused", "packed", "padded")),
    ("camembert", "lasttoken", ("lean", "fused", "packed", "padded")),
    ("distilbert", "mean", ("lean", "fused", "packed", "padded")),
    ("mpnet", "cls", ("lean", "fused", "padded")),
    ("electra", "max", ("lean", "fused", "packed", "padded")),
    ("albert", "mean_sqrt_len_tokens", ("packed", "padded")),
    ("modernbert", "mean", ("lean", "fused", "packed", "padded")),
    ("nomic_bert", "mean", ("lean", "packed", "padded")),
    ("gte", "cls", ("lean", "packed", "padded")),
    ("qwen2", "lasttoken", ("lean", "fused", "packed", "padded")),
    ("qwen3", "lasttoken", ("lean", "fused", "packed", "padded")),
    ("mistral", "weightedmean", ("lean", "fused", "packed", "padded")),
    ("gemma3_text", "mean", ("lean", "packed", "padded")),
    ("gpt2", "lasttoken", ("packed", "padded")),
    ("deberta-v2", "cls", ("lean", "fused", "padded")),
    ("t5", "mean", ("lean", "fused", "padded")),
    ("gemma2", "mean", ("packed", "padded")),
    ("fnet", "mean", ("unpadded",)),
]


@pytest.mark.parametrize(("family", "pooling", "paths"), FAMILIES)
def test_vectors_are_the_reference_s(
    family: str, pooling: str, paths: tuple[str, ...], checkpoint: Checkpoints, reference: Reference
) -> None:
    folder = checkpoint(family, pooling=pooling)
    batches = [random_batch(lengths, seed=seed) for seed, lengths in enumerate(BATCHES)]
    expected = [reference(folder, batch) for batch in batches]
    for path in paths:
        assert_batches_agree(engine_of(folder, path), batches, expected, "float32")
    path = next(path for path in paths if path != "lean")
    if family != "fnet" and (path != "fused" or "bfloat16" in FLOATS_OF_FUSED):  # PyTorch has no FFT in bfloat16
        assert_batches_agree(engine_of(folder, path, "bfloat16"), batches, expected, "bfloat16")


def assert_batches_agree(
    engine: Engine, batches: list[PackedBatch], expected: list[NDArray[np.float32]], dtype: str
) -> None:
    for batch, vectors in zip(batches, expected, strict=True):
        assert_same_vectors(embed(engine, batch, vectors.shape[1]), vectors, dtype)


_CHOSEN = ("bert", "mpnet", "albert", "gemma3_text", "deberta-v2", "fnet")


@pytest.mark.parametrize(
    ("family", "pooling", "paths"),
    [
        *(each for each in FAMILIES if each[0] in _CHOSEN),
        *in_full(*(each for each in FAMILIES if each[0] not in _CHOSEN)),
    ],
)
def test_the_fastest_path_is_chosen_and_those_before_it_are_refused(
    family: str, pooling: str, paths: tuple[str, ...], checkpoint: Checkpoints
) -> None:
    engine = load_engine(worker_config(checkpoint(family, pooling=pooling)), lambda stage: None)
    assert engine.facts["path"] == paths[0]
    refused = {"lean": [], "packed": [], "padded": ["packed"], "unpadded": ["packed", "padded"]}[paths[0]]
    assert [warning.split()[0] for warning in engine.warnings] == refused


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_family_without_a_path_in_sixteen_bits_is_run_in_float32(
    dtype: str, checkpoint: Checkpoints, reference: Reference
) -> None:
    folder, batch = checkpoint("fnet"), random_batch(MIXED)
    engine = load_engine(worker_config(folder, dtype=dtype), lambda stage: None)
    assert (engine.facts["path"], engine.facts["dtype"]) == ("unpadded", "float32")
    assert_same_vectors(embed(engine, batch), reference(folder, batch))


# --- what differs between checkpoints of one family ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "stored"),
    [
        ("mistral", {"stored": "bfloat16"}),
        ("bert", {"stored": "float16", "with_head": True}),
        *in_full(
            *((family, {"stored": "float16", "with_head": True}) for family in (*BERT_RELATIVES[1:], "modernbert"))
        ),
    ],
    ids=str,
)
def test_weights_may_be_stored_in_any_way(
    family: str, stored: dict[str, Any], checkpoint: Checkpoints, reference: Reference
) -> None:
    folder = checkpoint(family, **stored)
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, stored["stored"])}
    words = {"embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight", "embed_tokens.weight"}
    assert stored.get("with_head", False) == words.isdisjoint(weights)
    batch = random_batch(MIXED)
    expected = reference(folder, batch)
    assert_same_vectors(embed(engine_of(folder, "lean"), batch), expected)
    for dtype in FLOATS_OF_FUSED:
        assert_same_vectors(embed(engine_of(folder, "fused", dtype), batch), expected, dtype)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
@pytest.mark.parametrize(("dtype", "path"), [("float32", "lean"), ("bfloat16", "fused")])
def test_weights_of_sixteen_bits_are_compared_and_fused(
    stored: str, dtype: str, path: str, checkpoint: Checkpoints
) -> None:
    skip_without(dtype)
    config = worker_config(checkpoint("bert", stored=stored), dtype=dtype)
    engine = load_engine(config, lambda stage: None)
    assert (engine.facts["path"], engine.facts["dtype"], engine.warnings) == (path, dtype, [])


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_shards_are_fused(family: str, checkpoint: Checkpoints, reference: Reference, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint(family), tmp_path / "shards")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(sorted(weights))}
    for shard in set(shards.values()):
        save_file({name: weights[name] for name in weights if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    batch = random_batch(MIXED)
    assert_same_vectors(embed(engine_of(folder, "fused"), batch), reference(checkpoint(family), batch))


SETTINGS_OF_ALL_DESCRIBED: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"hidden_act": "silu"}),
    ("modernbert", {"hidden_activation": "gelu_new", "norm_bias": True, "attention_bias": True, "mlp_bias": True}),
    ("modernbert", {"global_attn_every_n_layers": 3, "global_rope_theta": 50.0, "local_rope_theta": 7.0}),
    ("modernbert", {"norm_eps": 0.5, "local_attention": 6}),
    ("mistral", {"num_key_value_heads": 1, "head_dim": 12, "sliding_window": None}),
    ("mistral", {"num_key_value_heads": 4, "hidden_act": "gelu", "rms_norm_eps": 0.5}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2, "head_dim": 16}),
    ("qwen3", {"rope_theta": 300.0, "attention_bias": True}),
    ("t5", {"feed_forward_proj": "gated-gelu", "relative_attention_max_distance": 20, "d_kv": 5}),
    ("deberta-v2", {"share_att_key": False, "norm_rel_ebd": "none", "position_buckets": -1}),
    ("t5", {"feed_forward_proj": "silu", "relative_attention_num_buckets": 12, "layer_norm_epsilon": 0.5}),
    ("deberta-v2", {"position_biased_input": True, "max_relative_positions": 20, "pos_att_type": ["c2p", "p2c"]}),
    ("deberta-v2", {"position_buckets": 64, "layer_norm_eps": 0.1}),
]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *SETTINGS_OF_ALL_DESCRIBED[::2],
        ("bert", {"type_vocab_size": 5, "num_hidden_layers": 1}),
        ("bert", {"hidden_size": 30, "num_attention_heads": 1, "intermediate_size": 50}),
        ("roberta", {"pad_token_id": 7, "type_vocab_size": 1}),
        ("electra", {"embedding_size": 12, "layer_norm_eps": 0.5}),
        *in_full(
            *SETTINGS_OF_ALL_DESCRIBED[1::2],
            ("bert", {"hidden_act": "relu"}),
            ("bert", {"hidden_act": "gelu_new"}),
            ("bert", {"hidden_act": "gelu_pytorch_tanh"}),
            ("bert", {"hidden_size": 60, "num_attention_heads": 5, "layer_norm_eps": 0.5}),
            ("roberta", {"pad_token_id": 0}),
            ("xlm-roberta", {"layer_norm_eps": 0.5, "hidden_size": 36, "num_attention_heads": 6}),
            ("distilbert", {"hidden_act": "relu", "hidden_size": 36, "num_attention_heads": 6}),
            ("distilbert", {"sinusoidal_pos_embds": True}),
            # More rows than transformers' MPNet looks at.
            ("mpnet", {"relative_attention_num_buckets": 64, "hidden_size": 60, "num_attention_heads": 5}),
            ("mpnet", {"layer_norm_eps": 0.5, "hidden_act": "relu"}),
            ("electra", {"embedding_size": 32}),
        ),
    ],
)
def test_every_setting_that_is_fused_is_obeyed(
    family: str, settings: dict[str, Any], checkpoint: Checkpoints, reference: Reference
) -> None:
    folder = checkpoint(family, **settings)
    batches = [random_batch(lengths) for lengths in (ONE_TOKEN, LONGEST, MIXED)]
    expected = [reference(folder, batch) for batch in batches]
    for dtype in FLOATS_OF_FUSED:
        assert_batches_agree(engine_of(folder, "fused", dtype), batches, expected, dtype)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *SETTINGS_OF_ALL_DESCRIBED[1::2],
        *in_full(*SETTINGS_OF_ALL_DESCRIBED[::2]),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.5}}),
        ("nomic_bert", {"layer_norm_eps": 0.5, "type_vocab_size": 1, "intermediate_size": 50}),
        ("gte", {"type_vocab_size": 0, "hidden_act": "gelu_new", "layer_norm_eps": 0.5}),
        ("gte", {"rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 1.7}}),
        ("deberta-v2", {"type_vocab_size": 2}),
        ("gemma3_text", {"layer_types": GEMMA_LAYERS, "sliding_window": 7, "rms_norm_eps": 0.5}),
        ("gemma3_text", {"layer_types": GEMMA_LAYERS, "use_bidirectional_attention": False, "attention_bias": True}),
        ("gemma3_text", {"num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 16}),
    ],
)
def test_every_setting_that_the_lean_engine_computes_is_obeyed(
    family: str, settings: dict[str, Any], checkpoint: Checkpoints, reference: Reference
) -> None:
    folder = checkpoint(family, **settings)
    batches = [random_batch(lengths) for lengths in (ONE_TOKEN, LONGEST, MIXED)]
    expected = [reference(folder, batch) for batch in batches]
    assert_batches_agree(engine_of(folder, "lean"), batches, expected, "float32")


@pytest.mark.parametrize(
    ("family", "saved"),
    [
        (
            "modernbert",
            {"layer_types": None, "rope_parameters": None, "global_rope_theta": 9e4, "local_rope_theta": 5e3},
        ),
        ("mistral", {"rope_parameters": None, "rope_theta": 700.0}),
        ("qwen2", {"is_causal": False}),
        ("gemma3_text", {"is_causal": False}),
        (
            "qwen3",
            {"rope_parameters": None, "rope_theta": 700.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        ("qwen3", {"layer_types": None, "rope_parameters": None, "rope_theta": 1e6, "rope_scaling": None}),
        (
            "gemma3_text",
            {
                "layer_types": None,
                "sliding_window_pattern": 2,
                "rope_parameters": None,
                "rope_theta": 9e4,
                "rope_local_base_freq": 5e3,
            },
        ),
    ],
)
def test_a_config_of_an_older_transformers_is_read(
    family: str, saved: dict[str, Any], checkpoint: Checkpoints, reference: Reference, tmp_path: Path
) -> None:
    folder = changed_config(checkpoint(family), tmp_path, saved)
    batch = random_batch(MIXED)
    for path in ("lean", "fused") if family in FUSED else ("lean",):
        assert_same_vectors(embed(engine_of(folder, path), batch), reference(folder, batch))


@pytest.mark.parametrize(
    ("family", "saved", "why"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "scaled"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1e4}, "scaled"),
        ("mistral", {"partial_rotary_factor": 0.5}, "part of each head"),
        ("modernbert", {"hidden_activation": "tanh"}, "activation tanh"),
        ("gemma3_text", {"query_pre_attn_scalar": 9}, "scores"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "scores that are capped"),
        ("t5", {"feed_forward_proj": "gated-tanh"}, "activation tanh"),
        ("t5", {"feed_forward_proj": "twice-gated-gelu"}, "feed_forward_proj twice-gated-gelu"),
        ("deberta-v2", {"pos_att_type": "c2p"}, "pos_att_type c2p"),
        ("deberta-v2", {"relative_attention": False}, "relative_attention False"),
        ("deberta-v2", {"conv_kernel_size": 3}, "conv_kernel_size 3"),
        ("deberta-v2", {"embedding_size": 16}, "embedding_size 16"),
    ],
)
def test_other_computations_of_a_described_family_are_refused(
    family: str, saved: dict[str, Any], why: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    card = read_card(changed_config(checkpoint(family), tmp_path, saved))
    with pytest.raises(NotDescribed, match=why):
        LeanEngine(card)
    with pytest.raises(NotDescribed, match=why if family in FUSED else "no family of the fused path"):
        load_fused(card, "float32")


@pytest.mark.parametrize("family", ["albert", "gpt2"])
def test_the_fused_path_refuses_what_it_does_not_compute(family: str, checkpoint: Checkpoints) -> None:
    with pytest.raises(NotDescribed, match="no family of the fused path"):
        engine_of(checkpoint(family), "fused")


def test_the_fused_path_refuses_parts_of_layers_that_it_does_not_compute(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever families it may compute."""
    monkeypatch.setattr(fused, "FUSED_FAMILIES", {"gemma3_text"})
    with pytest.raises(NotDescribed, match="all parts of layers"):
        engine_of(checkpoint("gemma3_text"), "fused")


def test_distances_of_long_texts_are_not_described(checkpoint: Checkpoints) -> None:
    """Their table would have a number for each head and pair of tokens."""
    for path in ("lean", "fused"):
        with pytest.raises(NotDescribed, match="texts of 2049 tokens"):
            engine_of(checkpoint("t5", max_tokens=2049, max_position_embeddings=2049), path)


def changed_config(folder: Path, tmp_path: Path, saved: dict[str, Any]) -> Path:
    """A copy whose config.json has these settings, and not those that are None."""
    changed = shutil.copytree(folder, tmp_path / "changed")
    config = {**json.loads((changed / "config.json").read_text()), **saved}
    gone = {name for name, value in saved.items() if value is None}
    (changed / "config.json").write_text(json.dumps({name: config[name] for name in config.keys() - gone}))
    return changed


@pytest.mark.parametrize(
    ("family", "path", "num_tensors"),
    [
        ("bert", "fused", 20),
        ("gemma3_text", "lean", 15),
        ("deberta-v2", "lean", 21),
        *in_full(
            ("distilbert", "fused", 19),
            ("mpnet", "fused", 20),
            ("modernbert", "fused", 9),
            ("mistral", "fused", 11),
            ("qwen2", "fused", 14),
            ("qwen3", "fused", 13),
            ("nomic_bert", "lean", 13),
            ("gte", "lean", 15),
        ),
    ],
)
def test_every_weight_shows_in_the_vectors(
    family: str, path: str, num_tensors: int, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Or else these tests would not see that it is missing, or another's."""
    batch = random_batch([12, 7])
    folder = checkpoint(family)
    plain = embed(engine_of(folder, path), batch)
    weights = load_file(folder / "model.safetensors")
    # Nobody reads the pooler, and a bias that is the same for all keys goes out of the softmax.
    names = [name for name in weights if not name.startswith("pooler.")]
    names = [name for name in names if not name.endswith(("key.bias", "key_proj.bias", "k_lin.bias", "attn.k.bias"))]
    of_layers = {re.sub(r"\.\d\.", ".1.", name) for name in names}
    assert len(of_layers) == num_tensors
    assert of_layers <= set(names)
    changed = shutil.copytree(folder, tmp_path / "changed")
    torch.manual_seed(0)
    for name in of_layers:
        # Not all by one factor, which a norm behind them would take back.
        other = weights[name] * (1 + torch.rand(weights[name].shape))
        save_file({**weights, name: other}, changed / "model.safetensors")
        assert np.abs(embed(engine_of(changed, path), batch) - plain).max() > 1e-4, name


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert", "mpnet"])
def test_a_padding_token_inside_a_text_has_the_position_that_the_reference_gives_it(
    family: str, checkpoint: Checkpoints, reference: Reference
) -> None:
    folder = checkpoint(family, pooling="cls")
    texts = ([5, 1, 7, 1, 1, 9], [1, 1, 4], [1], [1, 1], [4, 1])
    batch = batch_of([np.array(ids, dtype=np.int32) for ids in texts])
    for path in ("lean", "fused", "padded") if family == "mpnet" else ("fused", "packed"):
        assert_same_vectors(embed(engine_of(folder, path), batch), reference(folder, batch))


# --- the real model -----------------------------------------------------------------------------------------------

TEXTS = [
    "A text-embedding server.",
    "Zwei Sätze. Ein kurzer und ein etwas längerer, der bis hierher reicht.",
    "x",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "word " * 300,
    "東京は日本の首都です。",
]


def test_minilm_gives_the_reference_s_vectors(minilm_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(read_card(minilm_folder).max_tokens)
    batch = batch_of([np.array(encoding.ids, dtype=np.int32) for encoding in tokenizer.encode_batch(TEXTS)])
    assert batch.lengths.max() == 256
    expected = SentenceTransformer(str(minilm_folder), device="cpu", local_files_only=True).encode(TEXTS)
    assert_batches_agree(engine_of(minilm_folder, "lean"), [batch], [expected], "float32")
    for path in ("fused", "packed", "padded"):
        for dtype in FLOATS_OF_FUSED:
            assert_batches_agree(engine_of(minilm_folder, path, dtype), [batch], [expected], dtype)
