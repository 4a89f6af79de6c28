"""What all routes that classify have in common, and `/classify`: vLLM's and infinity's shapes, of models that classify,
and Jina's zero-shot shape, of models with dense vectors. Pure, but for the clock.

A model that classifies texts has scores for each (Output.SCORES); the labels of a text are in the order of its logits,
equal ones in their own order. A model that classifies tokens has scores for each token (TOKEN_SCORES), of which
`vecd.gateway.encoding.labels` makes spans. Scores are JSON numbers with all digits of a float64. A body with `labels`
is Jina's; one with `raw_scores` is infinity's, whose client always sends it; any other is vLLM's.

- vLLM: `probs` are in the order of the model's labels, `label` is the best one.
- infinity: a list of labels for each input, the best first. `raw_scores` counts, which infinity ignores.
- A model that classifies tokens: `entities` for each input, by `aggregation_strategy`.
- Jina: labels and inputs are embedded with the same prompt. The scores of an input are the softmax of its cosines with
  the labels. Jina does not publish its formula. Differences of cosines are small, so all scores are near 1 / (number of
  labels); `temperature`, by which cosines are divided first, separates them, and changes no order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import orjson

from vecd.base.files import JsonObject
from vecd.gateway.api import fields
from vecd.gateway.api.answer import list_response, list_schema, written
from vecd.gateway.api.fields import Field, Fields, Wanted, any_of, list_of, nullable, record
from vecd.gateway.api.operation import Call, Operation, ParsedEmbed, ParsedMessages
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects import ask
from vecd.gateway.dialects.ask import ACTIVATION, CONVERSATION_FIELDS, INPUT, MESSAGES, OWN, RAW, parse_inputs, resolve
from vecd.gateway.encoding.labels import (
    ACTIVATIONS,
    AGGREGATIONS,
    OUTSIDE,
    Entity,
    Scores,
    find_entities,
    ranked,
    softmax,
)
from vecd.gateway.encoding.result import list_pieces, runs_of
from vecd.gateway.errors import BadRequest, TooManyInputs, WrongModel
from vecd.gateway.request import Embedded, EmbedRequest, Encoding, FloatRows, Form, Response
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
    return activated(embedded.made[0].rows, head, activation)


def activated(logits: FloatRows, head: ScoreHead, activation: str | None) -> Scores:
    return ACTIVATIONS[head.activation if activation is None else activation](logits)


def ranked_labels(
    embedded: Embedded, head: ScoreHead, activation: str | None, top_k: int | None = None
) -> Iterator[list[JsonObject]]:
    """For each text its `top_k` best labels, the best first; None: all."""
    of_each = zip(embedded.made[0].rows, scores_of(embedded, head, activation), strict=True)
    for logits, scores in of_each:
        row = scores.tolist()
        yield [{"score": row[index], "label": head.labels[index]} for index in ranked(logits, top_k)]


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
        of_each = zip(embedded.made[0], embedded.token_ids, embedded.offsets, texts, strict=True)
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


# --- /classify ----------------------------------------------------------------------------------------------------

CLASSIFIED = replace(INPUT, description=INPUT.description.replace("embedded", "classified"))
LABELS = Field(
    "labels",
    "Jina's: the labels to choose from, of which each is embedded",
    list_of(fields.STRING, at_least=1),
    fields.read_texts,
)
RAW_SCORES = Field(
    "raw_scores",
    "infinity's, and answered in its shape: true: scores are logits",
    fields.nullable("boolean"),
    lambda value, name: RAW if fields.read_flag(value, name) else OWN,
    key=ACTIVATION.key,
)
USE_ACTIVATION = replace(
    ask.USE_ACTIVATION, description="false: `probs` are logits", schema=fields.nullable("boolean", default=True)
)
TEMPERATURE = fields.number(
    "temperature", "of `labels`: cosines are divided by it before the softmax", minimum=0.001, default=1
)
_COMMON: tuple[Field[Any], ...] = (
    CLASSIFIED,
    ask.MODEL,
    *ask.PROMPT_WORDS,
    *ask.OVERFLOW_WORDS,
    ask.PRIORITY,
    ask.USER,
    ask.PADDING,
    fields.REQUEST_ID,
)

# --- models that classify ---------------------------------------------------------------------------------------


def parse_classify(call: Call) -> ParsedEmbed | ParsedMessages:
    wanted, _, model_info = call
    head = head_of(model_info)
    if isinstance(value := wanted.get(INPUT), ask.Conversations):
        return ask.render_conversations(call, value, parse_classify)
    activation, is_of_infinity = ask.activation_of(wanted), wanted.has(RAW_SCORES.name)
    inputs = parse_inputs(value, INPUT.name, model_info.config.max_inputs)
    if classifies_tokens(model_info):
        return _parse_tokens(call, inputs, activation)

    def render(embedded: Embedded) -> Response:
        if is_of_infinity:
            ranking = ranked_labels(embedded, head, activation)
            return list_response("infinity", "classify", written(ranking), embedded)
        logits, scores = embedded.made[0].rows, scores_of(embedded, head, activation)
        data = (
            {"index": index, "label": head.labels[ranked(row)[0]], "probs": probs.tolist(), "num_classes": probs.size}
            for index, (row, probs) in enumerate(zip(logits, scores, strict=True))
        )
        return list_response("classify", "list", written(data), embedded)

    request = resolve(call, inputs, Output.SCORES, are_ids_of_model=True)
    return ParsedEmbed(request, render, is_large(len(inputs), model_info))


def _parse_tokens(call: Call, inputs: list[Any], activation: str | None) -> ParsedEmbed:
    if not isinstance(inputs[0], str):
        raise BadRequest("'input' must be texts: entities are parts of a text", param=INPUT.name)

    def respond(found: Iterable[Iterable[bytes]], embedded: Embedded) -> Response:
        head = b'{"index":%d,"object":"token-classification","entities":'
        data = (chain((head % index,), own, (b"}",)) for index, own in enumerate(found))
        return list_response("classify", "list", data, embedded)

    request = resolve(call, inputs, Output.TOKEN_SCORES)
    return parse_entities(request, call.model_info, call.wanted, activation, respond)


# --- zero-shot --------------------------------------------------------------------------------------------------

_MAX_PREDICTIONS = 256 * 1024
"""Texts times labels of one request: 10 MB of JSON."""
_MAX_LABEL_CHARS = 4 * 2**20
"""Characters of the labels, which the response repeats for each text."""


def check_label_chars(labels: Sequence[str], num_texts: int, word: str, num_around: int = 0) -> int:
    """Of labels that the response repeats for each text: their characters in it, and `num_around` more of each label.
    Raises BadRequest for too many."""
    num_chars = num_texts * (sum(map(len, labels)) + num_around * len(labels))
    if num_chars > _MAX_LABEL_CHARS:
        raise BadRequest(
            f"'{word}' {'in the template ' if num_around else ''}have {num_chars} characters, once for each of "
            f"{num_texts} texts: at most {_MAX_LABEL_CHARS} in one request",
            param=word,
        )
    return num_chars


def parse_zero_shot(call: Call) -> ParsedEmbed:
    wanted, _, model_info = call
    names = wanted.require(LABELS)
    if not names:
        raise BadRequest(f"'{LABELS.name}' is an empty list, at least 1 label is needed", param=LABELS.name)
    inputs = parse_inputs(wanted.get(INPUT), INPUT.name, model_info.config.max_inputs)
    if not isinstance(inputs[0], str):
        raise BadRequest("'input' must be texts, as 'labels' are", param=INPUT.name)
    if len(inputs) * len(names) > _MAX_PREDICTIONS:
        raise BadRequest(
            f"'{INPUT.name}' and '{LABELS.name}' have {len(inputs) * len(names)} scores, of {len(inputs)} texts and "
            f"{len(names)} labels: at most {_MAX_PREDICTIONS} in one request",
            param=LABELS.name,
        )
    check_label_chars(names, len(inputs), LABELS.name)
    if len(inputs) + len(names) > model_info.config.max_inputs:
        raise TooManyInputs(
            f"'{INPUT.name}' and '{LABELS.name}' have {len(inputs) + len(names)} texts, at most "
            f"{model_info.config.max_inputs} in one request (--max-inputs)",
            param=INPUT.name,
        )
    temperature, num_inputs = wanted.get(TEMPERATURE) or 1.0, len(inputs)
    texts: list[str] = [*inputs, *names]

    def render(embedded: Embedded) -> Response:
        rows = embedded.made[0].rows.astype("f8")
        cosines = rows[:num_inputs] @ rows[num_inputs:].T
        data = (_prediction(index, row, names) for index, row in enumerate(softmax(cosines / temperature)))
        return list_response("classify", "list", data, embedded)

    request = resolve(call, texts, forms=(Form(Encoding.BYTES),), normalizes=True, purpose="classification")
    return ParsedEmbed(request, render, num_inputs * len(names) > MANY_SCORES)


def _prediction(index: int, scores: Scores, names: tuple[str, ...]) -> Iterator[bytes]:
    best = ranked(scores)[0]
    item = {"object": "classification", "index": index, "prediction": names[best], "score": float(scores[best])}
    yield orjson.dumps(item)[:-1] + b',"predictions":'
    runs = zip(runs_of(names), runs_of(scores), strict=True)
    yield from list_pieces(
        [{"label": name, "score": float(score)} for name, score in zip(*run, strict=True)] for run in runs
    )
    yield b"}"


_SCORES = list_of(fields.NUMBER)
_KINDS = {"enum": ["list", "classify"]}
CLASSIFY = Operation(
    summary="Classify texts or token ids",
    fields=Fields(*_COMMON, USE_ACTIVATION, RAW_SCORES, AGGREGATION, IGNORED, *CONVERSATION_FIELDS),
    parse=parse_classify,
    response=list_schema(
        _KINDS,
        any_of(
            record(index=fields.COUNT, label=fields.STRING, probs=_SCORES, num_classes=fields.POSITIVE),
            record(index=fields.COUNT, object={"const": "token-classification"}, entities=list_of(ENTITY)),
            list_of(LABEL),
        ),
    ),
    claims=(INPUT.name, MESSAGES.name),
    needs=NEEDS,
)
ZERO_SHOT = Operation(
    summary="Choose among labels by the cosines of dense vectors",
    fields=Fields(LABELS, TEMPERATURE, *_COMMON, ask.TASK),
    parse=parse_zero_shot,
    response=list_schema(
        _KINDS,
        record(
            object={"const": "classification"},
            index=fields.COUNT,
            prediction=fields.STRING,
            score=fields.NUMBER,
            predictions=list_of(LABEL, at_least=1),
        ),
    ),
    claims=(LABELS.name,),
    needs=("dense",),
)
