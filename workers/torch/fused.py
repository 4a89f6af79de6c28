"""The fused forward pass: a transformer over packed sequences, from the weights' files alone.

Owns the computation of a layer: one linear kernel for query, key and value, activation, gate and residual inside the
kernels (`vecd.workers.torch.linear`), no padding and no copies between them. Attention is in
`vecd.workers.torch.attention`. Does not import transformers, which takes seconds. The differences between families are
data (`vecd.workers.description`).

    x ─┬─ qkv ─ attention per run ─ out + x ─ norm ─┬─ up, activation ─ down + x ─ norm ─ x
       └────────────────────────────────┘           └──────────────────────┘

Where the norms come first, they are before qkv and up. A gate is a product of its own, because oneDNN activates it in
the same call, and multiplies with it in the next: a joint product of gate and up needs two passes more over its output,
and takes 1.03 times as long (median over 16–1,024 tokens of two shapes in bfloat16, on a core with AVX512-BF16).

Where all that is read of a sequence is its first token, as by BERT's classifiers and rerankers, the last layer computes
no more than attention for the other tokens: 0.90 times the processor time of MiniLM's six layers in float32 (0.87–0.92,
pairs of 122 tokens, interleaved, AVX512-BF16, beside other load).

A batch is computed with a few additional tokens (`_rounded`), because oneDNN compiles its kernels for each number of
tokens: 0.6–0.8 ms for each of four, measured on an AVX-512 core, where a text of 12 tokens takes 5 ms.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, pad

from vecd.model.card import ModelCard, ModelError
from vecd.workers.activations import ACTIVATIONS
from vecd.workers.batch import Layout, Run
from vecd.workers.description import (
    EncoderSpec,
    LayerSpec,
    NotDescribed,
    bias_of_distances,
    describe,
    relative_rows,
    relative_states,
)
from vecd.workers.families import FUSED_FAMILIES
from vecd.workers.torch.attention import (
    Attention,
    RelativePositions,
    Rotation,
    SlidingWindow,
    normalize_rms_,
    paired,
    rotations,
    up_to,
)
from vecd.workers.torch.checkpoint import PrefixStates, Tensors
from vecd.workers.torch.linear import PrepackedLinear, make_linear, type_between_layers

# --- the parts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Norm:
    """LayerNorm, or RMSNorm, which has no bias. Computes in float32."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float
    is_rms: bool

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_rms:
            return normalize_rms_(x.to(torch.float32, copy=True), self.epsilon).mul_(self.weight).to(x.dtype)
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A token's word plus its position, if the family has a table of these, normalized in float32, then projected."""

    words: Tensor
    positions: Tensor | None
    """With the row of token type 0 added, where a family has types."""
    first_type: Tensor | None
    """The row of type 0, float32 [H], where there is no such table."""
    type_difference: Tensor | None
    """The row of type 1 less that of type 0, float32 [H], for the second part of a pair. None where all have type 0."""
    norm: Callable[[Tensor], Tensor]
    projection: PrepackedLinear | None
    positions_after: int | None

    def __call__(self, layout: Layout, num_tokens: int, dtype: torch.dtype) -> Tensor:
        """`dtype` [num_tokens, H]; the tokens behind the layout's own are word 0 at position 0. A layout with a prefix
        is for families without a table of positions."""
        x = self.words[_extended(layout.computed_ids(), num_tokens)].float()
        if self.positions is not None:
            after = self.positions_after
            positions = layout.offsets() if after is None else layout.positions_after(after)
            x += self.positions[_extended(positions, num_tokens)]
        elif self.first_type is not None:
            x += self.first_type
        if self.type_difference is not None and layout.borders is not None:
            x[torch.from_numpy(np.flatnonzero(layout.token_types()))] += self.type_difference
        x = self.norm(x).to(dtype)
        return x if self.projection is None else self.projection(x)


def _extended(ids: "np.ndarray[tuple[int], np.dtype[np.int64]]", num_tokens: int) -> Tensor:
    extended = np.zeros(num_tokens, dtype=np.int64)
    extended[: ids.size] = ids
    return torch.from_numpy(extended)


@dataclass(frozen=True, slots=True)
class FeedForward:
    gate: PrepackedLinear | None
    up: PrepackedLinear
    activation: tuple[str, str]
    down: PrepackedLinear

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [T, H] → [T, H], plus `residual`."""
        if self.gate is None:
            return self.down.plus(self.up(x, self.activation), residual)
        return self.down.plus(self.up.times(x, self.gate(x, self.activation)), residual)


@dataclass(frozen=True, slots=True)
class Experts:
    """Each token goes through the experts that the router chooses for it."""

    router: Tensor
    """float32 [experts, H]."""
    per_token: int
    ups: list[PrepackedLinear]
    downs: list[PrepackedLinear]
    activation: tuple[str, str]
    bias: Tensor
    """float32 [H], once for all."""

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """As that of `FeedForward`."""
        parts, chosen = linear(x.float(), self.router).softmax(dim=-1).topk(self.per_token)
        total = residual.float() + self.bias
        for index, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            tokens, ranks = torch.where(chosen == index)
            if num_tokens := len(tokens):
                given = x.index_select(0, pad(tokens, (0, _rounded(num_tokens) - num_tokens)))
                made = down(up(given, self.activation))[:num_tokens].float()
                total.index_add_(0, tokens, made * parts[tokens, ranks, None])
        return total.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    is_norm_first: bool
    attention_norm: Callable[[Tensor], Tensor]
    qkv: PrepackedLinear
    attention: Attention
    out: PrepackedLinear
    attended_norm: Callable[[Tensor], Tensor] | None
    """Where the norms come last: of attention plus x, to which x is then added once more."""
    norm: Callable[[Tensor], Tensor]
    fed_forward: FeedForward | Experts

    def __call__(
        self, x: Tensor, runs: list[Run], prefix: PrefixStates | None = None, wanted: Tensor | None = None
    ) -> Tensor:
        """x [T', H] → [T', H]. `prefix`: its computed tokens come first. `wanted`: int64, the rows that are returned,
        in this order; None for all."""
        normed = self.attention_norm(x) if self.is_norm_first else x
        attended = self.attention(self.qkv(normed), runs, prefix)
        if wanted is not None:
            x, attended = x.index_select(0, wanted), attended.index_select(0, wanted)
        summed = self.out.plus(attended, x)
        if self.is_norm_first:
            return self.fed_forward.plus(self.norm(summed), summed)
        if self.attended_norm is not None:
            summed = x + self.attended_norm(summed)
        x = self.attention_norm(summed)
        return self.norm(self.fed_forward.plus(x, x))


@dataclass
class FusedForward:
    embeddings: Embeddings
    layers: list[Layer]
    norm: Callable[[Tensor], Tensor]
    """Of the last layer's hidden states."""
    dtype: torch.dtype
    has_first_tokens_only: bool
    """It returns the states of each sequence's first token, [B, H]; most of the last layer need not be computed for the
    others."""
    num_padding_tokens: int = 0
    path: str = "fused"
    can_share: bool = False

    def __post_init__(self) -> None:
        self.can_share = all(layer.attention.can_share for layer in self.layers)

    def __call__(self, layout: Layout, prefix: PrefixStates | None = None) -> Tensor:
        num_before = layout.prefix.size
        num_tokens = num_before + layout.token_ids.size
        num_computed = _rounded(num_tokens)
        self.num_padding_tokens += num_computed - num_tokens
        x = self.embeddings(layout, num_computed, self.dtype)
        *layers, last = self.layers
        for layer in layers:
            x = layer(x, layout.runs, prefix)
        if self.has_first_tokens_only:
            starts = _extended(num_before + layout.starts, _rounded(layout.starts.size))
            return self.norm(last(x, layout.runs, prefix, starts)[: layout.starts.size])
        return self.norm(last(x, layout.runs, prefix)[num_before:num_tokens])

    def warm(self, max_tokens: int, width: int) -> None:
        """Compile oneDNN's kernels for short texts before the first request. They depend only on shapes, so one layer
        is enough. 0.1 s for all-MiniLM-L6-v2."""
        with torch.inference_mode():
            for num_tokens in range(_STEP_OF_SHORT, _WARM_UP_TO + 1, _STEP_OF_SHORT):
                x = torch.zeros(num_tokens, width, dtype=self.dtype)
                self.layers[0](x, [Run(start=0, count=1, length=min(num_tokens, max_tokens))])


_STEP_OF_SHORT = 4
_WARM_UP_TO = 64


def _rounded(num_tokens: int) -> int:
    """The number of tokens to compute: one of 104 numbers up to 2,048, because oneDNN keeps compiled kernels for each,
    some 100 KB for each of four, in every worker. At most 3 more for a short text, 1 % for a full batch."""
    step = _STEP_OF_SHORT if num_tokens <= 128 else 16 if num_tokens <= 512 else 32
    return up_to(step, num_tokens)


# --- loading a model's files ------------------------------------------------------------------------------------


def load_fused(card: ModelCard, dtype: str) -> FusedForward:
    """Load with linear kernels for `dtype`: "float32" or "bfloat16". Raises NotDescribed for another family, setting or
    type, or for a tensor under another name."""
    if card.model_type not in FUSED_FAMILIES:
        raise NotDescribed(f"{card.model_type} is no family of the fused path")
    if type_between_layers(dtype) is None:
        raise NotDescribed(f"there are no linear kernels for {dtype} here")
    try:
        weights = Tensors(card.weight_files)
        forward = _Builder(card, describe(card, weights), weights, dtype).build()
        forward.warm(card.max_tokens, card.hidden_size)
        return forward
    except (OSError, ModelError, ValueError, KeyError, TypeError, RuntimeError) as error:
        # The packed path reads the same files and reports their faults.
        raise NotDescribed(f"{type(error).__name__}: {error}") from error


class _Builder:
    def __init__(self, card: ModelCard, encoder: EncoderSpec, weights: Mapping[str, Tensor], dtype: str) -> None:
        self._card, self._encoder, self._weights, self._dtype = card, encoder, weights, dtype
        # Shared by the layers that have the same.
        self._bias = self._distance_bias()
        self._rotations = cache(partial(rotations, num_positions=card.max_tokens))
        self._windows = cache(partial(SlidingWindow, is_causal=encoder.is_causal, slopes=encoder.slopes))
        self._rows_of_distances = cache(lambda: [*map(torch.from_numpy, relative_rows(encoder, card.max_tokens))])

    def build(self) -> FusedForward:
        """Raises KeyError for a missing tensor, NotDescribed for layers with parts that are not computed here."""
        encoder = self._encoder
        has_others = encoder.words_factor != 1 or encoder.norm_offset != 0
        if has_others or any(layer.fed_forward_norm for layer in encoder.layers):
            raise NotDescribed("the fused path does not compute all parts of layers like these")
        layers = [self._layer(layer) for layer in encoder.layers]
        between = type_between_layers(self._dtype)
        assert between is not None
        norm = self._norm(encoder.final_norm)
        return FusedForward(self._embeddings(), layers, norm, between, self._card.reads_first_tokens_only)

    def _embeddings(self) -> Embeddings:
        encoder = self._encoder
        positions = None if encoder.positions is None else self._weights[f"{encoder.positions}.weight"].float()
        first_type = difference = None
        if encoder.types is not None:
            types = self._weights[f"{encoder.types}.weight"][:2].float()
            if positions is None:
                first_type = types[0]
            else:
                positions = positions + types[0]
            difference = types[1] - types[0] if self._card.has_segments and len(types) > 1 else None
        return Embeddings(
            words=self._weights[f"{encoder.words}.weight"],
            positions=positions,
            first_type=first_type,
            type_difference=difference,
            norm=self._norm(encoder.embedding_norm),
            projection=None if encoder.projection is None else self._linear(encoder.projection),
            positions_after=encoder.positions_after,
        )

    def _layer(self, layer: LayerSpec) -> Layer:
        qkv, attention = self._attention(layer)
        return Layer(
            is_norm_first=self._encoder.final_norm is not None,
            attention_norm=self._norm(layer.attention_norm),
            qkv=qkv,
            attention=attention,
            out=self._linear(layer.out),
            attended_norm=None if layer.attended_norm is None else self._norm(layer.attended_norm),
            norm=self._norm(layer.norm),
            fed_forward=self._fed_forward(layer),
        )

    def _fed_forward(self, layer: LayerSpec) -> FeedForward | Experts:
        activation = ACTIVATIONS[self._encoder.activation].onednn
        if layer.router is not None:
            router = self._weights[f"{layer.router}.weight"].float()
            ups, downs = (self._weights[f"{layer.experts}.mlp.{name}"].chunk(len(router)) for name in ("w1", "w2"))
            return Experts(
                router=router,
                per_token=self._encoder.experts_per_token,
                ups=[make_linear(up, None, self._dtype) for up in ups],
                downs=[make_linear(down.T.contiguous(), None, self._dtype) for down in downs],
                activation=activation,
                bias=self._weights[f"{layer.experts}.bias"].float(),
            )
        up, biases = self._rows(layer.up), self._biases(layer.up)
        gate = None
        if self._encoder.is_gated:
            parts = zip(up.chunk(2), (None, None) if biases is None else biases.chunk(2), strict=True)
            gate, made = (make_linear(weight, bias, self._dtype) for weight, bias in parts)
            if self._encoder.is_gate_last:
                gate, made = made, gate
        else:
            made = make_linear(up, biases, self._dtype)
        return FeedForward(gate, made, activation, self._linear(layer.down))

    def _attention(self, layer: LayerSpec) -> tuple[PrepackedLinear, Attention]:
        """Without a rotation, the scale of the scores, 1/√(head dim), goes into the query."""
        weight, bias = self._rows(layer.qkv), self._biases(layer.qkv)
        num_heads = self._encoder.num_heads
        head_dim = self._weights[f"{layer.out}.weight"].shape[1] // num_heads
        num_key_heads = (len(weight) // head_dim - num_heads) // 2
        rotation = norms = None
        factor = head_dim**-0.5 if self._encoder.score_scale is None else self._encoder.score_scale
        if layer.theta is None and layer.query_norm is not None:
            norms = self._norm(layer.query_norm, factor), self._norm(layer.key_norm)
        elif layer.theta is None:
            scale = torch.ones(len(weight))
            scale[: num_heads * head_dim] = factor
            weight, bias = weight.float() * scale[:, None], None if bias is None else bias.float() * scale
        else:
            num_rotated = (num_heads + num_key_heads) * head_dim
            weight = torch.cat([paired(weight[:num_rotated], head_dim), weight[num_rotated:]])
            if bias is not None:
                bias = torch.cat([paired(bias[:num_rotated], head_dim), bias[num_rotated:]])
            norm = self._head_norms(layer, num_heads, num_key_heads, head_dim)
            rotation = Rotation(self._rotations(layer.theta, layer.scaling, head_dim), norm, self._encoder.epsilon)
        hides = layer.window is not None and layer.window < self._card.max_tokens - 1
        window = self._windows(layer.window) if hides or self._encoder.slopes else None
        relative = None if self._encoder.relative is None else self._relative(layer, factor)
        is_causal = self._encoder.is_causal
        attention = Attention(num_heads, num_key_heads, self._bias, rotation, is_causal, window, relative, norms)
        return make_linear(weight, bias, self._dtype), attention

    def _relative(self, layer: LayerSpec, scale: float) -> RelativePositions:
        tables = relative_states(self._encoder, layer, lambda name: self._weights[name].float().numpy())
        keys, queries = (torch.from_numpy(np.ascontiguousarray(table)) for table in tables)
        return RelativePositions(keys, queries * scale, *self._rows_of_distances())

    def _head_norms(self, layer: LayerSpec, num_heads: int, num_key_heads: int, head_dim: int) -> Tensor | None:
        if layer.query_norm is None:
            return None
        query, key = (
            paired(self._weights[f"{name}.weight"].float(), head_dim) for name in (layer.query_norm, layer.key_norm)
        )
        return torch.cat([query.expand(num_heads, -1), key.expand(num_key_heads, -1)])

    def _distance_bias(self) -> Tensor | None:
        if self._encoder.distance_bias is None:
            return None
        table = self._weights[f"{self._encoder.distance_bias}.weight"].float().numpy()
        return torch.from_numpy(bias_of_distances(self._encoder, table, self._card.max_tokens))

    def _linear(self, name: str) -> PrepackedLinear:
        return make_linear(self._rows((name,)), self._biases((name,)), self._dtype)

    def _rows(self, names: tuple[str, ...]) -> Tensor:
        weights = [self._weights[f"{name}.weight"] for name in names]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def _biases(self, names: tuple[str, ...]) -> Tensor | None:
        names = tuple(f"{name}.bias" for name in names)
        if not self._encoder.has_all_biases and not any(name in self._weights for name in names):
            return None
        return torch.cat([self._weights[name] for name in names])

    def _norm(self, name: str | None, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
        if name is None:
            return lambda x: x
        bias = None if self._encoder.is_rms else self._biases((name,))
        weight = self._weights[f"{name}.weight"].float() * scale
        return Norm(weight, None if bias is None else bias.float() * scale, self._encoder.epsilon, self._encoder.is_rms)
