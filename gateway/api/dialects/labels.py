"""What all routes that classify have in common, whatever their shapes: the fields, the request, and the labels of its
result. Pure.

Owns which model can classify what. A model that classifies texts has scores for each (Output.SCORES); the labels of a
text are in the order of its logits, equal ones in their own order. A model that classifies tokens has scores for each
token (TOKEN_SCORES), of which `vecd.gateway.encoding.entities` makes spans. Scores are JSON numbers with all digits of
a float64. Called by `vecd.gateway.api.dialects.predict`, `classify` and `vllm`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.api import fields, schemas
from vecd.gateway.api.fields import Field
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.schemas import nullable, record
from vecd.gateway.encoding.activations import ACTIVATIONS, Scores, ranked
from vecd.gateway.encoding.entities import AGGREGATIONS, OUTSIDE, Entity, find_entities
from vecd.gateway.encoding.matrices import list_pieces, runs_of
from vecd.gateway.encoding.scores import ScoreRows
from vecd.gateway.encoding.token_rows import TokenRows
from vecd.gateway.types.errors import WrongModel
from vecd.gateway.types.request import Embedded, Overflow, Tokenizing
from vecd.shm.heads import ScoreHead
from vecd.shm.output import Output

NEEDS = ("classify", "token-classify")
"""As in `Operation.needs`."""

MANY_SCORES = 4096
"""More scores than this are rendered in a thread: 4 ms."""

AGGREGATION = fields.choice(
    "aggregation_strategy",
    "of a model that classifies tokens: spans of neighbours with one label (`simple`, the default), the same with one "
    "label for each word, that of its `first` token, of the one with the highest score (`max`) or of the mean scores "
    "(`average`), or each token by itself (`none`)",
    {name: name for name in AGGREGATIONS},
    default="simple",
)
IGNORED = Field(
    "ignore_labels",
    'of a model that classifies tokens: labels that are left out; default: ["O"]',
    nullable("array", items=schemas.STRING),
    fields.read_texts,
)

LABEL = record(label=schemas.STRING, score={"type": "number"})
ENTITY = record(
    "entity",
    "entity_group",
    "index",
    entity=schemas.STRING,
    entity_group=schemas.STRING,
    score={"type": "number"},
    index=schemas.COUNT,
    word=schemas.STRING,
    start=schemas.described(schemas.COUNT, "in characters of the text"),
    end=schemas.COUNT,
)


def head_of(model_info: ModelInfo) -> ScoreHead:
    """Raises WrongModel for a model that classifies nothing."""
    if model_info.score is None or not _classifies(model_info):
        raise WrongModel(f"{model_info.what_it_is()}: it cannot classify texts", can=_classifies)
    return model_info.score


def _classifies(model_info: ModelInfo) -> bool:
    return model_info.score is not None and not set(NEEDS).isdisjoint(model_info.capabilities)


def classifies_tokens(model_info: ModelInfo) -> bool:
    return Output.TOKEN_SCORES in model_info.outputs


def is_large(num_inputs: int, model_info: ModelInfo) -> bool:
    """Whether a response is rendered in a thread."""
    return classifies_tokens(model_info) or num_inputs * model_info.num_labels > MANY_SCORES


def without_chunks(tokenizing: Tokenizing, model_info: ModelInfo) -> Tokenizing:
    """A text in chunks has no scores of its own, nor vectors for its tokens. Where the server would split a long text,
    it is refused, because the request did not allow to cut it."""
    overflow = tokenizing.overflow or model_info.overflow
    return tokenizing._replace(overflow=Overflow.ERROR if overflow is Overflow.CHUNK else tokenizing.overflow)


# --- labels of texts --------------------------------------------------------------------------------------------


def scores_of(embedded: Embedded, head: ScoreHead, activation: str | None) -> Scores:
    """float64 [N, k]. `activation`: one of SCORE_ACTIVATIONS; None: the model's own."""
    return activated(logits_of(embedded), head, activation)


def logits_of(embedded: Embedded) -> NDArray[np.float32]:
    """float32 [N, k]."""
    [collector] = embedded.collectors
    assert isinstance(collector, ScoreRows)
    return collector.logits


def activated(logits: NDArray[np.float32], head: ScoreHead, activation: str | None) -> Scores:
    return ACTIVATIONS[head.activation if activation is None else activation](logits)


def ranked_labels(
    embedded: Embedded, head: ScoreHead, activation: str | None, top_k: int | None = None
) -> Iterator[list[dict[str, Any]]]:
    """For each text its `top_k` best labels, the best first; None: all."""
    for logits, scores in zip(logits_of(embedded), scores_of(embedded, head, activation), strict=True):
        row = scores.tolist()
        yield [{"score": row[index], "label": head.labels[index]} for index in ranked(logits, top_k)]


# --- labels of tokens -------------------------------------------------------------------------------------------


def matrices_of(embedded: Embedded) -> list[NDArray[np.float32]]:
    """float32 [rows of an input, width] for each."""
    [collector] = embedded.collectors
    assert isinstance(collector, TokenRows)
    return collector.matrices


def entities_of(
    embedded: Embedded,
    texts: Sequence[str],
    model_info: ModelInfo,
    aggregation: str | None,
    activation: str | None,
    ignored: Sequence[str] | None,
) -> Iterator[Iterator[bytes]]:
    """The JSON of each text's entities, with the keys that Hugging Face's pipeline gives them, in pieces: there may be
    as many as tokens."""
    head, vocabulary = head_of(model_info), model_info.vocabulary
    left_out = frozenset((OUTSIDE,) if ignored is None else ignored)
    for matrix, ids, offsets, text in zip(
        matrices_of(embedded), embedded.token_ids, embedded.offsets, texts, strict=True
    ):
        steps = zip(
            (activated(rows, head, activation) for rows in runs_of(matrix)),
            runs_of(offsets),
            (vocabulary.texts_of(some.tolist()) for some in runs_of(ids)),
            strict=True,
        )
        found = find_entities(
            steps,
            text,
            head.labels,
            aggregation or "simple",
            subword_prefix=vocabulary.subword_prefix,
            ignored=left_out,
        )
        yield list_pieces(list(map(_entity, entities)) for entities in found)


def _entity(entity: Entity) -> dict[str, Any]:
    is_token = entity.position is not None
    return {
        "entity" if is_token else "entity_group": entity.label,
        "score": entity.score,
        **({"index": entity.position} if is_token else {}),
        "word": entity.word,
        "start": entity.start,
        "end": entity.end,
    }
