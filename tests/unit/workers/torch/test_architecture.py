"""Models written for code of their own, loaded as transformers' version of them, and described for the lean engine:
hidden states are the original's.

The original is written out here once more, from its tensors and its configuration alone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.unit.model import test_card
from vecd.model.card import read_card
from vecd.workers.batch import PackedBatch, arrange
from vecd.workers.onnx.session import LeanForward
from vecd.workers.torch.loading import load_model

VOCAB_SIZE, HIDDEN, HEADS, INNER = 50, 32, 4, 256
# Sizes that are rounded up, to 256 and 50; and others than the defaults.
NOMIC = test_card.NOMIC | {"n_inner": 250, "vocab_size": 49, "layer_norm_epsilon": 1e-5, "rotary_emb_base": 500}
GTE = test_card.GTE | {"vocab_size": VOCAB_SIZE, "intermediate_size": INNER, "max_position_embeddings": 512}
GTE |= {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "gelu", "rope_theta": 700.0, "pack_qkv": True}
NTK = {"rope_scaling": {"type": "ntk", "factor": 8.0}}
ARCTIC = {"model_type": "gte", "auto_map": {"AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel"}}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape) * 0.3


def nomic_weights() -> dict[str, Tensor]:
    weights = {
        "embeddings.word_embeddings.weight": _random(VOCAB_SIZE, HIDDEN),
        "embeddings.token_type_embeddings.weight": _random(2, HIDDEN),
        **_norm("emb_ln"),
    }
    for layer in ("encoder.layers.0", "encoder.layers.1"):
        weights |= {
            f"{layer}.attn.Wqkv.weight": _random(3 * HIDDEN, HIDDEN),
            f"{layer}.attn.out_proj.weight": _random(HIDDEN, HIDDEN),
            f"{layer}.mlp.fc11.weight": _random(INNER, HIDDEN),
            f"{layer}.mlp.fc12.weight": _random(INNER, HIDDEN),
            f"{layer}.mlp.fc2.weight": _random(HIDDEN, INNER),
            **_norm(f"{layer}.norm1"),
            **_norm(f"{layer}.norm2"),
        }
    return weights


def gte_weights() -> dict[str, Tensor]:
    weights = {
        "embeddings.word_embeddings.weight": _random(VOCAB_SIZE, HIDDEN),
        "embeddings.token_type_embeddings.weight": _random(1, HIDDEN),
        **_norm("embeddings.LayerNorm"),
    }
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        weights |= {
            f"{layer}.attention.qkv_proj.weight": _random(3 * HIDDEN, HIDDEN),
            f"{layer}.attention.qkv_proj.bias": _random(3 * HIDDEN),
            f"{layer}.attention.o_proj.weight": _random(HIDDEN, HIDDEN),
            f"{layer}.attention.o_proj.bias": _random(HIDDEN),
            f"{layer}.mlp.up_gate_proj.weight": _random(2 * INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": _random(HIDDEN, INNER),
            f"{layer}.mlp.down_proj.bias": _random(HIDDEN),
            **_norm(f"{layer}.attn_ln"),
            **_norm(f"{layer}.mlp_ln"),
        }
    return weights


def _norm(name: str) -> dict[str, Tensor]:
    return {f"{name}.weight": 1 + _random(HIDDEN), f"{name}.bias": _random(HIDDEN)}


class Original:
    """The original's forward pass for one text."""

    def __init__(self, weights: dict[str, Tensor], frequencies: Tensor) -> None:
        self.weights, self.frequencies = weights, frequencies

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-5)

    def embed(self, token_ids: Tensor, norm: str) -> Tensor:
        words = self.weights["embeddings.word_embeddings.weight"][token_ids]
        return self.norm(words + self.weights["embeddings.token_type_embeddings.weight"][0], norm)

    def attend(self, x: Tensor, qkv: str, out: str) -> Tensor:
        query, key, value = self.linear(x, qkv).view(len(x), 3, HEADS, -1).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", self.rotate(query), self.rotate(key)) / (HIDDEN / HEADS) ** 0.5
        return self.linear(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1), out)

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(len(x)), self.frequencies)[:, None]
        left, right = x.chunk(2, dim=-1)
        turned = (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin())
        return torch.cat(turned, dim=-1)


def nomic(weights: dict[str, Tensor], frequencies: Tensor, token_ids: Tensor) -> Tensor:
    model = Original(weights, frequencies)
    x = model.embed(token_ids, "emb_ln")
    for layer in ("encoder.layers.0", "encoder.layers.1"):
        x = model.norm(x + model.attend(x, f"{layer}.attn.Wqkv", f"{layer}.attn.out_proj"), f"{layer}.norm1")
        gated = model.linear(x, f"{layer}.mlp.fc11") * F.silu(model.linear(x, f"{layer}.mlp.fc12"))
        x = model.norm(x + model.linear(gated, f"{layer}.mlp.fc2"), f"{layer}.norm2")
    return x


def gte(weights: dict[str, Tensor], frequencies: Tensor, token_ids: Tensor) -> Tensor:
    model = Original(weights, frequencies)
    x = model.embed(token_ids, "embeddings.LayerNorm")
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        attended = model.attend(x, f"{layer}.attention.qkv_proj", f"{layer}.attention.o_proj")
        x = model.norm(x + attended, f"{layer}.attn_ln")
        up, gate = model.linear(x, f"{layer}.mlp.up_gate_proj").chunk(2, dim=-1)
        x = model.norm(x + model.linear(up * F.gelu(gate), f"{layer}.mlp.down_proj"), f"{layer}.mlp_ln")
    return x


def frequencies(base: float, divisor: float = 1.0) -> Tensor:
    head_dim = HIDDEN // HEADS
    return base ** (-torch.arange(0, head_dim, 2) / head_dim) / divisor


def save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


CASES = {
    "nomic": (NOMIC, nomic_weights, "", nomic, frequencies(500)),
    "gte": (GTE, gte_weights, "", gte, frequencies(700)),
    "gte with a prefix": (GTE, gte_weights, "new.", gte, frequencies(700)),
    "gte scaled": ({**GTE, **NTK}, gte_weights, "", gte, frequencies(700 * 8, divisor=8 ** (2 / (HIDDEN // HEADS)))),
    "arctic": ({**GTE, **ARCTIC}, gte_weights, "", gte, frequencies(700)),
}


@pytest.mark.parametrize(("config", "make", "prefix", "original", "rotary"), CASES.values(), ids=CASES)
def test_hidden_states_are_the_original_s(
    tmp_path: Path,
    config: dict[str, Any],
    make: Callable[[], dict[str, Tensor]],
    prefix: str,
    original: Callable[..., Tensor],
    rotary: Tensor,
) -> None:
    torch.manual_seed(0)
    weights = make()
    card = read_card(save(tmp_path, config, {prefix + name: tensor for name, tensor in weights.items()}))
    model: Any = load_model(card, "float32", torch.device("cpu"))
    token_ids = torch.randint(VOCAB_SIZE, (40,))
    hidden = model(input_ids=token_ids[None], attention_mask=torch.ones(1, 40)).last_hidden_state[0]
    assert (card.hidden_size, card.vocab_size, card.model_type) == (HIDDEN, VOCAB_SIZE, model.config.model_type)
    expected = original(weights, rotary, token_ids)
    torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=0)
    batch = PackedBatch(np.array([40], dtype=np.int32), token_ids.numpy().astype(np.int32))
    lean = torch.from_numpy(LeanForward(card)(arrange(batch)))
    torch.testing.assert_close(lean, expected, atol=2e-5, rtol=0)


def test_code_is_never_run(tmp_path: Path) -> None:
    """Code that would leave a trace lies where the auto_map points; the model is loaded without it."""
    for name in ("modeling_hf_alibaba_nlp_gte.py", "configuration_hf_alibaba_nlp_gte.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    auto_map = {**ARCTIC["auto_map"], "AutoConfig": "configuration_hf_alibaba_nlp_gte.GteConfig"}  # type: ignore[dict-item]
    folder = save(tmp_path, {**GTE, **ARCTIC, "auto_map": auto_map}, gte_weights())
    assert load_model(read_card(folder), "float32", torch.device("cpu")) is not None
    assert not (tmp_path / "ran").exists()
