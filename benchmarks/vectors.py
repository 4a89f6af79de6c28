"""Whether a server embeds what vecd embeds: asked before anything is measured of it.

Owns the texts and the verdict. Called by `benchmarks.compare`.
"""

import base64
import http.client
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from benchmarks.loads import LONG, SHORT
from vecd.client.bench.texts import Lengths, draw_texts

MIN_COSINE = 0.999
"""To vecd's float32 vectors. bfloat16 keeps it on this model."""
_TIMEOUT_S = 60.0

Vectors: TypeAlias = NDArray[np.float32]
"""[B, D], each of length 1."""

TEXTS: Sequence[str] = (*draw_texts(4, SHORT, seed=1), *draw_texts(2, LONG, seed=1))
OVERLONG_TEXTS: Sequence[str] = draw_texts(2, Lengths(300), seed=1)
"""About 380 tokens, of which the model takes 256."""


class WrongVectors(Exception):
    """Raised when a server's vectors are not vecd's, or are none. One line."""


def embed(url: str, texts: Sequence[str]) -> Vectors:
    """Raises WrongVectors when the answer is not one vector a text."""
    body = orjson.dumps({"input": list(texts), "encoding_format": "base64"})
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/embeddings", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            items = orjson.loads(answer.read())["data"]
        rows = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in items]
    except urllib.error.HTTPError as error:
        raise WrongVectors(f"HTTP {error.code}: {error.read(200).decode(errors='replace')}") from error
    except (OSError, http.client.HTTPException) as error:
        raise WrongVectors(f"no answer: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise WrongVectors("the answer is not an OpenAI-shaped list of base64 vectors") from error
    if len(rows) != len(texts) or len({row.shape for row in rows}) != 1:
        raise WrongVectors(f"{len(rows)} vectors for {len(texts)} texts")
    return np.stack(rows)


def require_same(ours: Vectors, theirs: Vectors) -> None:
    """Raises WrongVectors when a vector differs from vecd's."""
    if ours.shape != theirs.shape:
        raise WrongVectors(f"vectors of {theirs.shape[1]} dimensions instead of {ours.shape[1]}")
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    least = float(((ours * theirs).sum(axis=1) / lengths).min())
    if not least >= MIN_COSINE:
        raise WrongVectors(f"cosine {least:.4f} with vecd's vectors, less than {MIN_COSINE:g}")
