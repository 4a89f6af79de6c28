"""Texts → vectors, by a server that may be busy, restart, or refuse one of them.

Owns the connections, the requests, the reaction to each kind of failure, and the comparison of models. Reads and writes
no file. Called by `vecd.client.bulk.run`.

- Busy, restarting, out of reach (429, 503, 502, 504, 408, no connection): the request is repeated, later each time or
  when the server says, until the server has responded to no request for `retry_for_s`.
- Refused because of its texts (400, 413, 422): the request is halved, down to the row that is refused.
- Failed because of its texts, perhaps (500, no response in time): repeated, then halved. A single row that fails is
  rejected only if the server embeds the probe right after it. If not, the server is ill, and the request is repeated.
- Not allowed, or not found (401, 403, 404, …): the run ends.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from vecd.client.bulk.concurrency import ConcurrencyLimit
from vecd.client.connection import (
    BadResponse,
    ClientConnection,
    ServerResponse,
    Target,
    connect,
    name_failure,
    render_request,
)

_AGENT = "vecd-embed"
_PATH = "/v1/embeddings"
_CONNECT_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.2
_MAX_PAUSE_S = 10.0
_MAX_RETRY_AFTER_S = 60.0
_MAX_FAILURES = 3
"""Failures after which the texts of a request are suspected."""
_REFUSED = (400, 413, 422)
_BUSY = (408, 425, 429, 502, 503, 504)
PROBE = "The probe of a run: a sentence whose vector tells one model from another."


class ServerLost(Exception):
    """Raised when the server has been out of reach, or ill, for too long."""


class NotServed(Exception):
    """Raised when the server will never embed what is requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What every request has beside its texts. Immutable."""

    dtype: str
    fields: dict[str, Any]
    """Fields of the body: the purpose of the texts, the truncation policy, …"""
    priority: str
    api_key: str | None
    timeout_s: float
    retry_for_s: float


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What tells one model from another."""

    name: str
    dim: int
    facts: dict[str, Any]
    """From /info, what cannot differ between runs; empty if the server does not say."""
    probe: list[float]
    """The vector of `PROBE`."""

    def why_other(self, journaled: dict[str, Any]) -> str:
        """How it differs from the model in a journal; "" when it does not. Names may differ: a folder may have been
        renamed."""
        if self.dim != journaled["dim"]:
            return f"{self.dim} dimensions, not {journaled['dim']}"
        for name, value in self.facts.items():
            if name in journaled["facts"] and journaled["facts"][name] != value:
                return f"{name} {value!r}, not {journaled['facts'][name]!r}"
        return "" if _is_same_direction(self.probe, journaled["probe"]) else "other vectors for the same text"

    def is_of(self, probe: NDArray[Any]) -> bool:
        """Whether `probe` is this model's vector of `PROBE`."""
        return len(probe) == self.dim and _is_same_direction(self.probe, probe)


_MIN_COSINE = 0.998
"""vecd's promise for any number format against any other. Vectors of different models are far below."""


def _is_same_direction(one: Sequence[float], other: Sequence[float] | NDArray[Any]) -> bool:
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return bool(np.array_equal(a, b)) or (lengths > 0 and float(a @ b) / lengths >= _MIN_COSINE)


class RequestLimits(NamedTuple):
    """The server's limits of one request; None if it does not say."""

    max_inputs: int | None
    max_body_bytes: int | None


@dataclass(slots=True)
class Vectors:
    """The vectors of the texts of one request."""

    matrix: NDArray[Any]
    """[texts, dimensions]; NaN in rows without a vector."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why there is no vector, by index."""
    num_tokens: int = 0


class EmbeddingService:
    """One server. `connect` first."""

    def __init__(
        self, target: Target, options: RequestOptions, why_gone: Callable[[], str | None] = lambda: None
    ) -> None:
        """`why_gone` returns why the server will not come back, or None."""
        self.trouble = ""
        """Why requests wait at the moment, or ""."""
        self.concurrency = ConcurrencyLimit()
        self._target = target
        self._options = options
        self._why_gone = why_gone
        self._idle: list[ClientConnection] = []
        self._served_at = time.monotonic()
        self._item = np.dtype(options.dtype).newbyteorder("<")
        self._model: ModelFingerprint

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    # --- the model ----------------------------------------------------------------------------------------

    async def connect(self) -> tuple[ModelFingerprint, RequestLimits]:
        """Find out which model the server has. Raises ServerLost, NotServed."""
        probe, name = await self._embed_probe()
        facts, limits = await self._info()
        self._model = ModelFingerprint(name, len(probe), facts, [float(value) for value in probe])
        return self._model, limits

    async def has_same_model(self) -> bool:
        """Whether the server's vectors are still those of the model at `connect`. Raises ServerLost, NotServed."""
        return self._model.is_of((await self._embed_probe())[0])

    async def _embed_probe(self) -> tuple[NDArray[Any], str]:
        """The vector, and the model's name."""
        response = await self._until_served([PROBE], is_probe=True)
        if response.status != 200:
            raise NotServed(f"{self._target} refuses: {_message(response)}")
        return np.frombuffer(response.body, self._item), response.model or ""

    async def _info(self) -> tuple[dict[str, Any], RequestLimits]:
        request = render_request(self._target, "/info", api_key=self._options.api_key, user_agent=_AGENT)
        try:
            response = await self._exchange(request)
            info = orjson.loads(response.body) if response.status == 200 else {}
        except (OSError, BadResponse, ValueError):
            info = {}
        model, limits = info.get("model") or {}, info.get("limits") or {}
        names = ("architecture", "dimensions", "max_tokens", "pooling", "normalized", "prompt")
        facts = {name: model[name] for name in names if name in model}
        facts.setdefault("max_tokens", info.get("max_input_length"))
        return facts, RequestLimits(info.get("max_client_batch_size"), limits.get("max_body_bytes"))

    # --- texts --------------------------------------------------------------------------------------------

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """The vectors of `texts`. Raises ServerLost, NotServed."""
        if not texts:
            return Vectors(np.empty((0, self._model.dim), self._item))
        async with self.concurrency.permit():
            return await self._embed(texts)

    async def _embed(self, texts: Sequence[str]) -> Vectors:
        response = await self._until_served(texts)
        if response.status == 200:
            if response.num_dimensions != self._model.dim:
                raise NotServed(
                    "the server has another model than this run began with: its vectors have "
                    f"{response.num_dimensions} dimensions, not {self._model.dim}"
                )
            # The matrix borrows the memory of the body.
            matrix = np.frombuffer(response.body, self._item).reshape(len(texts), self._model.dim)
            return Vectors(matrix, {}, response.num_tokens or 0)
        if len(texts) == 1:
            return Vectors(np.full((1, self._model.dim), np.nan, self._item), {0: _message(response)})
        middle = len(texts) // 2
        first, second = await self._embed(texts[:middle]), await self._embed(texts[middle:])
        reasons = first.reasons | {middle + index: reason for index, reason in second.reasons.items()}
        matrix = np.concatenate((first.matrix, second.matrix))
        return Vectors(matrix, reasons, first.num_tokens + second.num_tokens)

    def _render(self, texts: Sequence[str]) -> bytes:
        options = self._options
        body = {**options.fields, "input": texts, "encoding_format": "bytes", "output_dtype": options.dtype}
        return render_request(
            self._target,
            _PATH,
            orjson.dumps(body),
            api_key=options.api_key,
            user_agent=_AGENT,
            headers={"x-vecd-priority": options.priority},
        )

    def _why_bad(self, response: ServerResponse, num_texts: int) -> str | None:
        """What is wrong with a response of vectors, or None."""
        if response.num_dimensions is None:
            return "no response of vecd's: has it the header x-vecd-dimensions?"
        if len(response.body) != num_texts * response.num_dimensions * self._item.itemsize:
            return f"{len(response.body)} bytes for {num_texts} vectors of {response.num_dimensions} dimensions"
        if not np.isfinite(np.frombuffer(response.body, self._item)).all():
            return "vectors that are not finite"
        return None

    # --- requests -----------------------------------------------------------------------------------------

    async def _until_served(self, texts: Sequence[str], *, is_probe: bool = False) -> ServerResponse:
        """Repeat the request until there are vectors, or the texts are found to be at fault.

        `is_probe`: the text was chosen by this module, so failures are never its fault. Raises ServerLost, NotServed.
        """
        request = self._render(texts)
        began_at, pause_s, num_failures = time.monotonic(), _FIRST_PAUSE_S, 0
        while True:
            failure, retry_after_s = None, None
            try:
                response = await self._exchange(request)
                why = self._why_bad(response, len(texts)) if response.status == 200 else _message(response)
                if why is None or response.status in _REFUSED:
                    self.trouble = ""
                    self._served_at = time.monotonic()
                    return response
                if response.status not in _BUSY and response.status != 200 and response.status < 500:
                    raise NotServed(f"{self._target} answers {response.status}: {why}")
                num_failures += response.status not in _BUSY
                failure = response if response.status != 200 else None
                retry_after_s = response.retry_after_s
            except (OSError, BadResponse) as error:
                why = f"{name_failure(error)}: {error}"
                num_failures += isinstance(error, TimeoutError | BadResponse)
            is_own_fault = num_failures >= _MAX_FAILURES and not is_probe
            if is_own_fault and (len(texts) > 1 or await self._serves_probe()):
                return failure or ServerResponse(500, orjson.dumps({"error": {"message": why}}))
            self.trouble = why
            await self._pause(began_at, pause_s, retry_after_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _serves_probe(self) -> bool:
        try:
            response = await self._exchange(self._render([PROBE]))
        except (OSError, BadResponse):
            return False
        return response.status == 200 and self._why_bad(response, 1) is None

    async def _pause(self, began_at: float, pause_s: float, retry_after_s: float | None) -> None:
        """Wait before the next try. Raises ServerLost when no request has been served for too long."""
        if (gone := self._why_gone()) is not None:
            raise ServerLost(gone)
        retry_for_s = self._options.retry_for_s
        silent_s = time.monotonic() - max(self._served_at, began_at)
        if silent_s >= retry_for_s:
            raise ServerLost(f"{self._target} has served nothing for {silent_s:.0f} s: {self.trouble}")
        # Spread, so that requests that failed together do not come back together.
        pause_s *= random.uniform(0.75, 1.25)
        if retry_after_s is not None:
            pause_s = min(max(retry_after_s, pause_s), _MAX_RETRY_AFTER_S)
        await asyncio.sleep(min(pause_s, retry_for_s - silent_s))

    async def _exchange(self, request: bytes) -> ServerResponse:
        """Send once, on an idle connection that is still open or on a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return await self._exchange_on(connection, request)
        try:
            connection = await connect(self._target, _CONNECT_TIMEOUT_S)
        except TimeoutError as error:  # a TimeoutError would mean that a request got no response
            raise ConnectionError(f"no connection in {_CONNECT_TIMEOUT_S:g} s") from error
        return await self._exchange_on(connection, request)

    async def _exchange_on(self, connection: ClientConnection, request: bytes) -> ServerResponse:
        try:
            response = await connection.exchange(request, self._options.timeout_s)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return response


def _message(response: ServerResponse) -> str:
    """The message of an error, as one short line."""
    try:
        message = orjson.loads(response.body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"status {response.status}"
    return " ".join(str(message).split())[:500]
