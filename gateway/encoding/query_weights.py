"""Make the sparse vectors of queries without a worker, for models that have a static weight for each token.

Owns the reading of the weights, and the formula: a query's vector has the weight of each of its different tokens,
special tokens excluded. Knows no request. Called by `vecd.gateway.pipeline`.

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


def vector_of_query(
    token_ids: NDArray[np.int32], weights: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The indices, ascending, and the weights of a query's sparse vector; both are empty where no token has a weight
    above 0.

    `token_ids`: without special tokens, shape [T]. `weights`: of each token of the vocabulary, shape [V]."""
    indices = np.unique(token_ids)
    found = weights[indices]
    return indices[found > 0], found[found > 0]


def read_query_weights(card: ModelCard, id_of: Callable[[str], int | None]) -> NDArray[np.float32]:
    """Read the weights of queries of `card`, float32 [vocab_size]; tokens without one have 0. `id_of` gives the id of a
    token of the vocabulary, None for an unknown one.

    Raises ModelError for a file that cannot be read, that has more weights than the vocabulary has tokens, or whose
    weights are not finite."""
    assert card.sparse is not None
    path = Path(card.folder) / card.sparse.query_weights
    try:
        found = _by_token(path, card.vocab_size, id_of) if path.suffix == ".json" else _tensor(path)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if found.ndim != 1 or found.size > card.vocab_size:
        raise ModelError(f"{path}: has weights of shape {list(found.shape)}; the vocabulary has {card.vocab_size}")
    if not np.isfinite(found).all():
        raise ModelError(f"{path}: a weight is nan or infinity")
    weights = np.zeros(card.vocab_size, dtype=np.float32)
    weights[: found.size] = found
    return weights


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
