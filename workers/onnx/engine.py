"""The engine without torch: hidden states from ONNX Runtime, vectors from numpy.

Owns the steps of a batch, the second session for leased cores, and the running of a model's own export.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnxruntime import InferenceSession

from vecd.base.tasks import NoTasks, naming_limit
from vecd.model.card import POSITIONS_AFTER_PADDING, ModelCard, ModelError, export_files, one_line
from vecd.shm.output import Output
from vecd.shm.views import Rows
from vecd.workers.activations import Floats
from vecd.workers.arrays import Arrays, ModelFile
from vecd.workers.batch import (
    COMPLETE,
    Engine,
    Finish,
    Ints,
    Layout,
    PackedBatch,
    arrange,
    begin_or_halve,
    passes,
    write_outputs,
)
from vecd.workers.heads import Heads, SpladeHead
from vecd.workers.machine import available_mb
from vecd.workers.onnx.file import precision_of
from vecd.workers.onnx.heads import LeanOperations, load_heads
from vecd.workers.onnx.session import LeanForward, session_options

# Runs a model's own ONNX export in ONNX Runtime: where the folder has no other weights, or --file names it.
#
# Sequences of one length are computed together and none is padded, so a vector depends neither on its neighbours nor on
# how the graph treats its mask. Measured with all-MiniLM-L6-v2 on a core with AVX-512, for batches of 8 to 64 texts of
# mixed lengths: padding a tenth takes 0.89 to 1.07 of the time.
#
# A graph that makes whole numbers of the values of a batch scales them by its largest one: it gets each sequence alone.
# Measured with 6 layers of width 384 on such a core: 16 texts of 8, 16 and 64 tokens then take 2.4, 1.8 and 1.1 times
# as long, which is 0.9, 0.7 and 0.5 of float32's time.
#
# ONNX Runtime gets the content of the files, and so no weights that lie outside the export's folder.

_INPUTS: dict[str, Callable[[Ints, Ints], Ints]] = {
    "input_ids": lambda ids, types: ids,
    "attention_mask": lambda ids, types: np.ones_like(ids),
    "token_type_ids": lambda ids, types: types,
    "position_ids": lambda ids, types: np.tile(np.arange(ids.shape[1]), (len(ids), 1)),
}
"""From ids and types of the tokens of sequences of one length, both [B, L], to what a graph's input gets, [B, L]."""

_ELEMENTS: dict[str, type[np.signedinteger[Any]]] = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}

_OUTPUTS = ("last_hidden_state", "token_embeddings")
"""Names of hidden states, [B, L, H]: optimum's and sentence-transformers'. Pooling and what follows is vecd's own."""

_LOGITS = ("logits",)
"""Of a classifier: [B, labels], or [B, L, labels] of one that labels tokens."""

_SCALED_BY_BATCH = b"DynamicQuantize"
"""What the names of such operators begin with, in the graph, its branches and functions."""

_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}


class ExportForward:
    def __init__(
        self,
        card: ModelCard,
        num_threads: int = 1,
        *,
        keeps_files: bool = False,
        like: "ExportForward | None" = None,
    ) -> None:
        """Load the export of `card` and try it. `keeps_files`, `like`: as for `LeanForward`. Raises ModelError for one
        that ONNX Runtime does not run, for an unknown input or type, for hidden states or logits of another size than
        the card's, and if a file of `like` that is read again has been written to."""
        self._path = Path(card.export_file)
        self.arrays = Arrays([])  # it has no tensors by name
        self._files: dict[str, ModelFile] = _open_files(self._path, keeps_files) if like is None else like._files
        content, *others = (file.read(0, file.size) for file in self._files.values())
        graph = content.tobytes()
        self._max_count = 1 if _SCALED_BY_BATCH in graph else None
        options = session_options(num_threads)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", "/dev/null")  # no more
        _, *names = self._files
        options.add_external_initializers_from_files_in_memory(names, others, [each.nbytes for each in others])
        try:
            session = InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the library's errors have no other base
            raise ModelError(f"{self._path}: ONNX Runtime cannot load it: {one_line(error)}") from None
        del graph
        self._session = session
        self._elements = {given.name: self._element(card, given) for given in session.get_inputs()}
        types = {made.name: made.type for made in session.get_outputs()}
        known = _OUTPUTS if card.score is None else _LOGITS
        self._has_segments = card.has_segments
        self._output = next((name for name in known if name in types), "")
        if not self._output:
            raise ModelError(f"{self._path}: its outputs are {', '.join(types)}; one must be {' or '.join(known)}")
        if types[self._output] not in _DTYPES:
            raise ModelError(
                f"{self._path}: its output {self._output} is {types[self._output]}, which is not supported"
            )
        self.num_private_bytes = sum(file.size for file in self._files.values())
        dtype = precision_of(content)
        if dtype == "float32":
            dtype = _DTYPES[types[self._output]]
        self.facts: dict[str, Any] = {"dtype": dtype, "path": "export"}
        self._try(card)

    def __call__(self, layout: Layout) -> NDArray[np.float32]:
        """The last layer's hidden states, [T, H], in the layout's order; of a classifier the logits, [B or T,
        labels]."""
        parts = []
        all_types = layout.token_types() if self._has_segments else np.zeros_like(layout.token_ids)
        for run in layout.runs:
            ids, types = (
                each[run.start : run.stop].reshape(run.count, run.length) for each in (layout.token_ids, all_types)
            )
            step = self._max_count or run.count
            for first in range(0, run.count, step):
                given = ids[first : first + step], types[first : first + step]
                feeds = {name: _INPUTS[name](*given).astype(element) for name, element in self._elements.items()}
                [hidden] = self._session.run([self._output], feeds)
                parts.append(hidden.reshape(-1, hidden.shape[-1]))
        return np.concatenate(parts).astype(np.float32, copy=False)

    def close(self) -> None:
        del self._session

    def _element(self, card: ModelCard, given: Any) -> type[np.signedinteger[Any]]:
        is_known = given.name in _INPUTS and given.type in _ELEMENTS
        # Their positions begin after the id of padding, and texts may contain padding.
        if given.name == "position_ids" and card.model_type in POSITIONS_AFTER_PADDING:
            is_known = False
        if not is_known:
            raise ModelError(f"{self._path}: its input {given.name}, {given.type}, is not supported")
        return _ELEMENTS[given.type]

    def _try(self, card: ModelCard) -> None:
        """Two sequences of two tokens, which also shows a graph for one size of batch alone. Raises ModelError."""
        batch = PackedBatch(np.array([2, 2], dtype=np.int32), np.zeros(4, dtype=np.int32))
        try:
            shape = self(arrange(batch)).shape
        except Exception as error:  # as above
            raise ModelError(f"{self._path}: ONNX Runtime cannot run it: {one_line(error)}") from None
        if card.score is None and shape != (4, card.hidden_size):
            raise ModelError(
                f"{self._path}: its hidden states have {shape[1]} elements, and config.json says {card.hidden_size}"
            )
        if card.score is not None and shape != (expected := (2 if card.score.pooling else 4, card.num_labels)):
            raise ModelError(
                f"{self._path}: its logits for two texts of two tokens are {list(shape)}, and should be "
                f"{list(expected)} by config.json"
            )


def _open_files(export: Path, keeps_files: bool) -> dict[str, ModelFile]:
    """The files of an export by their names for it, the graph first; none that a link shows in its folder. Raises
    ModelError for a missing one."""
    folders = {export.parent.resolve(), export.resolve().parent}
    paths = [export, *(path for path in export_files(export) if path != export)]
    return {
        str(path.relative_to(export.parent)): ModelFile(path, in_memory=keeps_files)
        for path in paths
        if folders.intersection(path.resolve().parents)
    }


# A second forward pass for leased cores, of several threads, made when it is first wanted.
#
# A session of ONNX Runtime has the threads that it was made with, and those of one made before a fork are lost in it;
# so this one is made in the worker, in a thread of its own, while batches go on with one thread.

Forward: TypeAlias = LeanForward | ExportForward
Computation: TypeAlias = tuple[Forward, Heads[Floats]]

log = logging.getLogger("vecd.worker")

_MIN_FREE = 3
"""Memory that must be available, as a multiple of what stays in use: while it is made, there are up to two copies."""


class WideForward:
    def __init__(self, make: Callable[[], Computation], num_threads: int, num_bytes: int) -> None:
        """`make` is called in another thread, once at most. What it makes needs `num_bytes` of memory for its
        weights."""
        self.num_threads = num_threads
        self._make = make
        self._num_bytes = num_bytes
        self._made: Computation | None = None
        self._was_wanted = False

    def get(self) -> Computation | None:
        """None until it has been made, which the first call begins, and for ever if memory is short or it cannot be
        made."""
        if not self._was_wanted:
            self._was_wanted = True
            free_mb, needed_mb = available_mb(), _MIN_FREE * self._num_bytes >> 20
            if free_mb < needed_mb:
                log.warning("batches keep to one thread: %d MB of memory are available, not %d", free_mb, needed_mb)
            else:
                try:
                    with naming_limit():
                        threading.Thread(target=self._make_it, name="wide-session", daemon=True).start()
                except NoTasks as error:
                    log.warning("batches keep to one thread: %s", error)
        return self._made

    def _make_it(self) -> None:
        try:
            self._made = self._make()
        except Exception as error:  # the library's errors have no other base
            log.warning("batches keep to one thread: a session of %d: %s", self.num_threads, one_line(error))


TOKENS_OF_A_PASS = 512
"""A larger batch is computed in several passes: the values between layers then stay in the core's cache. Measured with
all-MiniLM-L6-v2 on a core with AVX-512: 1,526 tokens of mixed lengths take 0.87 of the time if cut so."""


class LeanEngine(Engine):
    """Runs one model on a processor: in float32, with products in int8, or in an export's own type."""

    def __init__(self, card: ModelCard, *, dtype: str = "float32", keeps_files: bool = False) -> None:
        """Load the model of `card` for one thread; `dtype`, for a model that is no export, is "float32" or "int8".
        `keeps_files`: keep their content in memory, so that `use_threads` reads no file. Raises NotDescribed when no
        table describes its layers, ModelError for files that cannot be used."""
        self._card = card
        self._dtype = dtype
        self._num_threads = 1
        forward = self._make_forward(1, keeps_files=keeps_files)
        self._own: Computation = (forward, load_heads(card, forward.arrays))
        self._wide: WideForward | None = None
        self._leased: Computation | None = None
        sparse = card.sparse
        words = 0 if sparse is None or sparse.is_lexical else card.vocab_size * sparse.steps[-1].in_dim
        self._num_private_bytes = forward.num_private_bytes + words * np.dtype(np.float32).itemsize
        self.facts: dict[str, Any] = dict(forward.facts)
        if not card.export_file:
            self.facts["converted_bytes"] = self._num_private_bytes
        self.warnings: list[str] = []

    def use_threads(self, num_threads: int) -> None:
        if num_threads != self._num_threads:
            self._num_threads = num_threads
            if num_threads == 0:
                self._own[0].close()
                return
            self._own = self._make(num_threads)

    def allow_leases(self, max_threads: int, *, may_copy_weights: bool) -> Sequence[int]:
        num_bytes = self._num_private_bytes if may_copy_weights else 0
        self.facts["wide_session_bytes"] = num_bytes
        if not may_copy_weights:
            return (1,)
        self._wide = WideForward(partial(self._make, max_threads), max_threads, num_bytes)
        return (1, max_threads)

    def _make(self, num_threads: int) -> Computation:
        """Like the engine's own, with threads. numpy's heads have one, whatever `num_threads` is."""
        forward, heads = self._own
        if Output.SPARSE in heads:
            heads = {**heads, Output.SPARSE: SpladeHead(self._card, LeanOperations(forward.arrays, num_threads))}
        return self._make_forward(num_threads, like=forward), heads

    def _make_forward(self, num_threads: int, **arguments: Any) -> Forward:
        if self._card.export_file:
            return ExportForward(self._card, num_threads, **arguments)
        return LeanForward(self._card, num_threads, is_int8=self._dtype == "int8", **arguments)

    def lease(self, num_threads: int) -> int:
        self._leased = None
        if self._wide is None or num_threads < self._wide.num_threads or (wide := self._wide.get()) is None:
            return self._num_threads
        self._leased = wide
        return self._wide.num_threads

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        return begin_or_halve(self._compute, batch, rows)

    def _compute(self, batch: PackedBatch, rows: Rows) -> Finish:
        forward, heads = self._leased or self._own
        for layout in passes(arrange(batch), TOKENS_OF_A_PASS):
            hidden = forward(layout)
            write_outputs(rows, layout, lambda output: heads[output](hidden, layout))  # noqa: B023
        return COMPLETE
