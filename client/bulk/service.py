"""Texts → vectors, by a server that may be busy, restart, or refuse one of them.

Owns the connections, the requests, the reaction to each kind of failure, the measurement of the server's throughput,
and the comparison of models. Reads and writes no file. Called by `vecd.client.bulk.run`.

- Busy, restarting, out of reach (429, 503, 502, 504, 408, no connection): the request is repeated, later each time or
  when the server says, until the server has responded to no request for `--retry-for`.
- Refused because of its texts (400, 413, 422): the request is halved, down to the row that is refused.
- Failed because of its texts, perhaps (500, no response in time): repeated, then halved. A single row that fails is
  rejected only if the server embeds the probe right after it. If not, the server is ill, and the request is repeated.
- Not allowed, or not found (401, 403, 404, …): the run ends.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from vecd.client.bulk.errors import ModelChanged, RunEnded
from vecd.client.bulk.options import EmbedOptions
from vecd.client.bulk.rows import InputRow
from vecd.client.bulk.throughput import ThroughputEstimate
from vecd.client.connection import (
    BadResponse,
    ClientConnection,
    ServerResponse,
    Target,
    TlsMismatch,
    check_not_tls,
    connect,
    render_request,
)

_CONNECT_TIMEOUT_S = 10.0
_FIRST_RESPONSE_S, _RESPONSE_S = 2.0, 10.0
"""Without a response for this long, requests count as waiting: for the first response of all, and later."""
_FIRST_PAUSE_S = 0.2
_MAX_PAUSE_S = 10.0
_MAX_RETRY_AFTER_S = 60.0
_MAX_FAILURES = 3
"""Failures after which the texts of a request are suspected."""
_REFUSED = (400, 413, 422)
_BUSY = (408, 425, 429, 502, 503, 504)
PROBE = "probe"
"""Its vector tells one model from another. It goes along with the texts of each request. A request for it alone, twice
a second, has the server keep all batches short, because others like it may come: 184 instead of 105 batches for 24,000
tokens."""
_PROBE_PRIORITY = "interactive"
"""One short text. Behind the run's own texts, a commit that needs it would come a second of work later."""
_MIN_COSINE = 0.998
"""vecd's promise for any number format against any other. Vectors of different models are far below."""
_FACTS = ("architecture", "dimensions", "max_tokens", "pooling", "normalized", "prompt")


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What tells one model from another. Its fields are in the journal."""

    name: str
    dim: int
    facts: dict[str, Any]
    """From /info, what cannot differ between runs; empty if the server does not say."""
    probe: list[float]
    """The vector of `PROBE`."""

    def why_other(self, journaled: Mapping[str, Any]) -> str:
        """How it differs from the model in a journal; "" when it does not. Names may differ: a folder may have been
        renamed."""
        if self.dim != journaled["dim"]:
            return f"{self.dim} dimensions, not {journaled['dim']}"
        for name, value in self.facts.items():
            if name in journaled["facts"] and journaled["facts"][name] != value:
                return f"{name} {value!r}, not {journaled['facts'][name]!r}"
        return "" if self.has_probe(journaled["probe"]) else "other vectors for the same text"

    def has_probe(self, probe: Sequence[float] | NDArray[Any]) -> bool:
        """Whether `probe` is this model's vector of `PROBE`."""
        if len(probe) != self.dim:
            return False
        a, b = np.asarray(self.probe, np.float64), np.asarray(probe, np.float64)
        lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
        return bool(np.array_equal(a, b)) or (lengths > 0 and float(a @ b) / lengths >= _MIN_COSINE)


@dataclass(slots=True)
class Vectors:
    """The vectors of the rows of one request."""

    matrix: NDArray[Any]
    """[rows, dimensions]; NaN in rows without a vector."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why a row has no vector, by its index."""
    num_tokens: int = 0
    is_verified: bool = True
    """Whether the probe has gone along with all texts."""


class EmbeddingService:
    """One server. `connect` first."""

    def __init__(
        self, target: Target, options: EmbedOptions, why_gone: Callable[[], str | None] = lambda: None
    ) -> None:
        """`why_gone` returns why the server will not come back, or None."""
        self._trouble = ""
        """Why the last request was not served, or ""."""
        self.estimate = ThroughputEstimate(options.concurrency)
        self.target = target
        self._options = options
        self._why_gone = why_gone
        self._idle: list[ClientConnection] = []
        self._served_at = self._silent_since = time.monotonic()
        """When vectors came, and when any response came, or the first of the requests under way was sent."""
        self._response_due_s = _FIRST_RESPONSE_S
        self._num_exchanges = 0
        self._item = np.dtype(options.dtype).newbyteorder("<")
        self._model: ModelFingerprint
        self._num_probe_tokens = 0

    @property
    def trouble(self) -> str:
        """Why requests wait at the moment, or ""."""
        silent_s = time.monotonic() - self._silent_since
        if not self._trouble and self._num_exchanges and silent_s > self._response_due_s:
            return f"no response for {silent_s:.0f} s"
        return self._trouble

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    # --- the model ----------------------------------------------------------------------------------------

    async def connect(self) -> tuple[ModelFingerprint, int | None, int | None]:
        """Find out which model the server has, and the most texts and bytes of a request; None if it does not say.

        Raises RunEnded.
        """
        response = await self._embed_probe()
        info = await self._info()
        model, limits = info.get("model") or {}, info.get("limits") or {}
        facts = {name: model[name] for name in _FACTS if name in model}
        facts.setdefault("max_tokens", info.get("max_input_length"))
        if facts["max_tokens"] and self._options.overflow != "chunk":
            self.estimate.set_max_tokens(facts["max_tokens"])
        probe = np.frombuffer(response.body, self._item)
        self._model = ModelFingerprint(response.model or "", len(probe), facts, [float(value) for value in probe])
        self._num_probe_tokens = response.num_tokens or 0
        return self._model, info.get("max_client_batch_size"), limits.get("max_body_bytes")

    async def check_same_model(self) -> None:
        """Raises ModelChanged when the server's vectors are not those of the model at `connect`; RunEnded."""
        self._check_probe(np.frombuffer((await self._embed_probe()).body, self._item))

    def _check_probe(self, probe: NDArray[Any]) -> None:
        if not self._model.has_probe(probe):
            raise ModelChanged("the server has another model than this run began with: its vectors are not used")

    async def _embed_probe(self) -> ServerResponse:
        response = await self._until_served([PROBE], is_probe=True)
        if isinstance(response, str):
            raise RunEnded(f"{self.target} refuses: {response}")
        return response

    async def _info(self) -> dict[str, Any]:
        try:
            response = await self._exchange(self._render("/info"))
            info = orjson.loads(response.body) if response.status == 200 else {}
        except (OSError, BadResponse, ValueError):
            return {}
        return info if isinstance(info, dict) else {}

    # --- texts --------------------------------------------------------------------------------------------

    async def embed(self, rows: Sequence[InputRow]) -> Vectors:
        """The vectors of `rows`. Raises ModelChanged when they are of another model than at `connect`; RunEnded."""
        vectors = Vectors(
            np.full((len(rows), self._model.dim), np.nan, self._item),
            {index: row.reason for index, row in enumerate(rows) if row.text is None},
        )
        texts = {index: row.text for index, row in enumerate(rows) if row.text is not None}
        if not texts:
            return vectors
        await self._fill(vectors, list(texts), list(texts.values()))
        return vectors

    async def _fill(self, vectors: Vectors, indices: list[int], texts: list[str]) -> None:
        """Request the vectors of `texts`, which are those of the rows `indices`."""
        # Not along with one text: a server may take no more, or refuse it only because of the probe's tokens.
        has_probe, dim = len(texts) > 1, self._model.dim
        response = await self._until_served([*texts, PROBE] if has_probe else texts)
        if not isinstance(response, str):
            if response.num_dimensions != dim:
                raise RunEnded(
                    "the server has another model than this run began with: its vectors have "
                    f"{response.num_dimensions} dimensions, not {dim}"
                )
            matrix = np.frombuffer(response.body, self._item).reshape(-1, dim)
            if has_probe:
                self._check_probe(matrix[-1])
            vectors.is_verified &= has_probe
            vectors.matrix[indices] = matrix[: len(texts)]
            vectors.num_tokens += (response.num_tokens or 0) - has_probe * self._num_probe_tokens
        elif len(texts) == 1:
            vectors.reasons[indices[0]] = response
        else:
            middle = len(texts) // 2
            await self._fill(vectors, indices[:middle], texts[:middle])
            await self._fill(vectors, indices[middle:], texts[middle:])

    def _render_texts(self, texts: Sequence[str], priority: str) -> bytes:
        body = {
            **self._options.request_fields(),
            "input": texts, "encoding_format": "bytes", "output_dtype": self._options.dtype,
        }  # fmt: skip
        return self._render("/v1/embeddings", orjson.dumps(body), {"x-vecd-priority": priority})

    def _render(self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> bytes:
        key = self._options.api_key
        return render_request(self.target, path, body, api_key=key, user_agent="vecd-embed", headers=headers)

    def _why_bad(self, response: ServerResponse, num_texts: int) -> str | None:
        """What is wrong with a response to a request for vectors, or None."""
        if response.status != 200:
            return _message(response)
        if response.num_dimensions is None:
            return "no response of vecd's: has it the header x-vecd-dimensions?"
        if len(response.body) != num_texts * response.num_dimensions * self._item.itemsize:
            return f"{len(response.body)} bytes for {num_texts} vectors of {response.num_dimensions} dimensions"
        if not np.isfinite(np.frombuffer(response.body, self._item)).all():
            return "vectors that are not finite"
        return None

    # --- requests -----------------------------------------------------------------------------------------

    async def _until_served(self, texts: Sequence[str], *, is_probe: bool = False) -> ServerResponse | str:
        """Repeat the request until there are vectors, or the texts are found to be at fault: then, what is wrong.

        `is_probe`: the text was chosen by this module, so failures are never its fault. Raises RunEnded.
        """
        request = self._render_texts(texts, _PROBE_PRIORITY if is_probe else self._options.priority)
        cost = sum(map(self.estimate.cost, texts))
        began_at, pause_s, num_failures = time.monotonic(), _FIRST_PAUSE_S, 0
        while True:
            retry_after_s = None
            try:
                response = await self._measured_exchange(request, 0.0 if is_probe else cost)
                why = self._why_bad(response, len(texts))
                if why is None or response.status in _REFUSED:
                    self._trouble = ""
                    self._response_due_s = _RESPONSE_S
                    self._served_at = time.monotonic()
                    return response if why is None else why
                if response.status not in _BUSY and response.status != 200 and response.status < 500:
                    raise RunEnded(f"{self.target} answers {response.status}: {why}")
                num_failures += response.status not in _BUSY
                why = why if response.status == 200 else f"status {response.status}: {why}"
                retry_after_s = response.retry_after_s
            except TlsMismatch as error:
                raise RunEnded(f"{self.target}: {error}") from error
            except (OSError, BadResponse) as error:
                why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                num_failures += isinstance(error, TimeoutError | BadResponse)
            is_own_fault = num_failures >= _MAX_FAILURES and not is_probe
            if is_own_fault and (len(texts) > 1 or await self._serves_probe()):
                return why
            self._trouble = why
            await self._pause(began_at, pause_s, retry_after_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _serves_probe(self) -> bool:
        try:
            return self._why_bad(await self._exchange(self._render_texts([PROBE], _PROBE_PRIORITY)), 1) is None
        except (OSError, BadResponse):
            return False

    async def _pause(self, began_at: float, pause_s: float, retry_after_s: float | None) -> None:
        """Wait before the next try. Raises RunEnded when no request has been served for too long."""
        if (gone := self._why_gone()) is not None:
            raise RunEnded(gone)
        retry_for_s = self._options.retry_for
        silent_s = time.monotonic() - max(self._served_at, began_at)
        if silent_s >= retry_for_s:
            raise RunEnded(f"{self.target} has served nothing for {silent_s:.0f} s: {self._trouble}")
        # Spread, so that requests that failed together do not come back together.
        pause_s *= random.uniform(0.75, 1.25)
        if retry_after_s is not None:
            pause_s = min(max(retry_after_s, pause_s), _MAX_RETRY_AFTER_S)
        await asyncio.sleep(min(pause_s, retry_for_s - silent_s))

    async def _measured_exchange(self, request: bytes, cost: float) -> ServerResponse:
        """As `_exchange`, of texts of this cost. Side effects: the time of vectors goes into the estimate."""
        began_at, took_s, work = time.monotonic(), None, self.estimate.begin(cost)
        try:
            is_first = self._response_due_s == _FIRST_RESPONSE_S
            response = await (self._first_exchange if is_first else self._exchange)(request)
            if response.status == 200 and cost:
                took_s = time.monotonic() - began_at
            return response
        finally:
            self.estimate.end(cost, work, took_s)

    async def _first_exchange(self, request: bytes) -> ServerResponse:
        """As `_exchange`. Raises TlsMismatch if that fails because the server speaks TLS and the target does not."""
        try:
            response = await self._exchange(request)
        except ConnectionRefusedError:
            raise
        except (OSError, BadResponse):
            await check_not_tls(self.target)
            raise
        if response.status == 400:
            await check_not_tls(self.target)
        return response

    async def _exchange(self, request: bytes) -> ServerResponse:
        """Send once, on an idle connection that is still open or on a new one."""
        if not self._num_exchanges:
            self._silent_since = time.monotonic()
        self._num_exchanges += 1
        try:
            connection = await self._take_connection()
            try:
                response = await connection.exchange(request, self._options.timeout)
            except BaseException:
                connection.close()
                raise
        finally:
            self._num_exchanges -= 1
        self._silent_since = time.monotonic()
        if connection.is_open:
            self._idle.append(connection)
        return response

    async def _take_connection(self) -> ClientConnection:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        try:
            return await connect(self.target, _CONNECT_TIMEOUT_S)
        except TimeoutError as error:  # a TimeoutError would mean that a request got no response
            raise ConnectionError(f"no connection in {_CONNECT_TIMEOUT_S:g} s") from error


def _message(response: ServerResponse) -> str:
    """The message of an error, as one short line."""
    try:
        message = orjson.loads(response.body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"status {response.status}"
    return " ".join(str(message).split())[:500]
