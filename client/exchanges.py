"""One call as a series of requests: which go out, what is repeated and when, and what ends it. No socket, no clock.

Owns the reaction to every kind of failure, for `vecd.Client`, `vecd embed` and `vecd check --fleet`. Computing vectors
changes nothing on a server, so a request can be repeated whenever it is not known to have been answered. The clients do
what the generator `ClientCall.attempts` yields, a `Send` or a pause, and note in a `Send` what came of it.

Repeats end when for `retry_for` seconds no request of the call has succeeded, and at the call's deadline.
"""

import json
import math
import os
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeAlias, TypeVar

import orjson

from vecd.base.target import parse_target
from vecd.client.http import BadResponse, Place, ServerResponse, render_request
from vecd.client.sockets import NotConnected, TlsMismatch

DEFAULT_URL = "http://127.0.0.1:8000"
FIRST = "first"
"""The identity that the first answer has."""

_MAX_TEXTS, _MAX_BODY_BYTES = 512, 512 * 1024
"""Of one request. A proxy repeats a request for itself only while its body fits the proxy's buffer, 1 MiB."""
_MAX_TIMEOUT_MS = 24 * 60 * 60 * 1000
"""The server's limit on x-vecd-timeout-ms."""
_SILENCE_S = 300.0
"""Without a byte for so long a connection counts as broken. The server's own limit, --request-timeout, is the same."""


class RequestLimits(NamedTuple):
    max_inputs: int = _MAX_TEXTS
    max_bytes: int = _MAX_BODY_BYTES
    dim: int | None = None
    """Dimensions of the model's vectors, if the server says so."""


class ClientBase:
    """Base of `vecd.Client` and `vecd.AsyncClient`."""

    user_agent = "vecd-python"
    silence_s = _SILENCE_S
    counts_silence = False
    """Whether a request that gets no response is sent three times at most, as one that fails."""

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

    def why_gone(self) -> str | None:
        """Why the server will not come back; None if it may."""
        return None

    def _point_to(self, url: str) -> None:
        """Raises ValueError."""
        self.target = parse_target(url, self._arguments["ca"])
        self._arguments["url"] = url
        self.render(Piece("/", b""))

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

    def render(self, piece: "Piece", identity: str | None = None, timeout_s: float = math.inf) -> bytes:
        """A whole request. Raises ValueError when an argument of the client cannot stand in it."""
        headers = dict(piece.headers)
        if self.model is not None:
            headers["x-vecd-model"] = self.model
        if identity is not None:
            headers["if-vecd-identity"] = identity
        if timeout_s < math.inf:  # what no caller waits for any more need not be computed
            headers["x-vecd-timeout-ms"] = str(min(max(1, int(timeout_s * 1000)), _MAX_TIMEOUT_MS))
        return render_request(
            self.target, piece.path, piece.body,
            api_key=self._arguments["api_key"], accept="*/*", headers=headers, user_agent=self.user_agent,
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


class Reaction(Enum):
    """What follows when a request has not succeeded."""

    BUSY = "repeated when Retry-After says so, or later each time"
    AWAY = "repeated later each time"
    SILENT = "as AWAY, or as FAILED where the inputs may be the reason"
    FAILED = "repeated later each time, three times in all: the inputs may be the reason"
    REFUSED = "never repeated: an input is wrong"
    OTHER_MODEL = "never repeated, but a proxy may have another node"
    FATAL = "never repeated"


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

    reaction = Reaction.FATAL


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


OTHER_MODEL = 412
_BY_STATUS: dict[int, tuple[type[VecdError], Reaction]] = {
    400: (BadRequest, Reaction.REFUSED),
    401: (AuthenticationError, Reaction.FATAL),
    403: (PermissionDenied, Reaction.FATAL),
    404: (NotFound, Reaction.FATAL),
    408: (BadRequest, Reaction.AWAY),
    OTHER_MODEL: (IdentityMismatch, Reaction.OTHER_MODEL),
    413: (BadRequest, Reaction.REFUSED),
    422: (BadRequest, Reaction.REFUSED),
    425: (BadRequest, Reaction.AWAY),
    429: (Overloaded, Reaction.BUSY),
    500: (ServerError, Reaction.FAILED),
    502: (ServerUnavailable, Reaction.AWAY),
    503: (Overloaded, Reaction.BUSY),
    504: (ServerUnavailable, Reaction.AWAY),
}
_MAX_FAILURES = 3
_MAX_RETRY_AFTER_S = 60.0
_MAY_LACK = (AuthenticationError, PermissionDenied, NotFound, BadRequest)


def error_of(outcome: ServerResponse | Exception, url: str, where: str = "") -> VecdError:
    """What a request that has not succeeded means: the error, and in it the reaction. `where`: which inputs the request
    had, for the message. Raises `outcome` when it is not of a request."""
    error: VecdError
    match outcome:
        case ServerResponse():
            return _error_of_response(outcome, where)
        case BadResponse():
            error, reaction = ServerError(f"{url}: no answer of vecd's: {outcome}{where}"), Reaction.FAILED
        case OSError():
            error = ServerUnavailable(f"{url}: {outcome or type(outcome).__name__}")
            reaction = Reaction.AWAY
            if isinstance(outcome, TlsMismatch):
                reaction = Reaction.FATAL
            elif isinstance(outcome, TimeoutError) and not isinstance(outcome, NotConnected):
                reaction = Reaction.SILENT
        case _:
            raise outcome
    error.reaction, error.__cause__ = reaction, outcome
    return error


def _error_of_response(response: ServerResponse, where: str) -> VecdError:
    status = response.status
    others = BadRequest if 400 <= status < 500 else ServerError
    kind, reaction = _BY_STATUS.get(status, (others, Reaction.FATAL))
    message, code, param = _read(response.body)
    message = message or f"the server answered with the status {status}"
    error = kind(message + where, status=status, code=code, param=param, request_id=response.request_id)
    error.reaction = reaction
    if isinstance(error, Overloaded) and response.retry_after_s is not None:
        error.retry_after = min(response.retry_after_s, _MAX_RETRY_AFTER_S)
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


_REPEATED = (Reaction.BUSY, Reaction.AWAY, Reaction.SILENT, Reaction.FAILED)
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 10.0

Result = TypeVar("Result")


@dataclass(slots=True)
class Piece:
    """One request of a call."""

    path: str
    body: bytes | None = None
    where: str = ""
    """Which inputs of the call it has, for messages."""
    start: int = 0
    end: int = 0
    """These inputs are `start`–`end` of the call's."""
    may_lack: bool = False
    """The call does without the answer where a key may not read it, or a proxy does not pass it on."""
    headers: Mapping[str, str] = field(default_factory=dict)
    place: Place | None = None
    """Has the memory for the body of an answer 200; None: that is JSON."""
    answer: Any = None
    """That JSON."""


Steps: TypeAlias = Generator[Sequence[Piece], None, Result]
"""A call: yields pieces, which are all answered when it goes on; returns the call's result."""


@dataclass(slots=True)
class Send:
    """Send `request`, and receive the response where `place` says: for `timeout_s`, which may be infinite, and while
    the client's `silence_s` do not pass without a byte."""

    request: bytes
    place: Place | None
    timeout_s: float
    outcome: ServerResponse | Exception | None = None
    """The response, or what went wrong, of any kind. Set by the client."""


class ClientCall:
    """What the requests of one call have in common."""

    def __init__(
        self,
        client: ClientBase,
        *,
        clock: Callable[[], float] = time.monotonic,
        spread: Callable[[], float] = random.random,
    ) -> None:
        """`spread` returns a number in [0, 1)."""
        self._client, self._clock, self._spread = client, clock, spread
        self._served_at = clock()
        self._deadline = self._served_at + (math.inf if client.timeout is None else client.timeout)
        self._identity: str | None = None
        """Of the first answer; None if that had none. All vectors of one call are of one model."""
        self._is_answered = False
        self._identity_lock = Lock()
        """The first answers of a call may come at the same time, in several threads."""

    def attempts(self, piece: Piece) -> Iterator[Send | float]:
        """What to send, and seconds to pause; returns when `piece` has its answer. Raises VecdError."""
        client = self._client
        failing_since, num_failures, usual_pause_s = math.inf, 0, _FIRST_PAUSE_S
        while True:
            yield (sent := self._send(piece))
            outcome = sent.outcome
            assert outcome is not None
            if isinstance(outcome, ServerResponse) and outcome.status == 200:
                try:
                    self._take(piece, outcome)
                    return
                except BadResponse as found:
                    sent.outcome = outcome = found
            error = error_of(outcome, client.url, piece.where)
            reaction = error.reaction
            if reaction not in _REPEATED:
                if piece.may_lack and isinstance(error, _MAY_LACK):
                    return
                raise error
            told_s = error.retry_after if isinstance(error, Overloaded) else None
            pause_s = told_s or usual_pause_s * (0.5 + self._spread() / 2)
            usual_pause_s = min(2 * usual_pause_s, _MAX_PAUSE_S)
            now = self._clock()
            failing_since = min(failing_since, now)
            num_failures += reaction is Reaction.FAILED or (reaction is Reaction.SILENT and client.counts_silence)
            if why := client.why_gone():
                raise ServerUnavailable(why) from error.__cause__
            if now >= self._deadline or (told_s and now + pause_s >= self._deadline):
                raise self._timeout(error) from (error.__cause__ or error)
            left_s = max(failing_since, self._served_at) + client.retry_for - now
            if num_failures >= _MAX_FAILURES or left_s <= 0 or (told_s and pause_s > left_s):
                raise error
            yield min(pause_s, left_s, self._deadline - now)

    def _send(self, piece: Piece) -> Send:
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise self._timeout(None)
        identity = self._identity or self._client.demanded_identity

        return Send(self._client.render(piece, identity, left_s), piece.place, left_s)

    def _take(self, piece: Piece, response: ServerResponse) -> None:
        """Raises BadResponse, IdentityMismatch."""
        if piece.body is not None:  # the head of /info has none, and it has no results
            with self._identity_lock:
                self._check_identity(response)
        if piece.place is None:
            try:
                piece.answer = orjson.loads(response.body)
            except orjson.JSONDecodeError as error:
                raise BadResponse(f"no JSON: {error}") from error
        self._served_at = self._clock()

    def _timeout(self, error: Exception | None) -> Timeout:
        last = f"; the last failure: {error}" if error is not None else ""
        return Timeout(f"{self._client.url}: the call took longer than {self._client.timeout} s{last}")

    def _check_identity(self, response: ServerResponse) -> None:
        """Raises IdentityMismatch."""
        found, demanded = response.identity, self._client.demanded_identity
        if demanded is not None and demanded not in (found, (found or "").partition(";")[0]):
            raise _mismatch(f"the server's model is {found or 'not known'}, and {demanded} was demanded", response)
        if self._is_answered and found != self._identity:
            first, other = (each or "one without an identity" for each in (self._identity, found))
            raise _mismatch(f"two models have answered one call: {first} and {other}", response)
        self._is_answered, self._identity = True, found
        if found is not None:
            self._client.identity = found


def _mismatch(message: str, response: ServerResponse) -> IdentityMismatch:
    error = IdentityMismatch(message, code="identity_mismatch", request_id=response.request_id)
    error.reaction = Reaction.OTHER_MODEL
    return error


# --- inputs into bodies -----------------------------------------------------------------------------------------

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


def write(value: Any) -> bytes:
    """Its JSON. Raises TypeError when it has none."""
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except orjson.JSONEncodeError as error:
        if "surrogates" not in str(error):
            raise TypeError(f"an input cannot be sent: {error}") from error
        # Half of a surrogate pair: the server says which input has it.
        return json.dumps(value, separators=(",", ":")).encode()


def cut(
    path: str, fields: Mapping[str, Any], name: str, inputs: Sequence[Any], limits: RequestLimits
) -> Iterator[Piece]:
    """Requests of `fields` and a list `name` with some of `inputs`, in their order, all within `limits`.

    An input that is too large for a request has one to itself, and the server refuses it. Raises TypeError.
    """
    fields = {key: value for key, value in fields.items() if value is not None}

    def pieces(start: int, end: int) -> Iterator[Piece]:
        body = write({name: inputs[start:end], **fields})
        num_parts = min(-(-len(body) // limits.max_bytes), end - start)
        if num_parts > 1:
            num_inputs = (end - start) // num_parts
            for part in range(start, end, num_inputs):
                yield from pieces(part, min(part + num_inputs, end))
            return
        is_all = end - start == len(inputs)
        where = "" if is_all else f" (inputs {start} to {end - 1} of the call are counted from 0 here)"
        yield Piece(path, body, where, start, end)

    for start in range(0, len(inputs), limits.max_inputs):
        yield from pieces(start, min(start + limits.max_inputs, len(inputs)))
