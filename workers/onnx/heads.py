"""The heads of a model without torch: which of them are computed here, and the product with the vocabulary of SPLADE
models."""

import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from vecd.model.card import ModelCard
from vecd.workers import heads
from vecd.workers.activations import Floats
from vecd.workers.arrays import Arrays
from vecd.workers.description import NotDescribed
from vecd.workers.heads import Decoder, Heads, NumpyOperations
from vecd.workers.onnx.file import Element, Graph
from vecd.workers.onnx.session import session_with


class LeanOperations(NumpyOperations):
    def __init__(self, own: Arrays, num_threads: int = 1) -> None:
        super().__init__(own)
        self._num_threads = num_threads

    def decoder(self, weight: Floats, bias: Floats | None) -> Decoder[Floats]:
        """A slice of the vocabulary is a session of its own: ONNX Runtime lays its weights out anew, which makes the
        product for a text of 12 tokens take a third of numpy's time, and writes the logits of all slices into the same
        memory."""
        starts = range(0, len(weight), heads.WORDS_OF_A_SLICE)
        slices = (slice(start, start + heads.WORDS_OF_A_SLICE) for start in starts)
        products = [
            _Product(weight[words], None if bias is None else bias[words], self._num_threads) for words in slices
        ]

        def logits_of(states: Floats, dtype: Any) -> Iterator[Floats]:
            states = np.ascontiguousarray(states)
            memory = np.empty(len(states) * heads.WORDS_OF_A_SLICE, dtype=np.float32)
            return (product(states, memory) for product in products)

        return logits_of


class _Product:
    """The product with a slice of the vocabulary. Borrows the weights where the session does not lay them out anew."""

    def __init__(self, weight: Floats, bias: Floats | None, num_threads: int) -> None:
        graph, self._num_words = Graph("decoder"), len(weight)
        weights: dict[str, NDArray[Any]] = {"weight": np.ascontiguousarray(weight)}
        if bias is not None:
            weights["bias"] = np.ascontiguousarray(bias)
        states = graph.input("states", Element.FLOAT32, ["tokens", weight.shape[1]])
        given = [graph.weight(name, array) for name, array in weights.items()]
        made = graph.node("Gemm", states, *given, transB=1)
        graph.output(made, Element.FLOAT32, ["tokens", self._num_words])
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in weights.items()}
        self._session = session_with(graph.to_bytes(), values, num_threads)
        self._binding, self._output = self._session.io_binding(), made
        if platform.machine() == "x86_64":  # as in `LeanForward`
            del values["weight"], weights["weight"]
        self._borrowed = values, weights

    def __call__(self, states: Floats, memory: Floats) -> Floats:
        """States [T, H] → logits [T, words of the slice], in `memory`."""
        shape = [len(states), self._num_words]
        self._binding.bind_cpu_input("states", states)
        self._binding.bind_output(self._output, "cpu", 0, np.float32, shape, memory.ctypes.data)
        self._session.run_with_iobinding(self._binding)
        return memory[: shape[0] * shape[1]].reshape(shape)


def load_heads(card: ModelCard, own: Arrays) -> Heads[Floats]:
    """A function for each of `card.outputs`. `own`: the model's tensors.

    Raises ModelError when a file or a tensor of a head is missing or misshapen, NotDescribed for a head that is not
    computed here."""
    if card.export_file and card.score is not None:
        return {card.main_output: lambda logits, layout: logits}  # the graph has the head
    if card.shares_beginnings:
        # One that torch's engine computes once for a batch, which matters more than what it takes by itself.
        raise NotDescribed("pairs that share a beginning, the model's template")
    return heads.load_heads(card, LeanOperations(own))
