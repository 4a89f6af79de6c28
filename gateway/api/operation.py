"""What a dialect is made of: operations, and what each needs of the model.

Runs no operation. A dialect is one file of `vecd.gateway.dialects` with a `DIALECT` at its end, and one row of
`vecd.gateway.app.table.DIALECTS`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from vecd.base.files import JsonMapping
from vecd.gateway.api.fields import Fields, Headers, Schema, Wanted
from vecd.gateway.api.served import ModelInfo, listed
from vecd.gateway.errors import ApiError, WrongModel
from vecd.gateway.request import Collect, Embedded, EmbedRequest, Response, TokenIds

#  body ─ fields.read ─ Wanted ─ parse(Call) ─┬─ ParsedEmbed.request ─ the same for all dialects ─ Embedded ─┐
#                                             └─ ParsedEmbed.render ◄────────────────────────────────────────┴─ Response


class Call(NamedTuple):
    """A request as a dialect sees it."""

    wanted: Wanted
    headers: Headers
    """Names in lower case."""
    model_info: ModelInfo


class ParsedEmbed(NamedTuple):
    request: EmbedRequest
    render: Callable[[Embedded], Response]
    """Leaves out the headers that all responses have, and the dialect's own. Keeps no reference to the call, which has
    all inputs."""
    is_large: bool = False
    """Rendering takes more than a few milliseconds, and is done in a thread, however few inputs there are. Many rows of
    tokens are written there in any case."""
    field: str = ""
    """The client's word for the inputs, where they are the attribute of a dialect, and not of all."""


class ParsedTokenize(NamedTuple):
    """A call for the tokens of texts."""

    texts: list[str]
    add_special_tokens: bool
    prompt: str
    """Put before every text."""
    collect: Collect
    render: Callable[[], Response]
    """Called once all tokens are collected."""


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
    """Makes of the texts what is needed further."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of an API. At most one of the functions is given; both are pure, and raise BadRequest.

    Without a function it documents a route that has a handler of its own.
    """

    summary: str
    response: Schema
    """The schema of the body of a 200, for the documentation. Empty if there is never a 200."""
    fields: Fields = field(default_factory=Fields)
    parse: Callable[[Call], Work] | None = None
    describe: Callable[[Sequence[ModelInfo], str], Response] | None = None
    """For a response that needs only the path and what is known of the model, or of several if it `describes_all`."""
    describes_all: bool = False
    """Where several models are served, and the path names none of them, all are described, and not the first."""
    claims: tuple[str, ...] = ()
    """The fields of which a body of this operation has one, where several dialects have one at the same path."""
    needs: tuple[str, ...] = ()
    """The model must have one of these capabilities (`vecd.model.steps.CAPABILITIES`); empty: any model will do. Where
    several models are served, the first counts most."""
    asks_for: Callable[[JsonMapping], tuple[str, ...]] | None = None
    """The capabilities that a body asks for, whose fields have not been read; empty: it does not say. None: no body
    does."""
    bare_list: str = ""
    """The field that is meant by a body which is a bare list; empty: such a body is an error."""
    returns_tokens: bool = False
    """A row may be a token's, which has another length than the model's vectors; for the documentation."""
    binary_media_types: tuple[str, ...] = ()
    """Other media types of a 200."""
    media_type: str = "application/json"
    status: int = 200
    """Like the media type: of a response that is not an error."""
    other_responses: Mapping[int, Schema] = field(default_factory=dict)
    """Schemas of responses of the server's own routes that have other statuses, for the documentation."""


def posted(operation: Operation, *paths: str) -> dict[str, Operation]:
    return {f"POST {path}": operation for path in paths}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    name: str
    title: str
    """For the documentation."""
    operations: Mapping[str, Operation]
    """By method and path: "POST /v1/embeddings". A path that ends in `/*` matches everything below it."""
    render_error: Callable[[ApiError], Response]
    """Renders an error without the headers of its status, which are added afterwards."""
    error: Schema
    """The schema of the body of every error, for the documentation."""
    headers: Callable[[Embedded, ModelInfo], dict[str, str]] | None = None
    """Makes its own headers of a response with rows. None: it has none."""
    statuses: Mapping[int, str] = field(default_factory=dict)
    """Statuses of errors that only this dialect has, and what each means, for the documentation."""
    prefix: str = ""
    """Errors of unknown paths that begin with this have the shape of the dialect: "/api/". Empty: there are none."""


_CAN = {
    "dense": "make dense vectors",
    "rerank": "rerank texts",
    "classify": "classify texts",
    "token-classify": "classify the tokens of texts",
    "sparse": "make sparse vectors",
    "multi-vector": "make a vector for each token",
}
"""By capability (`vecd.model.steps.CAPABILITIES`)."""
_MAX_ROUTES = 8


def wrong_model(operation: Operation, model_info: ModelInfo, routes: Mapping[str, Sequence[str]]) -> WrongModel:
    """For a model that cannot what the operation needs. `routes`: by capability, the paths of the operations that need
    it."""
    capabilities = model_info.card.capabilities
    can = " and ".join(_CAN[capability] for capability in capabilities)
    cannot = " or ".join(_CAN[need] for need in operation.needs)
    return WrongModel(
        f"This model can {can} ({', '.join(capabilities)}); it cannot {cannot}{_served_at(capabilities, routes)}",
        can=lambda info: True,
    )


def add_others(
    error: ApiError,
    operation: Operation,
    model_info: ModelInfo,
    all_infos: Iterable[ModelInfo],
    routes: Mapping[str, Sequence[str]],
) -> None:
    """Add to the message of an error about the kind of `model_info` what the client can do about it: where this model
    is served, and which of all models of this server could answer the request. Leaves other errors as they are."""
    if error.can is None:
        return
    served = _served_at(model_info.card.capabilities, routes)
    if isinstance(error, WrongModel) and served not in error.message:
        error.add(served)
    others = (info for info in all_infos if info is not model_info)
    able = [info.model for info in others if info.can(operation.needs) and error.can(info)]
    if able:
        error.add(f". Models of this server that can: {listed(able)}")


def _served_at(capabilities: Sequence[str], routes: Mapping[str, Sequence[str]]) -> str:
    paths = list(dict.fromkeys(path for capability in capabilities for path in routes.get(capability, ())))
    more = f" and {len(paths) - _MAX_ROUTES} more" if len(paths) > _MAX_ROUTES else ""
    return f". It is served at {', '.join(paths[:_MAX_ROUTES])}{more}" if paths else ""
