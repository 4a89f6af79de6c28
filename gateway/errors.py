"""The table of errors that a client can see: exception → status, type, code and log level.

Client errors (4xx) have the field, the limit and the value; overload (429 and 503) has Retry-After; server errors (5xx)
are generic for the client, and complete in the log under the request id. Statuses, types and codes follow OpenAI's API,
because clients match on them: 400 and never 422, and no 5xx is an `invalid_request_error`. No message quotes a text, a
token id, a vector or a key.
"""

import logging
import math
import random
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, ClassVar

INPUT = "\0input"
"""Stands for the name of the field that has the inputs, in the messages of modules that know no dialect."""


class ApiError(Exception):
    """An error response. Subclasses define the family; `message` is for the client to read."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})
    """Those that the status requires."""
    log_level: ClassVar[int] = logging.DEBUG

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        can: Callable[[Any], bool] | None = None,
    ) -> None:
        """`param` names the field. `can`: whether the model with a `vecd.gateway.api.served.ModelInfo` could answer the
        request; None: the error is not about the kind of the model."""
        super().__init__(message)
        self._message = message
        self._param = param
        self.field = "input"
        """The client's word for INPUT."""
        self.can = can
        self.dialect: str | None = None
        """Whose shape the response has, where the path alone does not decide."""
        self.code = code or self.code
        self.headers = headers or self.headers

    def __str__(self) -> str:
        return self.message

    @property
    def message(self) -> str:
        return self._message.replace(INPUT, self.field)

    @property
    def param(self) -> str | None:
        """The field that is wrong, by the client's word."""
        return self.field if self._param is INPUT else self._param

    @param.setter
    def param(self, param: str) -> None:
        self._param = param

    def add(self, text: str) -> None:
        self._message += text


# --- client errors ----------------------------------------------------------------------------------------------


class ClientError(ApiError):
    """Base of all errors but overload that are the client's."""

    type = "invalid_request_error"


class BadRequest(ClientError):
    status = 400


class TooManyInputs(BadRequest):
    """For more inputs than a request may have."""


class EmptyInput(BadRequest):
    """For a list of no inputs, in text-embeddings-inference's dialect."""


class InputTooLong(BadRequest):
    """With Overflow.ERROR. LiteLLM and Elasticsearch recognize OpenAI's sentence, and act on it."""

    def __init__(
        self,
        max_tokens: int,
        num_tokens: int,
        *,
        is_at_least: bool = False,
        param: str | None = None,
        where: str = "",
        index: int | None = None,
    ) -> None:
        """`is_at_least`: not all of the input was read. `where`: what follows OpenAI's sentence. `index`: of the
        input, for a caller that can say more."""
        self.index = index
        num = f"at least {num_tokens}" if is_at_least else f"{num_tokens}"
        super().__init__(
            f"This model's maximum context length is {max_tokens} tokens, however you requested {num} tokens ({num} in "
            f"your prompt; 0 for the completion). Please reduce your prompt; or completion length.{where}",
            param=param,
        )


class TooManyTokens(BadRequest):
    """For a request whose inputs have too many tokens together."""

    type = "max_tokens_per_request"
    code = "max_tokens_per_request"


class ModelNotFound(BadRequest):
    """For a name that is not the served model's, where the name is checked."""

    status = 404
    code = "model_not_found"

    def __init__(self, name: str, served: str) -> None:
        """`served`: its names, as one text."""
        name = name[:64]
        super().__init__(f"The model `{name}` does not exist; this server has {served}", param="model")
        # For dialects with a message of their own.
        self.name = name
        self.served = served


class InvalidApiKey(ClientError):
    """For a request with an unknown key, or none, where keys are configured."""

    status = 401
    code = "invalid_api_key"
    headers = MappingProxyType({"www-authenticate": "Bearer"})


class PermissionDenied(ClientError):
    """For a key without the scope, and for what may be a web page on the admin listener."""

    status = 403
    code = "insufficient_scope"


class NotFound(ClientError):
    status = 404


class MethodNotAllowed(ClientError):
    """The path exists under other methods, which the header `allow` lists."""

    status = 405
    code = "method_not_allowed"


class RequestTimeout(ClientError):
    """For a request whose bytes do not arrive in time."""

    status = 408
    code = "request_timeout"


class IdentityMismatch(ClientError):
    """For a request that demands another identity than the model's."""

    status = 412
    code = "identity_mismatch"


class PayloadTooLarge(ClientError):
    """Raised while the body arrives, or is decompressed, before any of it is parsed."""

    status = 413
    code = "payload_too_large"


class UnsupportedEncoding(ClientError):
    """For an unsupported Content-Encoding, before the body is read; the header `accept-encoding` lists the others."""

    status = 415
    code = "unsupported_content_encoding"


class WrongModel(ClientError):
    """The served model lacks the capability. TEI's dialect renders it as 424."""

    status = 400
    code = "wrong_model"


class HeadersTooLarge(ClientError):
    status = 431
    code = "headers_too_large"


class NotImplementedByServer(ApiError):
    """For methods that are not supported, and for a transfer coding other than chunked."""

    status = 501
    code = "not_implemented"


class HttpVersionNotSupported(ApiError):
    """For versions of HTTP before 1.0 and after 1.x."""

    status = 505
    code = "http_version_not_supported"


# --- overload ---------------------------------------------------------------------------------------------------


_MAX_RETRY_AFTER_S = 60.0
"""SDKs ignore more than a minute or two."""
_MAX_START_RETRY_AFTER_S = 10.0
"""A client that polls a starting server should not add more than this to the start."""
_SPREAD, _MIN_SPREAD_S = 0.5, 2.0
"""Clients that were refused together come back over half of the time that they were told to wait, or two seconds."""


class _Overload(ApiError):
    def __init__(self, message: str, *, retry_after_s: float, code: str | None = None) -> None:
        """`retry_after_s`: when a retry is expected to succeed. The headers never say less, but for the last two
        seconds of a minute, over which retries are spread, too. Whole seconds are at least one, because SDKs retry at
        once on zero."""
        milliseconds = {}
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            seconds = min(retry_after_s, _MAX_RETRY_AFTER_S - _MIN_SPREAD_S)
            seconds += random.uniform(0, min(max(_MIN_SPREAD_S, _SPREAD * seconds), _MAX_RETRY_AFTER_S - seconds))
            milliseconds = {"retry-after-ms": str(math.ceil(1000 * seconds))}
            retry_after_s = math.ceil(1000 * seconds) / 1000
        whole_seconds = math.ceil(min(_MAX_RETRY_AFTER_S, max(1.0, retry_after_s)))
        super().__init__(message, code=code, headers={"retry-after": str(whole_seconds), **milliseconds})


class TooManyRequests(_Overload):
    """Too much is waiting."""

    status = 429
    type = "rate_limit_error"
    code = "server_overloaded"


class RateLimited(_Overload):
    """The key has used up its quota."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Unavailable(_Overload):
    """No worker can serve within the request's deadline, or the server drains."""

    status = 503
    code = "service_unavailable"
    log_level = logging.WARNING


class NotReady(Unavailable):
    """Before a worker can serve for the first time."""

    code = "not_ready"
    log_level = logging.DEBUG

    def __init__(self, stage: str, started_s: float) -> None:
        """`stage`: what the start is doing. `started_s`: seconds since it began; it is expected to take as many
        more."""
        super().__init__(f"The server is starting; {stage}", retry_after_s=min(_MAX_START_RETRY_AFTER_S, started_s))


class DeadlinePassed(Unavailable):
    """The request's deadline passes, or would pass before its next batch is done."""

    log_level = logging.INFO

    def __init__(self, why: str | None) -> None:
        super().__init__(f"No answer before the request's deadline: {why or 'too much was waiting'}", retry_after_s=5)


# --- server errors ----------------------------------------------------------------------------------------------


class ServerError(ApiError):
    """The engine failed on a request; rendered for any unexpected exception, too."""

    code = "internal_error"
    log_level = logging.ERROR


class EngineFailed(ServerError):
    """The engine failed on an input, and nothing else did."""


class PoisonInput(EngineFailed):
    """For an input whose batches died with their workers."""

    code = "poison_input"
    # OpenAI's SDKs repeat a 5xx, which would crash a worker again.
    headers = MappingProxyType({"x-should-retry": "false"})


# Quote values of a client in error messages, shortened.

_MAX_QUOTED_CHARS, _MAX_SHOWN_CHARS = 32, 64


def quoted(text: str) -> str:
    """The beginning of a client's value, in ASCII."""
    shown = ascii(text[:_MAX_QUOTED_CHARS])  # ten characters for each that is not ASCII
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}..."
