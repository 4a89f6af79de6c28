"""One call as a series of requests: which go out, what is repeated and when, and what ends it. No socket, no clock.

Owns the reaction to every kind of failure. Computing vectors changes nothing on a server, so a request can be repeated
whenever it is not known to have been answered. The clients do what the generator `ClientCall.attempts` yields, a `Send`
or a `Pause`, and note in a `Send` what went wrong.

    429, 503                                    when Retry-After says so, or later each time
    no connection, reset, no answer, 502, 504   later each time
    500, an answer that is not HTTP             later each time, three times
    all else                                    never

Repeats end when for `retry_for` seconds no request of the call has succeeded, and at the call's deadline.
"""

import json
import math
import os
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlsplit, urlunsplit

import orjson

from vecd.base.target import parse_target, refuse_credentials
from vecd.client.connection import BadResponse, TlsMismatch, render_request
from vecd.client.http1 import ResponseHead, ResponseReader, number_of

DEFAULT_URL = "http://127.0.0.1:8000"
FIRST = "first"
"""The identity that the first answer has."""

_MAX_TEXTS, _MAX_BODY_BYTES = 512, 512 * 1024
"""Of one request. A proxy repeats a request for itself only while its body fits the proxy's buffer, 1 MiB."""
_MAX_TIMEOUT_MS = 24 * 60 * 60 * 1000
"""The server's limit on x-vecd-timeout-ms."""


class RequestLimits(NamedTuple):
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
        self.identity: str | None = None
        """The model, its revision and its number format, as the last results said; None before them."""
        self.limits: RequestLimits | None = None
        """None until `learn`."""
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
        return self._arguments["model"]  # type: ignore[no-any-return]

    @property
    def demanded_identity(self) -> str | None:
        demanded: str | None = self._arguments["identity"]
        return self.identity if demanded == FIRST else demanded

    def render(self, path: str, body: bytes | None, identity: str | None, timeout_s: float | None) -> bytes:
        """A whole request. Raises ValueError when an argument of the client cannot stand in it."""
        headers = {}
        if self.model is not None:
            headers["x-vecd-model"] = self.model
        if identity is not None:
            headers["if-vecd-identity"] = identity
        if timeout_s is not None:  # what no caller waits for any more need not be computed
            headers["x-vecd-timeout-ms"] = str(min(max(1, int(timeout_s * 1000)), _MAX_TIMEOUT_MS))
        return render_request(
            self._target, self._prefix + path, body,
            api_key=self._arguments["api_key"], accept="*/*", headers=headers, user_agent="vecd-python",
        )  # fmt: skip

    def learn(self, info: dict[str, Any]) -> RequestLimits:
        """Take the limits from the answer of /info; {} if there is none."""
        served = info.get("limits") or {}
        self.limits = RequestLimits(
            min(int(served.get("max_inputs") or info.get("max_client_batch_size") or _MAX_TEXTS), _MAX_TEXTS),
            min(int(served.get("max_body_bytes") or _MAX_BODY_BYTES), _MAX_BODY_BYTES),
            (info.get("model") or {}).get("dimensions"),
        )
        return self.limits

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._arguments), ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


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


_MAY_LACK = (AuthenticationError, PermissionDenied, NotFound, BadRequest)


def error_of(head: ResponseHead, body: bytes, where: str) -> VecdError:
    """`where` is added to the message: which inputs the request had."""
    kind = _BY_STATUS.get(head.status) or (BadRequest if 400 <= head.status < 500 else ServerError)
    message, code, param = _read(body)
    message = message or f"the server answered with the status {head.status}"
    request_id = head.headers.get("x-request-id")
    error = kind(message + where, status=head.status, code=code, param=param, request_id=request_id)
    if isinstance(error, Overloaded):
        error.retry_after = _retry_after_s(head)
    return error


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


SILENCE_S = 300.0
"""Without a byte for so long a connection counts as broken. The server's own limit, --request-timeout, is the same."""
CONNECT_S = 10.0
_FIRST_PAUSE_S, _MAX_PAUSE_S, _MAX_DOUBLINGS = 0.1, 10.0, 10
_MAX_RETRY_AFTER_S = 60.0
_MAX_ERRORS = 3
"""Tries of a request that the server fails to answer. A text may be the reason, so it is not tried for long."""
_BUSY = (408, 425, 429, 503)
_AWAY = (502, 504)

Result = TypeVar("Result")


class Piece:
    """One request of a call. Base of those that keep the answer's body elsewhere."""

    def __init__(self, path: str, body: bytes | None = None, where: str = "", *, may_lack: bool = False) -> None:
        """`where`: which inputs of the call it has, for messages. `may_lack`: the call does without the answer where
        a key may not read it, or a proxy does not pass it on."""
        self.path, self.body, self.where, self.may_lack = path, body, where, may_lack
        self.answer: Any = None

    def place(self, head: ResponseHead) -> memoryview | None:
        """The memory for the body of an answer 200. Raises BadResponse."""
        return None

    def finish(self, head: ResponseHead, body: bytes | bytearray | None) -> None:
        """Take an answer 200. `body`: None where `place` gave the memory. Raises BadResponse."""
        try:
            self.answer = orjson.loads(body or b"")
        except orjson.JSONDecodeError as error:
            raise BadResponse(f"no JSON: {error}") from error


Steps: TypeAlias = Generator[Sequence[Piece], None, Result]
"""A call: yields pieces, which are all answered when it goes on; returns the call's result."""


@dataclass(slots=True)
class Send:
    """Send `request`, and feed `reader` until it is complete: for `timeout_s`, which may be infinite, and while no
    SILENCE_S pass without a byte."""

    request: bytes
    reader: ResponseReader
    timeout_s: float
    failure: Exception | None = None
    """What went wrong, of any kind. Set by the client."""


class Pause(NamedTuple):
    seconds: float


class ClientCall:
    """What the requests of one call have in common."""

    def __init__(
        self,
        endpoint: ClientBase,
        why_gone: Callable[[], str | None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        spread: Callable[[], float] = random.random,
    ) -> None:
        """`why_gone` returns why the server will not come back, or None. `spread` returns a number in [0, 1)."""
        self._endpoint, self._why_gone, self._clock, self._spread = endpoint, why_gone, clock, spread
        self._served_at = clock()
        self._deadline = self._served_at + (math.inf if endpoint.timeout is None else endpoint.timeout)
        self._identity: str | None = None
        """Of the first answer; None if that had none. All vectors of one call are of one model."""
        self._is_answered = False
        self._identity_lock = Lock()
        """The first answers of a call may come at the same time, in several threads."""

    def attempts(self, piece: Piece) -> Iterator[Send | Pause]:
        """Returns when `piece` has its answer. Raises VecdError."""
        failing_since, num_failures, num_errors = math.inf, 0, 0
        while True:
            reader = ResponseReader(lambda head: piece.place(head) if head.status == 200 else None)
            pause_s = min(_FIRST_PAUSE_S * 2 ** min(num_failures, _MAX_DOUBLINGS), _MAX_PAUSE_S) * (
                0.5 + self._spread() / 2
            )
            is_told = False
            cause: Exception | None = None
            try:
                yield (sent := self._send(piece, reader))
                if sent.failure is not None:
                    raise sent.failure
                assert reader.head is not None
                if reader.head.status == 200:
                    if piece.body is not None:  # the head of /info has none, and it has no results
                        with self._identity_lock:
                            self._check_identity(reader.head)
                    piece.finish(reader.head, reader.body)
                    self._served_at = self._clock()
                    return
                error = error_of(reader.head, bytes(reader.body or b""), piece.where)
                if reader.head.status in _BUSY:
                    told_s = _retry_after_s(reader.head)
                    pause_s, is_told = told_s or pause_s, bool(told_s)
                elif reader.head.status == 500:
                    num_errors += 1
                elif reader.head.status not in _AWAY:
                    if piece.may_lack and isinstance(error, _MAY_LACK):
                        return
                    raise error
            except BadResponse as found:
                cause, error = found, ServerError(f"{self._endpoint.url}: no answer of vecd's: {found}{piece.where}")
                num_errors += 1
            except TlsMismatch as found:
                raise ServerUnavailable(f"{self._endpoint.url}: {found}") from found
            except OSError as found:
                cause, error = found, ServerUnavailable(f"{self._endpoint.url}: {found or type(found).__name__}")
            now = self._clock()
            failing_since = min(failing_since, now)
            num_failures += 1
            if why := self._why_gone():
                raise ServerUnavailable(why) from cause
            if now >= self._deadline or (is_told and now + pause_s >= self._deadline):
                raise self._timeout(error) from (cause or error)
            left_s = max(failing_since, self._served_at) + self._endpoint.retry_for - now
            if num_errors >= _MAX_ERRORS or left_s <= 0 or (is_told and pause_s > left_s):
                raise error from cause
            yield Pause(min(pause_s, left_s, self._deadline - now))

    def _send(self, piece: Piece, reader: ResponseReader) -> Send:
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise self._timeout(None)
        identity = self._identity or self._endpoint.demanded_identity
        timeout_s = None if math.isinf(left_s) else left_s
        request = self._endpoint.render(piece.path, piece.body, identity, timeout_s)
        return Send(request, reader, left_s)

    def _timeout(self, error: Exception | None) -> Timeout:
        last = f"; the last failure: {error}" if error is not None else ""
        return Timeout(f"{self._endpoint.url}: the call took longer than {self._endpoint.timeout} s{last}")

    def _check_identity(self, head: ResponseHead) -> None:
        """Raises IdentityMismatch."""
        found = head.headers.get("x-vecd-identity")
        demanded = self._endpoint.demanded_identity
        if demanded is not None and demanded not in (found, (found or "").partition(";")[0]):
            raise _mismatch(f"the server's model is {found or 'not known'}, and {demanded} was demanded", head)
        if self._is_answered and found != self._identity:
            first, other = (each or "one without an identity" for each in (self._identity, found))
            raise _mismatch(f"two models have answered one call: {first} and {other}", head)
        self._is_answered, self._identity = True, found
        if found is not None:
            self._endpoint.identity = found


def _mismatch(message: str, head: ResponseHead) -> IdentityMismatch:
    return IdentityMismatch(message, code="identity_mismatch", request_id=head.headers.get("x-request-id"))


def _retry_after_s(head: ResponseHead) -> float | None:
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        if (value := number_of(head.headers.get(name, ""))) is not None:
            return min(value * unit_s, _MAX_RETRY_AFTER_S)
    return None


# --- inputs into bodies -----------------------------------------------------------------------------------------

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


class Cut(NamedTuple):
    """Inputs `start`–`end` of a call, in one body."""

    start: int
    end: int
    body: bytes
    where: str
    """For messages: "" if these are all inputs of the call."""


def write(value: Any) -> bytes:
    """Its JSON. Raises TypeError when it has none."""
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except orjson.JSONEncodeError as error:
        if "surrogates" not in str(error):
            raise TypeError(f"an input cannot be sent: {error}") from error
        return json.dumps(value).encode()  # half of a surrogate pair: the server says which input has it


def cut(fields: Mapping[str, Any], name: str, inputs: Sequence[Any], limits: RequestLimits) -> Iterator[Cut]:
    """Bodies of `fields` and a list `name` with some of `inputs`, in their order, all within `limits`.

    An input that is too large for a request has one to itself, and the server refuses it. Raises TypeError.
    """
    rest = write({key: value for key, value in fields.items() if value is not None})[1:]
    head = b'{"' + name.encode() + b'":['
    tail = b"]," + rest if len(rest) > 1 else b"]}"
    room = limits.max_bytes - len(head) - len(tail)
    start, written, size = 0, list[bytes](), 0
    for each in inputs:
        one = write(each)
        if written and (len(written) == limits.max_inputs or size + len(one) >= room):
            yield _cut(head, written, tail, start, len(inputs))
            start, written, size = start + len(written), [], 0
        written.append(one)
        size += len(one) + 1
    if written:
        yield _cut(head, written, tail, start, len(inputs))


def _cut(head: bytes, written: list[bytes], tail: bytes, start: int, num_inputs: int) -> Cut:
    end = start + len(written)
    where = "" if end - start == num_inputs else f" (inputs {start} to {end - 1} of the call are counted from 0 here)"
    return Cut(start, end, b"".join((head, b",".join(written), tail)), where)
