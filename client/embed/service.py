"""Texts → vectors or other results, by a server that may be busy, restart, or refuse one of them.

Owns the connections, the requests, the reaction to each kind of failure, the measurement of the server's throughput,
and the comparison of models. Reads and writes no file.

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
import base64
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import orjson
from numpy.typing import NDArray

from vecd.base.files import JsonMapping, JsonObject
from vecd.base.target import Target
from vecd.client.embed.options import EmbedError, EmbedOptions, ModelChanged, OtherIdentity, ServerLost
from vecd.client.embed.rows import InputRow, ThroughputEstimate
from vecd.client.http import BadResponse, ServerResponse, render_request
from vecd.client.sockets import AsyncConnection, NotConnected, TlsMismatch, connect, or_mismatch

# What a run writes for each row:
#
#     --results       route            columns
#     dense           /v1/embeddings   embedding
#     sparse          /v1/embeddings   indices, values
#     multi-vector    /v1/embeddings   embeddings
#     scores          /score           score
#     labels          /predict         label, score, and scores with --all-scores; entities of a model for tokens
#
# Dense vectors alone come as bytes; of several kinds, which come in one response, those of tokens come as base64.

Item: TypeAlias = tuple[str, ...]
"""The texts of a row: one, or the two of a pair."""
Record: TypeAlias = JsonObject
"""The columns of a row."""
Found: TypeAlias = Sequence[Any] | NDArray[Any]
"""The results of the items of a request: rows of a matrix, or Records."""

PROBE = "probe"
"""Its results tell one model from another. It goes along with the texts of each request: a request for it alone, twice
a second, has the server keep all batches short (184 instead of 105 batches for 24,000 tokens)."""
_SENTENCE = "Ada sent a probe"
_PAIRS = (("probe", "snow"), ("depth", "a probe"), ("snow", "depth"))
"""One score is not much to tell models by, and good ones agree on what is clear. They are short: the server computes
them with each request."""
_CAPABILITIES = {
    "dense": "dense",
    "rerank": "scores",
    "classify": "labels",
    "token-classify": "labels",
    "sparse": "sparse",
    "multi-vector": "multi-vector",
}
"""By capability in /info, the results that it is for. The first one of a model is its main one."""
_NUM_BUCKETS = 256


class Served(NamedTuple):
    model: str | None
    identity: str | None
    results: Found
    num_tokens: int


class ResultKind:
    """What a run writes for each row. `columns` are complete when `learn` has had the results of the probes."""

    path = "/v1/embeddings"
    probes: tuple[Item, ...] = ((_SENTENCE,),)
    are_scores = False
    """Whether the numbers of a probe are scores, which are compared one by one, or those of a vector."""

    def __init__(self, options: EmbedOptions) -> None:
        self.columns: dict[str, str] = {}
        """By name, the type, as in `vecd.client.embed.parquet`; empty for rows of a matrix."""
        self.item = np.dtype(options.dtype).newbyteorder("<")
        """Of vectors."""
        self._options = options
        self._raw = {"raw_scores": True} if options.raw_scores else {}

    def body(self, items: Sequence[Item]) -> JsonObject:
        """Of the request for the results of `items`."""
        raise NotImplementedError

    def read(self, response: ServerResponse, num: int) -> Served:
        """The results of `num` items, by a response with status 200: a list, or an object's `data`.

        Raises ValueError with what is wrong, or LookupError, TypeError or AttributeError for items of another form.
        """
        try:
            body = orjson.loads(response.body)
        except ValueError as error:
            raise ValueError(f"no JSON: {error}") from error
        fields = body if isinstance(body, dict) else {"data": body}
        items = fields.get("data")
        if not isinstance(items, list) or len(items) != num:
            raise ValueError(f"{len(items) if isinstance(items, list) else 'no'} results for {num} rows")
        num_tokens = response.num_tokens or int((fields.get("usage") or {}).get("prompt_tokens") or 0)
        return Served(response.model, response.identity, [self._record(item) for item in items], num_tokens)

    def _record(self, item: Any) -> Record:
        raise NotImplementedError

    def probe_of(self, results: Found) -> list[float]:
        """The numbers by which the results of `probes` are compared. Their number does not depend on the results."""
        raise NotImplementedError

    def learn(self, results: Found) -> None:
        """See the first results of `probes`. Side effects: changes `columns`."""


class DenseVectors(ResultKind):
    probes = ((PROBE,),)

    def body(self, items: Sequence[Item]) -> JsonObject:
        return {
            **self._options.request_fields(),
            "input": [text for (text,) in items], "encoding_format": "bytes", "output_dtype": self._options.dtype,
        }  # fmt: skip

    def read(self, response: ServerResponse, num: int) -> Served:
        dim = response.num_dimensions
        if dim is None:
            raise ValueError("no response of vecd's: has it the header x-vecd-dimensions?")
        if len(response.body) != num * dim * self.item.itemsize:
            raise ValueError(f"{len(response.body)} bytes for {num} vectors of {dim} dimensions")
        matrix = _finite(np.frombuffer(response.body, self.item)).reshape(-1, dim)
        return Served(response.model, response.identity, matrix, response.num_tokens or 0)

    def probe_of(self, results: Found) -> list[float]:
        vector: list[float] = results[0].tolist()
        return vector


class SparseAndTokenVectors(ResultKind):
    """Sparse vectors, a vector for each token, or several kinds of vectors, of which one may be dense."""

    def __init__(self, options: EmbedOptions, kinds: Sequence[str]) -> None:
        super().__init__(options)
        self._kinds = kinds

    def body(self, items: Sequence[Item]) -> JsonObject:
        is_sparse = self._kinds == ("sparse",)
        # The base64 of a matrix does not say how many columns it has.
        encoding_format = "float" if is_sparse or not self.columns else "base64"
        return {
            **self._options.request_fields(),
            "input": [text for (text,) in items], "output": self._kinds, "encoding_format": encoding_format,
            **({} if is_sparse else {"output_dtype": self._options.dtype}),
        }  # fmt: skip

    def _record(self, item: Any) -> Record:
        record: Record = {}
        for kind in self._kinds:
            if kind == "sparse":
                record |= {name: item["sparse"][name] for name in ("indices", "values")}
            elif kind == "dense":
                record["embedding"] = self._numbers(item["embedding"])
            else:
                rows = self._numbers(item["embeddings"])
                if rows.ndim == 1:
                    width = self.columns.get("embeddings", "vectors 1").split()[1]
                    rows = rows.reshape(-1, int(width))
                record["embeddings"] = rows
        return record

    def _numbers(self, value: Any) -> NDArray[Any]:
        if isinstance(value, str):
            return _finite(np.frombuffer(base64.b64decode(value), self.item))
        return _finite(np.array(value, self.item))

    def learn(self, results: Found) -> None:
        [record] = results
        for name, value in record.items():
            is_matrix = name == "embeddings"
            width = f"vector{'s' * is_matrix} {value.shape[-1]}" if name.startswith("embedding") else name
            self.columns[name] = width

    def probe_of(self, results: Found) -> list[float]:
        """The kinds one behind the other, each of length 1."""
        [record] = results
        parts = []
        if "embedding" in record:
            parts.append(record["embedding"])
        if "indices" in record:
            buckets = np.array(record["indices"], np.int64) % _NUM_BUCKETS
            parts.append(np.bincount(buckets, record["values"], _NUM_BUCKETS))
        if "embeddings" in record:
            parts.append(record["embeddings"].sum(axis=0, dtype=np.float64))
        lengths = [max(float(np.linalg.norm(part)), 1e-9) for part in parts]
        return [float(value) / length for part, length in zip(parts, lengths, strict=True) for value in part]


class PairScores(ResultKind):
    path = "/score"
    probes = _PAIRS
    are_scores = True

    def __init__(self, options: EmbedOptions) -> None:
        super().__init__(options)
        self.columns = {"score": "number"}

    def body(self, items: Sequence[Item]) -> JsonObject:
        queries, documents = zip(*items, strict=True)
        return {**self._options.request_fields(), **self._raw, "queries": queries, "documents": documents}

    def _record(self, item: Any) -> Record:
        return {"score": float(item["score"])}

    def probe_of(self, results: Found) -> list[float]:
        return [record["score"] for record in results]


_OVERFLOW_OF_TEI: dict[str | None, JsonObject] = {
    None: {},
    "error": {"truncate": False},
    "truncate": {"truncate": True, "truncation_direction": "right"},
    "truncate_left": {"truncate": True, "truncation_direction": "left"},
}
"""By --overflow, the fields of text-embeddings-inference's routes."""


class TextLabels(ResultKind):
    """The best label of each text or pair, and with --all-scores all of them, the best first."""

    path = "/predict"
    are_scores = True

    def __init__(self, options: EmbedOptions) -> None:
        super().__init__(options)
        self.columns = {"label": "text", "score": "number"}
        if options.all_scores:
            self.columns["scores"] = "labels"
        if options.pair_with is not None:
            self.probes = _PAIRS

    def body(self, items: Sequence[Item]) -> JsonObject:
        best = {} if self._options.all_scores else {"top_k": 1}
        return {**_OVERFLOW_OF_TEI[self._options.overflow], **self._raw, **best, "inputs": items}

    def _record(self, item: Any) -> Record:
        labels = [{"label": str(each["label"]), "score": float(each["score"])} for each in item]
        return {**labels[0], "scores": labels} if self._options.all_scores else labels[0]

    def probe_of(self, results: Found) -> list[float]:
        """The score of the best label, in the label's own place."""
        numbers = np.zeros((len(results), 16))
        for row, record in zip(numbers, results, strict=True):
            row[crc32(record["label"].encode()) % row.size] = record["score"]
        return numbers.ravel().tolist()


class TokenLabels(ResultKind):
    path = "/predict"

    def __init__(self, options: EmbedOptions) -> None:
        super().__init__(options)
        self.columns = {"entities": "entities"}

    def body(self, items: Sequence[Item]) -> JsonObject:
        return {**_OVERFLOW_OF_TEI[self._options.overflow], **self._raw, "inputs": [text for (text,) in items]}

    def _record(self, item: Any) -> Record:
        parts = [
            {
                "label": str(each["entity_group"]), "start": int(each["start"]), "end": int(each["end"]),
                "score": float(each["score"]),
            }
            for each in item
        ]  # fmt: skip
        return {"entities": parts}

    def probe_of(self, results: Found) -> list[float]:
        """The score of each entity, in the place of its beginning."""
        [record] = results
        numbers = np.zeros(len(_SENTENCE))
        for entity in record["entities"]:
            numbers[entity["start"] % numbers.size] = entity["score"]
        return numbers.tolist()


def _finite(numbers: NDArray[Any]) -> NDArray[Any]:
    if not np.isfinite(numbers).all():
        raise ValueError("vectors that are not finite")
    return numbers


# --- which one ------------------------------------------------------------------------------------------------


def choose_results(options: EmbedOptions, capabilities: Sequence[str]) -> tuple[str, ...]:
    """The names of the results: those of --results, or what the model is for. `capabilities`: of /info; empty if the
    server does not say. Raises ValueError when the model has no such results, or they do not go with other flags."""
    own = list(dict.fromkeys(_CAPABILITIES[each] for each in capabilities if each in _CAPABILITIES))
    names = options.results or tuple(own[:1]) or ("dense",)
    for name in names:
        # The vectors of tokens can be compared, too.
        if capabilities and name not in own and not (name == "scores" and "multi-vector" in own):
            served = ", ".join(f"{each} ({make_kind(options, (each,), ()).path})" for each in own)
            raise ValueError(f"--results: the model makes no {name}; it makes: {served or 'nothing that is written'}")
    options.check_results(names, is_of_tokens="token-classify" in capabilities)
    return names


def make_kind(options: EmbedOptions, names: tuple[str, ...], capabilities: Sequence[str]) -> ResultKind:
    """`names` and `capabilities`: as of `choose_results`."""
    if names == ("dense",):
        return DenseVectors(options)
    if names == ("scores",):
        return PairScores(options)
    if names == ("labels",):
        return TokenLabels(options) if "token-classify" in capabilities else TextLabels(options)
    return SparseAndTokenVectors(options, names)


# --- which model ----------------------------------------------------------------------------------------------

_CONNECT_TIMEOUT_S = 10.0
_RESPONSE_S = 10.0
"""As `Pace.first_response_s`, later."""
_IDENTITY_S = 15.0
"""The longest wait for the identity of a server that has one for its models."""
_MAX_PAUSE_S = 10.0
_MAX_RETRY_AFTER_S = 60.0
_MAX_INFO_TRIES = 16
_MAX_FAILURES = 3
_REFUSED = (400, 413, 422)
_BUSY = (408, 425, 429, 502, 503, 504)
_OTHER_IDENTITY = 412
_FIRST_NODE_PAUSE_S, _MAX_NODE_PAUSE_S = 0.02, 1.0
"""Before another node is tried. The wrong one has computed nothing."""
_PROBE_PRIORITY = "interactive"
"""One short text. Behind the run's own texts, a commit that needs it would come a second of work later."""
_MIN_COSINE = 0.998
"""vecd's promise for any number format against any other. Vectors of different models are far below."""
_MAX_LOGIT_DIFFERENCE = 0.5
"""Of one model's scores for one pair, in any number format but int8. Three of another model are rarely all so near."""
_FACTS = ("architecture", "dimensions", "max_tokens", "pooling", "normalized", "prompt")


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What tells models apart. Its fields are in the journal."""

    name: str
    dim: int
    facts: JsonObject
    """From /info, what cannot differ between runs; empty if the server does not say."""
    probe: list[float]
    are_scores: bool = False
    columns: dict[str, str] = field(default_factory=dict)
    """As in `ResultKind`."""
    identity: str | None = None
    """Of files, settings and number format, as the server says; None if it does not say."""

    def why_other(self, journaled: JsonMapping) -> str:
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
    """The logits of scores where `expected` is between 0 and 1: near these, models have nearly the same scores."""
    inner = np.clip(scores, 1e-9, 1 - 1e-9)
    return np.where((expected > 0) & (expected < 1), np.log(inner / (1 - inner)), scores)


@dataclass(slots=True)
class Results:
    rows: NDArray[Any]
    """Vectors [rows, dimensions], or the Record of each row, [rows]. NaN or None where there is none."""
    reasons: dict[int, str]
    """Why a row has none, by its index."""
    num_tokens: int = 0
    is_verified: bool = True
    """Whether the probe has gone along with all texts, or all responses were of the identity of the run."""

    @property
    def are_vectors(self) -> bool:
        return self.rows.ndim == 2

    def record(self, index: int) -> Record:
        """The columns of a row; {} for a row without results."""
        if index in self.reasons:
            return {}
        record: Record = {"embedding": self.rows[index]} if self.are_vectors else self.rows[index]
        return record


class EmbeddingService:
    """`connect` first."""

    def __init__(
        self, target: Target, options: EmbedOptions, why_gone: Callable[[], str | None] = lambda: None
    ) -> None:
        """`why_gone` returns why the server will not come back, or None."""
        self.identity: str | None = None
        """What each response has to be of. Set by `connect`, to that of the first response, unless it is set before."""
        self._other_since: float | None = None
        """When the first response of another identity came since one was right."""
        self._has_nodes = False
        """Whether a response was right after one of another identity."""
        self._trouble = ""
        self.estimate = ThroughputEstimate(options.concurrency)
        self.target = target
        self._options = options
        self._why_gone = why_gone
        self._idle: list[AsyncConnection] = []
        self._served_at = self._silent_since = time.monotonic()
        """When vectors came; when any response came, or the first of the requests under way was sent."""
        self._response_due_s = options.pace.first_response_s
        self._num_exchanges = 0
        self._model: ModelFingerprint
        self.names: tuple[str, ...] = ()
        """As --results has them."""
        self.kind: ResultKind = DenseVectors(options)
        """Its `probes` go along with the texts or pairs of each request."""
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

        Raises ServerLost, EmbedError when the model or a flag does not go with the results that are to be written.
        """
        info = await self._info()
        self._choose_kind(info)
        served = await self._serve_probes()
        if not info:  # the server was not there, and may have a model for something else
            info, tried = await self._info(), type(self.kind)
            self._choose_kind(info)
            if type(self.kind) is not tried:
                served = await self._serve_probes()
        served = self._required(served)
        # At its first start with a model, a server reads the weights for it, and answers meanwhile without one.
        ends_at = time.monotonic() + _IDENTITY_S
        while served.identity is None and "identity" in (info.get("model") or {}) and time.monotonic() < ends_at:
            await asyncio.sleep(self._options.pace.first_pause_s)
            served = self._required(await self._serve_probes())
        self.identity = self.identity or served.identity
        for _ in range(_MAX_INFO_TRIES):
            if not self._is_of_other(info):
                break
            info = await self._info()
        self.kind.learn(served.results)
        model, limits = info.get("model") or {}, info.get("limits") or {}
        facts = {name: model[name] for name in _FACTS if name in model and not self._is_of_other(info)}
        facts.setdefault("max_tokens", info.get("max_input_length"))
        if facts["max_tokens"] and self._options.overflow != "chunk":
            self.estimate.set_max_tokens(facts["max_tokens"])
        probe = self.kind.probe_of(served.results)
        self._model = ModelFingerprint(
            served.model or "", len(probe), facts, probe, self.kind.are_scores, self.kind.columns, self.identity
        )
        self._num_probe_tokens = served.num_tokens
        return self._model, info.get("max_client_batch_size"), limits.get("max_body_bytes")

    def _is_of_other(self, info: JsonMapping) -> bool:
        """Whether a proxy got this /info from a node that serves another model."""
        identity = (info.get("model") or {}).get("identity")
        return None not in (identity, self.identity) and identity != self.identity

    async def check_same_model(self) -> None:
        """Raises ModelChanged when the server's results are not those of the model at `connect`; ServerLost."""
        self._check_probe(self._required(await self._serve_probes()).results)

    async def _serve_probes(self) -> Served | str:
        return await self._until_served(self.kind.probes, is_probe=True)

    def _check_probe(self, found: Found) -> None:
        if not self._model.has_probe(self.kind.probe_of(found)):
            raise ModelChanged("the server has another model than this run began with: its results are not used")

    def _required(self, served: Served | str) -> Served:
        if isinstance(served, str):
            raise ServerLost(f"{self.target} refuses: {served}")
        return served

    def _choose_kind(self, info: JsonMapping) -> None:
        """Raises EmbedError."""
        capabilities = (info.get("model") or {}).get("capabilities") or ()
        try:
            names = choose_results(self._options, capabilities)
        except ValueError as error:
            raise EmbedError(f"{self.target}: {error}") from error
        self.names = names
        self.kind = make_kind(self._options, names, capabilities)

    async def _info(self) -> JsonObject:
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
        if isinstance(self.kind, DenseVectors):
            results = Results(np.full((len(rows), self._model.dim), np.nan, self.kind.item), reasons)
        else:
            results = Results(np.full(len(rows), None), reasons)
        items = {index: row.texts for index, row in enumerate(rows) if row.text is not None}
        if items:
            await self._fill(results, list(items), list(items.values()))
        return results

    async def _fill(self, results: Results, indices: list[int], items: list[Item]) -> None:
        """`items` are the texts of the rows `indices`."""
        # Not along with one text: a server may take no more, or refuse it only because of the probe's tokens.
        has_probe, dim = len(items) > 1, self._model.dim
        served = await self._until_served([*items, *self.kind.probes] if has_probe else items)
        if not isinstance(served, str):
            if isinstance(served.results, np.ndarray) and served.results.shape[1] != dim:
                raise ServerLost(
                    "the server has another model than this run began with: its vectors have "
                    f"{served.results.shape[1]} dimensions, not {dim}"
                )
            if has_probe:
                self._check_probe(served.results[len(items) :])
            results.is_verified &= has_probe or self.identity is not None
            results.rows[indices] = served.results[: len(items)]
            results.num_tokens += served.num_tokens - has_probe * self._num_probe_tokens
        elif len(items) == 1:
            results.reasons[indices[0]] = served
        else:
            middle = len(items) // 2
            await self._fill(results, indices[:middle], items[:middle])
            await self._fill(results, indices[middle:], items[middle:])

    def _render_items(self, items: Sequence[Item], priority: str) -> bytes:
        return self._render(self.kind.path, orjson.dumps(self.kind.body(items)), {"x-vecd-priority": priority})

    def _render(self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> bytes:
        key = self._options.api_key
        if body is not None and self.identity is not None:
            headers = {**(headers or {}), "if-vecd-identity": self.identity}
        return render_request(self.target, path, body, api_key=key, user_agent="vecd-embed", headers=headers)

    def _read(self, response: ServerResponse, num_items: int) -> Served | str:
        if response.status != 200:
            return _message(response)
        try:
            return self.kind.read(response, num_items)
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
        began_at, pause_s, num_failures = time.monotonic(), self._options.pace.first_pause_s, 0
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
                num_failures += isinstance(error, TimeoutError | BadResponse) and not isinstance(error, NotConnected)
            is_own_fault = num_failures >= _MAX_FAILURES and not is_probe
            if is_own_fault and (len(items) > 1 or await self._serves_probe()):
                return why
            self._trouble = why
            await self._pause(began_at, pause_s, retry_after_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _is_other(self, response: ServerResponse) -> bool:
        if self.identity is None:
            return False
        return response.status == _OTHER_IDENTITY or (response.status == 200 and response.identity != self.identity)

    def _note_other(self, response: ServerResponse) -> str:
        """Why it is of no use. Raises OtherIdentity when there seems to be no other node."""
        why = f"its identity is {response.identity or 'not known'}, and this run began with {self.identity}"
        now = time.monotonic()
        self._other_since = self._other_since or now
        if not self._has_nodes and now - self._other_since >= min(
            self._options.pace.only_node_s, self._options.retry_for
        ):
            raise OtherIdentity(f"{self.target} has another model: {why}")
        return why

    def _note_right(self, sent_at: float) -> None:
        if self._other_since is not None and sent_at > self._other_since:
            self._has_nodes, self._other_since = True, None

    async def _serves_probe(self) -> bool:
        probes = self.kind.probes
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
        began_at, took_s, work = time.monotonic(), None, self.estimate.begin(cost)
        try:
            is_first = self._response_due_s == self._options.pace.first_response_s
            exchange = self._exchange(request)
            response = await (or_mismatch(self.target, exchange) if is_first else exchange)
            if response.status == 200 and cost:
                took_s = time.monotonic() - began_at
            return response
        finally:
            self.estimate.end(cost, work, took_s)

    async def _exchange(self, request: bytes) -> ServerResponse:
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

    async def _take_connection(self) -> AsyncConnection:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        return await connect(self.target, _CONNECT_TIMEOUT_S)


def _message(response: ServerResponse) -> str:
    try:
        error = orjson.loads(response.body)["error"]
        message = error if isinstance(error, str) else error["message"]
    except (ValueError, LookupError, TypeError):
        message = f"status {response.status}"
    return " ".join(str(message).split())[:500]
