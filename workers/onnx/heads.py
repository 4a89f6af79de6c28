"""The heads of a model without torch (`vecd.workers.onnx.steps`).

Owns which of them are computed here, and the product with the vocabulary of SPLADE models.
`vecd.workers.torch.heads` has the same on torch.
"""

import platform
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from vecd.model.card import ModelCard
from vecd.workers.arrays import Arrays
from vecd.workers.batch import Layout
from vecd.workers.description import NotDescribed
from vecd.workers.onnx import steps
from vecd.workers.onnx.file import Element, Graph
from vecd.workers.onnx.session import session_with
from vecd.workers.onnx.steps import Floats, Heads, NumpyOperations

# The sparse vector of a SPLADE model: a weight for each token of the vocabulary, from the states of a text's tokens.
#
# `vecd.workers.torch.heads` has the same on torch, and the formula.
#
# A slice of the vocabulary is a session of its own: ONNX Runtime lays its weights out anew, which makes the product for
# a text of 12 tokens take a third of numpy's time, and writes the logits of all slices into the same memory.

WORDS_OF_A_SLICE, TOKENS_OF_A_SLICE = 4096, 512
"""Of a slice: 8 MiB of logits. A pass has more tokens only if one sequence has; they are then computed in parts."""


class LeanSpladeHead:
    """Hidden states [T, H], in the layout's order → weights [B, vocab_size]."""

    def __init__(self, card: ModelCard, own: Arrays, num_threads: int = 1) -> None:
        """`own`: the model's tensors. Raises ModelError when one is missing or misshapen."""
        head = card.sparse
        assert head is not None
        *before, decoder = head.steps
        operations = NumpyOperations(own)
        self._states = steps.steps_of(card, before, operations)
        self.with_threads = partial(LeanSpladeHead, card, own)
        """Gives the same head with a number of threads."""
        weight, bias, _ = steps.weights_of(card, decoder, operations)
        self._vocab_size = len(weight)
        self.num_private_bytes = weight.nbytes
        """Memory for weights that every further head of this model needs for itself."""
        self._slices = [
            _Product(weight[words], None if bias is None else bias[words], num_threads)
            for words in (slice(start, start + WORDS_OF_A_SLICE) for start in range(0, len(weight), WORDS_OF_A_SLICE))
        ]
        self._is_sum, self._num_logs = head.pooling == "sum", head.num_logs

    def __call__(self, hidden: Floats, layout: Layout) -> Floats:
        states = self._states(hidden)
        pooled = np.full((layout.lengths.size, self._vocab_size), 0 if self._is_sum else -np.inf, dtype=np.float32)
        logits = np.empty((min(TOKENS_OF_A_SLICE, len(states)), WORDS_OF_A_SLICE), dtype=np.float32)
        combine = np.add if self._is_sum else np.maximum
        for tokens, sequences in _parts(layout):
            of_part = np.ascontiguousarray(states[tokens])
            for index, product in enumerate(self._slices):
                words = slice(index * WORDS_OF_A_SLICE, (index + 1) * WORDS_OF_A_SLICE)
                made = product(of_part, logits)
                if self._is_sum:
                    made = self.activated(made)
                for index_of_sequence, own in sequences:  # `reduceat` takes 30 times as long
                    combined = pooled[index_of_sequence, words]
                    combine(combined, combine.reduce(made[own], axis=0), out=combined)
        return pooled if self._is_sum else self.activated(pooled)

    def activated(self, logits: Floats) -> Floats:
        """In place."""
        np.maximum(logits, 0, out=logits)
        for _ in range(self._num_logs):
            np.log1p(logits, out=logits, where=logits > 0)
        return logits


def _parts(layout: Layout) -> Iterator[tuple[slice, list[tuple[int, slice]]]]:
    """At most TOKENS_OF_A_SLICE tokens at a time: which, and for each sequence that has some of them its index and its
    own ones among them."""
    ends = layout.starts + layout.lengths
    for begin in range(0, layout.token_ids.size, TOKENS_OF_A_SLICE):
        end = min(begin + TOKENS_OF_A_SLICE, layout.token_ids.size)
        first = int(np.searchsorted(layout.starts, begin, side="right")) - 1
        last = int(np.searchsorted(layout.starts, end))
        owns = zip(layout.starts[first:last].tolist(), ends[first:last].tolist(), strict=True)
        own_parts = (slice(max(start, begin) - begin, min(stop, end) - begin) for start, stop in owns)
        yield slice(begin, end), list(enumerate(own_parts, first))


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
        """States [T, H] → logits [T, words of the slice], in `memory`, of at least T · WORDS_OF_A_SLICE elements."""
        shape = [len(states), self._num_words]
        binding = self._binding
        binding.bind_cpu_input("states", states)
        binding.bind_output(self._output, "cpu", 0, np.float32, shape, memory.ctypes.data)
        self._session.run_with_iobinding(binding)
        return memory.reshape(-1)[: shape[0] * shape[1]].reshape(shape)


def load_heads(card: ModelCard, own: Arrays) -> Heads[Floats]:
    """A function for each of `card.outputs`. `own`: the model's tensors.

    Raises ModelError when a file or a tensor of a head is missing or misshapen, NotDescribed for a head that is not
    computed here."""
    if card.export_file and card.score is not None:
        return {card.main_output: lambda logits, layout: logits}  # the graph has the head
    if card.score is not None and card.score.pair_template is not None:
        # One that torch's engine computes once for a batch, which matters more than what it takes by itself.
        raise NotDescribed("pairs that share a beginning, the model's template")
    return steps.load_heads(card, NumpyOperations(own), partial(LeanSpladeHead, own=own))
