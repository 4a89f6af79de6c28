"""The fused forward pass: a post-LayerNorm encoder over packed sequences, from the weights' files alone.

Owns the computation of a layer: one linear kernel for query, key and value, activation and residual inside the kernels
(`vecd.workers.engines.torch.linear`), no padding and no copies between them. Does not import transformers, which takes
seconds. The differences between families are data (`vecd.workers.families.description`). Called by
`vecd.workers.engines.torch.transformer`.

    x ─┬─ qkv ─ attention per run ─ out + x ─ norm ─┬─ up, activation ─ down + x ─ norm ─ x
       └────────────────────────────────┘           └──────────────────────┘

A batch is computed with a few additional tokens (`_rounded`), because oneDNN compiles its kernels for each number of
tokens: 0.6–0.8 ms for each of four, measured on an AVX-512 core, where a text of 12 tokens takes 5 ms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from vecd.shm.card import ModelCard
from vecd.workers.engines.torch.checkpoint import map_tensors
from vecd.workers.engines.torch.linear import ACTIVATIONS, Activation, Linear, make_linear, type_between_layers
from vecd.workers.families.description import EncoderSpec, LayerSpec, NotDescribed, bias_of_distances, describe
from vecd.workers.families.encoders import FUSED_FAMILIES
from vecd.workers.layout import Layout, Run

# --- the parts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Norm:
    """LayerNorm. Weight and bias are always float32."""

    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The sum of a token's word and position, normalized, in float32 from tables as they are stored; then projected."""

    words: Tensor
    positions: Tensor
    """With the one row of token type 0 added, where a family has types."""
    norm: Norm
    projection: Linear | None
    positions_after: int | None

    def __call__(self, layout: Layout, num_tokens: int, dtype: torch.dtype) -> Tensor:
        """`dtype` [num_tokens, H]; the tokens behind the layout's own are word 0 at position 0."""
        after = self.positions_after
        positions = layout.offsets() if after is None else layout.positions_after(after)
        x = self.words[_extended(layout.token_ids, num_tokens)].float()
        x += self.positions[_extended(positions, num_tokens)]
        x = self.norm(x).to(dtype)
        return x if self.projection is None else self.projection(x)


def _extended(ids: "np.ndarray[tuple[int], np.dtype[np.int64]]", num_tokens: int) -> Tensor:
    extended = np.zeros(num_tokens, dtype=np.int64)
    extended[: ids.size] = ids
    return torch.from_numpy(extended)


@dataclass(frozen=True, slots=True)
class Attention:
    """Each sequence attends only to itself. The query weights contain the scale."""

    num_heads: int
    bias: Tensor | None
    """Added to the scores, float32 [heads, M, M] for texts of up to M tokens; shorter texts use its corner."""

    def __call__(self, qkv: Tensor, runs: list[Run]) -> Tensor:
        """qkv [T', 3 H] → [T', H]; rows behind the runs are zero."""
        num_tokens, width = qkv.shape[0], qkv.shape[1] // 3
        if len(runs) == 1 and runs[0].stop == num_tokens and not self._is_long(runs[0].length, qkv):
            return self._attend(qkv, runs[0])
        attended = qkv.new_empty(num_tokens, width)
        for run in runs:
            if self._is_long(run.length, qkv):
                for start in range(run.start, run.stop, run.length):
                    self._attend_long(qkv, slice(start, start + run.length), attended)
            else:
                attended[run.start : run.stop] = self._attend(qkv[run.start : run.stop], run)
        attended[runs[-1].stop :] = 0
        return attended

    def _attend(self, qkv: Tensor, run: Run) -> Tensor:
        """qkv [tokens of the run, 3 H] → [tokens of the run, H]."""
        # SDPA's kernel for processors is no faster in bfloat16 than in float32, and slower for short sequences.
        split = qkv.float().view(run.count, run.length, 3, self.num_heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)  # each [count, heads, length, head dim]
        bias = None if self.bias is None else self.bias[None, :, : run.length, : run.length]
        out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
        return out.transpose(1, 2).reshape(qkv.shape[0], -1).to(qkv.dtype)

    def _is_long(self, length: int, qkv: Tensor) -> bool:
        return length >= _LONG and qkv.dtype is torch.bfloat16 and qkv.shape[0] >= _up_to(_LONG_STEP, length)

    def _attend_long(self, qkv: Tensor, tokens: slice, attended: Tensor) -> None:
        """One sequence, some heads at a time, by oneDNN's bfloat16 kernels. Writes its rows of `attended`.

        Only few lengths are computed: the rest is filled with neighbouring tokens, with scores of -inf and values of
        zero.
        """
        length = tokens.stop - tokens.start
        size = _up_to(_LONG_STEP, length)
        first = min(tokens.start, qkv.shape[0] - size)
        own = slice(tokens.start - first, tokens.stop - first)
        window = qkv[first : first + size].view(size, 3, self.num_heads, -1)
        query, key, value = window.permute(1, 2, 0, 3).unbind(0)  # each [heads, size, head dim]
        if size != length:
            values = torch.zeros_like(value)
            values[:, own] = value[:, own]
            value = values
        out = attended[tokens].view(length, self.num_heads, -1).transpose(0, 1)
        step = max(1, _LONG_SCORES_BYTES // (2 * size * size))
        for start in range(0, self.num_heads, step):
            heads = slice(start, start + step)
            scores = torch.bmm(query[heads], key[heads].transpose(1, 2))
            if self.bias is not None:
                scores[:, own, own] += self.bias[heads, :length, :length]
            scores[:, :, : own.start] = -torch.inf
            scores[:, :, own.stop :] = -torch.inf
            out[heads] = torch.bmm(scores.softmax(dim=-1), value[heads])[:, own]


_LONG = 160
"""From this number of tokens on, bfloat16 attention is faster with oneDNN's kernels than with SDPA: at 512 tokens 10.1
instead of 13.2 µs per token and layer of all-MiniLM-L6-v2, measured on an AVX512-BF16 core without AMX."""

_LONG_STEP = 16
_LONG_SCORES_BYTES = 1 << 20
"""The size of a core's second-level cache; half or three times as much makes little difference."""


@dataclass(frozen=True, slots=True)
class Layer:
    qkv: Linear
    attention: Attention
    out: Linear
    attention_norm: Norm
    up: Linear
    activation: Activation
    down: Linear
    norm: Norm

    def __call__(self, x: Tensor, runs: list[Run]) -> Tensor:
        """x [T', H] → [T', H]."""
        attended = self.attention(self.qkv(x), runs)
        x = self.attention_norm(self.out.plus(attended, x))
        return self.norm(self.down.plus(self.up(x, self.activation), x))


class FusedForward:
    path = "fused"

    def __init__(self, embeddings: Embeddings, layers: list[Layer], dtype: torch.dtype) -> None:
        self._embeddings = embeddings
        self._layers = layers
        self._dtype = dtype
        self.num_padding_tokens = 0

    def __call__(self, layout: Layout) -> Tensor:
        num_tokens = layout.token_ids.size
        num_computed = _rounded(num_tokens)
        self.num_padding_tokens += num_computed - num_tokens
        x = self._embeddings(layout, num_computed, self._dtype)
        for layer in self._layers:
            x = layer(x, layout.runs)
        return x[:num_tokens]

    def warm(self, max_tokens: int) -> None:
        """Compile oneDNN's kernels for short texts before the first request. They depend only on shapes, so one layer
        is enough. 0.1 s for all-MiniLM-L6-v2."""
        with torch.inference_mode():
            for num_tokens in range(_STEP_OF_SHORT, _WARM_UP_TO + 1, _STEP_OF_SHORT):
                x = torch.zeros(num_tokens, self._layers[0].norm.weight.shape[0], dtype=self._dtype)
                self._layers[0](x, [Run(start=0, count=1, length=min(num_tokens, max_tokens))])


_STEP_OF_SHORT = 4
_WARM_UP_TO = 64


def _rounded(num_tokens: int) -> int:
    """The number of tokens to compute: one of 104 numbers up to 2,048, because oneDNN keeps compiled kernels for each,
    some 100 KB for each of four, in every worker. At most 3 more for a short text, 1 % for a full batch."""
    step = _STEP_OF_SHORT if num_tokens <= 128 else 16 if num_tokens <= 512 else 32
    return _up_to(step, num_tokens)


def _up_to(step: int, number: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


# --- loading a model's files ------------------------------------------------------------------------------------


def load_fused(card: ModelCard, dtype: str) -> FusedForward:
    """Load the fused path of the model of `card` with linear kernels for `dtype`: "float32", "bfloat16" or "int8".

    Raises NotDescribed for another family, setting or type, or for a tensor under another name.
    """
    if card.model_type not in FUSED_FAMILIES:
        raise NotDescribed(f"{card.model_type} is no family of the fused path")
    if type_between_layers(dtype) is None:
        raise NotDescribed(f"there are no linear kernels for {dtype} here")
    try:
        weights = map_tensors(Path(card.weights_folder))
        forward = _Builder(describe(card, weights), weights, dtype, card.max_tokens).build()
        forward.warm(card.max_tokens)
        return forward
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        # The packed path reads the same files and reports their faults.
        raise NotDescribed(f"{type(error).__name__}: {error}") from error


def _refuse_other_parts(encoder: EncoderSpec) -> None:
    has_others = encoder.words_factor != 1 or encoder.norm_offset != 0 or encoder.is_gate_last
    if has_others or any(layer.frequency_divisor != 1 or layer.attended_norm for layer in encoder.layers):
        raise NotDescribed("the fused path does not compute all parts of layers like these")


class _Builder:
    def __init__(self, encoder: EncoderSpec, weights: Mapping[str, Tensor], dtype: str, max_tokens: int) -> None:
        self._encoder = encoder
        self._weights = weights
        self._dtype = dtype
        self._max_tokens = max_tokens

    def build(self) -> FusedForward:
        """Raises KeyError for a missing tensor, NotDescribed for layers with parts that are not computed here."""
        _refuse_other_parts(self._encoder)
        attention = Attention(self._encoder.num_heads, self._distance_bias())
        layers = [self._layer(layer, attention) for layer in self._encoder.layers]
        between = type_between_layers(self._dtype)
        assert between is not None
        return FusedForward(self._embeddings(), layers, between)

    def _embeddings(self) -> Embeddings:
        encoder = self._encoder
        positions = self._weights[f"{encoder.positions}.weight"].float()
        if encoder.types is not None:
            positions = positions + self._weights[f"{encoder.types}.weight"][0].float()
        return Embeddings(
            words=self._weights[f"{encoder.words}.weight"],
            positions=positions,
            norm=self._norm(encoder.embedding_norm),
            projection=None if encoder.projection is None else self._linear(encoder.projection),
            positions_after=encoder.positions_after,
        )

    def _layer(self, layer: LayerSpec, attention: Attention) -> Layer:
        return Layer(
            qkv=self._qkv(layer.qkv),
            attention=attention,
            out=self._linear(layer.out),
            attention_norm=self._norm(layer.attention_norm),
            up=self._linear(layer.up[0]),
            activation=ACTIVATIONS[self._encoder.activation],
            down=self._linear(layer.down),
            norm=self._norm(layer.norm),
        )

    def _qkv(self, names: tuple[str, ...]) -> Linear:
        """Query, key and value side by side; the scale of the scores, 1/√(head dim), goes into the query."""
        weights = [self._weights[f"{name}.weight"].float() for name in names]
        biases = [self._weights[f"{name}.bias"].float() for name in names]
        scale = (weights[0].shape[0] // self._encoder.num_heads) ** -0.5
        weights[0], biases[0] = weights[0] * scale, biases[0] * scale
        return make_linear(torch.cat(weights), torch.cat(biases), self._dtype)

    def _linear(self, name: str) -> Linear:
        return make_linear(self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], self._dtype)

    def _norm(self, name: str | None) -> Norm:
        assert name is not None
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return Norm(weight.float(), bias.float(), self._encoder.epsilon)

    def _distance_bias(self) -> Tensor | None:
        if self._encoder.distance_bias is None:
            return None
        table = self._weights[f"{self._encoder.distance_bias}.weight"].float().numpy()
        return torch.from_numpy(bias_of_distances(table, self._max_tokens))
