"""The requests of a run, rendered before it starts, so that sending one costs one write.

Owns the OpenAI-shaped body and the headers. Opens no socket. Called by `vecd.client.bench.command`
and the benchmarks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from vecd.client.bench.texts import Lengths, draw_texts, shuffle_texts
from vecd.client.connection import parse_target, render_request

_NUM_DISTINCT_REQUESTS = 512
"""Enough that requests under way at the same time differ. A server with a cache would still use it."""
_TEN_WORDS = Lengths(10)
_ACCEPT = {"bytes": "*/*", "npy": "application/x-npy"}
"""By encoding; JSON for the others. "bytes" is requested in the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """What the requests of a run have in common."""

    path: str = "/v1/embeddings"
    lengths: Lengths = _TEN_WORDS
    texts: Sequence[str] | None = None
    """The texts to send, in an order that depends on `seed`; None: texts of `lengths` are drawn."""
    texts_per_request: int = 1
    encoding_format: str = "base64"
    """One of `vecd.client.bench.responses.READERS`. "npy" is requested by header, the others in the body."""
    model: str | None = None
    """Left out of the requests when None."""
    api_key: str | None = None
    seed: int = 0
    timeout_ms: int | None = None
    """Sent as the server's deadline."""
    priority: str | None = None
    """Sent as the priority in the server's queue."""


def render_requests(url: str, shape: RequestShape, num_requests: int = _NUM_DISTINCT_REQUESTS) -> list[bytes]:
    """`num_requests` whole HTTP requests of different texts.

    Raises ValueError when `url` names no server, or the path, key or priority cannot be sent.
    """
    target = parse_target(url)
    headers = {"x-vecd-timeout-ms": shape.timeout_ms, "x-vecd-priority": shape.priority}
    num_texts = num_requests * shape.texts_per_request
    if shape.texts is None:
        texts = draw_texts(num_texts, shape.lengths, shape.seed)
    else:
        texts = shuffle_texts(list(shape.texts), num_texts, shape.seed)
    return [
        render_request(
            target,
            shape.path,
            _render_body(shape, texts[start : start + shape.texts_per_request]),
            api_key=shape.api_key,
            accept=_ACCEPT.get(shape.encoding_format, "application/json"),
            headers={name: f"{value}" for name, value in headers.items() if value is not None},
        )
        for start in range(0, num_texts, shape.texts_per_request)
    ]


def _render_body(shape: RequestShape, texts: list[str]) -> bytes:
    body: dict[str, Any] = {"input": texts if len(texts) > 1 else texts[0]}
    if shape.encoding_format != "npy":
        body["encoding_format"] = shape.encoding_format
    if shape.model is not None:
        body["model"] = shape.model
    return orjson.dumps(body)
