"""What models can do, in words: for the error of a request that the served model cannot answer.

Owns those words, and the paths that a client of each kind of model looks for. Called by `vecd.gateway.api.handlers`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vecd.gateway.types.errors import WrongModel


class _Kind(NamedTuple):
    does: str
    paths: str


_KINDS: Mapping[str, _Kind] = {
    "dense": _Kind(
        "makes embeddings",
        "/v1/embeddings (OpenAI), /embed (text-embeddings-inference), /v2/embed (Cohere), /api/embed (Ollama)",
    ),
    "rerank": _Kind("ranks texts", "/rerank, /v1/rerank, /v2/rerank, /score"),
    "classify": _Kind("classifies texts", "/predict, /classify"),
    "token-classify": _Kind("classifies tokens", "/predict"),
    "sparse": _Kind("makes sparse vectors", "/embed_sparse"),
    "multi-vector": _Kind("makes vectors of tokens", "/rerank, /score, /pooling"),
}
"""By the names of `vecd.shm.heads.CAPABILITIES`."""


def check_capability(needs: Sequence[str], capabilities: Sequence[str]) -> None:
    """Raise WrongModel if a model with these capabilities has none that an operation needs."""
    if not needs or any(name in capabilities for name in needs):
        return
    kinds = [_KINDS[name] for name in capabilities]
    can = " and ".join(kind.does for kind in kinds)
    paths = ", ".join(dict.fromkeys(path for kind in kinds for path in kind.paths.split(", ")))
    raise WrongModel(
        f"The model served here {can}: it cannot do what this path needs ({' or '.join(needs)}); it serves POST {paths}"
    )
