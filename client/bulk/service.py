"""Texts → vectors or other results, by a server that may be busy, restart, or refuse one of them.

Owns the connections, the requests, the reaction to each kind of failure, the measurement of the server's throughput,
and the comparison of models. Reads and writes no file. Called by `vecd.client.bulk.run`.

- Busy, restarting, out of reach (429, 503, 502, 504, 408, no connection): the request is repeated, later each time or
  when the server says, until the server has responded to no request for `--retry-for`.
- Refused because of its texts (400, 413, 422): the request is halved, down to the row that is refused.
- Failed because of its texts, perhaps (500, no response in time): repeated, then halved. A single row that fails is
  rejected only if the server embeds the probe right after it. If not, the server is ill, and the request is repeated.
- Not allowed, or not found (401, 403, 404, …): the run ends.
- Of another identity (412, or a response that says so): the request is repeated, as a proxy may pick another node. If
  all responses are such for some seconds, and none was right between them, there is no other node: the run ends.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from vecd.client.bulk.errors import EmbedError, ModelChanged, OtherIdentity, ServerLost
from vecd.client.bulk.kinds import DenseVectors, Found, Item, Record, ResultKind, choose_results, make_kind
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
_IDENTITY_S = 15.0
"""The longest wait for the identity of a server that has one for its models."""
_MAX_PAUSE_S = 10.0
_MAX_RETRY_AFTER_S = 60.0
_MAX_INFO_TRIES = 16
_MAX_FAILURES = 3
"""Failures after which the texts of a request are suspected."""
_REFUSED = (400, 413, 422)
_BUSY = (408, 425, 429, 502, 503, 504)
_OTHER_IDENTITY = 412
_FIRST_NODE_PAUSE_S, _MAX_NODE_PAUSE_S = 0.02, 1.0
"""Before another node is tried. The wrong one has computed nothing."""
_ONLY_NODE_S = 15.0
"""Of nothing but responses of another identity: there is one server, and it has another model for good."""
_PROBE_PRIORITY = "interactive"
"""One short text. Behind the run's own texts, a commit that needs it would come a second of work later."""
_MIN_COSINE = 0.998
"""vecd's promise for any number format against any other. Vectors of different models are far below."""
_MAX_LOGIT_DIFFERENCE = 0.5
"""Of one model's scores for one pair, in any number format but int8. Three of another model are rarely all so near."""
_FACTS = ("architecture", "dimensions", "max_tokens", "pooling", "normalized", "prompt")


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What tells one model from another. Its fields are in the journal."""

    name: str
    dim: int
    facts: dict[str, Any]
    """From /info, what cannot differ between runs; empty if the server does not say."""
    probe: list[float]
    """The vector of the probe, or other numbers of its results."""
    are_scores: bool = False
    """Whether the numbers of `probe` are scores, not those of a vector."""
    columns: dict[str, str] = field(default_factory=dict)
    """As in `vecd.client.bulk.kinds.ResultKind`."""
    identity: str | None = None
    """Of files, settings and number format, as the server says; None if it does not say."""

    def why_other(self, journaled: Mapping[str, Any]) -> str:
        """How it differs from the model in a journal; "" when it does not. Names may differ: a folder may have been
        renamed."""
        if (columns := journaled.get("columns", {})) != self.columns:
            return f"its results are {_described(self.columns)}, not {_described(columns)}"
        if (identity := journaled.get("identity")) not in (None, self.identity):
            return f"its identity is {self.identity or 'not known'}, not {identity}"
        if self.dim != journaled["dim"]:
            return f"{self.dim} dimensions, not {journaled['dim']}"
        for name, value in self.facts.items():
            if name in journaled["facts"] and journaled["facts"][name] != value:
                return f"{name} {value!r}, not {journaled['facts'][name]!r}"
        return "" if self.has_probe(journaled["probe"]) else "other vectors for the same text"

    def has_probe(self, probe: Sequence[float] | NDArray[Any]) -> bool:
        """Whether the numbers of `probe` are this model's."""
        if len(probe) != self.dim:
            return False
        a, b = np.asarray(self.probe, np.float64), np.asarray(probe, np.float64)
        if self.are_scores:
            return bool((np.abs(_spread(a, a) - _spread(b, a)) <= _MAX_LOGIT_DIFFERENCE + 0.02 * np.abs(a)).all())
        lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
        return bool(np.array_equal(a, b)) or (lengths > 0 and float(a @ b) / lengths >= _MIN_COSINE)


def _described(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in columns.items()) or "dense vectors"


def _spread(scores: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logits of scores where those that are expected are between 0 and 1: near these, different models have nearly
    the same scores."""
    inner = np.clip(scores, 1e-9, 1 - 1e-9)
    return np.where((expected > 0) & (expected < 1), np.log(inner / (1 - inner)), scores)


@dataclass(slots=True)
class Results:
    """The results of the rows of one request."""

    reasons: dict[int, str] = field(default_factory=dict, kw_only=True)
    """Why a row has none, by its index."""
    num_tokens: int = field(default=0, kw_only=True)
    is_verified: bool = field(default=True, kw_only=True)
    """Whether the probe has gone along with all texts, or all responses were of the identity of the run."""

    def put(self, indices: Sequence[int], found: Found) -> None:
        raise NotImplementedError


@dataclass(slots=True)
class Records(Results):
    """The columns of each row."""

    records: list[Record | None]
    """None for a row without results."""

    def put(self, indices: Sequence[int], found: Found) -> None:
        for index, record in zip(indices, found, strict=True):
            self.records[index] = record


@dataclass(slots=True)
class Vectors(Results):
    """One dense vector a row."""

    matrix: NDArray[Any]
    """[rows, dimensions]; NaN in rows without a vector."""

    def put(self, indices: Sequence[int], found: Found) -> None:
        self.matrix[list(indices)] = found


class Served(NamedTuple):
    """What a request has brought."""

    model: str | None
    identity: str | None
    found: Found
    num_tokens: int


class EmbeddingService:
    """One server. `connect` first."""

    def __init__(
        self, target: Target, options: EmbedOptions, why_gone: Callable[[], str | None] = lambda: None
    ) -> None:
        """`why_gone` returns why the server will not come back, or None."""
        self.identity: str | None = None
        """What each response has to be of. Set by `connect`, to that of the first response, unless it is set before."""
        self._other_since: float | None = None
        """When the first of the responses of another identity came, since one was right."""
        self._has_nodes = False
        """Whether some responses are of another identity, and later ones are right."""
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
        self._names: tuple[str, ...] = ()
        self._kind: ResultKind = DenseVectors(options)
        self._num_probe_tokens = 0

    @property
    def what(self) -> str:
        """The results that are written, as --results names them."""
        return " and ".join(self._names)

    @property
    def num_probes(self) -> int:
        """Texts or pairs that go along with those of each request."""
        return len(self._kind.probes)

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

        Raises ServerLost, EmbedError when the model or a flag does not go with the results that are to be written.
        """
        info = await self._info()
        self._choose_kind(info)
        served = await self._until_served(self._kind.probes, is_probe=True)
        if not info:  # the server was not there, and may have a model for something else
            info, tried = await self._info(), type(self._kind)
            self._choose_kind(info)
            if type(self._kind) is not tried:
                served = await self._until_served(self._kind.probes, is_probe=True)
        served = self._required(served)
        # At its first start with a model, a server reads the weights for it, and answers meanwhile without one.
        ends_at = time.monotonic() + _IDENTITY_S
        while served.identity is None and "identity" in (info.get("model") or {}) and time.monotonic() < ends_at:
            await asyncio.sleep(_FIRST_PAUSE_S)
            served = self._required(await self._until_served(self._kind.probes, is_probe=True))
        self.identity = self.identity or served.identity
        for _ in range(_MAX_INFO_TRIES):
            if not self._is_of_other(info):
                break
            info = await self._info()
        self._kind.learn(served.found)
        model, limits = info.get("model") or {}, info.get("limits") or {}
        facts = {name: model[name] for name in _FACTS if name in model and not self._is_of_other(info)}
        facts.setdefault("max_tokens", info.get("max_input_length"))
        if facts["max_tokens"] and self._options.overflow != "chunk":
            self.estimate.set_max_tokens(facts["max_tokens"])
        probe = self._kind.probe_of(served.found)
        self._model = ModelFingerprint(
            served.model or "", len(probe), facts, probe, self._kind.are_scores, self._kind.columns, self.identity
        )
        self._num_probe_tokens = served.num_tokens
        return self._model, info.get("max_client_batch_size"), limits.get("max_body_bytes")

    def _is_of_other(self, info: Mapping[str, Any]) -> bool:
        """Whether a proxy got this /info from a node that serves another model."""
        identity = (info.get("model") or {}).get("identity")
        return None not in (identity, self.identity) and identity != self.identity

    async def check_same_model(self) -> None:
        """Raises ModelChanged when the server's results are not those of the model at `connect`; ServerLost."""
        self._check_probe(self._required(await self._until_served(self._kind.probes, is_probe=True)).found)

    def _check_probe(self, found: Found) -> None:
        if not self._model.has_probe(self._kind.probe_of(found)):
            raise ModelChanged("the server has another model than this run began with: its results are not used")

    def _required(self, served: Served | str) -> Served:
        if isinstance(served, str):
            raise ServerLost(f"{self.target} refuses: {served}")
        return served

    def _choose_kind(self, info: Mapping[str, Any]) -> None:
        """Raises EmbedError."""
        capabilities = (info.get("model") or {}).get("capabilities") or ()
        try:
            names = choose_results(self._options, capabilities)
        except ValueError as error:
            raise EmbedError(f"{self.target}: {error}") from error
        self._names = names
        self._kind = make_kind(self._options, names, capabilities)

    async def _info(self) -> dict[str, Any]:
        try:
            response = await self._exchange(self._render("/info"))
            info = orjson.loads(response.body) if response.status == 200 else {}
        except (OSError, BadResponse, ValueError):
            return {}
        return info if isinstance(info, dict) else {}

    # --- texts --------------------------------------------------------------------------------------------

    async def embed(self, rows: Sequence[InputRow]) -> Results:
        """The results of `rows`. Raises ModelChanged when they are of another model than at `connect`; ServerLost."""
        reasons = {index: row.reason for index, row in enumerate(rows) if row.text is None}
        results: Results
        if isinstance(self._kind, DenseVectors):
            results = Vectors(np.full((len(rows), self._model.dim), np.nan, self._item), reasons=reasons)
        else:
            results = Records([None] * len(rows), reasons=reasons)
        items = {index: row.texts for index, row in enumerate(rows) if row.text is not None}
        if items:
            await self._fill(results, list(items), list(items.values()))
        return results

    async def _fill(self, results: Results, indices: list[int], items: list[Item]) -> None:
        """Request the results of `items`, which are the texts of the rows `indices`."""
        # Not along with one text: a server may take no more, or refuse it only because of the probe's tokens.
        has_probe, dim = len(items) > 1, self._model.dim
        served = await self._until_served([*items, *self._kind.probes] if has_probe else items)
        if not isinstance(served, str):
            if isinstance(served.found, np.ndarray) and served.found.shape[1] != dim:
                raise ServerLost(
                    "the server has another model than this run began with: its vectors have "
                    f"{served.found.shape[1]} dimensions, not {dim}"
                )
            if has_probe:
                self._check_probe(served.found[len(items) :])
            results.is_verified &= has_probe or self.identity is not None
            results.put(indices, served.found[: len(items)])
            results.num_tokens += served.num_tokens - has_probe * self._num_probe_tokens
        elif len(items) == 1:
            results.reasons[indices[0]] = served
        else:
            middle = len(items) // 2
            await self._fill(results, indices[:middle], items[:middle])
            await self._fill(results, indices[middle:], items[middle:])

    def _render_items(self, items: Sequence[Item], priority: str) -> bytes:
        return self._render(self._kind.path, orjson.dumps(self._kind.body(items)), {"x-vecd-priority": priority})

    def _render(self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> bytes:
        key = self._options.api_key
        if body is not None and self.identity is not None:
            headers = {**(headers or {}), "if-vecd-identity": self.identity}
        return render_request(self.target, path, body, api_key=key, user_agent="vecd-embed", headers=headers)

    def _read(self, response: ServerResponse, num_items: int) -> Served | str:
        """What a response to a request for results has, or what is wrong with it."""
        if response.status != 200:
            return _message(response)
        try:
            return Served(response.model, response.identity, *self._kind.read(response, num_items))
        except ValueError as error:
            return str(error)
        except (LookupError, TypeError, AttributeError) as error:
            return f"results of another form ({type(error).__name__}: {error})"

    # --- requests -----------------------------------------------------------------------------------------

    async def _until_served(self, items: Sequence[Item], *, is_probe: bool = False) -> Served | str:
        """Repeat the request until there are results, or the texts are found to be at fault: then, what is wrong.

        `is_probe`: the texts are those of the probe, so failures are never their fault. Raises ServerLost.
        """
        request = self._render_items(items, _PROBE_PRIORITY if is_probe else self._options.priority)
        cost = sum(self.estimate.cost(text) for item in items for text in item)
        began_at, pause_s, num_failures = time.monotonic(), _FIRST_PAUSE_S, 0
        node_pause_s = _FIRST_NODE_PAUSE_S
        while True:
            retry_after_s, sent_at = None, time.monotonic()
            try:
                response = await self._measured_exchange(request, 0.0 if is_probe else cost)
                if self._is_other(response):
                    self._trouble = self._note_other(response)
                    await self._pause(began_at, node_pause_s, None)
                    node_pause_s = min(2 * node_pause_s, _MAX_NODE_PAUSE_S)
                    continue
                served = self._read(response, len(items))
                if not isinstance(served, str) or response.status in _REFUSED:
                    self._trouble = ""
                    self._response_due_s = _RESPONSE_S
                    self._served_at = time.monotonic()
                    self._note_right(sent_at)
                    return served
                why = served
                if response.status not in _BUSY and response.status != 200 and response.status < 500:
                    raise ServerLost(f"{self.target} answers {response.status}: {why}")
                num_failures += response.status not in _BUSY
                why = why if response.status == 200 else f"status {response.status}: {why}"
                retry_after_s = response.retry_after_s
            except TlsMismatch as error:
                raise ServerLost(f"{self.target}: {error}") from error
            except (OSError, BadResponse) as error:
                why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                num_failures += isinstance(error, TimeoutError | BadResponse)
            is_own_fault = num_failures >= _MAX_FAILURES and not is_probe
            if is_own_fault and (len(items) > 1 or await self._serves_probe()):
                return why
            self._trouble = why
            await self._pause(began_at, pause_s, retry_after_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _is_other(self, response: ServerResponse) -> bool:
        """Whether it is of another identity than the first one, or of none."""
        if self.identity is None:
            return False
        return response.status == _OTHER_IDENTITY or (response.status == 200 and response.identity != self.identity)

    def _note_other(self, response: ServerResponse) -> str:
        """Why it is of no use. Raises OtherIdentity when there seems to be no other node."""
        why = f"its identity is {response.identity or 'not known'}, and this run began with {self.identity}"
        now = time.monotonic()
        self._other_since = self._other_since or now
        if not self._has_nodes and now - self._other_since >= min(_ONLY_NODE_S, self._options.retry_for):
            raise OtherIdentity(f"{self.target} has another model: {why}")
        return why

    def _note_right(self, sent_at: float) -> None:
        """A request that was sent after a response of another identity has got one of the right identity."""
        if self._other_since is not None and sent_at > self._other_since:
            self._has_nodes, self._other_since = True, None

    async def _serves_probe(self) -> bool:
        probes = self._kind.probes
        try:
            response = await self._exchange(self._render_items(probes, _PROBE_PRIORITY))
            return not isinstance(self._read(response, len(probes)), str)
        except (OSError, BadResponse):
            return False

    async def _pause(self, began_at: float, pause_s: float, retry_after_s: float | None) -> None:
        """Wait before the next try. Raises ServerLost when no request has been served for too long."""
        if (gone := self._why_gone()) is not None:
            raise ServerLost(gone)
        retry_for_s = self._options.retry_for
        silent_s = time.monotonic() - max(self._served_at, began_at)
        if silent_s >= retry_for_s:
            raise ServerLost(f"{self.target} has served nothing for {silent_s:.0f} s: {self._trouble}")
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
        if response.status == _OTHER_IDENTITY:  # another connection may lead to another node
            connection.close()
        elif connection.is_open:
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
        error = orjson.loads(response.body)["error"]
        message = error if isinstance(error, str) else error["message"]
    except (ValueError, LookupError, TypeError):
        message = f"status {response.status}"
    return " ".join(str(message).split())[:500]
