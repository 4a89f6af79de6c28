"""The requests of a run, rendered before it starts: in a run, a request costs one write.

Owns the body's shape, OpenAI's. Opens no socket. Called by `client.bench` and `benchmarks.compare`.
"""

from dataclasses import dataclass
from typing import Any

import orjson

from client.connection import parse_target, render_post
from client.texts import FixedWords, Lengths, draw_texts

_NUM_DISTINCT_REQUESTS = 512
"""Enough that requests under way at the same time differ. A server with a cache would still answer from
it."""
_TEN_WORDS = FixedWords(10)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """What one request asks for."""

    path: str = "/v1/embeddings"
    lengths: Lengths = _TEN_WORDS
    texts_per_request: int = 1
    encoding_format: str = "base64"
    model: str | None = None
    """Left out of the requests when None."""
    api_key: str | None = None
    seed: int = 0


def render_requests(url: str, shape: RequestShape, num_requests: int = _NUM_DISTINCT_REQUESTS) -> list[bytes]:
    """`num_requests` whole HTTP requests of different texts.

    Raises ValueError when `url` names no server, or the path or key cannot be sent.
    """
    target = parse_target(url)
    texts = draw_texts(num_requests * shape.texts_per_request, shape.lengths, shape.seed)
    bodies = (
        _render_body(shape, texts[start : start + shape.texts_per_request])
        for start in range(0, len(texts), shape.texts_per_request)
    )
    return [render_post(target, shape.path, body, api_key=shape.api_key) for body in bodies]


def _render_body(shape: RequestShape, texts: list[str]) -> bytes:
    body: dict[str, Any] = {
        "input": texts if len(texts) > 1 else texts[0],
        "encoding_format": shape.encoding_format,
    }
    if shape.model is not None:
        body["model"] = shape.model
    return orjson.dumps(body)
