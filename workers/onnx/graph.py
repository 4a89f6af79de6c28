"""The packed forward pass as one graph for ONNX Runtime.

Owns the operators of a layer, and which weights they take in which shape. Knows no file and runs nothing.

    token ids, positions [T] ─ embeddings ─ layers ─ hidden states [T, H]
    token types [T]: of a model for pairs that has types; elsewhere every token has type 0
    starts, counts, lengths [R]: the runs of sequences of equal length, which attention computes one after the other
    pieces of a kind of attention [5, P]: the same where a token does not see all others (`pieces_of`)

Choices, each measured with all-MiniLM-L6-v2 on a core with AVX-512: Add and LayerNormalization instead of
SkipLayerNormalization, which takes six times as long (512 tokens: 1.0 → 0.16 ms); a condition around the loop over the
runs, because a loop of one turn costs 4 % of a text of 12 tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vecd.model.card import ModelCard
from vecd.workers.activations import ACTIVATIONS
from vecd.workers.batch import Ints, Run
from vecd.workers.description import (
    EncoderSpec,
    LayerSpec,
    NotDescribed,
    RotaryScaling,
    bias_of_distances,
    frequencies_of,
    relative_rows,
    relative_states,
    window_band,
)
from vecd.workers.machine import has_vnni
from vecd.workers.onnx.file import MICROSOFT, Element, Graph, Int8Products, Value, quantize

Array = NDArray[np.float32]


@dataclass(slots=True)
class EncoderGraph:
    """A graph and the weights that its session needs. Borrows the arrays that it was made of."""

    content: bytes
    weights: dict[str, NDArray[Any]] = field(default_factory=dict)
    """By the names of the graph's initializers; C-contiguous; float32, but whole numbers for products in int8. The
    session keeps no copy of them but for `products`, which it lays out anew for its own kernels."""
    products: set[str] = field(default_factory=set)
    """Names of the weights that are the right side of a product."""
    windows: dict[str, int | None] = field(default_factory=dict)
    has_types: bool = False
    has_first_tokens_only: bool = False


class GraphBuilder:
    def __init__(self, card: ModelCard, encoder: EncoderSpec, tensors: Mapping[str, Array], *, is_int8: bool) -> None:
        """For the graph of the model of `card`, which `encoder` describes. `is_int8`: products by weights are computed
        in int8. Raises KeyError for a missing tensor, as does `build`."""
        self._encoder = encoder
        self._tensors = tensors
        self._max_tokens = card.max_tokens
        self._has_unattended = card.tokens is not None and card.tokens.has_unattended
        self._graph = graph = Graph("pass")
        self._node, self._constant = graph.node, graph.constant
        self._int8 = Int8Products(self._graph, is_signed=has_vnni()) if is_int8 else None
        has_types = card.has_segments and encoder.types is not None and len(self._tensor(encoder.types)) > 1
        self._made = EncoderGraph(b"", has_types=has_types, has_first_tokens_only=card.reads_first_tokens_only)
        self._positions: Value = ""
        """[T, 1]."""
        self._rotations: dict[tuple[float, RotaryScaling], list[Value]] = {}
        self._attentions: dict[int | None, _Attention] = {}

    def build(self) -> EncoderGraph:
        graph = self._graph
        token_ids, positions = (graph.input(name, Element.INT64, ["tokens"]) for name in ("token_ids", "positions"))
        starts, counts, lengths = (
            graph.input(name, Element.INT64, ["runs"]) for name in ("starts", "counts", "lengths")
        )
        words = self._tensor(self._encoder.words)
        x = self._embeddings(words, token_ids, positions)
        width = int(words.shape[1])
        if self._encoder.projection is not None:
            x = self._linear(self._encoder.projection, x)
            width = int(self._tensor(self._encoder.projection).shape[0])
        whole = _Pieces(starts, starts, counts, lengths, lengths)
        if any(layer.theta is not None for layer in self._encoder.layers):
            self._positions = graph.node("Unsqueeze", positions, graph.constant([1]))
        words_of_layers = self._words_for_gates(x)
        firsts = graph.input("firsts", Element.INT64, ["sequences"]) if self._made.has_first_tokens_only else None
        last = len(self._encoder.layers) - 1
        for index, layer in enumerate(self._encoder.layers):
            wanted = firsts if index == last else None
            x = self._layer(layer, x, self._attention(layer, whole), f"attention_{index}", wanted)
            if layer.words_gate:
                x = self._gated(layer, x, self._some(words_of_layers[index], wanted))
        if self._encoder.final_norm is not None:
            x = self._norm(self._encoder.final_norm, x)
        if self._encoder.final_projection is not None:
            x = self._linear(self._encoder.final_projection, x)
            width = int(self._tensor(self._encoder.final_projection).shape[0])
        graph.output(x, Element.FLOAT32, ["tokens" if firsts is None else "sequences", width])
        self._made.content = graph.to_bytes()
        return self._made

    def _embeddings(self, words: Array, token_ids: Value, positions: Value) -> Value:
        encoder = self._encoder
        x = self._node("Gather", self._weight("embeddings/words", words), token_ids)
        if encoder.words_factor != 1:
            factor = np.array([encoder.words_factor], dtype=np.float32)
            x = self._node("Mul", x, self._weight("embeddings/factor", factor))
        types = None if encoder.types is None else self._tensor(encoder.types)
        if types is not None and self._made.has_types:
            given = self._graph.input("token_types", Element.INT64, ["tokens"])
            x = self._node("Add", x, self._node("Gather", self._weight("embeddings/types", types), given))
            types = None
        if encoder.positions is not None:
            table = self._tensor(encoder.positions)
            if types is not None:
                table = table + types[0]
            places = self._node("Gather", self._weight("embeddings/positions", table), positions)
            x = self._node("Add", x, places)
        elif types is not None:
            x = self._node("Add", x, self._weight("embeddings/types", types[0]))
        return x if encoder.embedding_norm is None else self._norm(encoder.embedding_norm, x)

    def _layer(
        self, layer: LayerSpec, x: Value, attention: "_Attention", name: str, wanted: Value | None = None
    ) -> Value:
        """`wanted`: the tokens that the result has; None: all. The others are computed as far as attention alone."""
        if self._encoder.final_norm is None:
            attended, x = self._attended(layer, x, attention, name, wanted), self._some(x, wanted)
            if layer.attended_norm is not None:
                attended = self._norm(layer.attended_norm, self._node("Add", attended, x))
            x = self._norm(layer.attention_norm, self._node("Add", attended, x))
            return self._norm(layer.norm, self._node("Add", self._fed_forward(layer, x), x))
        attended = self._attended(layer, self._norm(layer.attention_norm, x), attention, name, wanted)
        x = self._node("Add", self._norm(layer.attended_norm, attended), self._some(x, wanted))
        fed = self._fed_forward(layer, self._norm(layer.norm, x))
        return self._node("Add", self._norm(layer.fed_forward_norm, fed), x)

    def _words_for_gates(self, x: Value) -> list[Value]:
        """From the embeddings: of each layer, [T, D]. None where layers have no such gate."""
        name = self._encoder.gated_words
        if name is None:
            return []
        weight, num_layers = self._tensor(name), len(self._encoder.layers)
        words = self._product(name, x, weight * np.float32(weight.shape[1] ** -0.5))
        width = len(weight) // num_layers
        words = self._of_heads(lambda parts: self._norm(self._encoder.gated_words_norm, parts), words, width)
        return self._graph.nodes("Split", words, self._constant([width] * num_layers), num_outputs=num_layers, axis=1)

    def _gated(self, layer: LayerSpec, x: Value, words: Value) -> Value:
        up, down, norm, factor = layer.words_gate
        gated = self._node("Mul", self._activation(self._linear(up, x)), words)
        x = self._node("Add", self._norm(norm, self._linear(down, gated)), x)
        return self._node("Mul", x, self._weight(factor, self._tensors[factor]))

    def _some(self, x: Value, wanted: Value | None) -> Value:
        return x if wanted is None else self._node("Gather", x, wanted)

    def _attended(self, layer: LayerSpec, x: Value, attention: "_Attention", name: str, wanted: Value | None) -> Value:
        if layer.theta is None and layer.query_norm is None:
            weight = np.concatenate([self._tensor(name) for name in layer.qkv])
            biases = [bias for name in layer.qkv if (bias := self._bias(name)) is not None]
            qkv = self._product(layer.qkv[0], x, weight, np.concatenate(biases) if biases else None)
            thirds = self._constant([weight.shape[0] // 3] * 3)
            query, key, value = self._graph.nodes("Split", attention.framed(qkv, 3), thirds, num_outputs=3, axis=2)
        else:
            query, key, value = (attention.framed(each) for each in self._placed(layer, x))
        attended = self._some(attention(query, key, value, name, self._relative(layer)), wanted)
        if wanted is not None:
            self._use_other_rows()
        return self._linear(layer.out, attended)

    def _relative(self, layer: LayerSpec) -> "_Relative | None":
        encoder = self._encoder
        if encoder.relative is None:
            return None
        if self._has_unattended:
            raise NotDescribed("relative positions and tokens that are not attended to")
        keys, queries = relative_states(encoder, layer, self._tensors.__getitem__)
        of_keys, of_queries = relative_rows(encoder, self._max_tokens)
        scale = np.float32(encoder.score_scale)
        return _Relative(
            self._weight(f"{layer.position_key}/positions", keys * scale),
            self._weight(f"{layer.position_query}/positions", queries * scale),
            self._weight("rows/keys", of_keys),
            self._weight("rows/queries", of_queries),
            self._max_tokens,
        )

    def _placed(self, layer: LayerSpec, x: Value) -> tuple[Value, Value, Value]:
        """Query, key and value, normalized and rotated where the layer does so."""
        num_heads = self._encoder.num_heads
        head_dim = self._tensor(layer.out).shape[1] // num_heads
        num_rows = sum(len(self._tensor(name)) for name in layer.qkv)
        num_key_heads = (num_rows // head_dim - num_heads) // 2
        ends = [num_heads * head_dim, (num_heads + num_key_heads) * head_dim]
        query, key, value = self._parts(layer.qkv, x, ends)
        query, key = self._head_norm(layer.query_norm, query), self._head_norm(layer.key_norm, key)
        if layer.theta is not None:
            base = layer.theta, layer.scaling
            query, key = (self._rotate(each, base, head_dim) for each in (query, key))
        if self._encoder.has_value_norm:
            ones = np.ones(head_dim, dtype=np.float32)
            value = self._of_heads(lambda heads: self._normalized(f"ones/{head_dim}", heads, ones), value, head_dim)
        key, value = (self._for_all_heads(each, num_key_heads, head_dim) for each in (key, value))
        return query, key, value

    def _head_norm(self, name: str | None, x: Value) -> Value:
        return x if name is None else self._of_heads(lambda heads: self._norm(name, heads), x, len(self._tensor(name)))

    def _of_heads(self, norm: Callable[[Value], Value], x: Value, head_dim: int) -> Value:
        heads = self._node("Reshape", x, self._constant([-1, head_dim]))
        return self._node("Reshape", norm(heads), self._node("Shape", x))

    def _rotate(self, x: Value, base: tuple[float, RotaryScaling], head_dim: int) -> Value:
        if base not in self._rotations:
            angles = np.arange(self._max_tokens, dtype=np.float32)[:, None] * frequencies_of(*base, head_dim)
            tables = (("cos", np.cos(angles)), ("sin", np.sin(angles)))
            self._rotations[base] = [
                self._weight(f"rotary/{len(self._rotations)}/{name}", table) for name, table in tables
            ]
        # The operator wants [batch, length, width]: each token is a sequence of its own.
        apart = self._node("Unsqueeze", x, self._constant([1]))
        rotated = self._node("RotaryEmbedding", apart, self._positions, *self._rotations[base], domain=MICROSOFT)
        return self._node("Squeeze", rotated, self._constant([1]))

    def _for_all_heads(self, x: Value, num_key_heads: int, head_dim: int) -> Value:
        """[T, key heads · head dim] → [T, heads · head dim]: each key head for its group of query heads."""
        num_heads = self._encoder.num_heads
        if num_key_heads == num_heads:
            return x
        heads = self._node("Reshape", x, self._constant([-1, num_key_heads, 1, head_dim]))
        group = self._constant([1, 1, num_heads // num_key_heads, 1])
        return self._node("Reshape", self._node("Expand", heads, group), self._constant([-1, num_heads * head_dim]))

    def _fed_forward(self, layer: LayerSpec, x: Value) -> Value:
        if layer.router is not None and layer.experts is not None:
            return self._routed(layer.router, layer.experts, x)
        if not self._encoder.is_gated:
            return self._linear(layer.down, self._activated(layer.up[0], x))
        half = sum(len(self._tensor(name)) for name in layer.up) // 2
        gate, up = self._parts(layer.up, x, [half])
        if self._encoder.is_gate_last:
            gate, up = up, gate
        return self._linear(layer.down, self._node("Mul", self._activation(gate), up))

    def _routed(self, router: str, experts: str, x: Value) -> Value:
        """The sum of what the experts of each token give, times their part in the choice. Each expert computes its own
        tokens alone, which may be none."""
        weight, most = self._tensor(router), self._encoder.experts_per_token
        choice = self._node("Gemm", x, self._weight(f"{router}.weight", weight), transB=1)
        parts, chosen = self._graph.nodes(
            "TopK", self._node("Softmax", choice, axis=1), self._constant([most]), num_outputs=2, axis=1
        )
        bias = self._weight(f"{experts}.bias", self._tensor(experts, "bias"))
        total = self._node("Expand", bias, self._node("Shape", x))
        ups, downs = (np.split(self._tensor(f"{experts}.mlp", name), len(weight)) for name in ("w1", "w2"))
        for index, (up, down) in enumerate(zip(ups, downs, strict=True)):
            is_chosen = self._node("Cast", self._node("Equal", chosen, self._constant(index)), to=int(Element.FLOAT32))
            part = self._node("ReduceSum", self._node("Mul", parts, is_chosen), self._constant([1]), keepdims=1)
            tokens = self._node("Gather", self._node("NonZero", part), self._constant(0), axis=0)
            part = self._node("Gather", part, tokens)
            self._use_other_rows()
            fed = self._activation(self._product(f"{experts}/up_{index}", self._node("Gather", x, tokens), up))
            fed = self._product(f"{experts}/down_{index}", fed, np.ascontiguousarray(down.T))
            fed = self._node("Mul", fed, part)
            places = self._node("Unsqueeze", tokens, self._constant([1]))
            total = self._node("ScatterND", total, places, fed, reduction="add")
        self._use_other_rows()
        return total

    def _use_other_rows(self) -> None:
        """The products that follow have another number of rows."""
        if self._int8 is not None:
            self._int8.use_other_rows()

    def _parts(self, names: tuple[str, ...], x: Value, ends: list[int]) -> list[Value]:
        if len(names) > 1:
            return [self._linear(name, x) for name in names]
        weights, bias = np.split(self._tensor(names[0]), ends), self._bias(names[0])
        biases = [None] * len(weights) if bias is None else np.split(bias, ends)
        parts = enumerate(zip(weights, biases, strict=True))
        return [self._product(f"{names[0]}/{index}", x, weight, part) for index, (weight, part) in parts]

    def _linear(self, name: str, x: Value) -> Value:
        return self._product(name, x, self._tensor(name), self._bias(name))

    def _activated(self, name: str, x: Value) -> Value:
        operator = ACTIVATIONS[self._encoder.activation].onnx_with_bias
        if not operator:
            return self._activation(self._linear(name, x))
        # The operator adds the bias, which the product would otherwise do apart.
        product = self._product(name, x, self._tensor(name))
        bias = self._weight(f"{name}.bias", self._tensor(name, "bias"))
        return self._node(operator, product, bias, domain=MICROSOFT)

    def _activation(self, x: Value) -> Value:
        operator, attributes = ACTIVATIONS[self._encoder.activation].onnx or ("", {})
        return self._node(operator, x, **attributes)

    def _product(self, name: str, x: Value, weight: Array, bias: Array | None = None) -> Value:
        """x [T, K] times weight [N, K], plus bias [N]."""
        if self._int8 is not None:
            values, scales = quantize(weight, is_signed=self._int8.is_signed)
            quantized = [self._weight(f"{name}.int8", values), self._weight(f"{name}.scales", scales)]
            self._made.products.add(quantized[0])
            product = self._int8(x, *quantized)
            return product if bias is None else self._node("Add", product, self._weight(f"{name}.bias", bias))
        inputs = [x, self._weight(f"{name}.weight", weight)]
        self._made.products.add(inputs[1])
        if bias is not None:
            inputs.append(self._weight(f"{name}.bias", bias))
        return self._node("Gemm", *inputs, transB=1)

    def _norm(self, name: str | None, x: Value) -> Value:
        if name is None:
            return x
        weight = self._tensor(name)
        if self._encoder.norm_offset:
            weight = weight + np.float32(self._encoder.norm_offset)
        return self._normalized(name, x, weight, None if self._encoder.is_rms else self._bias(name))

    def _normalized(self, name: str, x: Value, weight: Array, bias: Array | None = None) -> Value:
        inputs = [x, self._weight(f"{name}.weight", weight)]
        operator = "SimplifiedLayerNormalization" if self._encoder.is_rms else "LayerNormalization"
        if bias is not None:
            inputs.append(self._weight(f"{name}.bias", bias))
        return self._node(operator, *inputs, axis=1, epsilon=self._encoder.epsilon)

    def _attention(self, layer: LayerSpec, whole: "_Pieces") -> "_Attention":
        if layer.window not in self._attentions:
            name, pieces, bias = "whole", whole, self._distance_bias()
            sees_all = not self._encoder.is_causal and layer.window is None
            if self._has_unattended or not sees_all:
                name = f"pieces_{layer.window}"
                self._made.windows[name] = layer.window
                given = self._graph.input(name, Element.INT64, [5, "pieces"])
                rows = [self._node("Gather", given, self._constant(row), axis=0) for row in range(5)]
                pieces = _Pieces(*rows)
            if not sees_all:
                bias = self._window_bias(layer.window)
            width, num_heads = int(self._tensor(layer.out).shape[1]), self._encoder.num_heads
            made = _Attention(
                name,
                self._graph,
                pieces,
                width,
                num_heads,
                *bias,
                self._encoder.score_scale,
                slopes=self._slopes(),
                has_unattended=self._has_unattended,
            )
            self._attentions[layer.window] = made
        return self._attentions[layer.window]

    def _window_bias(self, window: int | None) -> tuple[Value, int]:
        """A band that all pieces cut their part out of, 0 or -inf, [1, 1, queries, keys]; and the key that the first
        query is."""
        size = min(PIECE_TOKENS, self._max_tokens)
        reach = self._max_tokens if window is None else min(window, self._max_tokens)
        after = 0 if self._encoder.is_causal else reach
        band = window_band(size, reach, after, falls=bool(self._encoder.slopes))
        return self._weight(f"window_{window}", band[None, None]), reach

    def _slopes(self) -> Value:
        slopes = np.array(self._encoder.slopes, dtype=np.float32)
        return self._weight("slopes", slopes[None, :, None, None]) if slopes.size else ""

    def _distance_bias(self) -> tuple[Value | None, int]:
        if self._encoder.distance_bias is None:
            return None, 0
        bias = bias_of_distances(self._encoder, self._tensor(self._encoder.distance_bias), self._max_tokens)
        return self._weight("distance_bias", bias[None]), 0

    def _tensor(self, name: str, part: str = "weight") -> Array:
        return self._tensors[f"{name}.{part}"]

    def _bias(self, name: str) -> Array | None:
        is_there = self._encoder.has_all_biases or f"{name}.bias" in self._tensors
        return self._tensor(name, "bias") if is_there else None

    def _weight(self, name: str, array: NDArray[Any]) -> Value:
        self._made.weights[name] = np.ascontiguousarray(array)
        return self._graph.weight(name, array)


# --- attention --------------------------------------------------------------------------------------------------

PIECE_TOKENS = 256
"""Queries at a time where a token does not see all others. Fewer see fewer keys that the band hides; more share a
product. Not measured."""


def pieces_of(runs: Sequence[Run], window: int | None, is_causal: bool) -> Ints:
    """What attention computes at a time, [5, P]: the first query and the first key (tokens), the number of sequences,
    the queries and the keys of each. A run that is longer than PIECE_TOKENS is cut, unless its tokens see all others,
    and a piece has only those keys that one of its queries sees: scores of 8,192 × 8,192 tokens would take 268 MB for
    each head. Queries that see no token that is attended to are a piece without keys: they get zeros, as in torch."""
    pieces = []
    for run in runs:
        size = run.length if window is None and not is_causal else PIECE_TOKENS
        if run.length <= size and not run.attended:
            pieces.append((run.start, run.start, run.count, run.length, run.length))
            continue
        reach = run.length if window is None else window
        for start, attended in zip(
            range(run.start, run.stop, run.length), run.attended or run.count * (run.length,), strict=True
        ):
            borders = {*range(0, run.length, size), min(run.length, attended + reach), run.length}
            for first, last in pairwise(sorted(borders)):
                first_key = max(0, first - reach)
                last_key = min(attended, last if is_causal else last + reach)
                pieces.append((start + first, start + first_key, 1, last - first, max(0, last_key - first_key)))
    return np.array(pieces, dtype=np.int64).T.copy()


class _Pieces(NamedTuple):
    queries: Value
    keys: Value
    counts: Value
    num_queries: Value
    num_keys: Value


class _Relative(NamedTuple):
    """Of one layer: see `relative_states` and `relative_rows`. The states contain the scale of the scores."""

    keys: Value
    queries: Value
    key_rows: Value
    query_rows: Value
    max_tokens: int


class _Attention:
    def __init__(
        self,
        name: str,
        graph: Graph,
        pieces: _Pieces,
        width: int,
        num_heads: int,
        bias: Value | None,
        reach: int,
        scale: float | None = None,
        *,
        slopes: Value,
        has_unattended: bool,
    ) -> None:
        """`name` is unique in the graph. `bias`: added to the scores, [1, heads or 1, queries, keys]. A piece uses the
        part that begins with its first query, and with the key that lies `reach` before that; times `slopes`, [1,
        heads, 1, 1], which are empty for none. `has_unattended`: a run
        that is not cut may have fewer keys than queries."""
        self._graph = graph
        self._attributes = {"num_heads": num_heads, **({} if scale is None else {"scale": scale})}
        self._pieces = pieces
        self._bias, self._slopes = bias, slopes
        constant = graph.constant
        self._zero, self._axes, self._axes_of_scores = constant([0]), constant([1]), constant([2, 3])
        self._width, self._flat, self._reach = constant([width]), constant([-1, width]), constant([reach])
        self._true = constant(True)
        self._num_pieces = graph.node("Size", pieces.queries)
        self._is_one_piece = graph.node("Equal", self._num_pieces, constant(1))
        if has_unattended:
            sums = (graph.node("ReduceSum", each, keepdims=0) for each in (pieces.num_queries, pieces.num_keys))
            self._is_one_piece = graph.node("And", self._is_one_piece, graph.node("Equal", *sums))
        of_one = _branch(
            f"{name}/one", lambda one: one.node("Concat", pieces.counts, pieces.num_queries, axis=0), Element.INT64
        )
        of_many = _branch(f"{name}/many", lambda many: many.node("Identity", constant([1, -1])), Element.INT64)
        frame = graph.node("If", self._is_one_piece, then_branch=of_one, else_branch=of_many)
        self._shapes = {times: graph.node("Concat", frame, constant([times * width]), axis=0) for times in (1, 3)}

    def framed(self, x: Value, times: int = 1) -> Value:
        """[T, times · W] → [count, length, times · W] if there is one piece, which is then a run that was not cut; else
        [1, T, times · W]."""
        return self._graph.node("Reshape", x, self._shapes[times])

    def __call__(self, query: Value, key: Value, value: Value, name: str, relative: "_Relative | None" = None) -> Value:
        """Each framed → [T, W]. `name` is unique in the graph. `relative`: only if tokens see all others."""
        pieces, qkv = self._pieces, (query, key, value)
        one = _branch(f"{name}/one", lambda graph: self._attend(graph, qkv, pieces, relative))
        many = _branch(f"{name}/many", lambda graph: self._each_piece(graph, qkv, f"{name}/piece", relative))
        attended = self._graph.node("If", self._is_one_piece, then_branch=one, else_branch=many)
        return self._graph.node("Reshape", attended, self._flat)

    def _each_piece(
        self, graph: Graph, qkv: tuple[Value, Value, Value], name: str, relative: "_Relative | None"
    ) -> Value:
        body = Graph(name)
        index = body.input(f"{name}/index", Element.INT64, [])
        goes_on = body.input(f"{name}/goes_on", Element.BOOL, [])
        before = body.input(f"{name}/before", Element.FLOAT32, None, is_sequence=True)
        index = body.node("Unsqueeze", index, self._zero)
        piece = _Pieces(*(body.node("Gather", values, index) for values in self._pieces))
        query_stop, key_stop = (
            body.node("Add", start, body.node("Mul", piece.counts, number))
            for start, number in ((piece.queries, piece.num_queries), (piece.keys, piece.num_keys))
        )
        query, key, value = qkv
        cut = (
            body.node("Slice", query, piece.queries, query_stop, self._axes),
            *(body.node("Slice", each, piece.keys, key_stop, self._axes) for each in (key, value)),
        )
        of_queries, of_keys = (
            body.node("Concat", piece.counts, number, self._width, axis=0)
            for number in (piece.num_queries, piece.num_keys)
        )
        shapes = (of_queries, of_keys, of_keys)
        apart = [body.node("Reshape", part, shape) for part, shape in zip(cut, shapes, strict=True)]
        attended = body.node("Reshape", self._attend(body, apart, piece, relative), self._flat)
        body.output(body.node("Identity", goes_on), Element.BOOL, [])
        body.output(body.node("SequenceInsert", before, attended), Element.FLOAT32, None, is_sequence=True)
        empty = graph.node("SequenceEmpty", dtype=int(Element.FLOAT32))
        pieces = graph.node("Loop", self._num_pieces, self._true, empty, body=body)
        return graph.node("ConcatFromSequence", pieces, axis=0)

    def _attend(self, graph: Graph, qkv: Sequence[Value], piece: _Pieces, relative: "_Relative | None") -> Value:
        """The sequences of a piece, each [count, length, W], to queries of that shape. The fields of `piece` have shape
        [1]."""
        inputs = list(qkv)
        if self._bias is not None:
            first_key = graph.node("Add", graph.node("Sub", piece.keys, piece.queries), self._reach)
            begin = graph.node("Concat", self._zero, first_key, axis=0)
            last_key = graph.node("Add", first_key, piece.num_keys)
            end = graph.node("Concat", piece.num_queries, last_key, axis=0)
            bias = graph.node("Slice", self._bias, begin, end, self._axes_of_scores)
            inputs += ["", "", graph.node("Mul", bias, self._slopes) if self._slopes else bias]
        elif relative is not None:
            inputs += ["", "", self._relative_bias(graph, qkv[0], qkv[1], piece.num_queries, relative)]
        return graph.node("MultiHeadAttention", *inputs, domain=MICROSOFT, **self._attributes)

    def _relative_bias(self, graph: Graph, query: Value, key: Value, length: Value, relative: "_Relative") -> Value:
        """Two terms of the scores, [count, heads, length, length]."""
        node, constant = graph.node, graph.constant
        middle = constant([relative.max_tokens])
        first, last = node("Sub", middle, length), node("Add", middle, length)

        def term(states: Value, table: Value, rows: Value) -> Value:
            own = node("Gather", table, node("Slice", rows, first, last, self._zero), axis=1)
            heads = node("Reshape", states, constant([0, 0, self._attributes["num_heads"], -1]))
            heads = node("Transpose", heads, perm=[0, 2, 1, 3])
            by_distance = node("FusedMatMul", heads, own, domain=MICROSOFT, transB=1)
            # [count, heads, length, 2 · length], the distance of row i and column c is c - i - length: without the
            # first elements and with rows that are one shorter, each row begins at the distance of its first token.
            flat = node("Reshape", by_distance, constant([0, 0, -1]))
            flat = node("Slice", flat, length, constant([2**62]), constant([2]))
            shifted = node("Reshape", flat, node("Concat", constant([0, 0]), length, constant([-1]), axis=0))
            return node("Slice", shifted, self._zero, length, constant([3]))

        of_keys = node("Transpose", term(key, relative.queries, relative.query_rows), perm=[0, 1, 3, 2])
        return node("Add", term(query, relative.keys, relative.key_rows), of_keys)


def _branch(name: str, fill: Callable[[Graph], Value], element: Element = Element.FLOAT32) -> Graph:
    graph = Graph(name)
    graph.output(fill(graph), element, None)
    return graph
