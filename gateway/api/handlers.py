"""Runs the operations of all dialects: from an HTTP request to its response.

Owns what they have in common: parsing the body into fields, choosing among dialects that share a path, and calling the
embedder. Knows no dialect by name. Called by `vecd.gateway.api.application` through the routes that
`vecd.gateway.api.registry` makes.
"""

import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from vecd.gateway.admission.principals import Principal
from vecd.gateway.api.alias_defaults import fill_in, parse_with_defaults
from vecd.gateway.api.bodies import INLINE_BYTES, parse_small
from vecd.gateway.api.capabilities import add_others, check_model, is_able
from vecd.gateway.api.conditions import check_after, check_before, parse_demand
from vecd.gateway.api.context import Context
from vecd.gateway.api.dialects.headers import parse_timeout_s
from vecd.gateway.api.fields import REQUEST_ID
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.models import Models
from vecd.gateway.api.operations import (
    Call,
    Dialect,
    Operation,
    ParsedDecode,
    ParsedEmbed,
    ParsedMessages,
    ParsedStay,
    ParsedTokenize,
    Work,
)
from vecd.gateway.api.routes import name_in
from vecd.gateway.types.errors import ApiError
from vecd.gateway.types.messages import REQUEST_ID as VALID_ID
from vecd.gateway.types.messages import HttpRequest, Response
from vecd.gateway.types.request import Embedded

_INLINE_ITEMS = 4096
"""Responses of at most so many items are rendered on the event loop: 1 ms, 4 ms with a report of each."""

_INPUT = "input"
_NAMES_OF_MODEL = ("model", "name")
"""The fields that may name the model, the first that is given; the second is Ollama's."""
_QUOTED_INPUT = re.compile(r"'input(?=['\[])")
"""The name of the input field in messages of modules that know no dialect."""


class Claim(NamedTuple):
    """An operation of one dialect, at the path that it shares with others."""

    dialect: Dialect
    operation: Operation
    endpoint: int = 0
    """As in `RequestTimeline.endpoint`."""


class OperationsHandler:
    """The handler of one path and method."""

    def __init__(
        self, claims: tuple[Claim, ...], path: str = "", routes: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """`claims`: a body belongs to the first claim whose field it has, or else to the first that the model can
        answer, or to the first of all. `path`: a `*` inside it stands for the name of a model, which replaces the one
        in the body. `routes`: as `check_model` takes them; None: there are none to name."""
        self.claims = claims
        self._routes = routes or {}
        self._path_of_model = path if "*" in path else None
        self._bare_list = next((claim.operation.bare_list for claim in claims if claim.operation.bare_list), "")
        self._input_fields = {claim.dialect.name: _input_fields(claim.operation) for claim in claims}
        self._large = frozenset[str]().union(*(claim.operation.fields.large for claim in claims))
        self._small = frozenset[str]().union(*(claim.operation.fields.small for claim in claims))

    async def __call__(self, context: Context, http: HttpRequest, principal: Principal) -> Response:
        first = self.claims[0]
        models = context.models_for(principal)
        if first.operation.describe is not None:
            return self._describe(context, principal, first.operation, first.operation.describe, http)
        timeline = http.timeline
        timeline.arrived_at = time.monotonic()
        if models is None:
            http.identity = context.identity
        elif http.choice is not None and http.choice.is_made:
            http.identity = models.as_named(context, http.choice.named).identity
        try:
            principal.check_quota()  # before the body is parsed
            demand = parse_demand(http.headers)
            if len(self.claims) == 1 and models is None:
                check_model(first.operation, context.model_info.capabilities, self._routes)
            if http.coding is None and len(http.body) <= INLINE_BYTES:
                body = parse_small(http.body, self._bare_list, self._large, self._small)
                parsed = self._parse(context, models, http, body)
            else:
                parsed = await context.bodies.parse(
                    http.body, self._large, partial(self._parse, context, models, http), principal.tenant, self._small,
                    http.coding, self._bare_list,
                )  # fmt: skip
        except ApiError as error:
            if error.dialect is None and error.param is not None:  # the field may be of one of the dialects alone
                error.dialect = self.claim_of({error.param: True}, context.model_info.capabilities).dialect.name
            if first.operation.embed is not None:
                context.embedder.count_unread(error)
            raise
        timeline.parsed_at = time.monotonic()
        http.body = b""  # frees up to tens of megabytes
        work = parsed.work
        if models is not None:
            context = parsed.context
            assert http.choice is not None
            http.choice.on_chosen(context.model_info.model)
        try:
            if demand is not None:
                await check_before(demand, context, http)
            if type(work) is ParsedEmbed and len(work.request.inputs) <= _INLINE_ITEMS and not work.is_large:
                embedded = await context.embedder.embed(work.request, parsed.num_estimated, timeline, principal)
                response = _render(work, embedded)
            else:
                response = await _respond(context, parsed, http, principal)
            if demand is not None:
                check_after(demand, context)
            return response
        except ApiError as error:
            error.dialect = parsed.claim.dialect.name
            if parsed.field is not None and error.param == _INPUT:
                _name(error, parsed.field, is_list=parsed.field in parsed.claim.operation.fields.large)
            self._add_others(error, parsed.claim.operation, context, models)
            raise

    def claim_of(self, body: Mapping[str, Any], capabilities: Sequence[str]) -> Claim:
        """The claim that a body belongs to. `capabilities`: the model's."""
        if len(self.claims) == 1:
            return self.claims[0]
        claimed = self._claimed(body)
        if claimed is not None:
            return claimed
        return next((claim for claim in self.claims if is_able(claim.operation, capabilities)), self.claims[0])

    def _claimed(self, body: Mapping[str, Any]) -> Claim | None:
        """The first claim that the body has a field of."""
        for claim in self.claims:
            if any(body.get(name) is not None for name in claim.operation.claims):
                return claim
        return None

    def _field(self, claim: Claim, body: Mapping[str, Any]) -> str | None:
        names = self._input_fields[claim.dialect.name]
        if len(names) <= 1:
            return names[0] if names else None
        return next((name for name in names if body.get(name) is not None), None)

    # --- several models -------------------------------------------------------------------------------------

    def _describe(
        self,
        context: Context,
        principal: Principal,
        operation: Operation,
        describe: Callable[[ModelInfo, str], Response],
        http: HttpRequest,
    ) -> Response:
        path, models = http.path, context.models_for(principal)
        is_only = models is None or http.choice is None or http.choice.is_made
        if is_only:
            http.identity = context.identity  # errors have it, too
        if self._path_of_model is not None and (name := name_in(self._path_of_model, path)) is not None:
            models = context.models_named(name, http, principal)
            context = models.choose(name, (), refuses_unknown=True)
            path = self._path_of_model.replace("*", models.own_name(context, name))
        elif models is not None and not is_only and operation.describe_all is not None:
            return operation.describe_all([model.describe_model() for model in models.all])
        http.identity = context.identity
        return describe(context.describe_model(), path)

    def _choose(
        self, context: Context, models: Models[Context], http: HttpRequest, body: Mapping[str, Any]
    ) -> tuple[Context, Mapping[str, Any]]:
        """The context of the model that answers a request, and the body with the model's own name. `context`: that of
        the model which the path or the header names, or of the first.

        Raises ApiError, as `Models.choose`. Side effect: the model is noted on the request's timeline.
        """
        claimed = self._claimed(body) if len(self.claims) > 1 else None
        claims = [claimed] if claimed is not None else [claim for claim in self.claims if not claim.operation.claims]
        operations = [claim.operation for claim in claims or self.claims]
        fields = {name for operation in operations for name in operation.fields.small.intersection(_NAMES_OF_MODEL)}
        field = next((name for name in _NAMES_OF_MODEL if name in fields and body.get(name)), _NAMES_OF_MODEL[0])
        given = body.get(field) if fields else None
        name = given if isinstance(given, str) else None
        choice = http.choice
        assert choice is not None
        if not choice.is_made:
            asked = [(each.asks_for(body) if each.asks_for is not None else ()) or each.needs for each in operations]
            needs = [need for each in asked for need in each] if all(asked) else []
            try:
                context = models.choose(choice.named or name, needs)
            except ApiError as error:
                error.dialect = (claims or self.claims)[0].dialect.name
                raise
        elif models.have_defaults:
            context = models.as_named(context, choice.named)
        http.timeline.model, http.identity = context.model_info.model, context.identity
        if choice.named:
            own = models.own_name(context, choice.named)
            if own not in context.model_info.names:  # it chooses a prompt, too, which the body then does not
                return context, {**body, field: own}
        return context, body if name is None else {**body, field: models.own_name(context, name)}

    # --- parsing --------------------------------------------------------------------------------------------

    def _parse(
        self, context: Context, models: Models[Context] | None, http: HttpRequest, body: Mapping[str, Any]
    ) -> "_Parsed":
        """Called in a thread if the body is large."""
        if self._path_of_model is not None:  # Azure's clients send both, and it is the path that names the deployment
            body = {**body, "model": name_in(self._path_of_model, http.path)}
        if models is not None:
            context, body = self._choose(context, models, http, body)
        claim = self.claim_of(body, context.model_info.capabilities)
        http.timeline.endpoint = claim.endpoint
        operation = claim.operation
        if REQUEST_ID.name in body and REQUEST_ID.name in operation.fields.small:
            _take_request_id(http, body[REQUEST_ID.name])
        try:
            if models is not None or len(self.claims) > 1:
                check_model(operation, context.model_info.capabilities, self._routes)
            parse: Callable[[Call], Work] | None = operation.embed or operation.reply
            assert parse is not None
            if context.model_info.defaults is not None:
                body = fill_in(body, operation, context.model_info.defaults)
                parse = partial(parse_with_defaults, parse, body)
            call = Call(operation.fields.read(body), http.headers, context.model_info, http.request_id)
            work, num_estimated = parse(call), 0
            if isinstance(work, ParsedEmbed):
                num_estimated = context.estimate_tokens(work.request.inputs, work.request.tokenizing)
            own = work.field if isinstance(work, ParsedEmbed) else None
            field = "messages" if isinstance(work, ParsedMessages) else own or self._field(claim, body)
            return _Parsed(context, claim, work, num_estimated, field)
        except ApiError as error:
            error.dialect = claim.dialect.name
            self._add_others(error, operation, context, models)
            raise

    def _add_others(
        self, error: ApiError, operation: Operation, context: Context, models: Models[Context] | None
    ) -> None:
        infos = () if models is None else [model.model_info for model in models.all]
        add_others(error, operation, context.model_info, infos, self._routes)


def _take_request_id(http: HttpRequest, own_id: Any) -> None:
    """Name the request as its body does, unless a header does. An error in another field has that name, too."""
    if isinstance(own_id, str) and VALID_ID.fullmatch(own_id) and "x-request-id" not in http.headers:
        http.request_id = own_id


def _input_fields(operation: Operation) -> tuple[str, ...]:
    """The names of the fields that may hold the inputs; none if it is `input`, the name that errors have anyway."""
    names = tuple(field.name for field in operation.fields if field.is_large or field.is_required)
    return () if names == (_INPUT,) else names


class _Parsed(NamedTuple):
    context: Context
    """That of the model which answers."""
    claim: Claim
    work: Work
    num_estimated: int
    """Tokens of the inputs to embed, guessed from characters."""
    field: str | None
    """The field with the inputs, if it is not `input`."""


async def _respond(context: Context, parsed: _Parsed, http: HttpRequest, principal: Principal) -> Response:
    match parsed.work:
        case Response() as response:
            return response
        case ParsedEmbed() as work:
            is_large = work.is_large or len(work.request.inputs) > _INLINE_ITEMS  # `embed` removes them
            embedded = await context.embedder.embed(work.request, parsed.num_estimated, http.timeline, principal)
            if is_large:
                return await context.threads.run(_render_steps(work, embedded), principal.tenant)
            return _render(work, embedded)
        case ParsedStay() as work:
            return await _respond_to_stay(context, parsed, work, http, principal)
        case ParsedMessages() as work:
            timeout_s = parse_timeout_s(http.headers)
            texts = await context.embedder.render(work, timeout_s, http.timeline.arrived_at, principal)
            proceeding, num_estimated = work.proceed(texts), 0
            if isinstance(proceeding, ParsedEmbed):
                request = proceeding.request
                num_estimated = context.estimate_tokens(request.inputs, request.tokenizing)
            parsed = parsed._replace(work=proceeding, num_estimated=num_estimated)
            return await _respond(context, parsed, http, principal)
        case ParsedTokenize() as work:
            timeout_s = parse_timeout_s(http.headers)
            await context.embedder.describe(work, timeout_s, http.timeline.arrived_at, principal)
            return work.render()
        case ParsedDecode() as work:
            timeout_s = parse_timeout_s(http.headers)
            return work.render(await context.embedder.decode(work, timeout_s, http.timeline.arrived_at, principal))


def _render(work: ParsedEmbed, embedded: Embedded) -> Response:
    response = work.render(embedded)
    if not isinstance(response.body, bytes | list):
        response.body = list(response.body)
    return response


def _render_steps(work: ParsedEmbed, embedded: Embedded) -> Generator[None, None, Response]:
    response, pieces = work.render(embedded), list[bytes | memoryview]()
    if not isinstance(response.body, bytes | list):
        for piece in response.body:
            pieces.append(piece)
            yield
        response.body = pieces
    return response


async def _respond_to_stay(
    context: Context, parsed: _Parsed, work: ParsedStay, http: HttpRequest, principal: Principal
) -> Response:
    if work.work is not None:
        request = work.work.request
        num_estimated = context.estimate_tokens(request.inputs, request.tokenizing)
        parsed = parsed._replace(work=work.work, num_estimated=num_estimated)
        response = await _respond(context, parsed, http, principal)
    elif work.loads and context.residence.is_awaited:
        started_at = time.monotonic()
        await context.embedder.load(parse_timeout_s(http.headers), http.timeline.arrived_at)
        response = work.render(round((time.monotonic() - started_at) * 1e9))
    else:
        response = work.render(0)
    if work.sets_keep_alive:  # only now: a model that is to stay for 0 s would be unloaded before
        context.embedder.keep_alive(work.keep_alive_s)
    return response


def _name(error: ApiError, field: str, *, is_list: bool) -> None:
    """Put the client's name of the input field into an error. `is_list`: positions in the message count in that field
    too."""
    error.param = field
    if is_list:
        error.message = _QUOTED_INPUT.sub(f"'{field}", error.message)
