"""The methods of `vecd.Client` and `vecd.AsyncClient`: which requests each makes, and what becomes of the answers.

Owns their arguments, defaults and results. Sends nothing: a call is a generator that yields requests
(`vecd.client.exchanges.Steps`), and the two clients turn it into a method and a coroutine. numpy is imported when the
first matrix is made.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from numbers import Integral
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast
from urllib.parse import quote

from vecd.client.exchanges import ClientBase, Piece, RequestLimits, ServerError, Steps, cut, write
from vecd.client.http import BadResponse, ServerResponse

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray


# What calls return beside arrays.


@dataclass(frozen=True, slots=True)
class RankedDocument:
    index: int
    """Of the document, as passed."""
    score: float


class Label(NamedTuple):
    label: str
    score: float


class Entity(NamedTuple):
    label: str
    score: float
    text: str
    start: int
    """In characters of the text."""
    end: int


class SparseVector(NamedTuple):
    indices: "NDArray[np.int32]"
    """Ids of the vocabulary, ascending: int32 [k]."""
    values: "NDArray[np.float32]"
    """Their weights: float32 [k]."""


class Token(NamedTuple):
    id: int
    text: str
    is_special: bool
    start: int | None
    """In characters of the text; None for special tokens."""
    end: int | None


Info = dict[str, Any]
"""As GET /info has it: docs/api.md."""


Texts: TypeAlias = str | Sequence[str]
Inputs: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
"""A text, texts, the token ids of a text, or those of texts."""
Pair: TypeAlias = tuple[str, str] | list[str]

_EMBEDDINGS = "/v1/embeddings"
_ITEM_OF = {
    "float32": "<f4", "float16": "<f2", "int8": "i1", "uint8": "u1", "binary": "i1", "ubinary": "u1"
}  # fmt: skip
"""By vecd's name of a type of elements, numpy's."""
_PACKED = ("binary", "ubinary")
"""Eight elements to a byte."""


# --- dense vectors --------------------------------------------------------------------------------------------


def embed(
    self: ClientBase,
    /,
    inputs: Inputs,
    *,
    input_type: str | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    dimensions: int | None = None,
    normalize: bool | None = None,
    overflow: str | None = None,
    dtype: str = "float32",
    priority: str | None = None,
) -> "Steps[NDArray[Any]]":
    """The vectors of a text, of texts, or of token ids: a matrix [n, D], in the order of `inputs`.

    `input_type`: "query" or "document"; `prompt_name` and `prompt` select another prompt of the model, or a text. None,
    everywhere, is the server's default. `dimensions`: how many of the first. `normalize`: to length 1. `overflow`: what
    happens to a text that is too long: "truncate", "truncate_left", "chunk" or "error". `dtype`: of the elements:
    "float32", "float16", "int8", "uint8", or "binary" and "ubinary", whose rows have D / 8 bytes. `priority`:
    "interactive", "normal" or "bulk".

    The matrix is the memory into which the answers were received; it cannot be written to. Raises VecdError, or
    TypeError for what is no text.
    """
    matrix = yield from _embed(
        self, _listed(inputs), dtype, input_type=input_type, prompt_name=prompt_name, prompt=prompt,
        dimensions=dimensions, normalize=normalize, overflow=overflow, priority=priority,
    )  # fmt: skip
    matrix.flags.writeable = False
    return matrix


def encode(
    self: ClientBase,
    /,
    sentences: Texts,
    prompt_name: str | None = None,
    prompt: str | None = None,
    batch_size: int = 32,
    show_progress_bar: bool | None = None,
    output_value: str | None = "sentence_embedding",
    precision: str = "float32",
    convert_to_numpy: bool = True,
    convert_to_tensor: bool = False,
    device: object = None,
    normalize_embeddings: bool = False,
    truncate_dim: int | None = None,
    pool: object = None,
    chunk_size: int | None = None,
    *,
    input_type: str | None = None,
) -> Steps[Any]:
    """The vectors of texts, with the arguments of `SentenceTransformer.encode`: [n, D], or [D] for one text.

    float32, as a numpy array of the caller's own; `convert_to_tensor` returns a tensor of torch in the same memory, and
    without `convert_to_numpy` it is a list of those. `truncate_dim` needs a Matryoshka model. `precision`: as `dtype`
    of `embed`; vecd's int8 has one scale for all calls. `input_type`: as of `embed`. `batch_size`, `device`,
    `chunk_size` and `show_progress_bar` are accepted and have no effect: the server makes the batches. Raises
    ValueError for a `pool`, or an `output_value` that is not "sentence_embedding"; VecdError.
    """
    if output_value != "sentence_embedding":
        raise ValueError(f"output_value: must be 'sentence_embedding', is {output_value!r}; see `multi_vector`")
    if pool is not None:
        raise ValueError("pool: must be None: the server has the processes")
    matrix = yield from _embed(
        self, _listed(sentences), precision, input_type=input_type, prompt_name=prompt_name, prompt=prompt,
        dimensions=truncate_dim, normalize=normalize_embeddings or None,
    )  # fmt: skip
    vectors = matrix[0] if isinstance(sentences, str) else matrix
    if convert_to_numpy and not convert_to_tensor:
        return vectors
    tensor = import_module("torch").from_numpy(vectors)  # by name: nothing else in a client needs torch
    return tensor if convert_to_tensor or isinstance(sentences, str) else list(tensor)


def encode_query(self: ClientBase, /, sentences: Texts, **arguments: Any) -> Steps[Any]:
    """As `encode`, with the model's prompt for queries, if it has one and no prompt is passed."""
    return (yield from encode(self, sentences, **_with_input_type("query", arguments)))


def encode_document(self: ClientBase, /, sentences: Texts, **arguments: Any) -> Steps[Any]:
    """As `encode`, with the model's prompt for documents, if it has one and no prompt is passed."""
    return (yield from encode(self, sentences, **_with_input_type("document", arguments)))


def _with_input_type(input_type: str, arguments: dict[str, Any]) -> dict[str, Any]:
    has_prompt = any(arguments.get(name) is not None for name in ("prompt", "prompt_name"))
    return arguments if has_prompt else {"input_type": input_type, **arguments}


def similarity(a: "NDArray[Any]", b: "NDArray[Any]") -> "NDArray[np.float32]":
    """Cosines of the vectors `a` [n, D] or [D] and `b` [m, D] or [D]: float32 [n, m]. Sends nothing."""
    import numpy as np

    def rows_of(vectors: "NDArray[Any]") -> "NDArray[np.float32]":
        rows = np.atleast_2d(np.asarray(vectors, np.float32))
        return cast("NDArray[np.float32]", rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))

    return rows_of(a) @ rows_of(b).T


def _embed(self: ClientBase, inputs: Sequence[Any], dtype: str, **fields: Any) -> "Steps[NDArray[Any]]":
    if dtype not in _ITEM_OF:
        raise ValueError(f"dtype: must be one of {', '.join(_ITEM_OF)}, is {dtype!r}")
    limits = yield from _limits(self, len(inputs))
    matrix = _Matrix(len(inputs), dtype)
    fields = {**fields, "model": self.model, "encoding_format": "bytes_only", "output_dtype": dtype}
    pieces = list(cut(_EMBEDDINGS, fields, "input", inputs, limits))
    for piece in pieces:
        piece.place = partial(matrix.rows, piece.start, piece.end)  # not the piece: a cycle would keep the matrix
    yield pieces
    return matrix.result(fields.get("dimensions") or limits.dim or 0)


class _Matrix:
    """The result of a call, made when the first answer says how wide it is."""

    def __init__(self, num_rows: int, dtype: str) -> None:
        self._num_rows, self._dtype, self._lock = num_rows, dtype, Lock()
        self._array: NDArray[Any] | None = None

    def get(self, dim: int) -> "NDArray[Any]":
        """The array [rows, columns for `dim` elements]. Raises BadResponse when it was made for another `dim`."""
        width = -(-dim // 8) if self._dtype in _PACKED else dim
        with self._lock:
            if self._array is None:
                import numpy as np

                self._array = np.empty((self._num_rows, width), _ITEM_OF[self._dtype])
        if self._array.shape[1] != width:
            raise BadResponse(f"vectors of {dim} elements where others of the call have {self._array.shape[1]} columns")
        return self._array

    def rows(self, start: int, end: int, response: ServerResponse, length: int) -> memoryview | None:
        if response.status != 200:
            return None
        dim = response.num_dimensions
        if dim is None:
            raise BadResponse("it has no header x-vecd-dimensions with a number")
        return self.get(dim)[start:end].data.cast("B")

    def result(self, dim: int) -> "NDArray[Any]":
        """`dim`: of a matrix without rows, for which there was no answer."""
        return self.get(dim) if self._array is None else self._array


# --- other results --------------------------------------------------------------------------------------------


def sparse(
    self: ClientBase,
    /,
    texts: Texts,
    *,
    input_type: str | None = None,
    top_k: int | None = None,
    min_weight: float | None = None,
    overflow: str | None = None,
) -> Steps[list[SparseVector]]:
    """The weights of entries of the vocabulary, for each text. `top_k`: only the greatest; `min_weight`: only greater
    ones. Raises VecdError."""
    fields = {
        "output": "sparse", "encoding_format": "float", "input_type": input_type, "top_k": top_k,
        "min_weight": min_weight, "overflow": overflow, "model": self.model,
    }  # fmt: skip
    return [sparse_of(each) for each in (yield from answers(self, _EMBEDDINGS, fields, "input", texts, "data"))]


def sparse_of(answer: Any) -> SparseVector:
    import numpy as np

    found = answer["sparse"]
    return SparseVector(np.array(found["indices"], np.int32), np.array(found["values"], np.float32))


def multi_vector(
    self: ClientBase, /, texts: Texts, *, input_type: str | None = None, overflow: str | None = None
) -> "Steps[list[NDArray[np.float32]]]":
    """The vectors of the tokens of each text: arrays float32 [tokens, D]. Raises VecdError."""
    limits = yield from _limits(self, 2)  # for the dimensions, which the bytes of a matrix do not say
    fields = {
        "output": "multi-vector", "encoding_format": "float" if limits.dim is None else "base64",
        "input_type": input_type, "overflow": overflow, "model": self.model,
    }  # fmt: skip
    items = yield from answers(self, _EMBEDDINGS, fields, "input", texts, "data")
    return [matrix_of(item["embeddings"], "<f4", limits.dim) for item in items]


def matrix_of(rows: Any, item: "DTypeLike", dim: int | None) -> "NDArray[Any]":
    """The array of lists of numbers, or [rows, `dim`] of their bytes in base64."""
    import numpy as np

    if not isinstance(rows, str):
        return np.array(rows, item)
    return np.frombuffer(base64.b64decode(rows), item).reshape(-1, dim)  # type: ignore[arg-type]


def rerank(
    self: ClientBase, /, query: str, documents: Sequence[str], *, top_n: int | None = None, raw_scores: bool = False
) -> Steps[list[RankedDocument]]:
    """The documents by relevance to the query, the best first; `top_n`: how many at most.

    Scores are between 0 and 1, with `raw_scores` the model's logits, and with a multi-vector model its MaxSim. Raises
    VecdError.
    """
    limits = yield from _limits(self, len(documents))
    fields = {"query": query, "raw_scores": raw_scores or None, "model": self.model}
    pieces = list(cut("/v1/rerank", fields, "documents", _listed(documents), limits))
    yield pieces
    found = [
        RankedDocument(piece.start + int(item["index"]), float(item["relevance_score"]))
        for piece in pieces
        for item in _items([piece.answer], "results")
    ]
    found.sort(key=lambda document: (-document.score, document.index))
    return found[:top_n]


def score(self: ClientBase, /, pairs: Sequence[Pair], *, raw_scores: bool = False) -> "Steps[NDArray[np.float64]]":
    """The score of each pair of a query and a document, by the model's own activation: float64 [n].

    Raises VecdError.
    """
    import numpy as np

    scores = yield from score_pairs(self, pairs, {"raw_scores": raw_scores or None, "model": self.model})
    return np.array(scores, np.float64)


def score_pairs(self: ClientBase, pairs: Sequence[Pair], fields: Mapping[str, Any]) -> Steps[list[float]]:
    limits = yield from _limits(self, len(pairs))
    fields = {key: value for key, value in fields.items() if value is not None}
    pieces = list(cut("/score", fields, "pairs", pairs, limits))
    for piece in pieces:
        queries, documents = zip(*pairs[piece.start : piece.end], strict=True)
        piece.body = write({**fields, "queries": queries, "documents": documents})
    yield pieces
    return [float(item["score"]) for item in _items((piece.answer for piece in pieces), "data")]


def classify(
    self: ClientBase,
    /,
    texts: Texts | Sequence[Pair],
    *,
    labels: Sequence[str] | None = None,
    top_k: int | None = None,
    raw_scores: bool = False,
) -> Steps[list[list[Label]]]:
    """The labels of each text, or pair of texts, the best first.

    `labels`: with a model of dense vectors, those to choose from. `top_k`: how many at most. `raw_scores`: logits.
    Raises VecdError.
    """
    items = _listed(texts)
    if labels is None:
        listed = [[each] if isinstance(each, str) else list(each) for each in items]
        fields: dict[str, Any] = {"top_k": top_k, "raw_scores": raw_scores or None}
        found = yield from answers(self, "/predict", fields, "inputs", listed)
    else:
        fields = {"labels": list(labels), "model": self.model}
        predicted = yield from answers(self, "/v1/classify", fields, "input", items, "data")
        found = [sorted(item["predictions"], key=lambda each: -each["score"])[:top_k] for item in predicted]
    return [labels_of(each) for each in found]


def labels_of(answer: Any) -> list[Label]:
    return [Label(str(one["label"]), float(one["score"])) for one in answer]


def entities(
    self: ClientBase, /, texts: Texts, *, aggregation_strategy: str | None = None
) -> Steps[list[list[Entity]]]:
    """The labelled parts of each text, by a model that classifies tokens. Raises VecdError."""
    fields = {"aggregation_strategy": aggregation_strategy}
    return [entities_of(each) for each in (yield from answers(self, "/predict", fields, "inputs", texts))]


def entities_of(answer: Any) -> list[Entity]:
    return [
        Entity(
            str(one.get("entity_group") or one.get("entity")), float(one["score"]), str(one["word"]),
            int(one["start"]), int(one["end"]),
        )
        for one in answer
    ]  # fmt: skip


def tokenize(self: ClientBase, /, texts: Texts, *, add_special_tokens: bool = True) -> Steps[list[list[Token]]]:
    """The tokens of each text, as the model gets them. Raises VecdError."""
    fields = {"add_special_tokens": add_special_tokens}
    found = yield from answers(self, "/tokenize", fields, "inputs", texts)
    return [
        [Token(one["id"], one["text"], one["special"], one["start"], one["stop"]) for one in each] for each in found
    ]


def info(self: ClientBase, /) -> Steps[Info]:
    """What the server says of its model and limits: GET /info. Raises VecdError."""
    piece = Piece(_info_path(self))
    yield [piece]
    return cast(Info, piece.answer)


# --- what they share ------------------------------------------------------------------------------------------


def answers(
    self: ClientBase, path: str, fields: Mapping[str, Any], name: str, inputs: Any, items: str | None = None
) -> Steps[list[Any]]:
    """What the answers have for each input, in their order: in a list, or one with the name `items`."""
    inputs = _listed(inputs)
    limits = yield from _limits(self, len(inputs))
    pieces = list(cut(path, fields, name, inputs, limits))
    yield pieces
    found = [piece.answer for piece in pieces]
    return [each for answer in found for each in answer] if items is None else _items(found, items)


def _limits(self: ClientBase, num_inputs: int) -> Steps[RequestLimits]:
    """Known after one request for as long as the client lives; the usual ones where that has no answer. A single input
    needs none."""
    if self.limits is not None:
        return self.limits
    if num_inputs == 1:
        return RequestLimits()
    piece = Piece(_info_path(self), may_lack=True)
    yield [piece]
    return self.learn(piece.answer if isinstance(piece.answer, dict) else {})


def _info_path(self: ClientBase) -> str:
    return "/info" if self.model is None else f"/info?model={quote(self.model, safe='')}"


def _listed(inputs: Any) -> list[Any]:
    """One text, or the token ids of one, is a list of one input."""
    if isinstance(inputs, str):
        return [inputs]
    if not isinstance(inputs, Iterable) or isinstance(inputs, bytes | Mapping):
        raise TypeError(f"the inputs must be a text or a sequence of texts, not {type(inputs).__name__}")
    listed = list(inputs)
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def _items(answers: Iterable[Any], name: str) -> list[Any]:
    """Raises ServerError when an answer has no such list, as that of another server."""
    try:
        return [item for answer in answers for item in sorted(answer[name], key=lambda item: item["index"])]
    except (KeyError, TypeError) as error:
        raise ServerError(f"no answer of vecd's: it has no items as {name!r}") from error
