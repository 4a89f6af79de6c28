"""The options of text-embeddings-inference's API, which its operations have in common. Pure.

Owns the fields for inputs, truncation and prompts, the object `parameters`, which may have any of an operation's
options as well, and the headers of responses. Called by `vecd.gateway.api.dialects.tei` and the modules of its routes.
"""

from functools import partial
from typing import Any, TypeVar

from vecd.gateway.api import fields, schemas
from vecd.gateway.api.dialects.headers import response_headers
from vecd.gateway.api.dialects.inputs import parse_inputs
from vecd.gateway.api.fields import Field, Fields, Values, contradiction
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.schemas import any_of, list_of
from vecd.gateway.types.errors import EmptyInput
from vecd.gateway.types.request import Embedded, Overflow, TokenIds, Tokenizing

T = TypeVar("T")

TEXT_OR_TEXTS = (schemas.STRING, schemas.TEXTS)
IDS_OR_LISTS = (schemas.TOKEN_IDS, list_of(schemas.TOKEN_IDS, at_least=1))
_CUTS = {"left": Overflow.TRUNCATE_LEFT, "right": Overflow.TRUNCATE}
WHAT = "what is to be embedded: a text, a list of texts, token ids, or a list of lists of them"
INPUTS = fields.anything("inputs", WHAT, any_of(*TEXT_OR_TEXTS, *IDS_OR_LISTS), is_required=True, is_large=True)
TRUNCATE = fields.flag(
    "truncate", "whether a text that is longer than the model takes is cut, or refused; null: the server's default"
)
DIRECTION = fields.choice(
    "truncation_direction",
    "which end of a text that is cut is left out; null: the server's default",
    {name: cut for side, cut in _CUTS.items() for name in (side, side.capitalize())},
)
PROMPT_NAME = fields.text("prompt_name", "name of one of the model's prompts, put before every text")
TOKENIZING_FIELDS = (TRUNCATE, DIRECTION, PROMPT_NAME)


def read_nested(declared: Fields, body: Any, within: str) -> Values:
    """The fields of an object inside the body. Raises BadRequest, which names `within` and the field."""
    given = fields.expect(dict, body, within, "an object")
    return Values(
        {
            field.name: field.read(value, f"{within}.{field.name}")
            for field in declared
            if (value := given.get(field.name)) is not None
        }
    )


def parameters(declared: Fields) -> Field[Values]:
    """The field `parameters` of an operation that has these options."""
    return Field(
        _PARAMETERS,
        "the other fields may be in here as well, and mean the same",
        {**declared.schema(), "type": ["object", "null"]},
        partial(read_nested, declared),
    )


_PARAMETERS = "parameters"
_ANY_PARAMETERS = parameters(Fields())
"""The key to the value of every such field."""


class Options:
    """The options of a request, in its own fields or in its `parameters`. Clients use `parameters` with texts to
    compare, and for Hugging Face's endpoints with every model."""

    def __init__(self, values: Values, within: str = "") -> None:
        """`within`: the name of the object that the fields are in, for an error. Such an object has no `parameters`."""
        self._own = values
        self._parameters = values.get(_ANY_PARAMETERS)
        self._within = within

    def get(self, field: Field[T]) -> T | None:
        """The value of an option. Raises BadRequest if both places have it with different values."""
        own = self._own.get(field)
        if self._parameters is None:  # as most have none
            return own
        parameter = self._parameters.get(field)
        if own is not None and parameter is not None and own != parameter:
            raise contradiction(field.name, f"{_PARAMETERS}.{field.name}")
        return parameter if own is None else own

    def name_of(self, field: Field[Any]) -> str:
        """The name of the field in an error, with the place where it was found."""
        is_parameter = self._own.get(field) is None and self._parameters is not None
        return f"{_PARAMETERS if is_parameter else self._within}.{field.name}".removeprefix(".")


def checked_inputs(inputs: Any, name: str, model_info: ModelInfo) -> list[str] | list[TokenIds]:
    if inputs == []:
        raise EmptyInput(f"'{name}' cannot be empty", param=name)
    return parse_inputs(inputs, name, model_info.max_inputs)


def read_tokenizing(options: Options, model_info: ModelInfo) -> Tokenizing:
    name = options.get(PROMPT_NAME)
    prompt = None if name is None else model_info.prompt_named(name, options.name_of(PROMPT_NAME))
    return Tokenizing(prompt=prompt, overflow=read_overflow(options, model_info.overflow), are_ids_of_model=True)


def read_overflow(options: Options, default: Overflow) -> Overflow:
    """A direction alone does not decide whether inputs are cut; the server's `default` decides what is left open."""
    truncates, cut = options.get(TRUNCATE), options.get(DIRECTION)
    if truncates is False:
        return Overflow.ERROR
    if default in _CUTS.values():
        return cut or default
    return default if truncates is None else cut or Overflow.TRUNCATE


def headers_of(embedded: Embedded, model_info: ModelInfo) -> dict[str, str]:
    """Times are whole milliseconds."""
    stages = embedded.stages
    total_ms = str(int(stages.total_s * 1e3))
    return {
        "x-compute-type": model_info.compute_type,
        "x-compute-time": total_ms,
        "x-compute-characters": str(embedded.num_chars),
        "x-compute-tokens": str(embedded.num_tokens),
        "x-total-time": total_ms,
        "x-tokenization-time": str(int(stages.tokenize_s * 1e3)),
        "x-queue-time": str(int(stages.queue_s * 1e3)),
        "x-inference-time": str(int(stages.compute_s * 1e3)),
        **response_headers(embedded),
    }
