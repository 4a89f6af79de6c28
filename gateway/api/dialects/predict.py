"""text-embeddings-inference's `/predict`, and Hugging Face's shape of the same: parses, and renders responses. Pure.

Owns how texts and pairs of texts are recognized. Called by `vecd.gateway.api.dialects.tei`, which also has this at `/`,
`/invocations` and Hugging Face's paths for models that classify. Differences from text-embeddings-inference:

- scores are those of the model's own activation: several labels may be true at once where the model says so;
- a request has texts or pairs, not both;
- of a model that classifies tokens, a flat list is one of texts, and labels are of tokens or spans of the text.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from vecd.gateway.api import fields, schemas
from vecd.gateway.api.dialects.headers import parse_priority, parse_timeout_s
from vecd.gateway.api.dialects.inputs import parse_texts
from vecd.gateway.api.dialects.labels import (
    AGGREGATION,
    ENTITY,
    IGNORED,
    LABEL,
    classifies_tokens,
    entities_of,
    head_of,
    is_large,
    ranked_labels,
    without_chunks,
)
from vecd.gateway.api.dialects.options import refused
from vecd.gateway.api.dialects.rows import list_of_pieces, written
from vecd.gateway.api.dialects.tei_options import DIRECTION, TRUNCATE, Options, headers_of, read_tokenizing
from vecd.gateway.api.fields import Field, contradiction, json_type
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import Call, ParsedEmbed
from vecd.gateway.api.schemas import any_of, list_of, nullable, record
from vecd.gateway.types.errors import BadRequest, EmptyInput, TooManyInputs
from vecd.gateway.types.messages import Response
from vecd.gateway.types.request import Embedded, EmbedRequest, Pair
from vecd.shm.output import Output

# --- fields -----------------------------------------------------------------------------------------------------

_MAX_TEXTS = 2
"""Of one sequence."""
_PAIR = record("text_pair", text=schemas.STRING, text_pair=schemas.STRING)
PREDICTED = fields.anything(
    "inputs",
    "what is to be classified: a text, a list of two texts, which are a pair, or a list of lists of one text or of a "
    "pair each; also objects with a `text` and a `text_pair`",
    any_of(schemas.STRING, schemas.TEXTS, list_of(any_of(schemas.TEXTS, _PAIR), at_least=1), _PAIR),
    is_required=True,
    is_large=True,
)
RAW_SCORES = fields.flag("raw_scores", "true: scores are the model's own numbers, without an activation", default=False)
FUNCTION = fields.choice(
    "function_to_apply",
    "the activation; default: the model's own",
    {"none": "identity", "sigmoid": "sigmoid", "softmax": "softmax", "default": None},
)
TOP_K = fields.whole_number("top_k", "most labels of a text; default: all", minimum=1)
OPTIONS: tuple[Field[Any], ...] = (TRUNCATE, DIRECTION, RAW_SCORES, FUNCTION, TOP_K, AGGREGATION, IGNORED)
CANDIDATE_LABELS = refused(
    "candidate_labels", "to choose among labels of a request is POST /v1/classify with 'labels'", nullable("array")
)
"""Of Hugging Face's zero-shot classification, whose clients post it to the same paths."""

RESPONSE = any_of(list_of(LABEL), list_of(list_of(LABEL)), list_of(ENTITY), list_of(list_of(ENTITY)))

# --- inputs -----------------------------------------------------------------------------------------------------


class Sequences(NamedTuple):
    inputs: list[str] | list[Pair]
    is_single: bool
    """The response is that of the only one, and not a list of one."""


def read_sequences(value: Any, name: str, model_info: ModelInfo) -> Sequences:
    """The texts or pairs of `inputs`. Raises BadRequest."""
    if isinstance(value, str | dict):
        return Sequences(_of_one_kind([_texts_of(value, name, name)], name), is_single=True)
    if value == []:
        raise EmptyInput(f"'{name}' cannot be empty", param=name)
    if not isinstance(value, list):
        what = "missing" if value is None else json_type(value)
        raise BadRequest(f"'{name}' must be a text, a list of two texts, or a list of lists, is {what}", param=name)
    if isinstance(value[0], str):
        if len(value) > _MAX_TEXTS:
            raise BadRequest(
                f"'{name}' has {len(value)} texts: a flat list is one text, or a pair of two; send a list of lists, "
                "as [[first text], [second text], …]",
                param=name,
            )
        return Sequences(_of_one_kind([_texts_of(value, name, name)], name), is_single=True)
    _check_num(value, name, model_info)
    sequences = [_texts_of(item, f"{name}[{index}]", name) for index, item in enumerate(value)]
    return Sequences(_of_one_kind(sequences, name), is_single=False)


def _check_num(value: list[Any], name: str, model_info: ModelInfo) -> None:
    if len(value) > model_info.max_inputs:
        raise TooManyInputs(
            f"'{name}' has {len(value)} sequences, at most {model_info.max_inputs} in one request (--max-inputs)",
            param=name,
        )


def _texts_of(item: Any, where: str, name: str) -> list[str]:
    """One text, or the two of a pair."""
    places = ("[0]", "[1]")
    if isinstance(item, dict):
        places = (".text", ".text_pair")
        if item.get("text") is None:
            raise BadRequest(f"'{where}.text' must be a string, is missing", param=name)
        item = [item["text"]] if item.get("text_pair") is None else [item["text"], item["text_pair"]]
    if isinstance(item, str):
        return [item]
    if not isinstance(item, list):
        raise BadRequest(f"'{where}' must be a list of one text or two, is {json_type(item)}", param=name)
    if not 1 <= len(item) <= _MAX_TEXTS:
        raise BadRequest(f"'{where}' must have one text, or a pair of two, has {len(item)}", param=name)
    for place, text in zip(places, item, strict=False):
        if not isinstance(text, str):
            raise BadRequest(f"'{where}{place}' must be a string, is {json_type(text)}", param=name)
    return item


def _of_one_kind(sequences: list[list[str]], name: str) -> list[str] | list[Pair]:
    num = len(sequences[0])
    for index, texts in enumerate(sequences):
        if len(texts) != num:
            raise BadRequest(
                f"'{name}[{index}]' has {len(texts)} texts and '{name}[0]' {num}: one request has texts, or pairs",
                param=name,
            )
    return [texts[0] for texts in sequences] if num == 1 else [Pair(*texts) for texts in sequences]


# --- parse and render -------------------------------------------------------------------------------------------


def parse_predict(call: Call) -> ParsedEmbed:
    """Raises WrongModel and BadRequest."""
    head_of(call.model_info)
    if classifies_tokens(call.model_info):
        return _parse_tokens(call)
    return _parse_sequences(call, read_sequences(call.values.get(PREDICTED), PREDICTED.name, call.model_info))


def parse_by_hub(call: Call) -> ParsedEmbed:
    """The operation at Hugging Face's paths: a flat list is one of texts, and the labels of even one text are in a list
    of lists, where its clients look for them."""
    if classifies_tokens(call.model_info):
        return _parse_tokens(call)
    value, name = call.values.get(PREDICTED), PREDICTED.name
    if isinstance(value, list) and value and isinstance(value[0], str):
        value = [[text] for text in parse_texts(value, name, call.model_info.max_inputs)]
    sequences = read_sequences(value, name, call.model_info)
    return _parse_sequences(call, sequences._replace(is_single=False))


def _parse_sequences(call: Call, sequences: Sequences) -> ParsedEmbed:
    model_info, options = call.model_info, Options(call.values)
    head, activation, top_k = head_of(model_info), _activation(options), options.get(TOP_K)

    def render(embedded: Embedded) -> Response:
        results = written(ranked_labels(embedded, head, activation, top_k))
        return _render(results, sequences.is_single, embedded, model_info)

    request = _request(call, options, sequences.inputs, Output.SCORES)
    return ParsedEmbed(request, render, is_large(len(sequences.inputs), model_info))


def _parse_tokens(call: Call) -> ParsedEmbed:
    """Flat lists are of texts: there is nothing to say of the tokens of a pair."""
    model_info, options, value = call.model_info, Options(call.values), call.values.get(PREDICTED)
    if value == []:
        raise EmptyInput(f"'{PREDICTED.name}' cannot be empty", param=PREDICTED.name)
    texts = parse_texts(value, PREDICTED.name, model_info.max_inputs)
    activation, aggregation = _activation(options), options.get(AGGREGATION)
    ignored, is_single = options.get(IGNORED), isinstance(value, str)
    kept = list(texts)  # a request's inputs are removed when they have been tokenized

    def render(embedded: Embedded) -> Response:
        entities = entities_of(embedded, kept, model_info, aggregation, activation, ignored)
        return _render(entities, is_single, embedded, model_info)

    request = _request(call, options, texts, Output.TOKEN_SCORES)
    request = request._replace(tokenizing=request.tokenizing._replace(wants_offsets=True))
    return ParsedEmbed(request, render, is_large(len(texts), model_info))


def _request(call: Call, options: Options, inputs: list[str] | list[Pair], output: Output) -> EmbedRequest:
    return EmbedRequest(
        inputs=inputs,
        priority=parse_priority(call.headers),
        timeout_s=parse_timeout_s(call.headers),
        tokenizing=without_chunks(read_tokenizing(options, call.model_info), call.model_info),
        output=output,
    )


def _activation(options: Options) -> str | None:
    """As in `labels.scores_of`. Raises BadRequest."""
    is_raw, function = options.get(RAW_SCORES), options.get(FUNCTION)
    if is_raw and function not in (None, "identity"):
        raise contradiction(options.name_of(RAW_SCORES), options.name_of(FUNCTION))
    return "identity" if is_raw else function


def _render(results: Iterator[Iterable[bytes]], is_single: bool, embedded: Embedded, model_info: ModelInfo) -> Response:
    """`results`: the JSON of each sequence, in pieces."""
    body = iter(next(results)) if is_single else list_of_pieces(results)
    return Response(200, body, headers_of(embedded, model_info))
