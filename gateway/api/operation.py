"""What a dialect is made of: operations, what each needs of the model, and what an alias gives by default.

Runs no operation. A dialect is one file of `vecd.gateway.dialects` with a `DIALECT` at its end, and one row of
`vecd.gateway.app.app.DIALECTS`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from vecd.base.files import JsonMapping
from vecd.gateway.api.answer import Headers, parse_priority, parse_timeout_s
from vecd.gateway.api.fields import Fields, Schema, Values
from vecd.gateway.api.served import ModelInfo, listed
from vecd.gateway.config import AliasDefaults
from vecd.gateway.errors import ApiError, WrongModel
from vecd.gateway.request import (
    Embedded,
    EmbedRequest,
    Inputs,
    Overflow,
    Pair,
    Priority,
    Response,
    Role,
    TokenCollector,
    TokenIds,
)
from vecd.shm.output import Output

#  body ─ fields.read ─ Values ─ parse(Call) ─┬─ ParsedEmbed.request ─ the same for all dialects ─ Embedded ─┐
#                                             └─ ParsedEmbed.render ◄────────────────────────────────────────┴─ Response


class Call(NamedTuple):
    """A request as a dialect sees it."""

    values: Values
    headers: Headers
    """Names in lower case."""
    model_info: ModelInfo
    request_id: str = ""

    def request(self, inputs: Inputs, *, priority: Priority | None = None, **fields: Any) -> EmbedRequest:
        """A request with these `fields`, and with what the headers say; `priority`: the body's, which counts more.
        Raises BadRequest."""
        if priority is None:
            priority = parse_priority(self.headers)
        return EmbedRequest(inputs, priority=priority, timeout_s=parse_timeout_s(self.headers), **fields)


class ParsedEmbed(NamedTuple):
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
    """One operation of an API. At most one of the functions is given; each is pure, and raises BadRequest.

    Without a function it documents a route that has a handler of its own.
    """

    summary: str
    response: Schema
    """The schema of the body of a 200, for the documentation. Empty if there is never a 200."""
    fields: Fields = field(default_factory=Fields)
    embed: Callable[[Call], ParsedEmbed | ParsedMessages | ParsedStay | Response] | None = None
    """Returns a Response if there is nothing to embed."""
    reply: Callable[[Call], ParsedTokenize | ParsedDecode | ParsedMessages | Response] | None = None
    """For a response that needs no vectors: only the tokenizer, or only the body and the model info."""
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
"""Routes that a message names."""


def is_able(operation: Operation, capabilities: Sequence[str]) -> bool:
    """Whether a model of these capabilities has one that the operation needs."""
    return not operation.needs or any(need in capabilities for need in operation.needs)


def check_model(operation: Operation, capabilities: Sequence[str], routes: Mapping[str, Sequence[str]]) -> None:
    """Raises WrongModel unless `is_able`. `routes`: by capability, the paths of the operations that need it."""
    if not is_able(operation, capabilities):
        can = " and ".join(_CAN[capability] for capability in capabilities)
        cannot = " or ".join(_CAN[need] for need in operation.needs)
        raise WrongModel(
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
        error.message += served
    others = (info for info in all_infos if info is not model_info)
    able = [info.model for info in others if is_able(operation, info.card.capabilities) and error.can(info)]
    if able:
        error.message += f". Models of this server that can: {listed(able)}"


def _served_at(capabilities: Sequence[str], routes: Mapping[str, Sequence[str]]) -> str:
    paths = list(dict.fromkeys(path for capability in capabilities for path in routes.get(capability, ())))
    more = f" and {len(paths) - _MAX_ROUTES} more" if len(paths) > _MAX_ROUTES else ""
    return f". It is served at {', '.join(paths[:_MAX_ROUTES])}{more}" if paths else ""


# The request defaults of an alias: what a request by that name gets where it does not say otherwise. What
# `ModelInfo.by_alias` has as the model's own default (the prompt, the policy for long inputs) is only put into the
# request here. An operation that has no use for a default ignores it.

_DIMENSIONS = ("dimensions", "output_dimension", "truncate_dim")
_DTYPES = ("output_dtype", "embed_dtype", "embedding_type", "encoding_type")
_RAW_SCORES = ("raw_scores", "use_activation")
_DENSE_ALONE = (None, "dense", ["dense"])
"""Values of `output` for which the response has a dense vector alone."""
_OTHER_TASKS = ("token_embed", "classify", "token_classify")
"""Values of vLLM's `task` for other rows than a vector for each input."""
_COHERE_S_TYPES = ("int8", "uint8", "binary", "ubinary")
_VECTORS = (Output.VECTORS, Output.UNNORMALIZED)


def fill_in(body: JsonMapping, operation: Operation, defaults: AliasDefaults) -> JsonMapping:
    """The fields of the body that the operation has, and the defaults that decide the shape of its response in those
    that it has for them."""
    names, dtype = operation.fields.small, defaults.dtype
    body = {name: value for name, value in body.items() if name in names or name in operation.fields.large}
    filled: dict[str, Any] = {}
    if dtype is not None and operation.needs[:1] == ("dense",) and _is_dense_alone(body):
        if "output_dtype" in names and not _gives(body, _DTYPES):
            filled["output_dtype"] = dtype
        elif "embedding_types" in names and dtype in _COHERE_S_TYPES and not _gives(body, ("embedding_types",)):
            filled["embedding_types"] = [dtype]
    is_ranking = "rerank" in operation.needs and "raw_scores" in names
    if defaults.raw_scores is not None and is_ranking and not _gives(body, _RAW_SCORES):
        filled["raw_scores"] = defaults.raw_scores
    return {**body, **filled}


def parse_with_defaults(parse: Callable[[Call], Work], body: JsonMapping, call: Call) -> Work:
    """As `parse`, with the defaults of `call.model_info` in the request. `body`: as `fill_in` returns it. Raises what
    `parse` raises. A form that vectors of the default dimensions cannot have is refused when they are collected."""
    return _completed(parse(call), body, call.model_info)


def _completed(work: Work, body: JsonMapping, model_info: ModelInfo) -> Work:
    match work:
        case ParsedEmbed():
            return work._replace(request=_complete(work.request, body, model_info))
        case ParsedMessages(payload, proceed):

            def proceed_with_defaults(texts: list[str]) -> Any:
                return _completed(proceed(texts), body, model_info)

            return ParsedMessages(payload, proceed_with_defaults)
        case ParsedStay(work=ParsedEmbed() as embed):
            return work._replace(work=embed._replace(request=_complete(embed.request, body, model_info)))
        case _:
            return work


def _complete(request: EmbedRequest, body: JsonMapping, model_info: ModelInfo) -> EmbedRequest:
    """The request, in which None means a default wherever its tokenizing has it."""
    defaults, how = model_info.defaults, request.tokenizing
    assert defaults is not None
    is_ranking = how.num_queries > 0 or isinstance(request.inputs[0], Pair)
    if how.prompt is None and model_info.model_prompt is not None and not is_ranking:
        how = how._replace(prompt=model_info.default_prompt)
    if how.role is None and defaults.role is not None:
        how = how._replace(role=Role(defaults.role))
    if how.overflow is None and defaults.overflow is not None:
        how = how._replace(overflow=Overflow(defaults.overflow))
    request = request._replace(tokenizing=how)
    if defaults.dimensions is None or request.output not in _VECTORS or _gives(body, _DIMENSIONS):
        return request
    is_default = defaults.dimensions == model_info.card.default_dim
    return request._replace(dimensions=None if is_default else defaults.dimensions)


def _is_dense_alone(body: JsonMapping) -> bool:
    is_multi_vector = body.get("return_multivector") is True or body.get("task") in _OTHER_TASKS
    return body.get("output") in _DENSE_ALONE and not is_multi_vector


def _gives(body: JsonMapping, names: tuple[str, ...]) -> bool:
    """Whether the body has one of the fields, or the object in it that text-embeddings-inference has for options."""
    places = (place for place in (body, body.get("parameters")) if isinstance(place, Mapping))
    return any(place.get(name) is not None for place in places for name in names)
