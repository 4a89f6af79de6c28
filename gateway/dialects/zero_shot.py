"""Hugging Face's zero-shot classification: labels of a request, among which a classifier of entailment chooses. Pure.

Each text is a premise, and the template makes a hypothesis of each label: a pair for each text and label. The scores of
a text are the softmax of its labels' logits of entailment. With `multi_label`, and of a single label, each is that
label's softmax over contradiction and entailment.

Source of the formulas, the template and the labels that count: ZeroShotClassificationPipeline of transformers 5.23. A
model's label is that of entailment if its name begins with "entail"; contradiction is the first other one at an end. A
text that is too long is cut, and its labels are kept, unless they take more than half of the model's length.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vecd.base.files import JsonMapping
from vecd.gateway.api import fields
from vecd.gateway.api.answer import json_response, list_of_pieces, written
from vecd.gateway.api.fields import Field, any_of, list_of, record, value_of
from vecd.gateway.api.operation import Call, ParsedEmbed
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects.ask import INPUT, parse_texts, resolve
from vecd.gateway.dialects.classify import LABEL, check_label_chars
from vecd.gateway.dialects.rerank import default_overflow
from vecd.gateway.encoding.labels import Scores, ranked, softmax
from vecd.gateway.errors import BadRequest, TooManyInputs, WrongModel
from vecd.gateway.request import Embedded, FloatRows, Pair, Response
from vecd.shm.output import Output

_INPUTS = replace(INPUT, name="inputs")
_PLACE = "{}"
_DEFAULT_TEMPLATE = "This example is {}."
_LARGE_CHARS = 256 * 1024
"""Of texts in a response that is rendered in a thread."""


def _read_labels(value: Any, name: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    labels = fields.read_texts(value, name)
    if "" in labels or not labels:
        where = f"{name}[{labels.index('')}]" if labels else name
        raise BadRequest(f"'{where}' must not be empty: at least 1 label is needed", param=name)
    return labels


def _read_template(value: Any, name: str) -> str:
    template = fields.read_text(value, name)
    rest = template.replace(_PLACE, "", 1)
    if rest == template or "{" in rest or "}" in rest:
        raise BadRequest(f"'{name}' must have {{}} once, for the label, and no other braces", param=name)
    return template


CANDIDATES = Field(
    "candidate_labels",
    "of a model whose labels tell entailment from contradiction: labels to choose among, as a list, or as a text with "
    "commas between them",
    any_of(list_of(fields.STRING, at_least=1), fields.STRING, {"type": "null"}),
    _read_labels,
)
TEMPLATE = Field(
    "hypothesis_template",
    "with `candidate_labels`: the sentence that is made of a label, which stands for its {}",
    fields.nullable("string", default=_DEFAULT_TEMPLATE),
    _read_template,
)
MULTI_LABEL = fields.flag(
    "multi_label", "with `candidate_labels`: each label is scored by itself, as several may be true", default=False
)
FIELDS: tuple[Field[Any], ...] = (CANDIDATES, TEMPLATE, MULTI_LABEL)
CHOICE = record(
    sequence=fields.STRING,
    labels=fields.described(list_of(fields.STRING), "the best first"),
    scores=list_of(fields.NUMBER),
)
RESPONSE = any_of(CHOICE, list_of(any_of(CHOICE, LABEL, list_of(LABEL))))


def entailment_of(model_info: ModelInfo) -> int | None:
    """The index of the label; None for a model that has none."""
    card = model_info.card
    labels = card.score.labels if card.score is not None and "classify" in card.capabilities else ()
    return next((index for index, label in enumerate(labels) if label.lower().startswith("entail")), None)


def asks_for(body: JsonMapping) -> tuple[str, ...]:
    """As `Operation.asks_for`."""
    words = (CANDIDATES.name, f"parameters.{CANDIDATES.name}")
    return ("classify",) if any(value_of(word, body) is not None for word in words) else ()


def parse_or(parse_other: Callable[[Call], ParsedEmbed], *, is_for_hub: bool = False) -> Callable[[Call], ParsedEmbed]:
    """Parses requests with candidate labels, and all others by `parse_other`. `is_for_hub`: as in `parse`."""

    def parse_either(call: Call) -> ParsedEmbed:
        is_said = any(call.wanted.get(field) is not None for field in FIELDS)
        return parse(call, is_for_hub=is_for_hub) if is_said else parse_other(call)

    return parse_either


def parse(call: Call, *, is_for_hub: bool) -> ParsedEmbed:
    """`is_for_hub`: the labels of a text are a list of objects, as Hugging Face's clients want them; else they are what
    its pipeline returns. Raises WrongModel and BadRequest."""
    wanted, _, model_info = call
    labels, template = wanted.require(CANDIDATES), wanted.get(TEMPLATE) or _DEFAULT_TEMPLATE
    entailment, word = entailment_of(model_info), wanted.word(CANDIDATES)
    if entailment is None:
        raise WrongModel(
            f"{model_info.what_it_is()}: '{word}' needs a classifier with a label 'entailment'; a model with dense "
            "vectors chooses among labels at POST /v1/classify with 'labels'",
            param=word,
            can=lambda info: entailment_of(info) is not None,
        )
    value, input_word, max_inputs = wanted.get(_INPUTS), wanted.word(_INPUTS), model_info.config.max_inputs
    texts = parse_texts(value, input_word, max_inputs)
    if len(texts) * len(labels) > max_inputs:
        raise TooManyInputs(
            f"'{word}' has {len(labels)} labels for {len(texts)} texts: at most {max_inputs} pairs of a text and a "
            "label in one request (--max-inputs)",
            param=word,
        )
    num_chars = check_label_chars(labels, len(texts), word, len(template))
    hypotheses = [template.replace(_PLACE, label) for label in labels]
    pairs = [Pair(text, hypothesis) for text in texts for hypothesis in hypotheses]
    request = resolve(call, pairs, Output.SCORES, preferred=default_overflow(model_info), has_prompt=False)
    is_multi, is_single = wanted.get(MULTI_LABEL) is True, isinstance(value, str)

    def render(embedded: Embedded) -> Response:
        found = scores_of(embedded.made[0].rows, len(labels), entailment, is_multi=is_multi)
        answers = (_answer(text, labels, row, is_for_hub) for text, row in zip(texts, found, strict=True))
        return json_response(200, next(answers)) if is_single else Response(200, list_of_pieces(written(answers)))

    return ParsedEmbed(request, render, sum(map(len, texts)) + num_chars > _LARGE_CHARS, input_word)


def scores_of(logits: FloatRows, num_labels: int, entailment: int, *, is_multi: bool) -> Scores:
    """float64 [texts, labels]. `logits`: float32 [texts · labels, k]."""
    of_each = logits.astype("f8").reshape(-1, num_labels, logits.shape[1])
    if is_multi or num_labels == 1:
        contradiction = -1 if entailment == 0 else 0
        scores: Scores = softmax(of_each[..., [contradiction, entailment]])[..., 1]
        return scores
    return softmax(of_each[..., entailment])


def _answer(text: str, labels: tuple[str, ...], scores: Scores, is_for_hub: bool) -> Any:
    order = ranked(scores)
    if is_for_hub:
        return [{"label": labels[index], "score": float(scores[index])} for index in order]
    return {"sequence": text, "labels": [labels[index] for index in order], "scores": scores[order].tolist()}
