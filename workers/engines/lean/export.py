"""Runs a model's own ONNX export in ONNX Runtime, for a folder that has no other weights.

Owns the session, and which inputs and outputs of a graph are understood. Called by
`vecd.workers.engines.lean.engine`.

Sequences of one length are computed together and none is padded, so a vector depends neither on its neighbours nor on
how the graph treats its mask. Measured with all-MiniLM-L6-v2 on a core with AVX-512, for batches of 8 to 64 texts of
mixed lengths: padding a tenth takes 0.89 to 1.07 of the time.

ONNX Runtime gets the content of the files, and so no weights that lie outside the export's folder.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.shm.card import POSITIONS_AFTER_PADDING, ModelCard, ModelError, export_files, one_line
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.lean.arrays import Arrays
from vecd.workers.engines.lean.forward import session_of, session_options
from vecd.workers.layout import Layout, arrange
from vecd.workers.model_file import ModelFile

_INPUTS: dict[str, Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]] = {
    "input_ids": lambda ids, types: ids,
    "attention_mask": lambda ids, types: np.ones_like(ids),
    "token_type_ids": lambda ids, types: types,
    "position_ids": lambda ids, types: np.tile(np.arange(ids.shape[1]), (len(ids), 1)),
}
"""From ids and types of the tokens of sequences of one length, both [B, L], to what a graph's input gets, [B, L]."""

_ELEMENTS: dict[str, type[np.signedinteger[Any]]] = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}

_OUTPUTS = ("last_hidden_state", "token_embeddings")
"""Names of hidden states, [B, L, H]: those that optimum gives to models of transformers, and of sentence-transformers.
Pooling and what follows is vecd's own: a pooled output would not do for requests for other outputs."""

_LOGITS = ("logits",)
"""Of a classifier: [B, labels], or [B, L, labels] of one that labels tokens."""

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
        """Load the export of `card` and try it. `keeps_files`, `like`: as for `LeanForward`. Raises
        ModelError for one that ONNX Runtime does not run, for an input or a type that is unknown, for hidden states or
        logits of another size than the card's, and if a file of `like` that is read again has been written to."""
        self._path = Path(card.export_file)
        self.arrays = Arrays([])  # it has no tensors by name
        self._files: dict[str, ModelFile] = _open_files(self._path, keeps_files) if like is None else like._files
        graph, *others = (file.read(0, file.size) for file in self._files.values())
        options = session_options(num_threads)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", "/dev/null")  # no more
        _, *names = self._files
        options.add_external_initializers_from_files_in_memory(names, others, [each.nbytes for each in others])
        try:
            session = session_of(graph.tobytes(), options)
        except Exception as error:  # the library's errors have no other base
            raise ModelError(f"{self._path}: ONNX Runtime cannot load it: {one_line(error)}") from None
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
        self.facts: dict[str, Any] = {"dtype": _DTYPES[types[self._output]], "path": "export"}
        self._try(card)

    def __call__(self, layout: Layout) -> NDArray[np.float32]:
        """The last layer's hidden states, [T, H], in the layout's order; of a classifier the logits, [B or T, labels].
        Raises what the session raises."""
        parts = []
        all_types = layout.token_types() if self._has_segments else np.zeros_like(layout.token_ids)
        for run in layout.runs:
            ids, types = (
                each[run.start : run.stop].reshape(run.count, run.length) for each in (layout.token_ids, all_types)
            )
            feeds = {name: _INPUTS[name](ids, types).astype(element) for name, element in self._elements.items()}
            [hidden] = self._session.run([self._output], feeds)
            parts.append(hidden.reshape(-1, hidden.shape[-1]))
        return np.concatenate(parts).astype(np.float32, copy=False)

    def close(self) -> None:
        """As of `LeanForward`."""
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
    try:
        paths = [export, *(path for path in export_files(export) if path != export)]
        return {
            str(path.relative_to(export.parent)): ModelFile(path, in_memory=keeps_files)
            for path in paths
            if folders.intersection(path.resolve().parents)
        }
    except OSError as error:
        raise ModelError(one_line(error)) from None
