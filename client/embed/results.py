"""What a run writes for each row: by --results, the request for it and the columns of its result.

Owns the fields of requests and the names and types of columns. Sends nothing: a request is a call of the client
(`vecd.client.exchanges.Steps`), which reads the response.

    --results       route            columns
    dense           /v1/embeddings   embedding
    sparse          /v1/embeddings   indices, values
    multi-vector    /v1/embeddings   embeddings
    scores          /score           score
    labels          /predict         label, score, and scores with --all-scores; entities of a model for tokens

Dense vectors alone come as bytes; of several kinds, which come in one response, those of tokens come as base64.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vecd.base.files import JsonObject
from vecd.client import calls
from vecd.client.embed.options import EmbedOptions
from vecd.client.exchanges import ClientBase, Steps

Item: TypeAlias = tuple[str, ...]
"""The texts of a row: one, or the two of a pair."""
Record: TypeAlias = JsonObject
"""The columns of a row."""
Found: TypeAlias = Sequence[Record] | NDArray[Any]
"""The results of the items of a request: records, or the rows of a matrix."""

PROBE = "probe"
_EMBEDDINGS = "/v1/embeddings"
_ROUTES = {
    "dense": _EMBEDDINGS, "sparse": _EMBEDDINGS, "multi-vector": _EMBEDDINGS, "scores": "/score", "labels": "/predict"
}  # fmt: skip
_CAPABILITIES = {
    "dense": "dense",
    "rerank": "scores",
    "classify": "labels",
    "token-classify": "labels",
    "sparse": "sparse",
    "multi-vector": "multi-vector",
}
"""By capability in /info, the results that it is for. The first one of a model is its main one."""
_TYPES = {"label": "text", "score": "number", "scores": "labels"}
"""By column, its type in `vecd.client.embed.parquet`, where it is not the column's name."""
_OVERFLOW_OF_TEI: dict[str | None, JsonObject] = {
    None: {},
    "error": {"truncate": False},
    "truncate": {"truncate": True, "truncation_direction": "right"},
    "truncate_left": {"truncate": True, "truncation_direction": "left"},
}
"""By --overflow, the fields of text-embeddings-inference's routes."""
_OF_ENTITY = ("label", "start", "end", "score")


class ResultKind:
    def __init__(self, options: EmbedOptions, capabilities: Sequence[str] = ()) -> None:
        """The results of --results, or what the model is for. `capabilities`: of /info; empty if the server does not
        say. Raises ValueError when the model has no such results, or they do not go with other flags."""
        own = list(dict.fromkeys(_CAPABILITIES[each] for each in capabilities if each in _CAPABILITIES))
        self.names = options.results or tuple(own[:1]) or ("dense",)
        for name in self.names:
            # The vectors of tokens can be compared, too.
            if capabilities and name not in own and not (name == "scores" and "multi-vector" in own):
                served = ", ".join(f"{each} ({_ROUTES[each]})" for each in own)
                raise ValueError(
                    f"--results: the model makes no {name}; it makes: {served or 'nothing that is written'}"
                )
        self._are_entities = "token-classify" in capabilities
        options.check_results(self.names, is_of_tokens=self._are_entities)
        self._options = options
        self.sample: Item = (PROBE,) if options.pair_with is None else (PROBE, "snow")
        """Its results say what `learn` has to know."""
        self.item = np.dtype(options.dtype).newbyteorder("<")
        """Of vectors."""
        self.dim = 0
        """Of the rows of a matrix."""
        self.columns: dict[str, str] = {}
        """By name, the type, as in `vecd.client.embed.parquet`; empty for rows of a matrix."""

    def learn(self, results: Found) -> None:
        """See the results of `sample`. Side effects: changes `dim` or `columns`."""
        if isinstance(results, np.ndarray):
            self.dim = results.shape[1]
            return
        for name, value in results[0].items():
            is_matrix = name == "embeddings"
            is_vector = is_matrix or name == "embedding"
            self.columns[name] = f"vector{'s' * is_matrix} {value.shape[-1]}" if is_vector else _TYPES.get(name, name)

    def blank(self, num_rows: int) -> NDArray[Any]:
        """The results of rows that have none: NaN or None."""
        return np.full(num_rows, None) if self.columns else np.full((num_rows, self.dim), np.nan, self.item)

    def steps(self, client: ClientBase, items: Sequence[Item]) -> Steps[Found]:
        """The call for the results of `items`, in their order. Raises VecdError, and ValueError, LookupError,
        TypeError or AttributeError for a response of another form."""
        found = yield from self._steps(client, items)
        if len(found) != len(items):
            raise ValueError(f"{len(found)} results for {len(items)} rows")
        if isinstance(found, np.ndarray) and found.shape[1] != (self.dim or found.shape[1]):
            raise ValueError(f"vectors of {found.shape[1]} dimensions, not {self.dim}")
        return found

    def _steps(self, client: ClientBase, items: Sequence[Item]) -> Steps[Found]:
        options = self._options
        fields: JsonObject = options.request_fields()
        texts = [item[0] for item in items]
        if self.names == ("dense",):
            return _finite((yield from calls.embed(client, texts, dtype=options.dtype, **fields)))
        raw = {"raw_scores": options.raw_scores or None}
        if self.names == ("scores",):
            scores = yield from calls.score_pairs(client, [list(item) for item in items], fields | raw)
            return [{"score": score} for score in scores]
        if self.names == ("labels",):
            fields = _OVERFLOW_OF_TEI[options.overflow] | raw
            if self._are_entities:
                answers = yield from calls.answers(client, "/predict", fields, "inputs", texts)
                return [{"entities": _entities(answer)} for answer in answers]
            fields["top_k"] = None if options.all_scores else 1
            return [
                self._labels(found) for found in (yield from calls.answers(client, "/predict", fields, "inputs", items))
            ]
        fields |= {"output": self.names, "encoding_format": "float"}
        if self.names != ("sparse",):
            fields["output_dtype"] = options.dtype
            if self.columns:  # the base64 of a matrix does not say how many columns it has
                fields["encoding_format"] = "base64"
        answers = yield from calls.answers(client, _EMBEDDINGS, fields, "input", texts, "data")
        return [self._vectors(item) for item in answers]

    def _labels(self, answer: Any) -> Record:
        labels: list[Record] = [label._asdict() for label in calls.labels_of(answer)]
        return {**labels[0], "scores": labels} if self._options.all_scores else labels[0]

    def _vectors(self, answer: Any) -> Record:
        record: Record = {}
        if "dense" in self.names:
            record["embedding"] = self._matrix(answer, "embedding").reshape(-1)
        if "sparse" in self.names:
            record |= calls.sparse_of(answer)._asdict()
        if "multi-vector" in self.names:
            record["embeddings"] = self._matrix(answer, "embeddings")
        return record

    def _matrix(self, answer: Any, name: str) -> NDArray[Any]:
        width = self.columns.get(name, "").rpartition(" ")[2]
        return _finite(calls.matrix_of(answer[name], self.item, int(width) if width else None))


def _entities(answer: Any) -> list[Record]:
    return [{name: getattr(part, name) for name in _OF_ENTITY} for part in calls.entities_of(answer)]


def _finite(numbers: NDArray[Any]) -> NDArray[Any]:
    if not np.isfinite(numbers).all():
        raise ValueError("vectors that are not finite")
    return numbers
