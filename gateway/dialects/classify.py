"""`/classify`: vLLM's and infinity's shapes, of models that classify, and Jina's zero-shot shape, of models with dense
vectors: parses requests, renders responses. Pure, but for the clock. A body with `labels` is Jina's; one with
`raw_scores` is infinity's, whose client always sends it; any other is vLLM's.

- vLLM: `probs` are in the order of the model's labels, `label` is the best one.
- infinity: a list of labels for each input, the best first. `raw_scores` counts, which infinity ignores.
- A model that classifies tokens: `entities` for each input, by `aggregation_strategy`.
- Jina: labels and inputs are embedded with the same prompt. The scores of an input are the softmax of its cosines with
  the labels. Jina does not publish its formula. Differences of cosines are small, so all scores are near 1 / (number of
  labels); `temperature`, by which cosines are divided first, separates them, and changes no order.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import orjson

from vecd.gateway.api import fields
from vecd.gateway.api.answer import list_response, list_schema, written
from vecd.gateway.api.fields import Field, Fields, any_of, list_of, record
from vecd.gateway.api.operation import Call, Operation, ParsedEmbed, ParsedMessages
from vecd.gateway.dialects import ask, labels
from vecd.gateway.dialects.ask import ACTIVATION, CONVERSATION_FIELDS, INPUT, MESSAGES, OWN, RAW, parse_inputs, resolve
from vecd.gateway.encoding.fragments import Matrix, list_pieces, runs_of
from vecd.gateway.encoding.labels import Scores, ranked, softmax
from vecd.gateway.errors import BadRequest, TooManyInputs
from vecd.gateway.request import Embedded, Encoding, Form, Response
from vecd.shm.output import Output

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
    wanted, model_info = call.wanted, call.model_info
    head = labels.head_of(model_info)
    if isinstance(value := wanted.get(INPUT), ask.Conversations):
        return ask.render_conversations(call, value, parse_classify)
    activation, is_of_infinity = ask.activation_of(wanted), wanted.has(RAW_SCORES.name)
    inputs = parse_inputs(value, INPUT.name, model_info.config.max_inputs)
    if labels.classifies_tokens(model_info):
        return _parse_tokens(call, inputs, activation)

    def render(embedded: Embedded) -> Response:
        if is_of_infinity:
            ranking = labels.ranked_labels(embedded, head, activation)
            return _respond(call, "infinity", "classify", written(ranking), embedded)
        logits, scores = labels.logits_of(embedded), labels.scores_of(embedded, head, activation)
        data = (
            {"index": index, "label": head.labels[ranked(row)[0]], "probs": probs.tolist(), "num_classes": probs.size}
            for index, (row, probs) in enumerate(zip(logits, scores, strict=True))
        )
        return _respond(call, "classify", "list", written(data), embedded)

    request = resolve(call, inputs, Output.SCORES, are_ids_of_model=True)
    return ParsedEmbed(request, render, labels.is_large(len(inputs), model_info))


def _parse_tokens(call: Call, inputs: list[Any], activation: str | None) -> ParsedEmbed:
    if not isinstance(inputs[0], str):
        raise BadRequest("'input' must be texts: entities are parts of a text", param=INPUT.name)

    def respond(found: Iterable[Iterable[bytes]], embedded: Embedded) -> Response:
        head = b'{"index":%d,"object":"token-classification","entities":'
        data = (chain((head % index,), own, (b"}",)) for index, own in enumerate(found))
        return _respond(call, "classify", "list", data, embedded)

    request = resolve(call, inputs, Output.TOKEN_SCORES)
    return labels.parse_entities(request, call.model_info, call.wanted, activation, respond)


def _respond(call: Call, prefix: str, kind: str, data: Iterable[Iterable[bytes]], embedded: Embedded) -> Response:
    return list_response(prefix, kind, call.model_info.model, call.request_id, data, embedded)


# --- zero-shot --------------------------------------------------------------------------------------------------

_MAX_PREDICTIONS = 256 * 1024
"""Texts times labels of one request: 10 MB of JSON."""
_MAX_LABEL_CHARS = 4 * 2**20
"""Characters of the labels, which the response repeats for each text."""


def parse_zero_shot(call: Call) -> ParsedEmbed:
    wanted, model_info = call.wanted, call.model_info
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
    num_chars = len(inputs) * sum(map(len, names))
    if num_chars > _MAX_LABEL_CHARS:
        raise BadRequest(
            f"'{LABELS.name}' have {num_chars} characters, once for each of {len(inputs)} texts: at most "
            f"{_MAX_LABEL_CHARS} in one request",
            param=LABELS.name,
        )
    if len(inputs) + len(names) > model_info.config.max_inputs:
        raise TooManyInputs(
            f"'{INPUT.name}' and '{LABELS.name}' have {len(inputs) + len(names)} texts, at most "
            f"{model_info.config.max_inputs} in one request (--max-inputs)",
            param=INPUT.name,
        )
    temperature, num_inputs = wanted.get(TEMPERATURE) or 1.0, len(inputs)
    texts: list[str] = [*inputs, *names]

    def render(embedded: Embedded) -> Response:
        [collector] = embedded.collectors
        assert isinstance(collector, Matrix)
        cosines = collector.rows[:num_inputs].astype("f8") @ collector.rows[num_inputs:].astype("f8").T
        data = (_prediction(index, row, names) for index, row in enumerate(softmax(cosines / temperature)))
        return _respond(call, "classify", "list", data, embedded)

    request = resolve(call, texts, forms=(Form(Encoding.BYTES),), normalizes=True, purpose="classification")
    return ParsedEmbed(request, render, num_inputs * len(names) > labels.MANY_SCORES)


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
    fields=Fields(*_COMMON, USE_ACTIVATION, RAW_SCORES, labels.AGGREGATION, labels.IGNORED, *CONVERSATION_FIELDS),
    embed=parse_classify,
    response=list_schema(
        _KINDS,
        any_of(
            record(index=fields.COUNT, label=fields.STRING, probs=_SCORES, num_classes=fields.POSITIVE),
            record(index=fields.COUNT, object={"const": "token-classification"}, entities=list_of(labels.ENTITY)),
            list_of(labels.LABEL),
        ),
    ),
    claims=(INPUT.name, MESSAGES.name),
    needs=labels.NEEDS,
)
ZERO_SHOT = Operation(
    summary="Choose among labels by the cosines of dense vectors",
    fields=Fields(LABELS, TEMPERATURE, *_COMMON, ask.TASK),
    embed=parse_zero_shot,
    response=list_schema(
        _KINDS,
        record(
            object={"const": "classification"},
            index=fields.COUNT,
            prediction=fields.STRING,
            score=fields.NUMBER,
            predictions=list_of(labels.LABEL, at_least=1),
        ),
    ),
    claims=(LABELS.name,),
    needs=("dense",),
)
