"""The packed forward pass as one graph for ONNX Runtime.

Owns the operators of a layer, and which weights they take in which shape. Knows no file and runs nothing. Called by
`vecd.workers.engines.lean.forward`.

    token ids, positions [T] ─ embeddings ─ layers ─ hidden states [T, H]
    starts, counts, lengths [R]: the runs of sequences of equal length, which attention computes one after the other

Choices, each measured with all-MiniLM-L6-v2 on a core with AVX-512: Add and LayerNormalization instead of
SkipLayerNormalization, which takes six times as long (512 tokens: 1.0 → 0.16 ms); a condition around the loop over the
runs, because a loop of one turn costs 4 % of a text of 12 tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vecd.workers.engines.lean.onnx_file import MICROSOFT, Element, Graph, Value
from vecd.workers.families.description import EncoderSpec, LayerSpec, bias_of_distances

Array = NDArray[np.float32]


@dataclass(slots=True)
class EncoderGraph:
    """A graph and the weights that its session needs. Borrows the arrays that it was made of."""

    content: bytes
    """An ONNX file without the weights."""
    weights: dict[str, Array] = field(default_factory=dict)
    """By the names of the graph's initializers; C-contiguous float32. The session keeps no copy of them but for
    `products`, which it lays out anew for its own kernels."""
    products: set[str] = field(default_factory=set)
    """Names of the weights that are the right side of a product."""


def encoder_graph(
    encoder: EncoderSpec, tensors: Mapping[str, Array], max_tokens: int, placeholder_file: str
) -> EncoderGraph:
    """`placeholder_file`: the name of a file that exists where the session looks for weights. Raises KeyError for a
    missing tensor."""
    return _Builder(encoder, tensors, max_tokens, placeholder_file).build()


class _Builder:
    def __init__(
        self, encoder: EncoderSpec, tensors: Mapping[str, Array], max_tokens: int, placeholder_file: str
    ) -> None:
        self._encoder = encoder
        self._tensors = tensors
        self._max_tokens = max_tokens
        self._placeholder_file = placeholder_file
        self._graph = Graph("pass")
        self._made = EncoderGraph(b"")

    def build(self) -> EncoderGraph:
        graph = self._graph
        token_ids, positions = (graph.input(name, Element.INT64, ["tokens"]) for name in ("token_ids", "positions"))
        runs = tuple(graph.input(name, Element.INT64, ["runs"]) for name in ("starts", "counts", "lengths"))
        words = self._tensor(self._encoder.words)
        x = self._embeddings(words, token_ids, positions)
        width = int(words.shape[1])
        if self._encoder.projection is not None:
            x = self._linear(self._encoder.projection, x)
            width = int(self._tensor(self._encoder.projection).shape[0])
        attention = _Attention(graph, runs, width, self._encoder.num_heads, self._distance_bias())
        for layer in self._encoder.layers:
            x = self._layer(layer, x, attention)
        graph.output(x, Element.FLOAT32, ["tokens", width])
        self._made.content = graph.to_bytes()
        return self._made

    def _embeddings(self, words: Array, token_ids: Value, positions: Value) -> Value:
        encoder = self._encoder
        table = self._tensor(encoder.positions)
        if encoder.types is not None:
            table = table + self._tensor(encoder.types)[0]
        tokens = self._graph.node("Gather", self._weight("embeddings/words", words), token_ids)
        places = self._graph.node("Gather", self._weight("embeddings/positions", table), positions)
        return self._norm(encoder.embedding_norm, tokens, places)

    def _layer(self, layer: LayerSpec, x: Value, attention: "_Attention") -> Value:
        qkv = self._product(
            layer.qkv[0], x, self._side_by_side(layer.qkv, "weight"), self._side_by_side(layer.qkv, "bias")
        )
        x = self._norm(layer.attention_norm, self._linear(layer.out, attention(qkv)), x)
        return self._norm(layer.norm, self._linear(layer.down, self._activated(layer.up, x)), x)

    def _linear(self, name: str, x: Value) -> Value:
        return self._product(name, x, self._tensor(name), self._tensor(name, "bias"))

    def _activated(self, name: str, x: Value) -> Value:
        match self._encoder.activation:
            case "relu":
                return self._graph.node("Relu", self._linear(name, x))
            case activation:
                # The operator adds the bias, which the product would otherwise do apart.
                operator = {"gelu": "BiasGelu", "gelu_new": "FastGelu"}[activation]
                product = self._product(name, x, self._tensor(name))
                bias = self._weight(f"{name}.bias", self._tensor(name, "bias"))
                return self._graph.node(operator, product, bias, domain=MICROSOFT)

    def _product(self, name: str, x: Value, weight: Array, bias: Array | None = None) -> Value:
        """x [T, K] times weight [N, K], plus bias [N]."""
        inputs = [x, self._weight(f"{name}.weight", weight)]
        self._made.products.add(inputs[1])
        if bias is not None:
            inputs.append(self._weight(f"{name}.bias", bias))
        return self._graph.node("Gemm", *inputs, transB=1)

    def _norm(self, name: str, x: Value, residual: Value) -> Value:
        weight = self._weight(f"{name}.weight", self._tensor(name))
        bias = self._weight(f"{name}.bias", self._tensor(name, "bias"))
        x = self._graph.node("Add", x, residual)
        return self._graph.node("LayerNormalization", x, weight, bias, axis=1, epsilon=self._encoder.epsilon)

    def _distance_bias(self) -> Value | None:
        if self._encoder.distance_bias is None:
            return None
        bias = bias_of_distances(self._tensor(self._encoder.distance_bias), self._max_tokens)
        return self._weight("distance_bias", bias[None])

    def _side_by_side(self, names: tuple[str, ...], part: str) -> Array:
        return np.concatenate([self._tensor(name, part) for name in names])

    def _tensor(self, name: str, part: str = "weight") -> Array:
        return self._tensors[f"{name}.{part}"]

    def _weight(self, name: str, array: Array) -> Value:
        self._made.weights[name] = np.ascontiguousarray(array)
        return self._graph.weight(name, array.shape, self._placeholder_file)


class _Attention:
    """Each sequence attends only to itself: the sequences of a run are one call of the kernel."""

    def __init__(self, graph: Graph, runs: Sequence[Value], width: int, num_heads: int, bias: Value | None) -> None:
        """`runs`: the starts, counts and lengths of the runs, each [R]."""
        self._graph = graph
        self._starts, self._counts, self._lengths = runs
        self._num_heads = num_heads
        self._bias = bias
        """[1, heads, M, M], added to the scores; shorter sequences use its corner."""
        self._num_loops = 0
        constant = graph.constant
        self._zero, self._axes, self._axes_of_scores = constant([0]), constant([0]), constant([2, 3])
        self._origin = constant([0, 0])
        self._width, self._widths, self._flat = constant([width]), constant([width] * 3), constant([-1, width])
        self._true = constant(True)
        self._num_runs = graph.node("Size", self._starts)
        self._is_one_run = graph.node("Equal", self._num_runs, constant(1))

    def __call__(self, qkv: Value) -> Value:
        """qkv [T, 3 H] → [T, H]."""
        self._num_loops += 1
        name = f"attention_{self._num_loops}"
        one = _branch(f"{name}/one", lambda graph: self._attend(graph, qkv, self._counts, self._lengths))
        many = _branch(f"{name}/many", lambda graph: self._each_run(graph, qkv, f"{name}/run"))
        return self._graph.node("If", self._is_one_run, then_branch=one, else_branch=many)

    def _each_run(self, graph: Graph, qkv: Value, name: str) -> Value:
        body = Graph(name)
        index = body.input(f"{name}/index", Element.INT64, [])
        goes_on = body.input(f"{name}/goes_on", Element.BOOL, [])
        before = body.input(f"{name}/before", Element.FLOAT32, None, is_sequence=True)
        index = body.node("Unsqueeze", index, self._zero)
        start, count, length = (
            body.node("Gather", values, index) for values in (self._starts, self._counts, self._lengths)
        )
        stop = body.node("Add", start, body.node("Mul", count, length))
        attended = self._attend(body, body.node("Slice", qkv, start, stop, self._axes), count, length)
        body.output(body.node("Identity", goes_on), Element.BOOL, [])
        body.output(body.node("SequenceInsert", before, attended), Element.FLOAT32, None, is_sequence=True)
        empty = graph.node("SequenceEmpty", dtype=int(Element.FLOAT32))
        runs = graph.node("Loop", self._num_runs, self._true, empty, body=body)
        return graph.node("ConcatFromSequence", runs, axis=0)

    def _attend(self, graph: Graph, qkv: Value, count: Value, length: Value) -> Value:
        """qkv [count · length, 3 H] → [count · length, H]. count and length have shape [1]."""
        shape = graph.node("Concat", count, length, self._width, axis=0)
        parts = graph.nodes("Split", qkv, self._widths, num_outputs=3, axis=1)
        inputs = [graph.node("Reshape", part, shape) for part in parts]
        if self._bias is not None:
            end = graph.node("Concat", length, length, axis=0)
            inputs += ["", "", graph.node("Slice", self._bias, self._origin, end, self._axes_of_scores)]
        attended = graph.node("MultiHeadAttention", *inputs, domain=MICROSOFT, num_heads=self._num_heads)
        return graph.node("Reshape", attended, self._flat)


def _branch(name: str, fill: Callable[[Graph], Value]) -> Graph:
    graph = Graph(name)
    graph.output(fill(graph), Element.FLOAT32, None)
    return graph
