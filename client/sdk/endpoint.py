"""Where a client's requests go, and what goes along with each: address, key, model, demanded identity.

Owns the arguments of a client, and what answers have said that later calls need: the identity and the limits. Sends
nothing. Called by `vecd.client.sdk.client` and `vecd.client.sdk.aio`, of whose clients it is the base.
"""

import os
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit, urlunsplit

from vecd.client.connection import parse_target, refuse_credentials, render_request

DEFAULT_URL = "http://127.0.0.1:8000"
FIRST = "first"
"""The identity that the first answer has."""

_MAX_TEXTS, _MAX_BODY_BYTES = 512, 512 * 1024
"""Of one request. A proxy repeats a request for itself only while its body fits the proxy's buffer, 1 MiB."""
_MAX_TIMEOUT_MS = 24 * 60 * 60 * 1000
"""The server's limit on x-vecd-timeout-ms."""
_Client = TypeVar("_Client", bound="ClientBase")


class RequestLimits(NamedTuple):
    """Of one request."""

    max_inputs: int = _MAX_TEXTS
    max_bytes: int = _MAX_BODY_BYTES
    dim: int | None = None
    """Dimensions of the model's vectors, if the server says so."""


class ClientBase:
    """Base of `vecd.Client` and `vecd.AsyncClient`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        model: str | None = None,
        identity: str | None = None,
        timeout: float | None = None,
        retry_for: float = 60.0,
        connections: int = 4,
        ca: str | os.PathLike[str] | None = None,
    ) -> None:
        """Nothing is sent before the first call.

        `url`: "http://host:port", "https://host:port" or "unix:/path", with a path in front of the server's own if a
        proxy has one. Default: the variable VECD_URL, else http://127.0.0.1:8000. `api_key`: default, the variable
        VECD_API_KEY. `model`: the name of one of several models. `identity`: as `client.identity` of an earlier
        answer, or its part before ";": another model than that raises IdentityMismatch; "first": what the first
        answer has is demanded of all later ones. `timeout`: seconds for a whole call, its retries included; None, the
        default, sets no limit to the work, but 300 s without a byte of an answer count as a broken connection.
        `retry_for`: seconds for which a call is repeated while nothing succeeds. `connections`: requests that one
        call has on their way at the same time. `ca`: a PEM file of certificates to trust, instead of the system's.

        Raises ValueError when an argument is not valid.
        """
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout: must be above 0 seconds, is {timeout}")
        if connections < 1:
            raise ValueError(f"connections: must be at least 1, is {connections}")
        if retry_for < 0:
            raise ValueError(f"retry_for: must be at least 0 seconds, is {retry_for}")
        self._arguments: dict[str, Any] = {
            "url": url or os.environ.get("VECD_URL") or DEFAULT_URL,
            "api_key": api_key or os.environ.get("VECD_API_KEY") or None,
            "model": model, "identity": identity, "timeout": timeout,
            "retry_for": retry_for, "connections": connections, "ca": ca,
        }  # fmt: skip
        self.timeout, self.retry_for, self.connections = timeout, retry_for, connections
        self._identity: str | None = None
        self._limits: RequestLimits | None = None
        self._point_to(self.url)
        self._forget_connections()

    def _forget_connections(self) -> None:
        raise NotImplementedError

    def _point_to(self, url: str) -> None:
        """Raises ValueError."""
        refuse_credentials(url)
        self._arguments["url"] = url
        parts, ca = urlsplit(url), self._arguments["ca"]
        self._prefix = ""
        if parts.scheme != "unix":
            # OpenAI's clients have /v1 in their addresses.
            self._prefix = parts.path.rstrip("/").removesuffix("/v1")
            url = urlunsplit(parts._replace(path=""))
        self._target = parse_target(url, ca)
        self.render("/", b"", None, None)

    @property
    def url(self) -> str:
        return str(self._arguments["url"])

    @property
    def model(self) -> str | None:
        """The name that each request asks for."""
        return self._arguments["model"]  # type: ignore[no-any-return]

    @property
    def identity(self) -> str | None:
        """The model, its revision and its number format, as the last results said; None before them."""
        return self._identity

    @property
    def demanded_identity(self) -> str | None:
        demanded: str | None = self._arguments["identity"]
        return self._identity if demanded == FIRST else demanded

    def render(self, path: str, body: bytes | None, identity: str | None, timeout_s: float | None) -> bytes:
        """A whole request. Raises ValueError when an argument of the client cannot stand in it."""
        headers = {}
        if self.model is not None:
            headers["x-vecd-model"] = self.model
        if identity is not None:
            headers["if-vecd-identity"] = identity
        if timeout_s is not None:  # what nobody waits for any more need not be computed
            headers["x-vecd-timeout-ms"] = str(min(max(1, int(timeout_s * 1000)), _MAX_TIMEOUT_MS))
        return render_request(
            self._target, self._prefix + path, body,
            api_key=self._arguments["api_key"], accept="*/*", headers=headers, user_agent="vecd-python",
        )  # fmt: skip

    def on_identity(self, identity: str | None) -> None:
        self._identity = identity

    @property
    def limits(self) -> RequestLimits | None:
        """None until `learn`."""
        return self._limits

    def learn(self, info: dict[str, Any]) -> RequestLimits:
        """Take the limits from the answer of /info; {} if there is none."""
        served = info.get("limits") or {}
        self._limits = RequestLimits(
            min(int(served.get("max_inputs") or info.get("max_client_batch_size") or _MAX_TEXTS), _MAX_TEXTS),
            min(int(served.get("max_body_bytes") or _MAX_BODY_BYTES), _MAX_BODY_BYTES),
            (info.get("model") or {}).get("dimensions"),
        )
        return self._limits

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._arguments)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def _rebuild(kind: type[_Client], arguments: dict[str, Any]) -> _Client:
    return kind(**arguments)
