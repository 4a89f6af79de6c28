"""What a dialect is made of: operations, each a pure reading of a body and a pure writing of an answer.

Owns the types alone. A dialect is one file of `gateway.dialects` with a `DIALECT` at its end, and one row of
`vecd.gateway.api.registry.DIALECTS`. `vecd.gateway.api.handlers` runs operations; `vecd.gateway.api.openapi` documents
them.

    body ─ fields.read ─ Values ─ parse(Call) ─┬─ Ask.request ─ the same for all dialects ─ Embedded ─┐
                                               └─ Ask.render ◄────────────────────────────────────────┴─ Response
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from vecd.gateway.api.fields import Fields, Schema, Values
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.types.errors import ApiError
from vecd.gateway.types.messages import Response
from vecd.gateway.types.request import Embedded, EmbedRequest, TokenCollector, TokenIds


class Call(NamedTuple):
    """A request as a dialect sees it."""

    values: Values
    headers: Mapping[str, str]
    """Names in lower case."""
    model_info: ModelInfo
    request_id: str = ""


class Ask(NamedTuple):
    """What a call asks for, and how its answer is written."""

    request: EmbedRequest
    render: Callable[[Embedded], Response]


class TokenizeAsk(NamedTuple):
    texts: list[str]
    add_special_tokens: bool
    prompt: str
    """Put before every text."""
    collector: TokenCollector
    render: Callable[[], Response]
    """Once the collector has all tokens."""


class DecodeAsk(NamedTuple):
    lists: list[TokenIds]
    skip_special_tokens: bool
    render: Callable[[list[str]], Response]


NO_FIELDS = Fields()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing that callers may ask for. At most one of the functions is given; each is pure, and raises BadRequest.

    With none it documents a route that has a handler of its own.
    """

    summary: str
    answer: Schema
    """Of the body of a 200; for the documentation. Empty where there never is one."""
    fields: Fields = NO_FIELDS
    embed: Callable[[Call], Ask | Response] | None = None
    """A Response where there is nothing to embed."""
    tokenize: Callable[[Call], TokenizeAsk] | None = None
    decode: Callable[[Call], DecodeAsk] | None = None
    reply: Callable[[Call], Response] | None = None
    """Needs no more than the body, and what is served."""
    describe: Callable[[ModelInfo, str], Response] | None = None
    """Needs no more than what is served, and the path."""
    claims: str | None = None
    """The field by which a body is known to mean this operation, where several dialects have one at the same path."""
    answers_tokens: bool = False
    """Rows may be those of tokens, which have another length than the model's vectors; for the documentation."""
    binary_answers: tuple[str, ...] = ()
    """Other media types that a 200 may have."""
    media_type: str = "application/json"
    """Of an answer that is no error."""
    status: int = 200
    """The same."""
    other_answers: Mapping[int, Schema] = field(default_factory=dict)
    """What is answered with other statuses, and is no error of the dialect's; for the documentation."""


OperationsHandler: TypeAlias = Mapping[str, Operation]
"""By method and path: "POST /v1/embeddings". A path that ends in `/*` matches everything below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    name: str
    title: str
    """For the documentation."""
    operations: OperationsHandler
    render_error: Callable[[ApiError], Response]
    """Without the headers that the status asks for, which are added."""
    error: Schema
    """Of the body of every error; for the documentation."""
    statuses: Mapping[int, str] = field(default_factory=dict)
    """Statuses of errors that other dialects do not have, and what each means; for the documentation."""
    prefix: str = ""
    """Of the paths at which errors have its shape even where there is nothing, if there are such: "/api/"."""
