"""The vocabulary of requests: what any request of any dialect can want, and what that means for the model. Pure.

Dialects have many words for few attributes. `dimensions`, `output_dimension` and `truncate_dim` are one attribute;
TEI's `truncate: true`, Cohere's `truncate: "END"` and Voyage's `truncation: true` are another. A dialect is a table of
words:

    body ─ read(words, body) ─ Wanted: by attribute, whatever word was used ─ resolve(call, inputs) ─ EmbedRequest

- An attribute is declared once, in this module, as the field of its most usual name: values, reader, documentation. It
  is the key to its value in `Wanted`. Other words for it are made with `called`, or with `replace` where a dialect
  writes the values in another way. Attributes that one dialect alone has are declared there.
- One word may say something of several attributes: `truncate_prompt_tokens` also says that inputs may be cut.
- Words that contradict each other are found in one place (`vecd.gateway.api.fields.agreed`), because the vectors would
  depend on which one was ignored. Values must be equal. Where a word leaves something open, its value is the set of
  what it allows, and the sets of several words are intersected: `truncate: true` and `truncation_side: left` together
  allow one policy. The prompt is compared when the texts of all words for it are known, the model's name included.
- An alias' defaults are what it wants itself: `alias | wanted`. What its model info has as the model's own default (the
  prompt, the policy for long inputs) is used where the request says nothing.
- `resolve` has every check against the model, once. Errors speak the client's words (`Wanted.word`).
- A field that would change the vectors and is not supported is refused, never ignored.

The inputs of a request are texts, token ids, or vLLM's conversations, which the model's chat template makes a text of
each. Such texts have no other prompt, and by default no special tokens but the template's.
"""

from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeAlias

import orjson

from vecd.base.files import JsonMapping, JsonObject
from vecd.gateway.api import fields
from vecd.gateway.api.fields import (
    REQUEST_ID,
    SEVERAL,
    Field,
    Fields,
    Headers,
    Said,
    Schema,
    Wanted,
    agreed,
    any_of,
    given,
    json_type,
    list_of,
    nullable,
    parse_accept,
    parse_priority,
    parse_timeout_s,
    priority_named,
    priority_numbered,
    record,
)
from vecd.gateway.api.operation import Call, ParsedMessages
from vecd.gateway.api.served import PURPOSES, ModelInfo
from vecd.gateway.config import AliasDefaults
from vecd.gateway.encoding.forms import Names, check_forms
from vecd.gateway.errors import BadRequest, TooManyInputs
from vecd.gateway.request import (
    ALL,
    MAX_PROMPT_CHARS,
    Dtype,
    EmbedRequest,
    Encoding,
    Form,
    Inputs,
    Overflow,
    Priority,
    Role,
    SparseOptions,
    TokenIds,
    Tokenizing,
)
from vecd.gateway.tokenization.chat_process import MAX_PAYLOAD_BYTES
from vecd.model.steps import SCORE_ACTIVATIONS
from vecd.shm.output import Output

TextsOrIds: TypeAlias = list[str] | list[TokenIds]


def refused(name: str, why: str, schema: Schema, *, harmless: tuple[Any, ...] = ()) -> Field[None]:
    """A field that is not supported, and would change the vectors or the response: any value but those in `harmless`
    is an error."""

    def read(value: Any, name: str) -> None:
        if not any(value is known for known in harmless):
            raise BadRequest(f"'{name}' is not supported: {why}", param=name)

    return Field(name, f"not supported: {why}", schema, read)


# --- inputs -----------------------------------------------------------------------------------------------------

INPUT = fields.anything(
    "input",
    "what is to be embedded: a string, a list of strings (or of Jina's objects with a `text`), token ids, or a list of "
    "lists of them",
    any_of(
        fields.STRING,
        list_of(any_of(fields.STRING, record(text=fields.STRING)), at_least=1),
        fields.TOKEN_IDS,
        list_of(fields.TOKEN_IDS, at_least=1),
    ),
    is_required=True,
    is_large=True,
)


_STRINGS = {str}


def parse_inputs(value: Any, name: str, max_inputs: int) -> TextsOrIds:
    """A string, a list of strings, one list of token ids, or a list of such lists, of the field `name`. A string in a
    list may also be written as Jina's `{"text": "…"}`. Raises BadRequest."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and 0 < len(value) <= max_inputs and set(map(type, value)) == _STRINGS:  # most requests
        return value
    if isinstance(value, array) or (isinstance(value, list) and value and type(value[0]) is int):
        ids = parse_ids(value, name)
        return [ids]
    if not isinstance(value, list):
        raise _none_of(value, name, "a string, a list of strings, or token ids")
    check_num(value, name, max_inputs)
    if isinstance(value[0], list | array):
        return check_id_lists(value, name)
    if dict in map(type, value):
        value = [_unwrapped(item, f"{name}[{index}]", name) for index, item in enumerate(value)]
    return _check_texts(value, name)


def _unwrapped(item: Any, name: str, param: str) -> Any:
    """The text of an object that holds only a text."""
    # The message does not name the keys, because they may be any text that was sent.
    if type(item) is not dict:
        return item
    if not any(key != "text" and value is not None for key, value in item.items()):
        text = item.get("text")
        if isinstance(text, str):
            return text
    raise BadRequest(
        f"'{name}' must be a string, or an object with a string as its 'text' and nothing else (no image, …), is "
        "another object",
        param=param,
    )


def parse_texts(value: Any, name: str, max_inputs: int) -> list[str]:
    """A string or a list of strings. Raises BadRequest."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _none_of(value, name, "a string or a list of strings")
    check_num(value, name, max_inputs)
    return _check_texts(value, name)


def _none_of(value: Any, name: str, what: str) -> BadRequest:
    wrong = f"is required: {what}" if value is None else f"must be {what}, is {json_type(value)}"
    return BadRequest(f"'{name}' {wrong}", param=name)


def parse_ids(value: Any, where: str, param: str = "") -> TokenIds:
    """One list of token ids, at this place of the field `param`, which defaults to `where`. Raises BadRequest."""
    param = param or where
    if not isinstance(value, list | array):
        raise BadRequest(f"'{where}' must be a list of token ids, is {json_type(value)}", param=param)
    if not value:
        raise BadRequest(f"'{where}' is an empty list of token ids", param=param)
    if isinstance(value, array) or set(map(type, value)) == {int}:  # ten times faster than the loop, for millions
        return value
    index, wrong = next((index, item) for index, item in enumerate(value) if type(item) is not int)
    raise BadRequest(f"'{where}[{index}]' must be a token id, is {json_type(wrong)}", param=param)


def check_num(values: list[Any], name: str, max_inputs: int) -> None:
    """Refuse an empty list, and one with too many inputs. Raises BadRequest."""
    if not values:
        raise BadRequest(f"'$.{name}' is invalid: the list is empty, at least 1 input is needed", param=name)
    if len(values) > max_inputs:
        raise TooManyInputs(
            f"'$.{name}' is invalid: {len(values)} inputs, at most {max_inputs} in one request (--max-inputs)",
            param=name,
        )


def _check_texts(values: list[Any], name: str) -> list[str]:
    for index, value in enumerate(values):
        if type(value) is not str:
            raise BadRequest(f"'{name}[{index}]' must be a string, is {json_type(value)}", param=name)
    return values


def check_id_lists(values: list[Any], name: str) -> list[TokenIds]:
    """`values`, checked: lists of token ids, none of them empty. Raises BadRequest."""
    return [parse_ids(value, f"{name}[{index}]", name) for index, value in enumerate(values)]


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
TASK = INPUT_TYPE.called("task", "Jina's")
_KINDS_OF_INPUT = frozenset(("string", "text"))
"""Semantic Kernel for Java always sends `input_type` "string": what the input is, not what it is for."""
ROLE: Field[Role] = fields.choice("role", "only an alias says it", {role.value: role for role in Role})


def _prompt_of(wanted: Wanted, model_info: ModelInfo, purpose: str | None) -> str | None:
    """None for the model's default. `purpose`: of texts of which the words say none. Raises BadRequest, and
    ModelNotFound for another model's name if names are strict."""
    by_name = model_info.prompt_of_model_name(wanted.get(MODEL))
    if purpose is None and model_info.model_prompt is None and wanted.is_without(_FOR_PROMPT):  # most requests
        return by_name
    said: list[tuple[str, str | None]] = [] if by_name is None else [(wanted.word(MODEL), by_name)]
    instead = "send one of them"
    if wanted.has(MESSAGES.name):
        said.append((MESSAGES.name, ""))
        instead = "send the prompt as one of the messages, with the role 'system'"
    texts = (PROMPT, model_info.checked), (PROMPT_NAME, model_info.prompt_named), (INPUT_TYPE, model_info.prompt_for)
    for attribute, text_of in texts:
        value = wanted.get(attribute)
        is_kind = attribute is INPUT_TYPE and value in _KINDS_OF_INPUT and value not in model_info.prompts
        if value is not None and not is_kind:
            word = wanted.word(attribute)
            said.append((word, text_of(value, word)))
    if said:
        return agreed(said, instead)
    if model_info.model_prompt is not None:  # the default is an alias'
        return model_info.default_prompt
    return None if purpose is None else model_info.prompt_for(purpose)


def _role_of(wanted: Wanted, model_info: ModelInfo, purpose: str | None) -> Role | None:
    """By what chooses the prompt."""
    of_name = (wanted.get(MODEL) or "").rpartition(":")[2]
    purposes = (wanted.get(INPUT_TYPE), purpose, wanted.get(PROMPT_NAME), of_name)
    return next((role for purpose in purposes if (role := model_info.role_of(purpose))), None)


# --- overflow ---------------------------------------------------------------------------------------------------

_CUT = frozenset((Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT))
_NONE = frozenset((Overflow.ERROR,))
ENDS = {"NONE": _NONE, "START": frozenset((Overflow.TRUNCATE_LEFT,)), "END": frozenset((Overflow.TRUNCATE,))}
"""Cohere's values, by which end is cut."""
_OF_FLAG: dict[bool, frozenset[Overflow]] = {True: _CUT, False: _NONE}
# A side alone does not decide whether an input may be cut.
_OF_SIDE = {
    "left": Said(overflow=frozenset(Overflow) - ENDS["END"], truncation_side="left"),
    "right": Said(overflow=frozenset(Overflow) - ENDS["START"], truncation_side="right"),
}


def _read_truncate(value: Any, name: str) -> frozenset[Overflow]:
    if isinstance(value, bool):
        return _OF_FLAG[value]
    if isinstance(value, str) and value in ENDS:
        return ENDS[value]
    raise BadRequest(f"'{name}' must be true, false, 'NONE', 'START' or 'END', is {given(value)}", param=name)


def read_truncation(value: Any, name: str) -> frozenset[Overflow]:
    return _OF_FLAG[fields.read_flag(value, name)]


def _read_num_prompt_tokens(value: Any, name: str) -> Said:
    number = fields.read_whole_number(value, name)
    if number < 1 and number != -1:
        raise BadRequest(f"'{name}' must be at least 1, or -1 for the model's length, is {number}", param=name)
    return Said(overflow=_CUT, max_tokens=None if number == -1 else number)


OVERFLOW = fields.choice(
    "overflow",
    "what becomes of an input that is longer than the model takes: an error, its beginning (`truncate`), its end "
    "(`truncate_left`), or the mean of its chunks' vectors (`chunk`); default: the server's --overflow",
    {overflow.value: frozenset((overflow,)) for overflow in Overflow},
)
"""Its value is the set of policies that are allowed."""
TRUNCATE = replace(
    OVERFLOW,
    name="truncate",
    description="true, or Cohere's and NVIDIA's `END` and `START`, cut an input that is longer than the model takes at "
    "that end; false and `NONE` make it an error",
    schema=any_of(nullable("boolean"), {"enum": [*ENDS]}),
    read=_read_truncate,
)
TRUNCATION = replace(TRUNCATE.called("truncation", "Voyage's"), schema=nullable("boolean"), read=read_truncation)
TRUNCATE_PROMPT_TOKENS = Field(
    "truncate_prompt_tokens",
    "vLLM's: inputs are cut to so many tokens, special ones included; -1: to as many as the model takes",
    {**nullable("integer", minimum=-1), "not": {"const": 0}},
    _read_num_prompt_tokens,
    key=SEVERAL,
)
TRUNCATION_SIDE = fields.choice(
    "truncation_side", "the side on which inputs are cut, where they are", _OF_SIDE, key=SEVERAL
)
TRUNCATION_DIRECTION = fields.choice(
    "truncation_direction",
    "the same as `truncation_side`, by text-embeddings-inference's name",
    {name: left for side, left in _OF_SIDE.items() for name in (side, side.capitalize())},
    key=SEVERAL,
)
MAX_TOKENS = fields.whole_number("max_tokens", "longest text in tokens, if that is less than the model's", minimum=1)
ADD_SPECIAL_TOKENS = fields.flag(
    "add_special_tokens", "false: texts are embedded without the model's special tokens around them", default=True
)


_BY_DEFAULT: tuple[Overflow, ...] = (Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT, *Overflow)


def overflow_of(wanted: Wanted, preferred: Overflow) -> Overflow:
    """A policy for long inputs that all words allow: `preferred`, if it is one of them."""
    allowed = wanted.get(OVERFLOW) or (preferred,)
    return next(overflow for overflow in (preferred, *_BY_DEFAULT) if overflow in allowed)


def _max_tokens_of(wanted: Wanted, model_info: ModelInfo, *, adds_special_tokens: bool) -> int:
    """The longest sequence, where that is less than the model's."""
    most = wanted.get(MAX_TOKENS)
    if most is None:
        return ALL
    word = wanted.word(MAX_TOKENS)
    if most > model_info.config.max_tokens and word == TRUNCATE_PROMPT_TOKENS.name:
        raise BadRequest(
            f"'{word}' must be at most {model_info.config.max_tokens}, as many tokens as the model takes, is {most}",
            param=word,
        )
    if adds_special_tokens:
        model_info.check_max_tokens(most, word)
    return most if most < model_info.config.max_tokens else ALL


# --- vectors ----------------------------------------------------------------------------------------------------


def _read_use_activation(value: Any, name: str) -> Said:
    is_used = fields.read_flag(value, name)
    return Said(normalize=is_used, activation=OWN if is_used else RAW)


DIMENSIONS = Field(
    "dimensions",
    "length of the vectors: the model's own, or, of models made for it (Matryoshka), fewer, brought to length 1 again; "
    "0: the model's own",
    nullable("integer", minimum=0),
    fields.read_whole_number,  # the allowed numbers depend on the model; infinity's client always sends one
)
NORMALIZE = fields.flag(
    "normalize", "true: vectors are brought to length 1, which most models' are anyway; false: they are not"
)
ACTIVATION: Field[frozenset[str]] = fields.anything("activation", "no word of any client", {})
"""Of scores. Its value is the set of what is allowed: `_OWN`, the model's own, and those of SCORE_ACTIVATIONS."""
_OWN = "own"
OWN, RAW = frozenset((_OWN,)), frozenset(("identity",))
ANY_ACTIVATION = frozenset((_OWN, *SCORE_ACTIVATIONS))


def activation_of(wanted: Wanted) -> str | None:
    """One of SCORE_ACTIVATIONS; None: the model's own."""
    allowed = wanted.said(ACTIVATION)
    return None if allowed is None or _OWN in allowed else next(iter(allowed))


USE_ACTIVATION = Field(
    "use_activation",
    "the same as `normalize`, by vLLM's name; false: scores are logits",
    nullable("boolean"),
    _read_use_activation,
    key=SEVERAL,
)


# --- the form of vectors ----------------------------------------------------------------------------------------

METADATA = "bytes"
"""The encoding whose response describes its rows in vLLM's header, too."""
_ENCODINGS = {
    "float": Encoding.FLOAT,
    "base64": Encoding.BASE64,
    METADATA: Encoding.BYTES,
    "bytes_only": Encoding.BYTES,
    "npy": Encoding.NPY,
}
_DTYPES = {"float": Dtype.FLOAT32, **{dtype.value: dtype for dtype in Dtype}}
_JINA_TYPES = {
    "float": Dtype.FLOAT32, "base64": Dtype.FLOAT32, "binary": Dtype.BINARY, "ubinary": Dtype.UBINARY,
}  # fmt: skip


def _read_encoding(value: Any, name: str) -> str | None:
    if value == "":  # some clients send it for the default
        return None
    fields.one_of(_ENCODINGS, value, name)
    return str(value)


def _read_jina_type(value: Any, name: str) -> Said:
    if isinstance(value, list):
        if len(value) != 1:
            raise BadRequest(f"'{name}' must be one type, or a list of one, is a list of {len(value)}", param=name)
        [value] = value
    dtype, encoding = fields.one_of(_JINA_TYPES, value, name), value if value == "base64" else None
    return Said(embedding_type=value, output_dtype=dtype, encoding_format=encoding)


def _jina_type(name: str, description: str) -> Field[Said]:
    one = {**list_of({"enum": [*_JINA_TYPES]}, at_least=1), "maxItems": 1}
    return Field(name, description, any_of({"enum": [*_JINA_TYPES, None]}, one), _read_jina_type, key=SEVERAL)


ENCODING = Field(
    "encoding_format",
    "how vectors are written: numbers, base64 of their bytes, or without JSON: their bytes, one vector after the other "
    "(`bytes`; `bytes_only` without the header `metadata`), or a NumPy file (`npy`). Default: what `Accept` prefers",
    {"enum": [*_ENCODINGS, "", None], "default": "float"},
    _read_encoding,
)
DTYPE = fields.choice("output_dtype", "type of the vectors' elements", _DTYPES, default="float")
ENDIANNESS = fields.choice(
    "endianness",
    "order of the bytes of each element, where bytes are answered; native is little",
    {"native": False, "little": False, "big": True},
    default="little",
)
_OF_FORM = frozenset((DTYPE.key, ENDIANNESS.key))
_FORMS = {encoding: (Form(encoding),) for encoding in Encoding}
FLOATS = _FORMS[Encoding.FLOAT]


def forms_of(call: Call, output: Output = Output.VECTORS) -> tuple[Form]:
    """The form of a response. The client's words win over `Accept`; an alias' default is for dense vectors alone."""
    wanted, encoding = call.wanted, encoding_of(call)
    if wanted.is_without(_OF_FORM):  # most requests
        return _FORMS[encoding]
    dtype = (wanted.get if output is Output.VECTORS else wanted.said)(DTYPE) or Dtype.FLOAT32
    return (Form(encoding, dtype, wanted.get(ENDIANNESS) is True and encoding is not Encoding.FLOAT),)


def encoding_of(call: Call) -> Encoding:
    name = call.wanted.get(ENCODING)
    return parse_accept(call.headers) or Encoding.FLOAT if name is None else _ENCODINGS[name]


# --- sparse vectors and labels ------------------------------------------------------------------------------------

TOP_K = fields.whole_number("top_k", "most weights of a sparse vector, the greatest; default: all", minimum=1)
MAX_ACTIVE_DIMS = TOP_K.called("max_active_dims", "sentence-transformers'")
MIN_WEIGHT = fields.number("min_weight", "a sparse vector has only weights greater than this", minimum=0)

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
MODALITY = fields.choice("modality", "infinity's; of texts alone", {"text": None})
REFUSED_FIELDS: tuple[Field[None], ...] = (
    refused("chat_template", "only the model's own chat template is used", nullable("string")),
    refused("mm_processor_kwargs", "this server embeds texts, not images or sounds", nullable("object")),
    refused("late_chunking_params", "'late_chunking' of /v1/embeddings has all of them", nullable("object")),
)

# --- conversations ----------------------------------------------------------------------------------------------


class Conversations(NamedTuple):
    """What stands in place of texts."""

    messages: Any


_PART = record(type={"const": "text"}, text=fields.STRING)
_MESSAGE = record(role=fields.STRING, content=any_of(fields.STRING, list_of(_PART, at_least=1), {"type": "null"}))
_CONVERSATION = list_of(_MESSAGE, at_least=1)

MESSAGES = Field(
    "messages",
    "vLLM's: a conversation, or a list of conversations, in place of texts, for models with a chat template, which "
    "makes a text of each",
    any_of(_CONVERSATION, list_of(_CONVERSATION, at_least=1), {"type": "null"}),
    lambda value, _: Conversations(value),
    key=INPUT.key,
)
_PLAIN_END, _REPLY, _CONTINUED = "end", "reply", "continued"
_END_OF_REPLY = {True: frozenset((_REPLY,)), False: frozenset((_PLAIN_END, _CONTINUED))}
_END_CONTINUED = {True: frozenset((_CONTINUED,)), False: frozenset((_PLAIN_END, _REPLY))}
ADD_GENERATION_PROMPT = Field(
    "add_generation_prompt",
    "true: the chat template ends a conversation with the beginning of a reply",
    nullable("boolean"),
    lambda value, name: _END_OF_REPLY[fields.read_flag(value, name)],
)
"""Its value is the set of ends that the text of a conversation may have."""
CONTINUE_FINAL_MESSAGE = Field(
    "continue_final_message",
    "true: the text of a conversation ends where its last message does",
    nullable("boolean", default=False),
    lambda value, name: _END_CONTINUED[fields.read_flag(value, name)],
    key=ADD_GENERATION_PROMPT.key,
)
CHAT_TEMPLATE_KWARGS = fields.anything(
    "chat_template_kwargs", "further variables of the chat template", nullable("object")
)
CONVERSATION_FIELDS: tuple[Field[Any], ...] = (
    MESSAGES,
    ADD_GENERATION_PROMPT,
    CONTINUE_FINAL_MESSAGE,
    CHAT_TEMPLATE_KWARGS,
)


def render_conversations(
    call: Call,
    asked: Conversations,
    proceed: Callable[[Call], Any],
    instead_of: str = INPUT.name,
    *,
    max_conversations: int | None = None,
    add_generation_prompt: bool = False,
) -> ParsedMessages:
    """The call for the texts of conversations. `proceed` parses the same call with their texts in place of
    inputs. `instead_of`: the field of texts. `max_conversations`: None: the limit on inputs. `add_generation_prompt`:
    the default of the field. Raises BadRequest, also what `proceed` raises for any texts."""
    wanted, _, model_info = call
    if model_info.config.chat_template is None:
        raise BadRequest(
            f"'{MESSAGES.name}' is not supported: the model has no chat template, or --literal-special-tokens is set. "
            f"Send texts in '{instead_of}'",
            param=MESSAGES.name,
            can=lambda info: info.config.chat_template is not None,
        )
    ends = wanted.get(ADD_GENERATION_PROMPT) or frozenset((_REPLY if add_generation_prompt else _PLAIN_END,))
    usual_ends = (_REPLY if add_generation_prompt else _PLAIN_END, _PLAIN_END, _REPLY, _CONTINUED)
    end = next(end for end in usual_ends if end in ends)
    conversations = _conversations(asked.messages, max_conversations or model_info.config.max_inputs)
    adds_special_tokens = wanted.get(ADD_SPECIAL_TOKENS) is True

    def proceed_with(texts: list[str]) -> Any:
        rendered = Wanted({INPUT.key: texts, ADD_SPECIAL_TOKENS.key: adds_special_tokens})
        return proceed(call._replace(wanted=wanted | rendered))

    proceed_with([""] * len(conversations))  # refuses wrong fields before anything is rendered
    kwargs = fields.expect(dict, wanted.get(CHAT_TEMPLATE_KWARGS) or {}, CHAT_TEMPLATE_KWARGS.name, "an object")
    request = {
        "conversations": conversations,
        "kwargs": {**kwargs, ADD_GENERATION_PROMPT.name: end == _REPLY},
        "continue_final_message": end == _CONTINUED,
    }
    try:
        payload = orjson.dumps(request)
    except orjson.JSONEncodeError:
        raise _wrong(f"'{MESSAGES.name}' and '{CHAT_TEMPLATE_KWARGS.name}' are nested too deeply") from None
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise _wrong(f"'{MESSAGES.name}' takes {len(payload)} bytes as JSON, at most {MAX_PAYLOAD_BYTES} are allowed")
    return ParsedMessages(payload, proceed_with)


def _conversations(value: Any, max_conversations: int) -> list[list[JsonObject]]:
    name = MESSAGES.name
    items = _full_list(value, name, "a list of messages, or of such lists")
    if not isinstance(items[0], list):
        return [_conversation(items, name)]
    if len(items) > max_conversations:
        raise TooManyInputs(
            f"'$.{name}' is invalid: {len(items)} conversations, at most {max_conversations} in one request", param=name
        )
    return [_conversation(messages, f"{name}[{index}]") for index, messages in enumerate(items)]


def _conversation(value: Any, where: str) -> list[JsonObject]:
    messages = _full_list(value, where, "a list of messages")
    return [_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def _message(value: Any, where: str) -> JsonObject:
    """The message, with other keys that a template may use."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise _wrong(f"'{where}' must be an object with a string as its 'role'")
    content = value.get("content")
    if isinstance(content, list) and content:
        content = [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    elif content is not None and not isinstance(content, str):
        raise _wrong(f"'{where}.content' must be a string, or a list of parts, is {json_type(content)}")
    return {**value, "content": content or ""}


def _part(value: Any, where: str) -> dict[str, str]:
    if isinstance(value, dict) and value.get("type", "text") == "text" and isinstance(value.get("text"), str):
        return {"type": "text", "text": value["text"]}
    raise _wrong(
        f"'{where}' must be an object with 'type' 'text' and a string as its 'text': this server embeds texts alone"
    )


def _full_list(value: Any, where: str, what: str) -> list[Any]:
    if isinstance(value, list) and value:
        return value
    raise _wrong(f"'{where}' must be {what}, is {'empty' if value == [] else json_type(value)}")


def _wrong(message: str) -> BadRequest:
    return BadRequest(message, param=MESSAGES.name)


# --- tables of words --------------------------------------------------------------------------------------------

PROMPT_WORDS: tuple[Field[Any], ...] = (PROMPT, PROMPT_NAME, INPUT_TYPE)
OVERFLOW_WORDS: tuple[Field[Any], ...] = (
    OVERFLOW, TRUNCATE, TRUNCATION, TRUNCATION_SIDE, TRUNCATION_DIRECTION, TRUNCATE_PROMPT_TOKENS, ADD_SPECIAL_TOKENS,
)  # fmt: skip
COMMON: tuple[Field[Any], ...] = (
    MODEL,
    *PROMPT_WORDS,
    *OVERFLOW_WORDS,
    DIMENSIONS,
    DIMENSIONS.called("output_dimension", "Voyage's and Cohere's"),
    DIMENSIONS.called("truncate_dim", "sentence-transformers'"),
    NORMALIZE,
    NORMALIZE.called("normalized", "Jina's"),
    USE_ACTIVATION,
    ENCODING,
    DTYPE,
    fields.choice(
        "embed_dtype",
        "the same as `output_dtype`, by vLLM's name",
        {dtype.value: dtype for dtype in (Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16)},
        key=DTYPE.key,
    ),
    ENDIANNESS,
    _jina_type("embedding_type", "type of the vectors' elements, or `base64`, as with Jina"),
    _jina_type("encoding_type", "the same, as clients of Jina's first API have it"),
    REPORT,
    PRIORITY,
    USER,
    MODALITY,
    PADDING,
    REQUEST_ID,
    *CONVERSATION_FIELDS,
    *REFUSED_FIELDS,
)
"""The words of every operation of OpenAI's kind that embeds, without its inputs."""

# --- all together -----------------------------------------------------------------------------------------------


def read(words: Fields, body: JsonMapping, headers: Headers, model_info: ModelInfo) -> Call:
    """What a body and its headers want of a model, by whatever name it is seen. Raises BadRequest."""
    wanted = words.read(body)
    if model_info.defaults is not None:
        wanted = _wanted_by(model_info.defaults) | wanted
    return Call(wanted, headers, model_info)


@cache
def _wanted_by(defaults: AliasDefaults) -> Wanted:
    """What an alias wants. What is left out is the model's own default by that name: see `ModelInfo.by_alias`."""
    said = {
        DIMENSIONS.key: defaults.dimensions,
        DTYPE.key: None if defaults.dtype is None else Dtype(defaults.dtype),
        ROLE.key: None if defaults.role is None else Role(defaults.role),
        ACTIVATION.key: None if defaults.raw_scores is None else RAW if defaults.raw_scores else OWN,
    }
    return Wanted({key: value for key, value in said.items() if value is not None})


_FOR_PROMPT = frozenset(field.key for field in (PROMPT, PROMPT_NAME, INPUT_TYPE, ADD_SPECIAL_TOKENS))
"""What `_prompt_of` looks for: conversations say the last."""
_FURTHER = frozenset(
    attribute.key
    for attribute in (OVERFLOW, MAX_TOKENS, ADD_SPECIAL_TOKENS, ROLE, NORMALIZE, DIMENSIONS, DTYPE, PRIORITY, REPORT)
)
"""What `resolve` looks for besides the prompt, of dense vectors."""
_OF_TOKENS = frozenset((Output.TOKENS, Output.TOKEN_VECTORS, Output.HYBRID))
_WITH_ROLES = frozenset((Output.SPARSE, Output.LEXICAL, Output.TOKEN_VECTORS, Output.HYBRID))
"""Outputs that may be others for a query than for a document."""
_WITH_WEIGHTS = frozenset((Output.SPARSE, Output.LEXICAL, Output.HYBRID))


@lru_cache(64)
def _tokenizing(prompt: str | None, overflow: Overflow, are_ids_of_model: bool) -> Tokenizing:
    return Tokenizing(prompt, overflow, are_ids_of_model=are_ids_of_model)


def resolve(
    call: Call,
    inputs: Inputs,
    output: Output = Output.VECTORS,
    *,
    forms: tuple[Form, ...] = FLOATS,
    normalizes: bool | None = None,
    preferred: Overflow | None = None,
    purpose: str | None = None,
    has_prompt: bool = True,
    has_chunks: bool = False,
    are_ids_of_model: bool = False,
) -> EmbedRequest:
    """The request for `inputs`, with all that the call wants. `output`: any but UNNORMALIZED; only VECTORS have
    `dimensions`. `normalizes`: whether vectors are brought to length 1 where the client does not say; None: those of
    tokens, as with vLLM. `preferred`: the policy for long inputs where the words leave it open, in place of the
    server's. `purpose`: of the texts, where the words say none. `has_prompt`: False if the texts have no prompt,
    whatever the model's default is. `has_chunks`: scores of an input are the mean of those of its chunks.
    Raises BadRequest."""
    wanted, headers, model_info = call
    is_dense = output is Output.VECTORS
    if has_prompt:
        prompt = _prompt_of(wanted, model_info, purpose)
    else:
        model_info.prompt_of_model_name(wanted.get(MODEL))  # raises ModelNotFound if names are strict
        prompt = None
    overflow = preferred or model_info.overflow
    if is_dense and model_info.defaults is None and wanted.is_without(_FURTHER):  # most requests
        tokenizing = _tokenizing(prompt, overflow, are_ids_of_model)
        priority, timeout_s = parse_priority(headers), parse_timeout_s(headers)
        return EmbedRequest(inputs, forms, priority, timeout_s, tokenizing, output, normalizes is True)
    overflow = overflow_of(wanted, overflow)
    if not (is_dense or has_chunks) and overflow is Overflow.CHUNK:
        # An input in chunks has no scores of its own, nor a single row for each of its tokens. Where the server would
        # split it, it is refused, because the request did not allow to cut it.
        overflow = Overflow.ERROR
    adds_special_tokens = wanted.get(ADD_SPECIAL_TOKENS) is not False
    tokenizing = Tokenizing(
        prompt,
        overflow,
        _max_tokens_of(wanted, model_info, adds_special_tokens=adds_special_tokens),
        adds_special_tokens,
        are_ids_of_model,
        (_role_of(wanted, model_info, purpose) if output in _WITH_ROLES else None) or wanted.get(ROLE),
    )
    says, dimensions = wanted.get(NORMALIZE), wanted.get(DIMENSIONS) if is_dense else None
    if says is None:
        says = normalizes
    if dimensions:
        dimensions = model_info.check_dimensions(dimensions, wanted.word(DIMENSIONS))
    priority = wanted.get(PRIORITY)
    request = EmbedRequest(
        inputs,
        forms,
        parse_priority(headers) if priority is None else priority,
        parse_timeout_s(headers),
        tokenizing,
        output=Output.UNNORMALIZED if is_dense and says is False else output,
        normalize=says is not False if output in _OF_TOKENS else is_dense and says is True,
        dimensions=dimensions or None,
        wants_report=_wants_report(wanted, forms),
    )
    if output in _WITH_WEIGHTS:
        weights = SparseOptions(wanted.get(TOP_K), wanted.get(MIN_WEIGHT) or 0.0)
        request = request._replace(sparse=weights)
    _check_forms(request, wanted, model_info)
    return request


def _wants_report(wanted: Wanted, forms: tuple[Form, ...]) -> bool:
    """Raises BadRequest if the response is binary."""
    wants_report = wanted.get(REPORT) is True
    if wants_report and forms[0].encoding not in (Encoding.FLOAT, Encoding.BASE64):
        raise BadRequest(
            f"'{REPORT.name}' is part of a JSON answer, and this one has the encoding "
            f"'{forms[0].encoding.value}', which leaves no place for it",
            param=REPORT.name,
        )
    return wants_report


def _check_forms(request: EmbedRequest, wanted: Wanted, model_info: ModelInfo) -> None:
    """Raises BadRequest, which names the field, if the vectors cannot have the requested form."""
    output = request.output
    is_float = all(form.dtype is Dtype.FLOAT32 for form in request.forms)
    if output in (Output.SPARSE, Output.LEXICAL) or (output.is_plain and is_float):
        return  # they always can
    if output is Output.HYBRID:  # its vectors of tokens are as long as the others
        request = request._replace(output=Output.TOKEN_VECTORS)
    names = Names(wanted.word(DTYPE), wanted.word(ENCODING), wanted.word(DIMENSIONS))
    check_forms(request, model_info.card, names, has_ranges=model_info.config.quantization_ranges is not None)
