"""Conversations in place of texts: the fields that vLLM has for them. Pure.

Owns their checks, and the payload for the process that renders them with the model's chat template. The rendered texts
take the place of the inputs; they have no other prompt, and by default no special tokens but the template's. Called by
`vecd.gateway.api.dialects.openai` and `vecd.gateway.api.dialects.vllm`.
"""

from collections.abc import Callable
from typing import Any

import orjson

from vecd.gateway.api import fields, schemas
from vecd.gateway.api.fields import Field, Values, json_type
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import ParsedEmbed, ParsedMessages, ParsedTokenize
from vecd.gateway.api.schemas import any_of, list_of, nullable, record
from vecd.gateway.tokenization.chat_process import MAX_PAYLOAD_BYTES
from vecd.gateway.types.errors import BadRequest, TooManyInputs

_PART = record(type={"const": "text"}, text=schemas.STRING)
_MESSAGE = record(role=schemas.STRING, content=any_of(schemas.STRING, list_of(_PART, at_least=1), {"type": "null"}))
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
FIELDS: tuple[Field[Any], ...] = (MESSAGES, ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE, CHAT_TEMPLATE_KWARGS)


def read_messages(
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
    if not model_info.has_chat_template:
        raise BadRequest(
            f"'{MESSAGES.name}' is not supported: the model has no chat template, or --literal-special-tokens is set. "
            f"Send texts in '{instead_of.name}'",
            param=MESSAGES.name,
            can=lambda info: info.has_chat_template,
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


def _conversations(value: Any, max_conversations: int) -> list[list[dict[str, Any]]]:
    name = MESSAGES.name
    items = _full_list(value, name, "a list of messages, or of such lists")
    if not isinstance(items[0], list):
        return [_conversation(items, name)]
    if len(items) > max_conversations:
        raise TooManyInputs(
            f"'$.{name}' is invalid: {len(items)} conversations, at most {max_conversations} in one request", param=name
        )
    return [_conversation(messages, f"{name}[{index}]") for index, messages in enumerate(items)]


def _conversation(value: Any, where: str) -> list[dict[str, Any]]:
    messages = _full_list(value, where, "a list of messages")
    return [_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def _message(value: Any, where: str) -> dict[str, Any]:
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
