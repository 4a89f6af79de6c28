"""Tiny models with random weights, as sentence-transformers saves them, and its vectors for token ids.

Owns their sizes and their making. Imports torch, transformers and sentence-transformers: only for the tests of workers
and the golden ones.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING, PreTrainedTokenizerFast

from vecd.model.card import read_card
from vecd.shm.arena import ArenaSpec
from vecd.shm.output import Output
from vecd.workers.batch import Engine, PackedBatch
from vecd.workers.config import WorkerConfig
from vecd.workers.parity import vectors_of
from vecd.workers.select import build
from vecd.workers.torch.fused import FusedForward
from vecd.workers.torch.linear import type_between_layers

FLOATS_OF_FUSED = tuple(dtype for dtype in ("float32", "bfloat16") if type_between_layers(dtype) is not None)
"""Number formats that the fused path can be computed in on this processor."""

VOCAB_SIZE = 120
HIDDEN_SIZE = 32
MAX_TOKENS = 60
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    # A window of 5 tokens, and layers without one.
    "mistral": {**_GROUPED, "sliding_window": 5},
    "gemma3_text": {**_GROUPED, "sliding_window": 5, "use_bidirectional_attention": True, "query_pre_attn_scalar": 8},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 80},
    "gemma2": {**_GROUPED, "sliding_window": 5},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "deberta-v2": {
        "relative_attention": True,
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "fnet": {"tpu_short_seq_length": 80},
}
# DistilBERT's names for what others call so.
_DISTILBERT_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}


class Checkpoints:
    """Makes a tiny model once for each set of arguments without steps."""

    def __init__(self, new_folder: Callable[[str], Path]) -> None:
        self._new_folder = new_folder
        self._made: dict[str, Path] = {}

    def __call__(
        self,
        family: str = "bert",
        *,
        pooling: str | Sequence[str] = "mean",
        steps: Sequence[Any] | None = None,
        prompts: dict[str, str] | None = None,
        max_tokens: int = MAX_TOKENS,
        stored: str = "float32",
        with_head: bool = False,
        **settings: Any,
    ) -> Path:
        """The folder of the model. `steps` are sentence-transformers modules, [Normalize()] by default; the first of
        `prompts` is the default one; `stored` is the type of the weights in the file; `with_head`: the weights are
        those of the model for masked words, one level down; `settings` go into config.json.
        """
        key = json.dumps([family, pooling, prompts, max_tokens, stored, with_head, settings]) if steps is None else ""
        if key not in self._made or not key:
            plain = self._new_folder(f"{family}-plain")
            hidden_size = _save_transformer(plain, family, max_tokens, stored, with_head, settings)
            modules = [
                Transformer(str(plain)),
                Pooling(hidden_size, pooling_mode=pooling if isinstance(pooling, str) else tuple(pooling)),
                *([Normalize()] if steps is None else steps),
            ]
            self._made[key] = self._new_folder(family)
            default = next(iter(prompts)) if prompts else None
            SentenceTransformer(modules=modules, prompts=prompts, default_prompt_name=default).save(
                str(self._made[key])
            )
            # As they were published, not as sentence-transformers has understood them.
            weights = (plain / "model.safetensors").read_bytes()
            (self._made[key] / "model.safetensors").write_bytes(weights)
        return self._made[key]


def _save_transformer(
    folder: Path, family: str, max_tokens: int, stored: str, with_head: bool, settings: dict[str, Any]
) -> int:
    """A model with its tokenizer. Returns the hidden size."""
    config = tiny_config(family, **settings)
    save_random((MODEL_FOR_MASKED_LM_MAPPING if with_head else MODEL_MAPPING)[type(config)], config, folder, stored)
    words = {"[UNK]": 0, "[PAD]": 1, **{f"w{index}": index for index in range(2, VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", model_max_length=max_tokens
    ).save_pretrained(folder)
    return int(config.hidden_size)


def save_random(make: Any, config: Any, folder: Path, stored: str = "float32", seed: int = 0) -> None:
    """The model that `make` makes of a configuration, with random weights, larger than usual so that every part of it
    shows in the vectors."""
    torch.manual_seed(seed)
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(getattr(torch, stored)).save_pretrained(folder)


def tiny_config(family: str, **settings: Any) -> Any:
    """transformers' configuration of a tiny model of a family."""
    if family == "distilbert":
        settings = {_DISTILBERT_NAMES.get(name, name): value for name, value in settings.items()}
    return CONFIG_MAPPING[family](**{**_SIZES, **_FAMILY_SIZES.get(family, {}), **settings})


def worker_config(folder: Path, kind: str = "auto", **changes: Any) -> WorkerConfig:
    card = read_card(folder, kind)
    settings: dict[str, Any] = {
        "card": card,
        "arena": ArenaSpec(num_slots=2, rows_per_slot=16, dim=card.dim),
        "engine": "auto",
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "log_level": "info",
        "cache_dir": None,
    }
    return WorkerConfig(**{**settings, **changes})


class Reference:
    """sentence-transformers' rows for token ids, each sequence by itself, in float32 whatever is stored."""

    def __init__(self) -> None:
        self._loaded: dict[Path, SentenceTransformer] = {}

    def __call__(self, folder: Path, batch: PackedBatch) -> NDArray[np.float32]:
        if folder not in self._loaded:
            self._loaded[folder] = SentenceTransformer(
                str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": torch.float32}
            ).eval()
        model = self._loaded[folder]
        outputs = [Output.VECTORS] * batch.lengths.size if batch.outputs is None else map(Output, batch.outputs)
        with torch.inference_mode():
            rows = [_rows_of(model, ids, output) for ids, output in zip(sequences_of(batch), outputs, strict=True)]
        dim = max(part.shape[1] for part in rows)
        return np.concatenate([np.pad(part, ((0, 0), (0, dim - part.shape[1]))) for part in rows])


reference = Reference()
"""For all tests of this process."""


def _rows_of(model: SentenceTransformer, ids: NDArray[np.int32], output: Output) -> NDArray[np.float32]:
    """What one sequence asks for: [1, D], or [its tokens, H]."""
    modules = list(model)
    if output is Output.UNNORMALIZED and isinstance(modules[-1], Normalize):
        modules.pop()
    token_ids = torch.from_numpy(ids.astype(np.int64))[None]
    features = {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}
    for module in modules:
        features = module(features)
    if output is Output.TOKENS:
        return features["token_embeddings"][0].numpy()
    return features["sentence_embedding"].numpy()


def random_batch(lengths: Sequence[int], vocab_size: int = VOCAB_SIZE, seed: int = 0) -> PackedBatch:
    token_ids = np.random.default_rng(seed).integers(0, vocab_size, sum(lengths), dtype=np.int32)
    return PackedBatch(np.array(lengths, dtype=np.int32), token_ids)


def sequences_of(batch: PackedBatch) -> list[NDArray[np.int32]]:
    return np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1])


def batch_of(sequences: Sequence[NDArray[np.int32]]) -> PackedBatch:
    return PackedBatch(np.array([ids.size for ids in sequences], dtype=np.int32), np.concatenate(sequences))


def assert_same_vectors(found: NDArray[np.float32], expected: NDArray[np.float32], dtype: str = "float32") -> None:
    """float32: to 1e-5 an element, or that part of the largest where it is beyond 1; less: to a cosine of 0.998."""
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    if dtype == "float32":
        atol = 1e-5 * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(found, expected, atol=atol, rtol=0)
    else:
        cosines = cosines_of(found, expected)
        assert cosines.min() >= 0.998, cosines


def cosines_of(found: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float64]:
    ours, theirs = found.astype(np.float64), expected.astype(np.float64)
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    cosines: NDArray[np.float64] = np.einsum("bd,bd->b", ours, theirs) / norms
    return cosines


def skip_without(dtype: str) -> None:
    """Skip a test of the fused path in a number format that this processor has no products for."""
    if type_between_layers(dtype) is None:
        pytest.skip(f"this processor has no prepacked products for {dtype}")


def engine_of(folder: Path, path: str, dtype: str = "float32") -> Engine:
    """The engine that runs a model in one way, compared with nothing, which the tests do, and not warm, which takes the
    time of several tests. Skips the test where the processor cannot run it so."""
    if path == "fused":
        skip_without(dtype)
    with mock.patch.object(FusedForward, "warm"):
        return build(worker_config(folder), path, dtype)


def embed(engine: Engine, batch: PackedBatch, dim: int = HIDDEN_SIZE) -> NDArray[np.float32]:
    return vectors_of(engine, batch, dim)


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Write a model's weights anew, after `change` has changed them in place. Returns the folder."""
    path = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})
    return folder
