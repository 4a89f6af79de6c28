"""Weigh the tokens of queries without a worker, for sparse models that have a static weight for each token.

Owns the reading of the weights. A query's vector has the weight of each of its different tokens, special tokens
excluded; `vecd.gateway.encoding.sparse` makes it, as it does of a worker's weights of tokens. Called by
`vecd.gateway.pipeline`.

Source: SparseStaticEmbedding of sentence-transformers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.shm.card import ModelCard, ModelError

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""numpy's types by those of safetensors; bfloat16 is the upper half of a float32."""

_TENSOR = "weight"


class QueryWeights:
    """A weight for each token of a vocabulary."""

    def __init__(self, weights: NDArray[np.float32]) -> None:
        """`weights`: shape [V]."""
        self._weights = weights

    def of_tokens(self, token_ids: NDArray[np.int32], num_prefix: int = 0, num_suffix: int = 0) -> NDArray[np.float32]:
        """The weight of each token of a query, as a worker has them for Output.LEXICAL: float32 [T, 1]. The first
        `num_prefix` and the last `num_suffix` are special tokens around the query, and have 0."""
        weights = self._weights[token_ids]
        weights[:num_prefix] = 0
        weights[token_ids.size - num_suffix :] = 0
        return weights[:, None]


def read_query_weights(
    card: ModelCard, id_of: Callable[[str], int | None], copy: str | None = None
) -> QueryWeights | None:
    """Read the weights of queries of `card`, None if it has none; tokens of the vocabulary without one have 0.
    `id_of` gives the id of a token of the vocabulary, None for an unknown one. `copy`: of the card's file, which is
    read in its place.

    Raises ModelError for a file that cannot be read, that has more weights than the vocabulary has tokens, or whose
    weights are not finite."""
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


def _by_token(path: Path, vocab_size: int, id_of: Callable[[str], int | None]) -> NDArray[np.float32]:
    """The weights of a JSON object by token. Tokens that are not in the vocabulary have no effect."""
    weights = np.zeros(vocab_size, dtype=np.float32)
    for token, weight in json.loads(path.read_text(encoding="utf-8")).items():
        if (token_id := id_of(token)) is not None:
            weights[token_id] = weight
    return weights


def _tensor(path: Path) -> NDArray[np.float32]:
    """The only tensor of a safetensors file. By hand, because the library's numpy has no bfloat16. Source of the
    format: https://github.com/huggingface/safetensors, "Format"."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        most = path.stat().st_size
        header: dict[str, Any] = json.loads(file.read(min(size, most)))
        described = header[_TENSOR]
        start, stop = described["data_offsets"]
        file.seek(8 + size + start)
        stored = np.frombuffer(file.read(min(stop - start, most)), dtype=_DTYPES[described["dtype"]])
    if described["dtype"] == "BF16":
        stored = (stored.astype("<u4") << 16).view("<f4")
    weights: NDArray[np.float32] = stored.astype(np.float32).reshape(described["shape"])
    return weights
