"""The model of an architecture that transformers has no class for, which its engines are compared with.

Owns its computation, from the description that every engine has (`vecd.workers.description`), and by itself: whole
rectangles and masks, attention in float32, every token through every expert. Takes and gives what a model of
transformers does, so that `vecd.workers.torch.padded` runs it. A comparison with it does not show a fault of the
description; the tests compare both with the formulas of the published code.
"""

import json
from collections.abc import Container, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear
from transformers.activations import ACT2FN

from vecd.base.files import JsonMapping
from vecd.model.architecture import native_config
from vecd.model.card import ModelCard, ModelError
from vecd.workers.description import EncoderSpec, LayerSpec, NotDescribed, describe
from vecd.workers.torch.checkpoint import Tensors

_NUM_QUERIES = 512
"""Of a sequence at a time: the scores of 8,192 tokens with each other take 268 MB a head."""


def load_described(card: ModelCard, dtype: str, device: torch.device) -> "DescribedModel":
    """With weights in `dtype`, a name of torch's, on `device`. Raises ModelError, in one line, for weights that differ
    from what config.json calls for."""
    folder, stored = card.weights_folder, Tensors(card.weight_files)
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    config = native_config(config) or config
    try:
        encoder = describe(card, stored)
    except NotDescribed as error:
        raise ModelError(f"{folder}: cannot be loaded: {error}") from error
    wanted = dict(_shapes(encoder, config, stored))
    for name, shape in wanted.items():
        if name not in stored:
            raise ModelError(f"{folder}: the weights lack {name}, which config.json calls for")
        if (found := stored.shape(name)) != shape:
            raise ModelError(f"{folder}: {name} is {list(found)} in the weights and {list(shape)} in config.json")
    prefix = encoder.words.removesuffix("embeddings.word_embeddings")
    parts = {name.removeprefix(prefix).partition(".")[0] for name in wanted}
    for name in stored:
        is_of_model = name.removeprefix(prefix).partition(".")[0] in parts and not name.endswith(_BUFFERS)
        if is_of_model and name not in wanted:
            raise ModelError(f"{folder}: the weights have {name}, which config.json has no place for")
    weights = {name: stored[name].to(device, getattr(torch, dtype), copy=True) for name in wanted}
    return DescribedModel(encoder, config, weights)


_BUFFERS = (".position_ids", ".inv_freq")
"""Of the published code, which older versions of transformers have saved with the weights."""


def _shapes(encoder: EncoderSpec, config: JsonMapping, stored: Container[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that the model has to have."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    tables = {
        encoder.words: "vocab_size",
        encoder.positions: "max_position_embeddings",
        encoder.types: "type_vocab_size",
    }
    for name, size in tables.items():
        if name is not None:
            yield f"{name}.weight", (config[size], width)
    products: list[tuple[str, int, int]] = []
    norms = [encoder.embedding_norm]
    for layer in encoder.layers:
        norms += [layer.query_norm, layer.key_norm, layer.attended_norm, layer.attention_norm, layer.norm]
        products += [(name, 3 * width // len(layer.qkv), width) for name in layer.qkv]
        products.append((layer.out, width, width))
        if layer.router is not None:
            num_experts = config["num_experts"]
            yield f"{layer.router}.weight", (num_experts, width)
            yield from ((f"{layer.experts}.mlp.{name}", (num_experts * inner, width)) for name in ("w1", "w2"))
            yield f"{layer.experts}.bias", (width,)
        else:
            products += [(name, (1 + encoder.is_gated) * inner // len(layer.up), width) for name in layer.up]
            products.append((layer.down, width, inner))
    for name in norms:
        if name is not None:
            yield from ((f"{name}.{part}", (width,)) for part in ("weight", "bias"))
    for name, num_rows, num_columns in products:
        yield f"{name}.weight", (num_rows, num_columns)
        if encoder.has_all_biases or f"{name}.bias" in stored:
            yield f"{name}.bias", (num_rows,)


class DescribedModel(nn.Module):
    def __init__(self, encoder: EncoderSpec, config: JsonMapping, weights: dict[str, Tensor]) -> None:
        """`weights` by their full names, all on one device and of one type."""
        super().__init__()
        is_plain = encoder.final_norm is None and not (encoder.is_causal or encoder.is_rms)
        assert is_plain, "parts that are not computed here"
        names = ("model_type", "pad_token_id", "type_vocab_size")
        given = {name: config.get(name) for name in names}
        self.config = SimpleNamespace(**given, is_encoder_decoder=False, _attn_implementation="eager")
        self._encoder, self._activation = encoder, ACT2FN[encoder.activation]
        self._places = {name: place for place, name in enumerate(weights)}
        self._weights = nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights.values())
        self.device = next(iter(weights.values())).device

    @property
    def base_model(self) -> "DescribedModel":
        """As of transformers' models with a head, which this one has not."""
        return self

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> SimpleNamespace:
        """Each int64 [B, L]. `last_hidden_state` of the result is [B, L, H]."""
        encoder = self._encoder
        x = self._weight(encoder.words)[input_ids]
        if encoder.positions is not None:
            padding = encoder.positions_after or 0
            is_text = input_ids != padding
            x = x + self._weight(encoder.positions)[padding + is_text.cumsum(1) * is_text]
        if encoder.types is not None:
            x = (
                x
                + self._weight(encoder.types)[torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids]
            )
        x = self._norm(encoder.embedding_norm, x)
        for layer in encoder.layers:
            attended = self._linear((layer.out,), self._attended(layer, x, attention_mask.bool()))
            if layer.attended_norm is not None:
                attended = self._norm(layer.attended_norm, x + attended)
            x = self._norm(layer.attention_norm, x + attended)
            x = self._norm(layer.norm, x + self._fed_forward(layer, x))
        return SimpleNamespace(last_hidden_state=x)

    def _attended(self, layer: LayerSpec, x: Tensor, mask: Tensor) -> Tensor:
        num_heads, length = self._encoder.num_heads, x.shape[1]
        query, key, value = self._linear(layer.qkv, x).chunk(3, dim=-1)
        query, key = self._norm(layer.query_norm, query), self._norm(layer.key_norm, key)
        shape = (*x.shape[:2], num_heads, -1)
        query, key, value = (part.float().view(shape).transpose(1, 2) for part in (query, key, value))
        if layer.theta is not None:
            query, key = (_rotated(part, layer.theta) for part in (query, key))
        places = torch.arange(length, device=x.device)
        attended = []
        for queries in torch.split(places, _NUM_QUERIES):
            scores = query[:, :, queries] @ key.transpose(2, 3) / key.shape[-1] ** 0.5
            apart = (places - queries[:, None]).abs()
            if self._encoder.slopes:
                scores -= torch.tensor(self._encoder.slopes, device=x.device)[:, None, None] * apart
            is_seen = mask[:, None, None] & (apart <= (length if layer.window is None else layer.window))
            attended.append(scores.masked_fill(~is_seen, -torch.inf).softmax(-1) @ value)
        return torch.cat(attended, dim=2).transpose(1, 2).flatten(2).to(x.dtype)

    def _fed_forward(self, layer: LayerSpec, x: Tensor) -> Tensor:
        if layer.router is not None:
            return self._routed(layer, x)
        made = self._linear(layer.up, x)
        if not self._encoder.is_gated:
            return self._linear((layer.down,), self._activation(made))
        gate, up = made.chunk(2, dim=-1)
        if self._encoder.is_gate_last:
            gate, up = up, gate
        return self._linear((layer.down,), self._activation(gate) * up)

    def _routed(self, layer: LayerSpec, x: Tensor) -> Tensor:
        router = self._weight(f"{layer.router}").float()
        parts = linear(x.float(), router).softmax(-1)
        least = parts.topk(self._encoder.experts_per_token).values[..., -1:]
        total = x.new_zeros(()).float()
        w1, w2 = (self._weight(f"{layer.experts}.mlp", name).chunk(len(router)) for name in ("w1", "w2"))
        for index, (up, down) in enumerate(zip(w1, w2, strict=True)):
            part = parts[..., index, None]
            total = total + (self._activation(x @ up.T) @ down) * part * (part >= least)
        return (total + self._weight(f"{layer.experts}", "bias")).to(x.dtype)

    def _linear(self, names: tuple[str, ...], x: Tensor) -> Tensor:
        """The products with several matrices, side by side."""
        made = [linear(x, self._weight(name), self._bias(name)) for name in names]
        return torch.cat(made, dim=-1)

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        if name is None:
            return x
        return layer_norm(x, x.shape[-1:], self._weight(name), self._bias(name), self._encoder.epsilon)

    def _weight(self, name: str, part: str = "weight") -> Tensor:
        weight: Tensor = self._weights[self._places[f"{name}.{part}"]]
        return weight

    def _bias(self, name: str) -> Tensor | None:
        return self._weight(name, "bias") if f"{name}.bias" in self._places else None


def _rotated(x: Tensor, theta: float) -> Tensor:
    """x, float32 [B, heads, L, head dim]: each half of a head with the other one."""
    head_dim = x.shape[-1]
    frequencies = 1 / theta ** (torch.arange(0, head_dim, 2, device=x.device).float() / head_dim)
    angles = torch.arange(x.shape[2], device=x.device).float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
