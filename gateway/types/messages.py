"""HTTP messages as values: requests that were read, and responses to write.

Owns the two types and the limits on requests. Parses nothing and holds no socket. `vecd.gateway.http` makes requests
and writes responses; handlers read requests and make responses.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from vecd.gateway.types.identity import Identity
from vecd.gateway.types.model_choice import ModelChoice
from vecd.gateway.types.timeline import RequestTimeline

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""An id that a client may give its request: it is a header of the response, and in the log."""


class Coding(Enum):
    GZIP = "gzip"
    DEFLATE = "deflate"
    ZSTD = "zstd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that is read of one request. A request at a limit is accepted; one byte or header more is refused."""

    max_body_bytes: int
    max_target_bytes: int = 8 * 1024
    """Path and query, as sent."""
    max_head_bytes: int = 32 * 1024
    """Request line and headers with their line ends. Trailers of a chunked body have the same limit again."""
    max_headers: int = 100


@dataclass(slots=True)
class HttpRequest:
    """One HTTP request. Its repr has neither headers nor body, because both may contain what must not be logged."""

    method: str
    path: str
    """Percent-decoded, without the query; "*" for `OPTIONS *`."""
    query: bytes
    """As sent, without the question mark."""
    headers: dict[str, str] = field(repr=False)
    """Names in lower case, values as latin-1; the values of a repeated header are joined with ", "."""
    http_minor: int
    """0 for HTTP/1.0, 1 for HTTP/1.1."""
    keep_alive: bool
    """The client wants to keep the connection open for another request."""
    request_id: str = field(compare=False)
    """The client's own, or one made here."""
    expects_continue: bool = False
    """The client sends its body only after an interim response."""
    coding: Coding | None = None
    """Of the body, which is kept compressed: see `vecd.gateway.http.decompress`."""
    body: bytes = field(default=b"", repr=False)
    """Empty until the whole body was received."""
    client: str = field(default="", repr=False)
    """The caller's address, by `vecd.gateway.http.forwarded.client_of`: an IPv4 address, the /64 of an IPv6 address,
    "" on a unix socket. Of the connection, or as trusted proxies say."""
    scheme: str = field(default="", repr=False)
    """"http" or "https", which the caller speaks to a trusted proxy; "": that of the listener."""
    is_admin: bool = False
    """It was received by the admin listener."""
    timeline: RequestTimeline = field(default_factory=RequestTimeline, compare=False, repr=False)
    choice: ModelChoice | None = field(default=None, compare=False, repr=False)
    """None where one model is served."""
    identity: Identity | None = field(default=None, compare=False, repr=False)
    """That of the model that answers, once it is known which that is. The response names it."""


@dataclass(slots=True)
class Response:
    """The response of an application. The connection adds headers of its own."""

    status: int
    body: bytes | list[bytes | memoryview] | Iterator[bytes | memoryview] = field(default=b"", repr=False)
    """One piece or several, which are sent without a copy; a memoryview is one-dimensional and of bytes. A dialect may
    give an iterator, which writes them, some of them empty: it is run to its end before the response is sent."""
    headers: dict[str, str] = field(default_factory=dict)
    """All but content-type, content-length, x-request-id and connection."""
    content_type: str = "application/json"

    @property
    def num_body_bytes(self) -> int:
        return len(self.body) if isinstance(self.body, bytes) else sum(map(len, self.body))
