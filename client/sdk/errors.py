"""What a call of `vecd.Client` raises, and which answer of a server is which error.

Owns the classes, and the reading of error bodies in every API's shape. Called by `vecd.client.sdk.exchanges` and
`vecd.client.sdk.server`.
"""

from typing import Any

import orjson

_MAX_QUOTED = 500
"""Characters of an error page that is not JSON."""


class VecdError(Exception):
    """Base of all errors of this package. The message is the server's where it answered."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status of the answer; None if none came."""
        self.code = code
        """The server's name of the error, such as "context_length_exceeded"."""
        self.param = param
        """The field of the request that is wrong."""
        self.request_id = request_id
        """Under which the request is in the server's log."""


class BadRequest(VecdError):
    """The request is wrong (400, 413, 422 and other statuses from 400 to 499); `param` names the field."""


class AuthenticationError(VecdError):
    """The API key is missing or unknown (401)."""


class PermissionDenied(VecdError):
    """The API key does not have the scope, or the model (403)."""


class NotFound(VecdError):
    """No such path, or no such model (404)."""


class IdentityMismatch(VecdError):
    """The server would answer with another model than was demanded, or did (412). No result of it is returned."""


class Overloaded(VecdError):
    """The server was busy or starting (429, 503) for longer than `retry_for`."""

    retry_after: float | None = None
    """Seconds after which the server expects to have room."""


class ServerError(VecdError):
    """The server failed several times (500), or its answer is not one of vecd's."""


class ServerUnavailable(VecdError, ConnectionError):
    """No server was reached, or none that answered, for longer than `retry_for`; or there is no trust in its TLS."""


class ServerNotStarted(VecdError):
    """`vecd.Server` could not start; the message ends with the last lines of the server's log."""


class Timeout(VecdError, TimeoutError):
    """The call took longer than `timeout`."""


_BY_STATUS: dict[int, type[VecdError]] = {
    401: AuthenticationError,
    403: PermissionDenied,
    404: NotFound,
    412: IdentityMismatch,
    429: Overloaded,
    502: ServerUnavailable,
    503: Overloaded,
    504: ServerUnavailable,
}


def error_of(status: int, body: bytes, request_id: str | None = None, where: str = "") -> VecdError:
    """The error that an answer stands for. `where` is added to the message: which inputs the request had."""
    kind = _BY_STATUS.get(status) or (BadRequest if 400 <= status < 500 else ServerError)
    message, code, param = _read(body)
    message = message or f"the server answered with the status {status}"
    return kind(message + where, status=status, code=code, param=param, request_id=request_id)


def _read(body: bytes) -> tuple[str, str | None, str | None]:
    """Message, code and field of an error body: OpenAI's, vLLM's, text-embeddings-inference's or any other text."""
    try:
        found: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[: 4 * _MAX_QUOTED].decode(errors="replace").strip()[:_MAX_QUOTED], None, None
    if not isinstance(found, dict):
        return str(found)[:_MAX_QUOTED], None, None
    error = found.get("error", found.get("message", found.get("detail", "")))
    if not isinstance(error, dict):
        return str(error), _text(found.get("error_type")), None
    return str(error.get("message", "")), _text(error.get("code") or error.get("type")), _text(error.get("param"))


def _text(value: object) -> str | None:
    return None if value is None else str(value)
