"""Sparse vectors: collected from workers' rows, or made of a query's tokens without a worker. A weight of 0 is none."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vecd.gateway.request import FloatRows, Ints, Make, SparseOptions
from vecd.model.card import ModelCard, ModelError

SparseVector = tuple[Ints, FloatRows]
"""Indices, ascending, and their weights, above 0. Both of the same length, which may be 0."""

_EMPTY: SparseVector = (np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))


class SparseRows(Make):
    """A sparse vector for each input."""

    __slots__ = ("_ignored_ids", "_least_weight", "_token_ids", "_top_k", "made")

    def __init__(
        self,
        num_inputs: int,
        options: SparseOptions,
        token_ids: Sequence[Ints] = (),
        ignored_ids: Sequence[int] = (),
    ) -> None:
        """For weights by token of the sequence: `token_ids` of each input, shape [T], are read when its rows have come;
        `ignored_ids` have no weight."""
        self.made: list[SparseVector] = [_EMPTY] * num_inputs
        """In input order."""
        self._least_weight = max(0.0, options.min_weight)  # weights are greater
        self._top_k = options.top_k
        self._token_ids = token_ids
        self._ignored_ids = ignored_ids

    def put(self, index: int, rows: FloatRows, num_left: int) -> None:
        """`rows` are weights over the vocabulary, [n, V]."""
        for row in rows:
            indices = np.flatnonzero(row > self._least_weight)
            self.made[index] = self._largest(indices.astype(np.int32), row[indices])
            index += 1

    def put_whole(self, index: int, rows: FloatRows) -> None:
        """`rows` are weights of tokens, [T, 1]. Of equal tokens the largest counts."""
        token_ids, weights = self._token_ids[index], rows[:, 0]
        counts = (weights > self._least_weight) & ~np.isin(token_ids, self._ignored_ids)
        token_ids, weights = token_ids[counts], weights[counts]
        order = np.lexsort((-weights, token_ids))
        indices, firsts = np.unique(token_ids[order], return_index=True)
        self.made[index] = self._largest(indices, weights[order[firsts]])

    def _largest(self, indices: Ints, weights: FloatRows) -> SparseVector:
        """What `top_k` leaves; of equal weights those with the lower indices."""
        if self._top_k is None or self._top_k >= indices.size:
            return indices, weights
        kept = np.sort(np.argsort(-weights, kind="stable")[: self._top_k])
        return indices[kept], weights[kept]


_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""numpy's types by those of safetensors; bfloat16 is the upper half of a float32."""


class QueryWeights:
    """A static weight for each token of a vocabulary, for queries of sparse models that need no worker. Source:
    SparseStaticEmbedding of sentence-transformers."""

    def __init__(self, weights: FloatRows) -> None:
        """`weights`: shape [V]."""
        self._weights = weights

    def of_tokens(self, token_ids: Ints, num_prefix: int = 0, num_suffix: int = 0) -> FloatRows:
        """The weight of each token of a query, as a worker has them for Output.LEXICAL: float32 [T, 1]. The first
        `num_prefix` and the last `num_suffix` are special tokens around the query, and have 0."""
        weights = self._weights[token_ids]
        weights[:num_prefix] = 0
        weights[token_ids.size - num_suffix :] = 0
        return weights[:, None]


def read_query_weights(
    card: ModelCard, id_of: Callable[[str], int | None], copy: str | None = None
) -> QueryWeights | None:
    """The weights of queries of `card`, None if it has none; tokens of the vocabulary without one have 0. `id_of` gives
    the id of a token, None for an unknown one. `copy`: of the card's file, which is read in its place. Raises
    ModelError for a file that cannot be read, that has more weights than the vocabulary has tokens, or whose weights
    are not finite."""
    if card.sparse is None or not card.sparse.query_weights:
        return None
    path = Path(card.folder) / card.sparse.query_weights
    try:
        file = Path(copy or path)
        found = _by_token(file, card.vocab_size, id_of) if path.suffix == ".json" else _tensor(file)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if found.ndim != 1 or found.size > card.vocab_size:
        raise ModelError(f"{path}: has weights of shape {list(found.shape)}; the vocabulary has {card.vocab_size}")
    if not np.isfinite(found).all():
        raise ModelError(f"{path}: a weight is nan or infinity")
    weights = np.zeros(card.vocab_size, dtype=np.float32)
    weights[: found.size] = found
    return QueryWeights(weights)


def _by_token(path: Path, vocab_size: int, id_of: Callable[[str], int | None]) -> FloatRows:
    """The weights of a JSON object by token. Tokens that are not in the vocabulary have no effect."""
    weights = np.zeros(vocab_size, dtype=np.float32)
    for token, weight in json.loads(path.read_text(encoding="utf-8")).items():
        if (token_id := id_of(token)) is not None:
            weights[token_id] = weight
    return weights


def _tensor(path: Path) -> FloatRows:
    """The only tensor of a safetensors file. By hand, because the library's numpy has no bfloat16. Source of the
    format: https://github.com/huggingface/safetensors, "Format"."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        most = path.stat().st_size
        header: dict[str, Any] = json.loads(file.read(min(size, most)))
        described = header["weight"]
        start, stop = described["data_offsets"]
        file.seek(8 + size + start)
        stored = np.frombuffer(file.read(min(stop - start, most)), dtype=_DTYPES[described["dtype"]])
    if described["dtype"] == "BF16":
        stored = (stored.astype("<u4") << 16).view("<f4")
    weights: FloatRows = stored.astype(np.float32).reshape(described["shape"])
    return weights
