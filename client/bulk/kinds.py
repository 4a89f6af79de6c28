"""What a run writes for each row: the route that computes it, its request, and the columns that a response becomes.

Owns which results a model has, by its capabilities, and what of a response tells one model from another. Sends nothing.
Called by `vecd.client.bulk.service`.

    --results       route            columns
    dense           /v1/embeddings   embedding
    sparse          /v1/embeddings   indices, values
    multi-vector    /v1/embeddings   embeddings
    scores          /score           score
    labels          /predict         label, score, and scores with --all-scores; entities of a model for tokens

Dense vectors alone come as bytes. Several kinds of vectors come in one response, those of tokens as base64. The other
routes have JSON alone.
"""

import base64
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import orjson
from numpy.typing import NDArray

from vecd.client.bulk.options import EmbedOptions
from vecd.client.connection import ServerResponse

Item: TypeAlias = tuple[str, ...]
"""The texts of a row: one, or the two of a pair."""
Record: TypeAlias = dict[str, Any]
"""The columns of a row."""
Found: TypeAlias = Sequence[Any] | NDArray[Any]
"""The results of the items of a request: rows of a matrix, or Records."""

PROBE = "probe"
"""Its results tell one model from another. It goes along with the texts of each request. A request for it alone, twice
a second, has the server keep all batches short, because others like it may come: 184 instead of 105 batches for 24,000
tokens."""
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
_NEEDS = {
    "dense": ("dense",),
    "sparse": ("sparse",),
    "multi-vector": ("multi-vector",),
    "scores": ("rerank", "multi-vector"),
    "labels": ("classify", "token-classify"),
}
"""One of these capabilities is needed."""
_NUM_BUCKETS = 256


class Reading(NamedTuple):
    """A response, read."""

    results: Found
    num_tokens: int


class ResultKind(ABC):
    """What a run writes for each row. `columns` are complete when `learn` has had the results of the probes."""

    path = "/v1/embeddings"
    probes: tuple[Item, ...] = ((_SENTENCE,),)
    are_scores = False
    """Whether the numbers of a probe are scores, which are compared one by one, or those of a vector."""

    def __init__(self, options: EmbedOptions) -> None:
        self.columns: dict[str, str] = {}
        """By name, the type, as in `vecd.client.bulk.parquet`; empty for rows of a matrix."""
        self._options = options

    @abstractmethod
    def body(self, items: Sequence[Item]) -> dict[str, Any]:
        """Of the request for the results of `items`."""

    @abstractmethod
    def read(self, response: ServerResponse, num: int) -> Reading:
        """The results of `num` items, by a response with status 200. Raises ValueError with what is wrong with it."""

    @abstractmethod
    def probe_of(self, results: Found) -> list[float]:
        """The numbers by which the results of `probes` are compared. Their number does not depend on the results."""

    def learn(self, results: Found) -> None:  # noqa: B027 (most have nothing to learn)
        """See the first results of `probes`. Side effects: changes `columns`."""


class DenseVectors(ResultKind):
    """One vector a row, and nothing else: rows of a matrix."""

    probes = ((PROBE,),)

    def __init__(self, options: EmbedOptions) -> None:
        super().__init__(options)
        self._item = np.dtype(options.dtype).newbyteorder("<")

    def body(self, items: Sequence[Item]) -> dict[str, Any]:
        return {
            **self._options.request_fields(),
            "input": [text for (text,) in items], "encoding_format": "bytes", "output_dtype": self._options.dtype,
        }  # fmt: skip

    def read(self, response: ServerResponse, num: int) -> Reading:
        dim = response.num_dimensions
        if dim is None:
            raise ValueError("no response of vecd's: has it the header x-vecd-dimensions?")
        if len(response.body) != num * dim * self._item.itemsize:
            raise ValueError(f"{len(response.body)} bytes for {num} vectors of {dim} dimensions")
        return Reading(_finite(np.frombuffer(response.body, self._item)).reshape(-1, dim), response.num_tokens or 0)

    def probe_of(self, results: Found) -> list[float]:
        return [float(value) for value in results[0]]


class SparseAndTokenVectors(ResultKind):
    """Sparse vectors, a vector for each token, or several kinds of vectors, of which one may be dense."""

    def __init__(self, options: EmbedOptions, kinds: Sequence[str]) -> None:
        super().__init__(options)
        self._kinds = kinds
        self._item = np.dtype(options.dtype).newbyteorder("<")

    def body(self, items: Sequence[Item]) -> dict[str, Any]:
        # The base64 of a matrix does not say how many columns it has.
        wants_numbers = self._kinds == ("sparse",) or not self.columns
        dtype = {} if self._kinds == ("sparse",) else {"output_dtype": self._options.dtype}
        return {
            **self._options.request_fields(),
            "input": [text for (text,) in items], "output": self._kinds,
            "encoding_format": "float" if wants_numbers else "base64", **dtype,
        }  # fmt: skip

    def read(self, response: ServerResponse, num: int) -> Reading:
        body = _object_of(response)
        return Reading([self._record(item) for item in _items_of(body, "data", num)], _num_tokens(response, body))

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
            return _finite(np.frombuffer(base64.b64decode(value), self._item))
        return _finite(np.array(value, self._item))

    def learn(self, results: Found) -> None:
        [record] = results
        for name, value in record.items():
            self.columns[name] = name if name in ("indices", "values") else _vector_type(value)

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

    def body(self, items: Sequence[Item]) -> dict[str, Any]:
        queries, documents = zip(*items, strict=True)
        raw = {"raw_scores": True} if self._options.raw_scores else {}
        return {**self._options.request_fields(), **raw, "queries": queries, "documents": documents}

    def read(self, response: ServerResponse, num: int) -> Reading:
        body = _object_of(response)
        records = [{"score": float(item["score"])} for item in _items_of(body, "data", num)]
        return Reading(records, _num_tokens(response, body))

    def probe_of(self, results: Found) -> list[float]:
        return [record["score"] for record in results]


_OVERFLOW_OF_TEI: dict[str | None, dict[str, Any]] = {
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

    def body(self, items: Sequence[Item]) -> dict[str, Any]:
        fields = {**_OVERFLOW_OF_TEI[self._options.overflow]}
        if self._options.raw_scores:
            fields["raw_scores"] = True
        if not self._options.all_scores:
            fields["top_k"] = 1
        return {**fields, "inputs": items}

    def read(self, response: ServerResponse, num: int) -> Reading:
        found = _items_of({"labels": _json_of(response)}, "labels", num)
        return Reading([self._record(labels) for labels in found], _num_tokens(response, {}))

    def _record(self, labels: Any) -> Record:
        labels = [{"label": str(each["label"]), "score": float(each["score"])} for each in labels]
        return {**labels[0], "scores": labels} if self._options.all_scores else labels[0]

    def probe_of(self, results: Found) -> list[float]:
        """The score of the best label, in a place that is the label's own."""
        numbers = np.zeros((len(results), 16))
        for row, record in zip(numbers, results, strict=True):
            row[crc32(record["label"].encode()) % row.size] = record["score"]
        return [float(number) for number in numbers.reshape(-1)]


class TokenLabels(ResultKind):
    """The labelled parts of each text."""

    path = "/predict"

    def __init__(self, options: EmbedOptions) -> None:
        super().__init__(options)
        self.columns = {"entities": "entities"}

    def body(self, items: Sequence[Item]) -> dict[str, Any]:
        raw = {"raw_scores": True} if self._options.raw_scores else {}
        return {**_OVERFLOW_OF_TEI[self._options.overflow], **raw, "inputs": [text for (text,) in items]}

    def read(self, response: ServerResponse, num: int) -> Reading:
        found = _items_of({"texts": _json_of(response)}, "texts", num)
        return Reading([{"entities": list(map(_entity, each))} for each in found], _num_tokens(response, {}))

    def probe_of(self, results: Found) -> list[float]:
        """The score of each entity, in the place of its beginning."""
        [record] = results
        numbers = np.zeros(len(_SENTENCE))
        for entity in record["entities"]:
            numbers[entity["start"] % numbers.size] = entity["score"]
        return [float(number) for number in numbers]


def _entity(found: Any) -> Record:
    return {
        "label": str(found["entity_group"]),
        "start": int(found["start"]),
        "end": int(found["end"]),
        "score": float(found["score"]),
    }


# --- which one ------------------------------------------------------------------------------------------------


def choose_results(options: EmbedOptions, capabilities: Sequence[str]) -> tuple[str, ...]:
    """The names of the results: those of --results, or what the model is for. `capabilities`: of /info; empty if the
    server does not say.

    Raises ValueError when the model has no such results, or they do not go with other flags.
    """
    own = list(dict.fromkeys(_CAPABILITIES[each] for each in capabilities if each in _CAPABILITIES))
    names = options.results or tuple(own[:1]) or ("dense",)
    for name in names:
        if capabilities and not set(_NEEDS[name]).intersection(capabilities):
            served = ", ".join(f"{each} ({_ROUTES[each]})" for each in own)
            raise ValueError(f"--results: the model makes no {name}; it makes: {served or 'nothing that is written'}")
    options.check_results(names, is_of_tokens="token-classify" in capabilities)
    return names


_ROUTES = {
    "dense": DenseVectors.path,
    "sparse": SparseAndTokenVectors.path,
    "multi-vector": SparseAndTokenVectors.path,
    "scores": PairScores.path,
    "labels": TextLabels.path,
}


def make_kind(options: EmbedOptions, names: tuple[str, ...], capabilities: Sequence[str]) -> ResultKind:
    """`names` and `capabilities`: as of `choose_results`."""
    if names == ("dense",):
        return DenseVectors(options)
    if names == ("scores",):
        return PairScores(options)
    if names == ("labels",):
        return TokenLabels(options) if "token-classify" in capabilities else TextLabels(options)
    return SparseAndTokenVectors(options, names)


# --- responses ------------------------------------------------------------------------------------------------


def _json_of(response: ServerResponse) -> Any:
    try:
        return orjson.loads(response.body)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from error


def _object_of(response: ServerResponse) -> dict[str, Any]:
    body = _json_of(response)
    if not isinstance(body, dict):
        raise ValueError("no JSON object")
    return body


def _items_of(body: dict[str, Any], name: str, num: int) -> list[Any]:
    items = body.get(name)
    if not isinstance(items, list) or len(items) != num:
        raise ValueError(f"{len(items) if isinstance(items, list) else 'no'} results for {num} rows")
    return items


def _num_tokens(response: ServerResponse, body: dict[str, Any]) -> int:
    return response.num_tokens or int((body.get("usage") or {}).get("prompt_tokens") or 0)


def _finite(numbers: NDArray[Any]) -> NDArray[Any]:
    if not np.isfinite(numbers).all():
        raise ValueError("vectors that are not finite")
    return numbers


def _vector_type(value: NDArray[Any]) -> str:
    return f"{'vector' if value.ndim == 1 else 'vectors'} {value.shape[-1]}"
