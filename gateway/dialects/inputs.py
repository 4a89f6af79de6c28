"""The inputs of a request: texts, token ids, or vLLM's conversations. Pure.

Owns their checks, and the payload for the process that renders conversations with the model's chat template. The
rendered texts take the place of the inputs; they have no other prompt, and by default no special tokens but the
template's.
"""

from array import array
from collections.abc import Callable
from typing import Any, TypeAlias

import orjson

from vecd.base.files import JsonObject
from vecd.gateway.api import fields
from vecd.gateway.api.fields import Field, Values, any_of, json_type, list_of, nullable, record
from vecd.gateway.api.operation import ParsedEmbed, ParsedMessages, ParsedTokenize
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.errors import BadRequest, TooManyInputs
from vecd.gateway.request import TokenIds
from vecd.gateway.tokenization.chat_process import MAX_PAYLOAD_BYTES

TextsOrIds: TypeAlias = list[str] | list[TokenIds]


def parse_inputs(value: Any, name: str, max_inputs: int) -> TextsOrIds:
    """A string, a list of strings, one list of token ids, or a list of such lists, of the field `name`. A string in a
    list may also be written as Jina's `{"text": "…"}`. Raises BadRequest."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, array) or (isinstance(value, list) and value and type(value[0]) is int):
        ids = parse_ids(value, name)
        return [ids]
    if not isinstance(value, list):
        raise _none_of(value, name, "a string, a list of strings, or token ids")
    check_num(value, name, max_inputs)
    if isinstance(value[0], list | array):
        return check_id_lists(value, name)
    return _check_texts(_unwrapped(value, name), name)


def _unwrapped(values: list[Any], name: str) -> list[Any]:
    """Replace each object that holds only a text by that text."""
    if dict not in set(map(type, values)):
        return values
    return [
        _text_of(value, f"{name}[{index}]", name) if type(value) is dict else value
        for index, value in enumerate(values)
    ]


def _text_of(item: JsonObject, name: str, param: str) -> Any:
    # The message does not name the keys, because they may be any text that was sent.
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


# --- conversations ----------------------------------------------------------------------------------------------

_PART = record(type={"const": "text"}, text=fields.STRING)
_MESSAGE = record(role=fields.STRING, content=any_of(fields.STRING, list_of(_PART, at_least=1), {"type": "null"}))
_CONVERSATION = list_of(_MESSAGE, at_least=1)

MESSAGES = fields.anything(
    "messages",
    "vLLM's: a conversation, or a list of conversations, in place of texts, for models with a chat template, which "
    "makes a text of each",
    any_of(_CONVERSATION, list_of(_CONVERSATION, at_least=1), {"type": "null"}),
)
ADD_GENERATION_PROMPT = fields.flag(
    "add_generation_prompt", "true: the chat template ends a conversation with the beginning of a reply"
)
CONTINUE_FINAL_MESSAGE = fields.flag(
    "continue_final_message", "true: the text of a conversation ends where its last message does", default=False
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


def read_conversations(
    values: Values,
    model_info: ModelInfo,
    proceed: Callable[[list[str]], ParsedEmbed | ParsedTokenize],
    *,
    instead_of: Field[Any],
    max_conversations: int,
    add_generation_prompt: bool = False,
) -> ParsedMessages:
    """The conversations of a body that has `messages`. `instead_of`: the field of texts. `add_generation_prompt`: the
    default of the field. Raises BadRequest, also what `proceed` raises for any texts."""
    if model_info.config.chat_template is None:
        raise BadRequest(
            f"'{MESSAGES.name}' is not supported: the model has no chat template, or --literal-special-tokens is set. "
            f"Send texts in '{instead_of.name}'",
            param=MESSAGES.name,
            can=lambda info: info.config.chat_template is not None,
        )
    if values.get(instead_of) is not None:
        raise _wrong(f"'{MESSAGES.name}' and '{instead_of.name}': send one of them")
    does_continue = values.get(CONTINUE_FINAL_MESSAGE) is True
    if does_continue and values.get(ADD_GENERATION_PROMPT) is True:
        raise BadRequest(
            f"Cannot set both `{CONTINUE_FINAL_MESSAGE.name}` and `{ADD_GENERATION_PROMPT.name}` to True.",
            param=CONTINUE_FINAL_MESSAGE.name,
        )
    conversations = _conversations(values.get(MESSAGES), max_conversations)
    proceed([""] * len(conversations))  # refuses wrong fields before anything is rendered
    given = values.get(ADD_GENERATION_PROMPT)
    does_add = not does_continue and (add_generation_prompt if given is None else given)
    kwargs = fields.expect(dict, values.get(CHAT_TEMPLATE_KWARGS) or {}, CHAT_TEMPLATE_KWARGS.name, "an object")
    request = {
        "conversations": conversations,
        "kwargs": {**kwargs, ADD_GENERATION_PROMPT.name: does_add},
        "continue_final_message": does_continue,
    }
    try:
        payload = orjson.dumps(request)
    except orjson.JSONEncodeError:
        raise _wrong(f"'{MESSAGES.name}' and '{CHAT_TEMPLATE_KWARGS.name}' are nested too deeply") from None
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise _wrong(f"'{MESSAGES.name}' takes {len(payload)} bytes as JSON, at most {MAX_PAYLOAD_BYTES} are allowed")
    return ParsedMessages(payload, proceed)


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
