"""Checks the inputs of a request: texts or token ids. Pure. Called by the dialects."""

from array import array
from typing import Any

from vecd.gateway.api.fields import json_type
from vecd.gateway.types.errors import BadRequest, TooManyInputs
from vecd.gateway.types.request import TokenIds


def parse_inputs(value: Any, name: str, max_inputs: int) -> list[str] | list[TokenIds]:
    """A string, a list of strings, one list of token ids, or a list of such lists, of the field `name`.

    A string in a list may also be written as Jina's `{"text": "…"}`. Raises BadRequest.
    """
    if isinstance(value, str):
        return [value]
    if value is None:
        raise BadRequest(f"'{name}' is required: a string, a list of strings, or token ids", param=name)
    if isinstance(value, array):
        return _one_list(value)
    if not isinstance(value, list):
        raise BadRequest(
            f"'{name}' must be a string, a list of strings, or token ids, is {json_type(value)}", param=name
        )
    if value and type(value[0]) is int:
        _check_ids(value, name, name)
        return _one_list(value)
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


def _text_of(item: dict[str, Any], name: str, param: str) -> Any:
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
    if value is None:
        raise BadRequest(f"'{name}' is required: a string or a list of strings", param=name)
    if not isinstance(value, list):
        raise BadRequest(f"'{name}' must be a string or a list of strings, is {json_type(value)}", param=name)
    check_num(value, name, max_inputs)
    return _check_texts(value, name)


def parse_ids(value: Any, name: str) -> TokenIds:
    """One list of token ids. Raises BadRequest."""
    if not isinstance(value, list | array):
        raise BadRequest(f"'{name}' must be a list of token ids, is {json_type(value)}", param=name)
    if not value:
        raise BadRequest(f"'{name}' is an empty list of token ids", param=name)
    if isinstance(value, list):
        _check_ids(value, name, name)
    return value


def check_num(values: list[Any], name: str, max_inputs: int) -> None:
    """Refuse an empty list, and one with too many inputs. Raises BadRequest."""
    if not values:
        raise BadRequest(f"'$.{name}' is invalid: the list is empty, at least 1 input is needed", param=name)
    if len(values) > max_inputs:
        raise TooManyInputs(
            f"'$.{name}' is invalid: {len(values)} inputs, at most {max_inputs} in one request (--max-inputs)",
            param=name,
        )


def _one_list(ids: TokenIds) -> list[TokenIds]:
    return [ids]


def _check_texts(values: list[Any], name: str) -> list[str]:
    for index, value in enumerate(values):
        if type(value) is not str:
            raise BadRequest(f"'{name}[{index}]' must be a string, is {json_type(value)}", param=name)
    return values


def check_id_lists(values: list[Any], name: str) -> list[TokenIds]:
    """`values`, checked: lists of token ids, none of them empty. Raises BadRequest."""
    for index, value in enumerate(values):
        if not isinstance(value, list | array):
            raise BadRequest(f"'{name}[{index}]' must be a list of token ids, is {json_type(value)}", param=name)
        if not value:
            raise BadRequest(f"'{name}[{index}]' is an empty list of token ids", param=name)
        if isinstance(value, list):
            _check_ids(value, f"{name}[{index}]", name)
    return values


def _check_ids(values: list[Any], name: str, param: str) -> None:
    if set(map(type, values)) == {int}:  # ten times faster than the loop, for millions of ids
        return
    for index, value in enumerate(values):
        if type(value) is not int:
            raise BadRequest(f"'{name}[{index}]' must be a token id, is {json_type(value)}", param=param)
