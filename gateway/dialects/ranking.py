"""What all routes that rank or score documents have in common, whatever their shapes: the fields, how queries and
documents are read, the policy for long documents, which models can rank, and the scores of a result. Pure.

- A model with scores (Output.SCORES) gets a pair of a query and a document for each document.
- A multi-vector model gets the queries, and behind them the documents (`Tokenizing.num_queries`). The score of a
  document is MaxSim (`vecd.gateway.encoding.result`), which no activation is applied to.

A document that is too long is cut, and its query is kept: one long document of fifty is no reason to rank none. The
server (`--overflow error`) or the request may say that it is an error instead. Documents are ranked by their logits,
equal ones in their own order. Scores are JSON numbers with all digits of a float64, and always with a point or an
exponent, because some clients read nothing else as a floating-point number.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vecd.gateway.api import fields
from vecd.gateway.api.fields import Field, Values, any_of, given, json_type, list_of, nullable, record
from vecd.gateway.api.operation import Call, ParsedEmbed
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects import options
from vecd.gateway.dialects.inputs import check_num, parse_texts
from vecd.gateway.encoding.labels import Scores, ranked, relevance_logits, relevance_of
from vecd.gateway.encoding.result import MaxSimRows, ScoreRows
from vecd.gateway.errors import BadRequest, WrongModel
from vecd.gateway.request import Embedded, Overflow, Pair, Response, Role, Tokenizing
from vecd.shm.output import Output

NEEDS = ("rerank", "multi-vector")
"""As in `Operation.needs`."""

_LARGE_RESPONSE_CHARS = 256 * 1024
"""A response that repeats more of the documents is written in a thread: 0.3 ms."""
_CUTS = (Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT)

# --- fields -----------------------------------------------------------------------------------------------------

_TEXT = any_of(fields.STRING, record(text=fields.STRING))
TEXTS_SCHEMA = any_of(list_of(_TEXT, at_least=1), fields.STRING)


def flag(name: str, description: str, **schema: Any) -> Field[bool]:
    """A boolean that may also be written as a string, because Xinference's clients do."""
    return Field(name, description, any_of(nullable("boolean", **schema), {"enum": [*_FLAGS]}), _read_flag)


_FLAGS = {"true": True, "false": False, "True": True, "False": False}


def _read_flag(value: Any, name: str) -> bool:
    if isinstance(value, str) and value in _FLAGS:
        return _FLAGS[value]
    if not isinstance(value, bool):
        raise BadRequest(f"'{name}' must be true or false, is {given(value)}", param=name)
    return value


def _read_query(value: Any, name: str) -> str:
    if isinstance(value, dict):
        return fields.expect(str, value.get("text"), f"{name}.text", "a string", none="missing")
    return fields.expect(str, value, name, "a string, or an object with a string as its 'text'")


QUERY = Field("query", "what the documents are ranked for", _TEXT, _read_query, is_required=True, is_large=True)
TOP_N = fields.whole_number("top_n", "most documents in the response; 0: all", minimum=0)
RAW_SCORES = flag("raw_scores", "true: scores are the model's own numbers, without a sigmoid", default=False)
USE_ACTIVATION = flag("use_activation", "false: the same, by vLLM's name")
INSTRUCTION = fields.text("instruction", "what to rank by, for models whose template has a place for it")
MAX_TOKENS_PER_DOC = fields.whole_number(
    "max_tokens_per_doc", "most tokens of a document, the rest is cut off; 0: as many as the model takes", minimum=0
)
MAX_TOKENS_PER_QUERY = fields.whole_number("max_tokens_per_query", "the same for the query", minimum=0)
TRUNCATION = replace(
    options.TRUNCATION,
    schema=flag("", "").schema,
    read=lambda value, name: options.TRUNCATION.read(_read_flag(value, name), name),
)
OVERFLOW = fields.choice(
    "overflow",
    "what becomes of a document that is too long: an error, its beginning (`truncate`), or its end (`truncate_left`); "
    "default: the server's --overflow, or its beginning where that is `chunk`",
    {overflow.value: frozenset((overflow,)) for overflow in (Overflow.ERROR, *_CUTS)},
)
TOKENIZING_FIELDS: tuple[Field[Any], ...] = (
    OVERFLOW,
    options.TRUNCATE,
    TRUNCATION,
    options.TRUNCATE_PROMPT_TOKENS,
    options.TRUNCATION_SIDE,
    options.TRUNCATION_DIRECTION,
    MAX_TOKENS_PER_DOC,
    MAX_TOKENS_PER_QUERY,
    INSTRUCTION,
)
COMMON: tuple[Field[Any], ...] = (
    options.MODEL,
    *TOKENIZING_FIELDS,
    options.PRIORITY,
    options.USER,
    fields.REQUEST_ID,
)

# --- inputs -----------------------------------------------------------------------------------------------------

_TEXT_FIELD = ("text",)


def read_documents(value: Any, name: str, max_inputs: int, rank_fields: tuple[str, ...] = _TEXT_FIELD) -> list[str]:
    """A text, or a list of texts and of objects, of which the `rank_fields` become lines of one text. Raises
    BadRequest, which has the index of the wrong one."""
    if isinstance(value, list):
        check_num(value, name, max_inputs)
    if isinstance(value, list) and set(map(type, value)) != {str}:
        value = [_text_of(item, f"{name}[{index}]", name, rank_fields) for index, item in enumerate(value)]
    return parse_texts(value, name, max_inputs)


def _text_of(item: Any, where: str, name: str, rank_fields: tuple[str, ...]) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, dict):
        values = [item.get(field) for field in rank_fields if item.get(field) is not None]
        texts = [value for value in values if isinstance(value, str)]
        if texts and len(texts) == len(values):
            return "\n".join(texts)
    what = "as its 'text'" if rank_fields == _TEXT_FIELD else "in its 'rank_fields'"
    is_now = "another object" if isinstance(item, dict) else json_type(item)
    raise BadRequest(f"'{where}' must be a string, or an object with a string {what}, is {is_now}", param=name)


def read_tokenizing(values: Values, model_info: ModelInfo) -> Tokenizing:
    """By the fields of `TOKENIZING_FIELDS`."""
    model_info.prompt_of_model_name(values.get(options.MODEL))  # raises ModelNotFound if names are strict
    default = default_overflow(model_info)
    tokenizing = options.read_tokenizing(values, model_info, None, default)
    instruction = values.get(INSTRUCTION)
    template = None if model_info.card.score is None else model_info.card.score.pair_template
    has_place = template is not None and "{instruction}" in template.before + template.between + template.after
    if instruction is not None and not has_place:
        raise BadRequest(f"'{INSTRUCTION.name}': this model has no place for one", param=INSTRUCTION.name)
    return tokenizing._replace(
        overflow=tokenizing.overflow or default,
        max_document_tokens=values.get(MAX_TOKENS_PER_DOC) or None,
        max_query_tokens=values.get(MAX_TOKENS_PER_QUERY) or None,
        instruction=instruction,
    )


def default_overflow(model_info: ModelInfo) -> Overflow:
    """The server's own policy. What is ranked has no chunks, and is cut instead."""
    return Overflow.TRUNCATE if model_info.overflow is Overflow.CHUNK else model_info.overflow


def _is_raw(values: Values) -> bool:
    """Whether scores are the model's own numbers."""
    raw, activated = values.get(RAW_SCORES), values.get(USE_ACTIVATION)
    if raw is not None and raw is activated:
        raise fields.contradiction(RAW_SCORES.name, USE_ACTIVATION.name)
    return raw is True or activated is False


# --- the request and its result ---------------------------------------------------------------------------------


class Relevance(NamedTuple):
    """How well each document answers its query, in the order of the request."""

    logits: Scores
    """What documents are ranked by."""
    scores: list[float]
    """What the response has."""

    def ranked(self, num: int | None) -> list[tuple[int, float]]:
        """The index and the score of the `num` best documents, the best first; 0 and None: of all."""
        return [(index, self.scores[index]) for index in ranked(self.logits, num or None)]


def parse(
    call: Call,
    queries: list[str],
    documents: list[str],
    field: str,
    render: Callable[[Embedded, Relevance], Response],
    *,
    tokenizing: Tokenizing | None = None,
    is_raw: bool | None = None,
    activation: str = "sigmoid",
    repeated: Sequence[str] = (),
) -> ParsedEmbed:
    """The call for the scores of `documents`, each for the query of its index, or all for the only one. `field`: the
    name of that of the documents. `tokenizing`, and `is_raw`, whether scores are what the model computes: by the fields
    of `COMMON` if they are not given. `activation`: of scores that are not raw. `repeated`: the texts that the response
    has, too. Raises WrongModel and BadRequest."""
    model_info, values = call.model_info, call.values
    tokenizing = read_tokenizing(values, model_info) if tokenizing is None else tokenizing
    is_raw = _is_raw(values) if is_raw is None else is_raw
    is_scored = _check(model_info)
    if not is_scored:
        tokenizing = tokenizing._replace(role=Role.DOCUMENT, num_queries=len(queries))
    of_each = queries * len(documents) if len(queries) == 1 else queries
    request = call.request(
        list(map(Pair, of_each, documents)) if is_scored else [*queries, *documents],
        priority=values.get(options.PRIORITY),
        tokenizing=tokenizing,
        output=Output.SCORES if is_scored else Output.TOKEN_VECTORS,
        is_max_sim=not is_scored,
    )

    def render_scores(embedded: Embedded) -> Response:
        [collector] = embedded.collectors
        if isinstance(collector, ScoreRows):
            logits = relevance_logits(collector.logits)
            scores = relevance_of(logits, "identity" if is_raw else activation)
        else:
            assert isinstance(collector, MaxSimRows)
            logits = scores = collector.scores()
        return render(embedded, Relevance(logits, scores.tolist()))

    is_large = not is_scored or sum(map(len, repeated)) > _LARGE_RESPONSE_CHARS
    return ParsedEmbed(request, render_scores, is_large, field)


def _check(model_info: ModelInfo) -> bool:
    """Whether the model ranks by scores, not by MaxSim. Raises WrongModel if it does neither."""
    if _ranks(model_info):
        return "rerank" in model_info.card.capabilities
    what = "makes embeddings" if model_info.card.score is None else "classifies texts"
    raise WrongModel(f"The model served here {what}: it cannot rank texts", can=_ranks)


def _ranks(model_info: ModelInfo) -> bool:
    return not set(NEEDS).isdisjoint(model_info.card.capabilities)
