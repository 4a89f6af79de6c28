"""One call as a series of requests: which go out, what is repeated and when, and what ends it. No socket, no clock.

Owns the reaction to every kind of failure. Computing vectors changes nothing on a server, so a request can be repeated
whenever it is not known to have been answered. The clients drive `ClientCall.attempts`, a generator: they do what it
yields, a `Send` or a `Pause`, and throw into it what went wrong. Called by `vecd.client.sdk.client` and `.aio`.

    429, 503                                    when Retry-After says so, or later each time
    no connection, reset, no answer, 502, 504   later each time
    500, an answer that is not HTTP             later each time, three times
    all else                                    never

Repeats end when for `retry_for` seconds no request of the call has succeeded, and at the call's deadline.
"""

import math
import random
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias, TypeVar

import orjson

from vecd.client.connection import BadResponse, TlsMismatch
from vecd.client.sdk.endpoint import ClientBase
from vecd.client.sdk.errors import (
    IdentityMismatch,
    Overloaded,
    ServerError,
    ServerUnavailable,
    Timeout,
    VecdError,
    error_of,
)
from vecd.client.sdk.http1 import ResponseHead, ResponseReader

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

    def __init__(self, path: str, body: bytes | None = None, where: str = "") -> None:
        """`where`: which inputs of the call it has, for messages."""
        self.path, self.body, self.where = path, body, where
        self.answer: Any = None
        """The answer's JSON."""

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


@dataclass(frozen=True, slots=True)
class Send:
    """Send `request`, and feed `reader` until it is complete: for `timeout_s`, which may be infinite, and while no
    SILENCE_S pass without a byte."""

    request: bytes
    reader: ResponseReader
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Pause:
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

    def attempts(self, piece: Piece) -> Generator[Send | Pause, None, None]:
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
                yield self._send(piece, reader)
                assert reader.head is not None
                if reader.head.status == 200:
                    if piece.body is not None:  # the head of /info has none, and it has no results
                        with self._identity_lock:
                            self._check_identity(reader.head)
                    piece.finish(reader.head, reader.body)
                    self._served_at = self._clock()
                    return
                error = _error(reader.head, reader.body, piece)
                if reader.head.status in _BUSY:
                    if told_s := _retry_after_s(reader.head):
                        pause_s, is_told = told_s, True
                elif reader.head.status == 500:
                    num_errors += 1
                elif reader.head.status not in _AWAY:
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
        if demanded is not None and not _is_same(found, demanded):
            raise _mismatch(f"the server's model is {found or 'not known'}, and {demanded} was demanded", head)
        if self._is_answered and found != self._identity:
            first, other = (each or "one without an identity" for each in (self._identity, found))
            raise _mismatch(f"two models have answered one call: {first} and {other}", head)
        self._is_answered, self._identity = True, found
        if found is not None:
            self._endpoint.on_identity(found)


def _is_same(found: str | None, demanded: str) -> bool:
    if found is None:
        return False
    return found == demanded or (";" not in demanded and found.partition(";")[0] == demanded)


def _mismatch(message: str, head: ResponseHead) -> IdentityMismatch:
    return IdentityMismatch(message, code="identity_mismatch", request_id=head.headers.get("x-request-id"))


def _error(head: ResponseHead, body: bytes | bytearray | None, piece: Piece) -> VecdError:
    error = error_of(head.status, bytes(body or b""), head.headers.get("x-request-id"), piece.where)
    if isinstance(error, Overloaded):
        error.retry_after = _retry_after_s(head)
    return error


def _retry_after_s(head: ResponseHead) -> float | None:
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = head.headers.get(name, "")
        if value.isascii() and value.isdigit():
            return min(int(value) * unit_s, _MAX_RETRY_AFTER_S)
    return None
