"""The parts of a dialect: operations, each a pure function that parses a body and one that renders a response.

Owns the types alone. A dialect is one file of `vecd.gateway.api.dialects` with a `DIALECT` at its end, and one row of
`vecd.gateway.api.registry.DIALECTS`. `vecd.gateway.api.handlers` runs operations; `vecd.gateway.api.openapi` documents
them.

   body ─ fields.read ─ Values ─ parse(Call) ─┬─ ParsedEmbed.request ─ the same for all dialects ─ Embedded ─┐
                                              └─ ParsedEmbed.render ◄────────────────────────────────────────┴─ Response
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from vecd.gateway.api.fields import Fields, Values
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.schemas import Schema
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


class ParsedEmbed(NamedTuple):
    """A call for vectors, and how its response is rendered."""

    request: EmbedRequest
    render: Callable[[Embedded], Response]
    is_large: bool = False
    """Rendering takes more than a few milliseconds, and is done in a thread, however few inputs there are."""
    field: str | None = None
    """The field whose index an error of an input has; None: the first of the body's fields for inputs."""


class ParsedTokenize(NamedTuple):
    """A call for the tokens of texts."""

    texts: list[str]
    add_special_tokens: bool
    prompt: str
    """Put before every text."""
    collector: TokenCollector
    render: Callable[[], Response]
    """Called once the collector has all tokens."""


class ParsedDecode(NamedTuple):
    """A call for the texts of lists of token ids."""

    lists: list[TokenIds]
    skip_special_tokens: bool
    render: Callable[[list[str]], Response]


class ParsedMessages(NamedTuple):
    """A call for something of the texts that the model's chat template makes of conversations."""

    payload: bytes
    """As `vecd.gateway.tokenization.chat_template` reads it."""
    proceed: Callable[[list[str]], ParsedEmbed | ParsedTokenize]
    """Makes of the texts what is needed further. Raises BadRequest."""


class ParsedStay(NamedTuple):
    """A call that says how long the model stays loaded, or only wants it to be loaded or unloaded."""

    work: ParsedEmbed | None
    """What it needs besides; None: nothing."""
    render: Callable[[int], Response]
    """Renders the response where nothing else is needed. Takes the nanoseconds that the model was waited for."""
    loads: bool = False
    """Wait until the model is loaded."""
    sets_keep_alive: bool = False
    keep_alive_s: float | None = None
    """If set: the seconds that the model stays after its last request; None: for ever."""


Work: TypeAlias = ParsedEmbed | ParsedTokenize | ParsedDecode | ParsedMessages | ParsedStay | Response
"""What a parsed call needs; a Response needs nothing more."""

NO_FIELDS = Fields()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of an API. At most one of the functions is given; each is pure, and raises BadRequest.

    Without a function it documents a route that has a handler of its own.
    """

    summary: str
    response: Schema
    """The schema of the body of a 200, for the documentation. Empty if there is never a 200."""
    fields: Fields = NO_FIELDS
    embed: Callable[[Call], ParsedEmbed | ParsedMessages | ParsedStay | Response] | None = None
    """Returns a Response if there is nothing to embed."""
    reply: Callable[[Call], ParsedTokenize | ParsedDecode | ParsedMessages | Response] | None = None
    """For a response that needs no vectors: only the tokenizer, or only the body and the model info."""
    describe: Callable[[ModelInfo, str], Response] | None = None
    """For a response that needs only the model info and the path."""
    describe_all: Callable[[Sequence[ModelInfo]], Response] | None = None
    """The same where several models are served, and the path names none of them. None: the first is described."""
    claims: tuple[str, ...] = ()
    """The fields of which a body of this operation has one, where several dialects have one at the same path."""
    needs: tuple[str, ...] = ()
    """The model must have one of these capabilities (`vecd.shm.heads.CAPABILITIES`); empty: any model will do. Where
    several models are served, the first counts most."""
    asks_for: Callable[[Mapping[str, Any]], tuple[str, ...]] | None = None
    """The capabilities that a body asks for, whose fields have not been read; empty: it does not say. None: no body
    does."""
    bare_list: str = ""
    """The field that is meant by a body which is a bare list; empty: such a body is an error."""
    returns_tokens: bool = False
    """A row may be a token's, which has another length than the model's vectors; for the documentation."""
    binary_media_types: tuple[str, ...] = ()
    """Other media types of a 200."""
    media_type: str = "application/json"
    """The media type of a response that is not an error."""
    status: int = 200
    """The status of a response that is not an error."""
    other_responses: Mapping[int, Schema] = field(default_factory=dict)
    """Schemas of responses of the server's own routes that have other statuses, for the documentation."""


OperationTable: TypeAlias = Mapping[str, Operation]
"""Operations by method and path: "POST /v1/embeddings". A path that ends in `/*` matches everything below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    name: str
    title: str
    """For the documentation."""
    operations: OperationTable
    render_error: Callable[[ApiError], Response]
    """Renders an error without the headers of its status, which are added afterwards."""
    error: Schema
    """The schema of the body of every error, for the documentation."""
    statuses: Mapping[int, str] = field(default_factory=dict)
    """Statuses of errors that only this dialect has, and what each means, for the documentation."""
    prefix: str = ""
    """Errors of unknown paths that begin with this have the shape of the dialect: "/api/". Empty: there are none."""
