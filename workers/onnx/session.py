"""Runs the graph of a model in ONNX Runtime.

Owns the session and the memory that it borrows. A session of one thread starts no thread, so it works in every process
that is forked afterwards, and all of them share its memory. A session of several threads must be made in the process
that uses it, and has weights of its own.
"""

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from vecd.model.card import ModelCard, ModelError, one_line
from vecd.workers.arrays import Arrays
from vecd.workers.batch import Layout
from vecd.workers.description import NotDescribed, describe
from vecd.workers.machine import cpu_flags
from vecd.workers.onnx.file import PLACEHOLDER
from vecd.workers.onnx.graph import GraphBuilder, pieces_of


class LeanForward:
    def __init__(
        self,
        card: ModelCard,
        num_threads: int = 1,
        *,
        is_int8: bool = False,
        keeps_files: bool = False,
        like: "LeanForward | None" = None,
    ) -> None:
        """Load the model of `card`. Raises NotDescribed for a family or a setting that no table describes, or for a
        tensor under another name. `keeps_files`: keep the content of the files for further ones like this. `like`: a
        forward pass of the same model and type, which lends its files, and the weights that its session has not laid
        out anew. Raises ModelError if a file has been written to since."""
        try:
            if like is None:
                self.arrays = Arrays(card.weight_files, in_memory=keeps_files)
                self._encoder = describe(card, self.arrays)
            else:
                self.arrays, self._encoder = like.arrays, like._encoder
            made = GraphBuilder(card, self._encoder, self.arrays, is_int8=is_int8).build()
        except (OSError, ValueError, KeyError, TypeError, ModelError) as error:
            if like is not None:
                raise
            # The reference model reads the same files and reports their faults.
            raise NotDescribed(one_line(error)) from error
        self._made = made  # the session borrows its weights
        self.num_private_bytes = sum(made.weights[name].nbytes for name in made.products)
        lent: dict[str, onnxruntime.OrtValue] = {} if like is None else like._weights
        self._weights: dict[str, onnxruntime.OrtValue] = {
            name: lent[name] if name in lent else onnxruntime.OrtValue.ortvalue_from_numpy(array)
            for name, array in made.weights.items()
        }
        for name in lent:
            del made.weights[name]  # before the session takes memory for the others: a table may have been converted
        self._session = session_with(made.content, self._weights, num_threads)
        self.facts: dict[str, Any] = {"dtype": "int8" if is_int8 else "float32", "path": "lean"}
        # The session has laid out the products' weights anew, and never looks at these again. Elsewhere it might not
        # have: a kernel without a layout of its own reads what it was given. For int8 that begins with AVX2.
        if platform.machine() == "x86_64" and (not is_int8 or "avx2" in cpu_flags()):
            for name in made.products:
                del self._weights[name], made.weights[name]
        self._lender = like  # its memory is this one's, too

    def __call__(self, layout: Layout) -> NDArray[np.float32]:
        """The last layer's hidden states, [T, H], in the layout's order; of a model that reads no others, those of each
        sequence's first token, [B, H]."""
        after, made = self._encoder.positions_after, self._made
        positions = layout.offsets() if after is None else layout.positions_after(after)
        token_ids, placeholders = layout.token_ids, self._encoder.placeholders
        if placeholders:
            token_ids = np.where(np.isin(token_ids, placeholders), placeholders[0], token_ids)
        feeds = {
            "token_ids": token_ids,
            "positions": positions,
            "starts": np.array([run.start for run in layout.runs]),
            "counts": np.array([run.count for run in layout.runs]),
            "lengths": np.array([run.length for run in layout.runs]),
        }
        if made.has_types:
            feeds["token_types"] = layout.token_types()
        if made.has_first_tokens_only:
            feeds["firsts"] = layout.starts
        for name, window in made.windows.items():
            feeds[name] = pieces_of(layout.runs, window, self._encoder.is_causal)
        [hidden] = self._session.run(None, feeds)
        return hidden  # type: ignore[no-any-return]

    def close(self) -> None:
        del self._session


def session_with(
    content: bytes, weights: Mapping[str, "onnxruntime.OrtValue"], num_threads: int
) -> onnxruntime.InferenceSession:
    options = session_options(num_threads)
    # The graph is written the way the optimizer would leave it; without it a session is there in half the time.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", PLACEHOLDER[0])
    for name, value in weights.items():
        options.add_initializer(name, value)
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def session_options(num_threads: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    if num_threads > 1:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
    options.enable_mem_pattern = False  # a plan of the memory for every shape that ever came
    options.log_severity_level = _ERROR
    return options


_SPIN_US = 100
"""How long a thread waits for more work before it sleeps. Without a limit it is 36 to 50 ms, which the threads of other
workers then lack after each pass. With AVX-512, 50 to 1,000 µs gave the same speed. With AVX2 alone a lone text over
HTTP is 1.01 to 1.12 times as fast with 1,000 or 3,000 µs, in float32 and int8, for 1.04 to 1.5 times the processor
time. Without any waiting, a text of 12 tokens gains 1.1 instead of 1.5."""

_ERROR = 3
