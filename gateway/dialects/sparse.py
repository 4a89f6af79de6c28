"""What all routes with sparse vectors have in common: the fields, and how a vector is written. Pure.

A vector has the weights that are greater than `min_weight`, at most `top_k` of them, in the order of their indices,
which are the ids of the model's vocabulary. It may be empty.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from vecd.gateway.api import fields
from vecd.gateway.api.fields import NUMBER, Field, Given, agreed, any_of, list_of, record
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.encoding.fragments import list_pieces, runs_of
from vecd.gateway.encoding.sparse import SparseRows, SparseVector
from vecd.gateway.errors import WrongModel
from vecd.gateway.request import Embedded, Inputs, SparseOptions
from vecd.gateway.tokenization.tokenizer import TokenVocabulary
from vecd.shm.output import Output

_MANY_VECTORS = 8
"""More vectors than this are rendered in a thread: 400 weights take 0.1 ms, with their tokens 0.3 ms."""
_MANY_CHARS = 4096
"""So are those of more characters or token ids, which may have as many weights."""

TOP_K = fields.whole_number("top_k", "most weights of a sparse vector, the greatest; default: all", minimum=1)
MAX_ACTIVE_DIMS = fields.whole_number("max_active_dims", "the same, by sentence-transformers' name", minimum=1)
MIN_WEIGHT = fields.number("min_weight", "a sparse vector has only weights greater than this", minimum=0)
RETURN_TOKENS = fields.flag(
    "return_tokens", "true: a sparse vector has the strings of its tokens, too, as in the vocabulary", default=False
)
FORMAT = fields.choice(
    "sparse_format",
    "how a sparse vector is written: lists of indices and of values, or an object with the weight of each token, by "
    "its string, as Elasticsearch and OpenSearch take it (`map`)",
    {"lists": "lists", "map": "map"},
    default="lists",
)
FIELDS: tuple[Field[Any], ...] = (TOP_K, MAX_ACTIVE_DIMS, MIN_WEIGHT, RETURN_TOKENS, FORMAT)

VECTOR = any_of(
    record("tokens", indices=list_of(fields.COUNT), values=fields.VECTOR, tokens=list_of(fields.STRING)),
    {"type": "object", "additionalProperties": NUMBER},
)


def read_options(given: Given) -> SparseOptions:
    most = agreed(given, TOP_K, MAX_ACTIVE_DIMS)
    return SparseOptions(None if most is None else most[0], given.get(MIN_WEIGHT) or 0.0)


def output_of(model_info: ModelInfo) -> Output:
    """Raises WrongModel for a model without sparse vectors."""
    if model_info.card.sparse is None:
        raise WrongModel(
            f"{model_info.what_it_is()}: it cannot make sparse vectors", can=lambda info: info.card.sparse is not None
        )
    return Output.LEXICAL if model_info.card.sparse.is_lexical else Output.SPARSE


def is_large(inputs: Inputs) -> bool:
    """Whether a response is rendered in a thread."""
    return len(inputs) > _MANY_VECTORS or sum(map(len, inputs)) > _MANY_CHARS


def vectors_of(embedded: Embedded) -> list[SparseVector]:
    [collector] = embedded.collectors
    assert isinstance(collector, SparseRows)
    return collector.vectors


def indexed_pieces(vector: SparseVector) -> Iterator[bytes]:
    """The JSON of a list of objects, as text-embeddings-inference has it, some weights at a time."""
    runs = zip(runs_of(vector[0].tolist()), runs_of(vector[1]), strict=True)
    return list_pieces([{"index": index, "value": value} for index, value in zip(*run, strict=True)] for run in runs)


def vector_pieces(
    vector: SparseVector, vocabulary: TokenVocabulary, *, as_map: bool, has_tokens: bool
) -> Iterator[bytes]:
    """The JSON of a vector as `VECTOR`, some weights at a time. A map has no entries for ids that the vocabulary has no
    string for: Elasticsearch refuses empty keys. Weights are the shortest numbers that are read as the same float32."""
    indices, values = map(runs_of, vector)
    texts = (vocabulary.texts_of(some.tolist()) for some in runs_of(vector[0]))
    if as_map:
        runs = zip(texts, values, strict=True)
        maps = ({text: value for text, value in zip(*run, strict=True) if text} for run in runs)
        return list_pieces(maps, b"{}")
    tokens = ((b',"tokens":',), list_pieces(texts)) if has_tokens else ()
    return chain((b'{"indices":',), list_pieces(indices), (b',"values":',), list_pieces(values), *tokens, (b"}",))
