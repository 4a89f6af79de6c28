"""What all routes that classify have in common, whatever their shapes: the fields, which model can classify what, and
the labels of a result. Pure.

A model that classifies texts has scores for each (Output.SCORES); the labels of a text are in the order of its logits,
equal ones in their own order. A model that classifies tokens has scores for each token (TOKEN_SCORES), of which
`vecd.gateway.encoding.labels` makes spans. Scores are JSON numbers with all digits of a float64.
"""

from collections.abc import Callable, Iterator

from vecd.base.files import JsonObject
from vecd.gateway.api import fields
from vecd.gateway.api.fields import Field, Wanted, nullable, record
from vecd.gateway.api.operation import ParsedEmbed
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.encoding.fragments import list_pieces, runs_of
from vecd.gateway.encoding.labels import ACTIVATIONS, AGGREGATIONS, OUTSIDE, Entity, Scores, find_entities, ranked
from vecd.gateway.encoding.result import FloatRows, ScoreRows, TokenRows
from vecd.gateway.errors import WrongModel
from vecd.gateway.request import Embedded, EmbedRequest, Response
from vecd.model.steps import ScoreHead
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
    nullable("array", items=fields.STRING),
    fields.read_texts,
)

LABEL = record(label=fields.STRING, score=fields.NUMBER)
ENTITY = record(
    "entity",
    "entity_group",
    "index",
    entity=fields.STRING,
    entity_group=fields.STRING,
    score=fields.NUMBER,
    index=fields.COUNT,
    word=fields.STRING,
    start=fields.described(fields.COUNT, "in characters of the text"),
    end=fields.COUNT,
)


def head_of(model_info: ModelInfo) -> ScoreHead:
    """Raises WrongModel for a model that classifies nothing."""
    if model_info.card.score is None or not _classifies(model_info):
        raise WrongModel(f"{model_info.what_it_is()}: it cannot classify texts", can=_classifies)
    return model_info.card.score


def _classifies(model_info: ModelInfo) -> bool:
    return model_info.card.score is not None and not set(NEEDS).isdisjoint(model_info.card.capabilities)


def classifies_tokens(model_info: ModelInfo) -> bool:
    return Output.TOKEN_SCORES in model_info.outputs


def is_large(num_inputs: int, model_info: ModelInfo) -> bool:
    """Whether a response is rendered in a thread."""
    return classifies_tokens(model_info) or num_inputs * model_info.card.num_labels > MANY_SCORES


def scores_of(embedded: Embedded, head: ScoreHead, activation: str | None) -> Scores:
    """float64 [N, k]. `activation`: one of SCORE_ACTIVATIONS; None: the model's own."""
    return activated(logits_of(embedded), head, activation)


def logits_of(embedded: Embedded) -> FloatRows:
    """float32 [N, k]."""
    [collector] = embedded.collectors
    assert isinstance(collector, ScoreRows)
    return collector.logits


def activated(logits: FloatRows, head: ScoreHead, activation: str | None) -> Scores:
    return ACTIVATIONS[head.activation if activation is None else activation](logits)


def ranked_labels(
    embedded: Embedded, head: ScoreHead, activation: str | None, top_k: int | None = None
) -> Iterator[list[JsonObject]]:
    """For each text its `top_k` best labels, the best first; None: all."""
    for logits, scores in zip(logits_of(embedded), scores_of(embedded, head, activation), strict=True):
        row = scores.tolist()
        yield [{"score": row[index], "label": head.labels[index]} for index in ranked(logits, top_k)]


def matrices_of(embedded: Embedded) -> list[FloatRows]:
    """float32 [rows of an input, width] for each."""
    [collector] = embedded.collectors
    assert isinstance(collector, TokenRows)
    return collector.matrices


def parse_entities(
    request: EmbedRequest,
    model_info: ModelInfo,
    wanted: Wanted,
    activation: str | None,
    respond: Callable[[Iterator[Iterator[bytes]], Embedded], Response],
) -> ParsedEmbed:
    """The call for the entities of a request's texts. `activation`: as in `scores_of`.
    `respond` takes the JSON of each text's entities, with the keys that Hugging Face's pipeline gives them, in pieces:
    there may be one for each token."""
    head, vocabulary, ignored = head_of(model_info), model_info.vocabulary, wanted.get(IGNORED)
    aggregation, left_out = wanted.get(AGGREGATION) or "simple", frozenset((OUTSIDE,) if ignored is None else ignored)
    # The inputs of the request are removed when they have been tokenized.
    texts = [text for text in request.inputs if isinstance(text, str)]

    def find(embedded: Embedded) -> Iterator[Iterator[bytes]]:
        of_each = zip(matrices_of(embedded), embedded.token_ids, embedded.offsets, texts, strict=True)
        for matrix, ids, offsets, text in of_each:
            steps = zip(
                (activated(rows, head, activation) for rows in runs_of(matrix)),
                runs_of(offsets),
                (vocabulary.texts_of(some.tolist()) for some in runs_of(ids)),
                strict=True,
            )
            prefix = vocabulary.subword_prefix
            found = find_entities(steps, text, head.labels, aggregation, subword_prefix=prefix, ignored=left_out)
            yield list_pieces(list(map(_entity, entities)) for entities in found)

    request = request._replace(tokenizing=request.tokenizing._replace(wants_offsets=True))
    return ParsedEmbed(request, lambda embedded: respond(find(embedded), embedded), is_large=True)


def _entity(entity: Entity) -> JsonObject:
    is_token = entity.position is not None
    return {
        "entity" if is_token else "entity_group": entity.label,
        "score": entity.score,
        **({"index": entity.position} if is_token else {}),
        "word": entity.word,
        "start": entity.start,
        "end": entity.end,
    }
