"""The options of requests in OpenAI's shape, beyond inputs: their fields, by the names that vLLM, Jina, Voyage, Cohere,
text-embeddings-inference and vecd itself use, and their meaning together. Pure.

Fields that contradict each other are refused, because the vectors would depend on which one was ignored.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, NoReturn

from vecd.gateway.api import fields
from vecd.gateway.api.answer import Headers, parse_accept, priority_named, priority_numbered
from vecd.gateway.api.fields import (
    REQUEST_ID,
    Field,
    Schema,
    Values,
    agreed,
    any_of,
    contradiction,
    given,
    list_of,
    nullable,
)
from vecd.gateway.api.operation import Call, ParsedEmbed, ParsedMessages
from vecd.gateway.api.served import PURPOSES, ModelInfo
from vecd.gateway.dialects.inputs import CONVERSATION_FIELDS, TextsOrIds, read_conversations
from vecd.gateway.encoding.forms import Names, check_forms
from vecd.gateway.errors import BadRequest
from vecd.gateway.request import (
    MAX_PROMPT_CHARS,
    Dtype,
    EmbedRequest,
    Encoding,
    Form,
    Overflow,
    Priority,
    Role,
    Tokenizing,
)
from vecd.shm.output import Output


def refused(name: str, why: str, schema: Schema, *, harmless: tuple[Any, ...] = ()) -> Field[None]:
    """A field that is not supported, and would change the vectors or the response: any value but those in `harmless`
    is an error."""

    def read(value: Any, name: str) -> None:
        if not any(value is known for known in harmless):
            raise BadRequest(f"'{name}' is not supported: {why}", param=name)

    return Field(name, f"not supported: {why}", schema, read)


# --- model and prompt -------------------------------------------------------------------------------------------


def _read_prompt(value: Any, name: str) -> str:
    prompt = fields.read_text(value, name)
    if len(prompt) > MAX_PROMPT_CHARS:
        raise BadRequest(f"'{name}' must have at most {MAX_PROMPT_CHARS} characters, has {len(prompt)}", param=name)
    return prompt


MODEL = fields.text(
    "model",
    "name of the model. What stands behind its last colon may be what the texts are for, as in `name:query`: see "
    "`input_type`",
)
PROMPT = Field(
    "prompt",
    'put before every text; "" for no prompt, not even the model\'s own',
    nullable("string", maxLength=MAX_PROMPT_CHARS),
    _read_prompt,
)
PROMPT_NAME = fields.text("prompt_name", "name of one of the model's prompts, which is put before every text")
INPUT_TYPE = fields.text(
    "input_type",
    "what the texts are for, which chooses one of the model's prompts, if it has one for it: a prompt's name, or what "
    "other APIs call the same",
    examples=list(PURPOSES),
)
TASK = fields.text("task", "the same as `input_type`, by Jina's name", examples=list(PURPOSES))
PROMPT_FIELDS: tuple[Field[str], ...] = (PROMPT, PROMPT_NAME, INPUT_TYPE, TASK)
"""A request may have at most one of them."""
_PROMPT_NAMES = frozenset(field.name for field in PROMPT_FIELDS)
_KINDS_OF_INPUT = frozenset(("string", "text"))
"""Semantic Kernel for Java always sends `input_type` "string": what the input is, not what it is for."""


def read_prompt(
    values: Values, model_info: ModelInfo, prompt_fields: Sequence[Field[str]] = PROMPT_FIELDS
) -> str | None:
    """None for the model's default. Raises BadRequest, also if a field and the model's name select different prompts,
    and ModelNotFound for another model's name if names are strict."""
    of_name = model_info.prompt_of_model_name(values.get(MODEL))
    if not values.has_any(_PROMPT_NAMES):
        return of_name
    chosen_by = [field for field in prompt_fields if _selects(field, values, model_info)]
    if not chosen_by:
        return of_name
    if len(chosen_by) > 1:
        names = [field.name for field in chosen_by]
        raise BadRequest(f"'{names[0]}' and '{names[1]}' both choose the prompt: send one of them", param=names[1])
    [field] = chosen_by
    choosers = {PROMPT.name: model_info.checked, PROMPT_NAME.name: model_info.prompt_named}
    prompt = choosers.get(field.name, model_info.prompt_for)(values.require(field), field.name)
    if of_name is not None and prompt != of_name:
        raise contradiction(MODEL.name, field.name)
    return prompt


def _selects(field: Field[str], values: Values, model_info: ModelInfo) -> bool:
    value = values.get(field)
    is_kind = field in (INPUT_TYPE, TASK) and value in _KINDS_OF_INPUT and value not in model_info.prompts
    return value is not None and not is_kind


# --- overflow ---------------------------------------------------------------------------------------------------

_CUT = frozenset((Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT))
_TRUNCATE: dict[str, frozenset[Overflow]] = {
    "NONE": frozenset((Overflow.ERROR,)),
    "START": frozenset((Overflow.TRUNCATE_LEFT,)),
    "END": frozenset((Overflow.TRUNCATE,)),
}
_OF_FLAG: dict[bool, frozenset[Overflow]] = {True: _CUT, False: _TRUNCATE["NONE"]}
# A side alone does not decide whether an input may be cut.
_OF_SIDE = {"left": frozenset(Overflow) - _TRUNCATE["END"], "right": frozenset(Overflow) - _TRUNCATE["START"]}


def _read_truncate(value: Any, name: str) -> frozenset[Overflow]:
    if isinstance(value, bool):
        return _OF_FLAG[value]
    if isinstance(value, str) and value in _TRUNCATE:
        return _TRUNCATE[value]
    raise BadRequest(f"'{name}' must be true, false, 'NONE', 'START' or 'END', is {given(value)}", param=name)


def _read_num_prompt_tokens(value: Any, name: str) -> int:
    number = fields.read_whole_number(value, name)
    if number < 1 and number != -1:
        raise BadRequest(f"'{name}' must be at least 1, or -1 for the model's length, is {number}", param=name)
    return number


OVERFLOW = fields.choice(
    "overflow",
    "what becomes of an input that is longer than the model takes: an error, its beginning (`truncate`), its end "
    "(`truncate_left`), or the mean of its chunks' vectors (`chunk`); default: the server's --overflow",
    {overflow.value: frozenset((overflow,)) for overflow in Overflow},
)
TRUNCATE = Field(
    "truncate",
    "true, or Cohere's and NVIDIA's `END` and `START`, cut an input that is longer than the model takes at that end; "
    "false and `NONE` make it an error",
    any_of(nullable("boolean"), {"enum": [*_TRUNCATE]}),
    _read_truncate,
)
TRUNCATION = Field(
    "truncation",
    "the same, by Voyage's name",
    nullable("boolean"),
    lambda value, name: _OF_FLAG[fields.read_flag(value, name)],
)
TRUNCATE_PROMPT_TOKENS = Field(
    "truncate_prompt_tokens",
    "vLLM's: inputs are cut to so many tokens, special ones included; -1: to as many as the model takes",
    {**nullable("integer", minimum=-1), "not": {"const": 0}},
    _read_num_prompt_tokens,
)
TRUNCATION_SIDE = fields.choice("truncation_side", "the side on which inputs are cut, where they are", _OF_SIDE)
TRUNCATION_DIRECTION = fields.choice(
    "truncation_direction",
    "the same, by text-embeddings-inference's name",
    {name: left for side, left in _OF_SIDE.items() for name in (side, side.capitalize())},
)
ADD_SPECIAL_TOKENS = fields.flag(
    "add_special_tokens", "false: texts are embedded without the model's special tokens around them", default=True
)
OVERFLOW_FIELDS = (OVERFLOW, TRUNCATE, TRUNCATION, TRUNCATION_SIDE, TRUNCATION_DIRECTION)
"""The value of each is the set of policies for a long input that it allows."""
_OVERFLOW_NAMES = frozenset(field.name for field in (*OVERFLOW_FIELDS, TRUNCATE_PROMPT_TOKENS, ADD_SPECIAL_TOKENS))
USUAL_TOKENIZING = Tokenizing()


def read_tokenizing(
    values: Values, model_info: ModelInfo, prompt: str | None, default: Overflow | None = None
) -> Tokenizing:
    """The options of the tokenizer. `default`: the policy for a long input that is preferred where the fields leave it
    open; None: the server's. Raises BadRequest."""
    if not values.has_any(_OVERFLOW_NAMES):
        return USUAL_TOKENIZING if prompt is None else Tokenizing(prompt)
    max_tokens, adds = values.get(TRUNCATE_PROMPT_TOKENS), values.get(ADD_SPECIAL_TOKENS) is not False
    if max_tokens is not None and max_tokens > model_info.config.max_tokens:
        raise BadRequest(
            f"'{TRUNCATE_PROMPT_TOKENS.name}' must be at most {model_info.config.max_tokens}, as many tokens as "
            f"the model takes, is {max_tokens}",
            param=TRUNCATE_PROMPT_TOKENS.name,
        )
    if max_tokens is not None and max_tokens != -1 and adds:
        model_info.check_max_tokens(max_tokens, TRUNCATE_PROMPT_TOKENS.name)
    return Tokenizing(
        prompt,
        overflow=_read_overflow(values, default or model_info.overflow),
        max_tokens=None if max_tokens == -1 else max_tokens,
        add_special_tokens=adds,
    )


def _read_overflow(values: Values, default: Overflow) -> Overflow | None:
    """A policy that all fields allow: `default`, if it is one of them. None if there are no fields for it."""
    agreed(values, TRUNCATION_SIDE, TRUNCATION_DIRECTION)  # both sides together would leave only an error
    allowed_by = {field.name: allowed for field in OVERFLOW_FIELDS if (allowed := values.get(field)) is not None}
    if values.get(TRUNCATE_PROMPT_TOKENS) is not None:
        allowed_by[TRUNCATE_PROMPT_TOKENS.name] = _CUT
    if not allowed_by:
        return None
    for (first, allowed), (second, also_allowed) in combinations(allowed_by.items(), 2):
        if not allowed & also_allowed:
            raise contradiction(first, second)
    candidates: tuple[Overflow, ...] = (default, Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT, *Overflow)
    return next(overflow for overflow in candidates if all(overflow in allowed for allowed in allowed_by.values()))


# --- vectors ----------------------------------------------------------------------------------------------------


def _dimensions(name: str, description: str) -> Field[int]:
    # The allowed numbers depend on the model; the error has OpenAI's words. infinity's client always sends a number.
    def read(value: Any, name: str) -> Any:
        return fields.read_whole_number(value, name) or None

    return Field(name, description, nullable("integer", minimum=0), read)


DIMENSIONS = _dimensions(
    "dimensions",
    "length of the vectors: the model's own, or, of models made for it (Matryoshka), fewer, brought to length 1 again; "
    "0: the model's own",
)
OUTPUT_DIMENSION = _dimensions("output_dimension", "the same, by Voyage's and Cohere's name")
TRUNCATE_DIM = _dimensions("truncate_dim", "the same, by sentence-transformers' name")
DIMENSION_FIELDS = (DIMENSIONS, OUTPUT_DIMENSION, TRUNCATE_DIM)
NORMALIZE = fields.flag(
    "normalize", "true: vectors are brought to length 1, which most models' are anyway; false: they are not"
)
NORMALIZED = fields.flag("normalized", "the same, by Jina's name")
USE_ACTIVATION = fields.flag("use_activation", "the same, by vLLM's name")
NORMALIZE_FIELDS = (NORMALIZE, NORMALIZED, USE_ACTIVATION)


def read_normalize(values: Values) -> bool | None:
    """Whether vectors must have length 1; None: as the model gives them."""
    found = agreed(values, *NORMALIZE_FIELDS)
    return None if found is None else found[0]


# --- the form of vectors ----------------------------------------------------------------------------------------

_METADATA = "bytes"
_ENCODINGS = {
    "float": Encoding.FLOAT,
    "base64": Encoding.BASE64,
    _METADATA: Encoding.BYTES,
    "bytes_only": Encoding.BYTES,
    "npy": Encoding.NPY,
}
_DTYPES = {"float": Dtype.FLOAT32, **{dtype.value: dtype for dtype in Dtype}}
_JINA_TYPES = {
    "float": Dtype.FLOAT32, "base64": Dtype.FLOAT32, "binary": Dtype.BINARY, "ubinary": Dtype.UBINARY,
}  # fmt: skip


def _or(names: Mapping[str, Any]) -> str:
    *most, last = [f"'{name}'" for name in names]
    return f"{', '.join(most)} or {last}"


def _refuse(value: Any, name: str, must_be: str) -> NoReturn:
    raise BadRequest(f"'{name}' must be {must_be}, is {given(value)}", param=name)


def _read_encoding(value: Any, name: str) -> str | None:
    if value == "":  # some clients send it for the default
        return None
    if not isinstance(value, str) or value not in _ENCODINGS:
        _refuse(value, name, _or(_ENCODINGS))
    return value


def _read_jina_type(value: Any, name: str) -> str:
    if isinstance(value, list):
        if len(value) != 1:
            raise BadRequest(f"'{name}' must be one type, or a list of one, is a list of {len(value)}", param=name)
        [value] = value
    if not isinstance(value, str) or value not in _JINA_TYPES:
        _refuse(value, name, _or(_JINA_TYPES))
    return value


def _jina_type(name: str, description: str) -> Field[str]:
    names = [*_JINA_TYPES]
    one = {**list_of({"enum": names}, at_least=1), "maxItems": 1}
    return Field(name, description, any_of({"enum": [*names, None]}, one), _read_jina_type)


ENCODING = Field(
    "encoding_format",
    "how vectors are written: numbers, base64 of their bytes, or without JSON: their bytes, one vector after the other "
    "(`bytes`; `bytes_only` without the header `metadata`), or a NumPy file (`npy`). Default: what `Accept` prefers",
    {"enum": [*_ENCODINGS, "", None], "default": "float"},
    _read_encoding,
)
OUTPUT_DTYPE = fields.choice("output_dtype", "type of the vectors' elements", _DTYPES, default="float")
EMBED_DTYPE = fields.choice(
    "embed_dtype",
    "the same, by vLLM's name",
    {dtype.value: dtype for dtype in (Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16)},
)
ENDIANNESS = fields.choice(
    "endianness",
    "order of the bytes of each element, where bytes are answered; native is little",
    {"native": False, "little": False, "big": True},
    default="little",
)
EMBEDDING_TYPE = _jina_type("embedding_type", "type of the vectors' elements, or `base64`, as with Jina")
ENCODING_TYPE = _jina_type("encoding_type", "the same, as clients of Jina's first API have it")
FORM_FIELDS = (ENCODING, OUTPUT_DTYPE, EMBED_DTYPE, ENDIANNESS, EMBEDDING_TYPE, ENCODING_TYPE)
_DTYPE_NAMES = frozenset(field.name for field in FORM_FIELDS if field is not ENCODING)


class RequestedForm(NamedTuple):
    form: Form
    has_metadata: bool = False
    """The response describes its rows in vLLM's header, too."""


_PLAIN = {name: RequestedForm(Form(encoding), name == _METADATA) for name, encoding in _ENCODINGS.items()}
"""By `encoding_format`, for requests without other fields for the form."""
_ACCEPTED = {encoding: RequestedForm(Form(encoding or Encoding.FLOAT)) for encoding in (None, *Encoding)}
"""By what `Accept` prefers to JSON, for requests without a field for the form."""


def read_encoding(values: Values, headers: Headers) -> RequestedForm:
    """Of a request with no field for the form but `encoding_format`."""
    name = values.get(ENCODING)
    return _PLAIN[name] if name is not None else _ACCEPTED[parse_accept(headers)]


def read_form(values: Values, headers: Headers) -> RequestedForm:
    """Fields win over `Accept`. Raises BadRequest."""
    if not values.has_any(_DTYPE_NAMES):
        return read_encoding(values, headers)
    name = values.get(ENCODING)
    jina = agreed(values, EMBEDDING_TYPE, ENCODING_TYPE)
    encoding = None if name is None else _ENCODINGS[name]
    if jina is not None and jina[0] == "base64":
        if encoding not in (None, Encoding.BASE64):
            raise contradiction(ENCODING.name, jina[1])
        encoding = Encoding.BASE64
    if encoding is None:
        encoding = parse_accept(headers) or Encoding.FLOAT
    is_big_endian = values.get(ENDIANNESS) is True and encoding is not Encoding.FLOAT
    return RequestedForm(Form(encoding, _read_dtype(values, jina), is_big_endian), name == _METADATA)


def _read_dtype(values: Values, jina: tuple[str, str] | None) -> Dtype:
    found = agreed(values, OUTPUT_DTYPE, EMBED_DTYPE)
    if jina is None:
        return Dtype.FLOAT32 if found is None else found[0]
    dtype = _JINA_TYPES[jina[0]]
    if found is not None and found[0] is not dtype:
        raise contradiction(found[1], jina[1])
    return dtype


def _check_form(request: EmbedRequest, values: Values, model_info: ModelInfo) -> None:
    """Raises BadRequest, which names the field, if the vectors cannot have the requested form."""
    output = request.output
    if output in (Output.SPARSE, Output.LEXICAL) or (output.is_plain and request.forms[0].dtype is Dtype.FLOAT32):
        return  # they always can
    if output is Output.HYBRID:  # its vectors of tokens are as long as the others
        request = request._replace(output=Output.TOKEN_VECTORS)
    check_forms(
        request,
        model_info.card,
        Names(
            dtype=_first_given(values, (OUTPUT_DTYPE, EMBED_DTYPE, EMBEDDING_TYPE, ENCODING_TYPE)),
            encoding=_first_given(values, (ENCODING, EMBEDDING_TYPE, ENCODING_TYPE)),
            dimensions=_first_given(values, DIMENSION_FIELDS),
        ),
        has_ranges=model_info.config.quantization_ranges is not None,
    )


def _first_given(values: Values, candidates: Sequence[Field[Any]]) -> str:
    return next((field.name for field in candidates if values.get(field) is not None), candidates[0].name)


# --- the rest ---------------------------------------------------------------------------------------------------


def _read_priority(value: Any, name: str) -> Priority:
    if type(value) is int:
        return priority_numbered(value)
    return priority_named(fields.expect(str, value, name, "a string or a whole number"), f"'{name}'", param=name)


PRIORITY = Field(
    "priority",
    "how soon an answer is wanted, beside other requests: a name, or a number, lower first",
    any_of({"enum": ["interactive", "normal", "bulk", None]}, {"type": "integer"}),
    _read_priority,
)
REPORT = fields.flag(
    "report", "true: each item of the answer says what became of its input: tokens, whether it was cut, chunks, source"
)
USER = fields.anything("user", "ignored", {})
PADDING = fields.choice(
    "padding",
    "vLLM's; changes nothing, because padding is masked: an input has the vector that it has without",
    {"max_length": None, "do_not_pad": None},
)
REFUSED_FIELDS: tuple[Field[None], ...] = (
    refused("chat_template", "only the model's own chat template is used", nullable("string")),
    refused("mm_processor_kwargs", "this server embeds texts, not images or sounds", nullable("object")),
    refused("late_chunking_params", "'late_chunking' of /v1/embeddings has all of them", nullable("object")),
)


def _read_modality(value: Any, name: str) -> None:
    if value != "text":
        _refuse(value, name, "'text'")


RETURN_MULTIVECTOR = fields.flag(
    "return_multivector",
    "Jina's: true: a vector for each token (`embeddings`) in place of one for each input, of a model made for it",
    default=False,
)
MODALITY = Field("modality", "infinity's; of texts alone", {"enum": ["text", None]}, _read_modality)


COMMON: tuple[Field[Any], ...] = (
    MODEL,
    PROMPT,
    PROMPT_NAME,
    INPUT_TYPE,
    *OVERFLOW_FIELDS,
    TRUNCATE_PROMPT_TOKENS,
    ADD_SPECIAL_TOKENS,
    *DIMENSION_FIELDS,
    *NORMALIZE_FIELDS,
    *FORM_FIELDS,
    REPORT,
    PRIORITY,
    USER,
    MODALITY,
    PADDING,
    REQUEST_ID,
    *CONVERSATION_FIELDS,
    *REFUSED_FIELDS,
)
"""The fields of every operation of this kind that embeds, without its inputs."""
RARE_NAMES = frozenset(field.name for field in (*COMMON, TASK)) - {
    MODEL.name, ENCODING.name, USER.name, REQUEST_ID.name,
}  # fmt: skip
"""The names of all fields but those that most requests have."""

# --- all together -----------------------------------------------------------------------------------------------


def read_request(
    call: Call,
    inputs: TextsOrIds,
    requested: RequestedForm,
    *,
    output: Output = Output.VECTORS,
    prompt_fields: Sequence[Field[str]] = PROMPT_FIELDS,
    are_ids_of_model: bool = False,
) -> EmbedRequest:
    """The request with all its options. `output`: any but UNNORMALIZED; only VECTORS have `dimensions`. Raises
    BadRequest."""
    values, model_info = call.values, call.model_info
    normalize, dimensions = read_normalize(values), agreed(values, *DIMENSION_FIELDS)
    tokenizing = read_tokenizing(values, model_info, read_prompt(values, model_info, prompt_fields))
    # vLLM brings the vectors of tokens to length 1 by default; those of inputs are as the model gives them.
    are_tokens, has_vector = output in _OF_TOKENS, output is Output.VECTORS
    if output in _WITH_ROLES:
        tokenizing = tokenizing._replace(role=_read_role(values, model_info))
    request = call.request(
        inputs,
        forms=(requested.form,),
        priority=values.get(PRIORITY),
        tokenizing=tokenizing._replace(are_ids_of_model=True) if are_ids_of_model else tokenizing,
        output=Output.UNNORMALIZED if has_vector and normalize is False else output,
        normalize=normalize is not False if are_tokens else has_vector and normalize is True,
        dimensions=model_info.check_dimensions(*dimensions) if has_vector and dimensions is not None else None,
        wants_report=_read_report(values, requested),
    )
    _check_form(request, values, model_info)
    return request


_OF_TOKENS = frozenset((Output.TOKENS, Output.TOKEN_VECTORS, Output.HYBRID))
_WITH_ROLES = frozenset((Output.SPARSE, Output.LEXICAL, Output.TOKEN_VECTORS, Output.HYBRID))
"""Outputs that may be others for a query than for a document."""


def _read_role(values: Values, model_info: ModelInfo) -> Role | None:
    """By the field that chooses the prompt, or by the model's name."""
    purposes = [values.get(field) for field in (INPUT_TYPE, TASK, PROMPT_NAME)]
    of_name = (values.get(MODEL) or "").rpartition(":")[2]
    return next((role for purpose in (*purposes, of_name) if (role := model_info.role_of(purpose))), None)


def read_messages(
    call: Call, instead_of: Field[Any], parse: Callable[[Call], ParsedEmbed | ParsedMessages]
) -> ParsedMessages:
    """The conversations of a call that has `messages`. `parse` makes a request of the same call with their texts in the
    field `instead_of`. Raises BadRequest."""
    values, model_info = call.values, call.model_info
    for field in PROMPT_FIELDS:
        if values.get(field) is not None:
            raise BadRequest(
                f"'messages' and '{field.name}': send the prompt as one of the messages, with the role 'system'",
                param=field.name,
            )

    def proceed(texts: list[str]) -> ParsedEmbed:
        changes = {
            "messages": None,
            instead_of.name: texts,
            PROMPT.name: "",
            ADD_SPECIAL_TOKENS.name: values.get(ADD_SPECIAL_TOKENS) is True,
        }
        parsed = parse(call._replace(values=values.changed(changes)))
        assert isinstance(parsed, ParsedEmbed)
        return parsed

    return read_conversations(
        values, model_info, proceed, instead_of=instead_of, max_conversations=model_info.config.max_inputs
    )


def _read_report(values: Values, requested: RequestedForm) -> bool:
    """Raises BadRequest if the response is binary."""
    wants_report = values.get(REPORT) is True
    if wants_report and requested.form.encoding not in (Encoding.FLOAT, Encoding.BASE64):
        raise BadRequest(
            f"'{REPORT.name}' is part of a JSON answer, and this one has the encoding "
            f"'{requested.form.encoding.value}', which leaves no place for it",
            param=REPORT.name,
        )
    return wants_report
