"""The engine of static embeddings: a table with a row per token, and the mean of a text's rows, in numpy.

Owns the table, which is in memory as it is stored: only gathered rows become float32. Imports no torch.

    row of a token   table[mapping[id]] * weights[id]      mapping and weights only where the file has them
    vector           mean of the rows of all tokens but the ignored ones; zeros if there are none
    then             the steps behind it, usually none or Normalize

Source: StaticEmbedding of sentence-transformers, StaticModel of model2vec. Both add rows in the table's own type; here
rows become float32 first, so vectors of a float16 table differ from theirs by float16's rounding.
"""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.model.card import TABLES, ModelCard, ModelError
from vecd.shm.output import Output
from vecd.shm.views import Rows
from vecd.workers.activations import Floats
from vecd.workers.arrays import Arrays
from vecd.workers.batch import COMPLETE, Engine, Finish, Ints, PackedBatch, write_outputs
from vecd.workers.heads import Head, NumpyOperations

_ROWS_OF_A_BLOCK = 256


class StaticEngine(Engine):
    def __init__(self, card: ModelCard) -> None:
        """Raises ModelError for files that cannot be used."""
        path = Path(card.weights_folder) / "model.safetensors"
        arrays = Arrays([path])
        table, self._row_of = _table_and_rows(card, arrays, path)
        self._rows_at = arrays.table(table)
        self._weights = _weights_of_tokens(arrays)
        self._operations = NumpyOperations(arrays)
        self._head = Head(card, self._operations)
        self._hidden_size = card.hidden_size
        self.facts: dict[str, Any] = {"dtype": "float32", "path": "static"}
        self.warnings: list[str] = []

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        write_outputs(rows, batch, partial(self._rows_of, batch))
        return COMPLETE

    def _rows_of(self, batch: PackedBatch, output: Output) -> Floats:
        if output is Output.TOKENS:
            return self._hidden(batch)
        vectors = self._head.after_pooling(self._means(batch))
        is_final = output is Output.VECTORS and self._head.is_normalized
        return self._operations.normalize(vectors) if is_final else vectors

    def _hidden(self, batch: PackedBatch) -> Floats:
        """The row of each token, [T, H]; zeros for ignored ones."""
        row_of = self._row_of[batch.token_ids]
        is_counted = row_of >= 0
        hidden = np.zeros((batch.token_ids.size, self._hidden_size), dtype=np.float32)
        weights = self._weights_of(batch.token_ids[is_counted])
        hidden[is_counted] = self._rows_at(row_of[is_counted]) * weights[:, None]
        return hidden

    def _means(self, batch: PackedBatch) -> Floats:
        row_of = self._row_of[batch.token_ids]
        is_counted = row_of >= 0
        counts = np.add.reduceat(is_counted, np.cumsum(batch.lengths) - batch.lengths, dtype=np.int64)
        row_of, weights = row_of[is_counted], self._weights_of(batch.token_ids[is_counted])
        sums = np.empty((batch.lengths.size, self._hidden_size), dtype=np.float64)
        ends = np.cumsum(counts).tolist()
        for place, (start, end) in enumerate(pairwise([0, *ends])):
            sums[place] = self._sum(row_of[start:end], weights[start:end])
        means: Floats = (sums / np.maximum(counts, 1)[:, None]).astype(np.float32)
        return means

    def _sum(self, row_of: Ints, weights: Floats) -> NDArray[np.floating[Any]]:
        """Each row times its weight, [H]."""
        # By a product, because `np.add.reduceat` takes twenty times as long. A product adds in float32, which loses
        # 1e-6 in a long text; blocks lose less than 1e-7, and keep the gathered rows in the core's cache.
        if row_of.size > _ROWS_OF_A_BLOCK:
            starts = range(0, row_of.size, _ROWS_OF_A_BLOCK)
            blocks = [slice(start, start + _ROWS_OF_A_BLOCK) for start in starts]
            sums = [self._sum(row_of[block], weights[block]) for block in blocks]
            return np.add.reduce(sums, axis=0, dtype=np.float64)  # type: ignore[no-any-return]
        return weights @ self._rows_at(row_of)

    def _weights_of(self, token_ids: NDArray[np.int32]) -> Floats:
        return np.ones(token_ids.size, np.float32) if self._weights is None else self._weights[token_ids]


def _weights_of_tokens(arrays: Arrays) -> Floats | None:
    """The weight of each token id but the last, which is ignored, [vocab_size - 1]; None if the file has none."""
    shape = arrays.shape("weights")
    return None if shape is None else arrays.table("weights")(np.arange(shape[0]))


def _table_and_rows(card: ModelCard, arrays: Arrays, path: Path) -> tuple[str, Ints]:
    """The table's name, and its row for each token id, int64 [vocab_size]; -1 for ignored ones. Raises ModelError for
    tensors that do not fit each other."""
    name = next((name for name in TABLES if arrays.shape(name) is not None), "")
    shape = arrays.shape(name)
    if shape is None:
        raise ModelError(f"{path}: the table of embeddings has a type that is not supported")
    num_tokens, num_rows = card.vocab_size - 1, (shape or (0,))[0]
    if arrays.shape("mapping") is None:
        row_of = np.arange(num_tokens, dtype=np.int64)
    else:
        row_of = arrays.whole_numbers("mapping")
    if shape != (num_rows, card.hidden_size) or row_of.shape != (num_tokens,):
        raise ModelError(f"{path}: the tensors of the table do not fit each other")
    if row_of.min() < 0 or row_of.max() >= num_rows:
        raise ModelError(f"{path}: mapping names rows outside the table, which has {num_rows}")
    if arrays.shape("weights") not in (None, (num_tokens,)):
        raise ModelError(f"{path}: weights is {list(arrays.shape('weights') or ())}, should be [{num_tokens}]")
    row_of = np.append(row_of, -1)
    row_of[list(card.ignored_ids)] = -1
    return name, row_of
