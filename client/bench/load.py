"""The load of a run as data: its requests, rendered before it starts, and how fast they are sent.

Owns the OpenAI-shaped body and the headers; sending a request costs one write. Opens no socket and reads no clock.
"""

# ruff: noqa: RUF009 (a flag is a dataclasses.field)

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import orjson

from vecd.base.flags import flag
from vecd.base.target import Target
from vecd.client.bench.texts import Lengths, draw_texts, parse_lengths, shuffle_texts
from vecd.client.http import render_request

DEFAULT_MAX_CONNECTIONS = 1024
MAX_RATE_PER_S = 100_000.0
"""Several times what this generator can send."""
_NUM_DISTINCT_REQUESTS = 2 * DEFAULT_MAX_CONNECTIONS
"""Enough that requests in progress at the same time differ: vecd computes identical inputs once that wait at the same
time. A server with a cache would still use it."""
MAX_TEXTS_PER_REQUEST = 100_000
TEN_WORDS = Lengths(10)
_ACCEPT = {"bytes": "*/*", "npy": "application/x-npy"}
"""By encoding; JSON for the others. "bytes" is requested in the body."""


class Unreachable(Exception):
    """Raised by `LoadRun.run` when no connection can be made."""


_request = partial(flag, group="requests")


@dataclass(frozen=True, kw_only=True)
class RequestShape:
    """Of all requests of a run. Immutable. All fields but `texts` are flags of `vecd bench`."""

    path: str = _request("/v1/embeddings", "of the OpenAI-shaped endpoint (/v1/embeddings)")
    texts_per_request: int = _request(1, "inputs in each (1)", at_least=1, at_most=MAX_TEXTS_PER_REQUEST)
    lengths: Lengths | None = _request(
        None,
        "words in each text (10), or lognormal:MEAN,SIGMA",
        names=("--words", "--lengths"),
        read=parse_lengths,
        word="NUMBER",
    )
    texts: Sequence[str] | None = None
    """The texts to send, in an order that depends on `seed`; None: texts of `lengths` are drawn."""
    encoding_format: Literal["base64", "float", "bytes", "npy"] = _request(
        "base64", "encoding of the vectors (base64); bytes and npy are not JSON"
    )
    model: str | None = _request(None, "left out of the requests when not given")
    api_key: str | None = _request(None, "sent as a bearer token")
    timeout_ms: int | None = _request(
        None, "sent as x-vecd-timeout-ms: the server's deadline for an answer", at_least=1, unit="milliseconds"
    )
    priority: str | None = _request(None, "sent as x-vecd-priority", word="P")
    seed: int = _request(0, "of the texts and the arrivals (0)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run: a closed loop of `clients`, or an open one of `rate_per_s`. Immutable.

    Raises ValueError when it is neither or both.
    """

    target: Target
    shape: RequestShape
    requests: Sequence[bytes]
    """Whole HTTP requests of that shape, sent in turn by all clients together."""
    clients: int = 0
    rate_per_s: float | None = None
    """Average arrivals a second, at random moments (a Poisson process), whatever the server does."""
    max_connections: int = DEFAULT_MAX_CONNECTIONS
    """Connections of an open loop. An arrival that finds all of them busy is an error."""
    warmup_s: float
    duration_s: float
    """Length of the measured window; ignored when `num_requests` is given."""
    num_requests: int | None = None
    timeout_s: float
    """Longest time from sending a request to its whole response."""
    gone_after_s: float = 3.0
    """Without a connection or an answer for this long, the server counts as gone."""
    drain_s: float = 10.0
    """How long a timed run waits for answers after its last request, so that the next run begins with an idle
    server."""
    goodput_ms: float | None = None
    """An answer is good when it comes within this of the request's arrival."""
    bulk: "Load | None" = None
    """A closed loop that runs beside; its duration is infinite beside a run of `num_requests`, at whose end it ends."""

    def __post_init__(self) -> None:
        if (self.rate_per_s is None) == (self.clients == 0):
            raise ValueError("a load has clients or a rate, and not both")
        if self.rate_per_s is not None and not 0 < self.rate_per_s <= MAX_RATE_PER_S:
            raise ValueError(f"a rate must be above 0 and at most {MAX_RATE_PER_S:,.0f} a second")


def render_requests(target: Target, shape: RequestShape, num_requests: int = _NUM_DISTINCT_REQUESTS) -> list[bytes]:
    """`num_requests` whole HTTP requests of different texts.

    Raises ValueError when the path, key or priority cannot be sent.
    """
    headers = {"x-vecd-timeout-ms": shape.timeout_ms, "x-vecd-priority": shape.priority}
    num_texts = num_requests * shape.texts_per_request
    if shape.texts is None:
        texts = draw_texts(num_texts, shape.lengths or TEN_WORDS, shape.seed)
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
