"""Runs the operations of all dialects: from an HTTP request to its response.

Owns the choice among dialects that share a path, and the condition on the model's identity. Knows no dialect by name.
"""

import asyncio
import re
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from vecd.base.files import JsonMapping
from vecd.gateway.api.answer import Headers, add_headers, parse_timeout_s
from vecd.gateway.api.body import INLINE_BYTES, parse_small
from vecd.gateway.api.fields import REQUEST_ID
from vecd.gateway.api.large_json import FieldNames
from vecd.gateway.api.operation import (
    Dialect,
    Operation,
    ParsedDecode,
    ParsedEmbed,
    ParsedMessages,
    ParsedStay,
    ParsedTokenize,
    Work,
    add_others,
    check_model,
    is_able,
)
from vecd.gateway.api.served import ModelInfo, Models
from vecd.gateway.app.routes import Route, name_in
from vecd.gateway.dialects.ask import INPUT, MODEL, read
from vecd.gateway.encoding.fragments import Pieces
from vecd.gateway.errors import ApiError, BadRequest, IdentityMismatch, NotReady, Unavailable, quoted
from vecd.gateway.pipeline import deadline_of
from vecd.gateway.request import HEADER, Embedded, HttpRequest, Identity, ModelChoice, Response
from vecd.gateway.request import REQUEST_ID as VALID_ID
from vecd.gateway.scheduling.keys import Principal
from vecd.gateway.service import Service

# The condition of a request on the model's identity: the request header `if-vecd-identity`.

CONDITION = "if-vecd-identity"
_CONDITION = re.compile(r"([0-9a-f]{32})(?:;dtype=([a-z0-9_]{1,32}))?", re.ASCII)
MAX_WAIT_S = 30.0
"""Of a request that has not been admitted yet: it holds a connection and its body. The weights of a large model take
longer to read, and the client's retry waits as well."""
_RETRY_AFTER_S = 5.0


class Demand(NamedTuple):
    digest: str
    number_format: str | None

    def __str__(self) -> str:
        return self.digest if self.number_format is None else f"{self.digest};dtype={self.number_format}"


def parse_demand(headers: Headers) -> Demand | None:
    """Raises BadRequest."""
    value = headers.get(CONDITION)
    if value is None:
        return None
    match = _CONDITION.fullmatch(value)
    if match is None:
        raise BadRequest(
            f"header {CONDITION}: must be an identity as {HEADER} has it, 32 lower-case hexadecimal digits with or "
            f"without ;dtype=FORMAT, is {quoted(value)}"
        )
    return Demand(match[1], match[2])


async def check_before(demand: Demand, service: Service, http: HttpRequest) -> None:
    """Wait until the identity is known, at most 30 s and until the request's deadline, and compare. For a number format
    the model is loaded, and the first worker is waited for as long. Raises IdentityMismatch; NotReady at the deadline;
    Unavailable for a model that cannot be loaded, and at once for an identity that cannot be found out."""
    identity, deadline = http.identity, _deadline(service, http)
    assert identity is not None
    if not identity.digest:
        await _until(identity.known, deadline)
    if not identity.digest:
        raise _unknown(identity, service)
    if demand.digest == identity.digest and demand.number_format is not None and not identity.formats:
        await service.residence.until_ready(deadline - time.monotonic())
        await _until(identity.has_format, deadline)
    check_after(demand, service, identity)


def check_after(demand: Demand, service: Service, identity: Identity) -> None:
    """Compare once more. Raises IdentityMismatch, and Unavailable for an identity that is not known any more."""
    if demand.digest == identity.digest and demand.number_format in (None, identity.formats):
        return
    if not identity.digest or (demand.digest == identity.digest and not identity.formats):
        raise _unknown(identity, service)
    message = f"header {CONDITION}: {demand} is demanded, and the model here is {identity.describe()}"
    raise IdentityMismatch(message)


def _deadline(service: Service, http: HttpRequest) -> float:
    return deadline_of(service.config, parse_timeout_s(http.headers), http.timeline.arrived_at)


async def _until(event: asyncio.Event, deadline: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), min(MAX_WAIT_S, max(0.0, deadline - time.monotonic())))


def _unknown(identity: Identity, service: Service) -> ApiError:
    if problem := identity.problem:
        message = f"header {CONDITION}: the identity of the model here is not known: {problem}"
        return Unavailable(message, retry_after_s=_RETRY_AFTER_S)
    return NotReady("the model's identity is not known yet", time.monotonic() - service.made_at)


_INLINE_ITEMS = 4096
"""Responses up to this many items are rendered on the event loop: 1 ms, 4 ms with a report of each."""


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
        operations = [claim.operation for claim in claims]
        self._names = FieldNames(
            frozenset[str]().union(*(operation.fields.large for operation in operations)),
            frozenset[str]().union(*(operation.fields.small for operation in operations)),
            next((operation.bare_list for operation in operations if operation.bare_list), ""),
        )

    async def __call__(self, service: Service, http: HttpRequest, principal: Principal) -> Response:
        first, choice = self.claims[0], http.choice
        models = service.services.models if choice is None else service.models_for(principal)
        if first.operation.describe is not None:
            return first.operation.describe(*self._described(service.info, models, first.operation, http))
        timeline = http.timeline
        timeline.arrived_at = time.monotonic()
        if choice is None:
            http.identity = service.info.identity
        elif choice.is_made:
            http.identity = models.as_named(service.info, choice.named).identity
        try:
            principal.check_quota()  # before the body is parsed
            demand = parse_demand(http.headers)
            if len(self.claims) == 1 and choice is None:
                check_model(first.operation, service.info.card.capabilities, self._routes)
            if http.coding is None and len(http.body) <= INLINE_BYTES:
                parsed = self._parse(service, models, http, parse_small(http.body, self._names))
            else:
                parse = partial(self._parse, service, models, http)
                parsed = await service.bodies.parse(http.body, self._names, parse, principal.tenant, http.coding)
        except ApiError as error:
            if error.dialect is None and error.param is not None:  # the field may be of one of the dialects alone
                error.dialect = self.claim_of({error.param: True}, service.info.card.capabilities).dialect.name
            raise
        timeline.parsed_at = time.monotonic()
        http.body = b""  # frees up to tens of megabytes
        work, info = parsed.work, parsed.info
        if choice is not None:
            service = service.services.all[info.generation]
            choice.on_chosen(info.model)
        try:
            if demand is not None:
                await check_before(demand, service, http)
            if type(work) is ParsedEmbed and len(work.request.inputs) <= _INLINE_ITEMS and not work.is_large:
                embedded = await service.pipeline.embed(work.request, parsed.num_estimated, timeline, principal)
                response = _render(parsed, embedded, http)
            else:
                response = await respond(service, parsed, http, principal)
            if demand is not None:
                check_after(demand, service, info.identity)
            return response
        except ApiError as error:
            error.dialect = parsed.claim.dialect.name
            error.field = parsed.field
            add_others(error, parsed.claim.operation, info, models.all, self._routes)
            raise

    def claim_of(self, body: JsonMapping, capabilities: Sequence[str]) -> Claim:
        """The claim that a body belongs to. `capabilities`: the model's."""
        if len(self.claims) == 1:
            return self.claims[0]
        able = (claim for claim in self.claims if is_able(claim.operation, capabilities))
        return self._claimed(body) or next(able, self.claims[0])

    def _claimed(self, body: JsonMapping) -> Claim | None:
        """The first claim that the body has a field of."""
        claims = (claim for claim in self.claims for name in claim.operation.claims if body.get(name) is not None)
        return next(claims, None)

    def _described(
        self, info: ModelInfo, models: Models, operation: Operation, http: HttpRequest
    ) -> tuple[Sequence[ModelInfo], str]:
        """What `Operation.describe` takes."""
        path, may_choose = http.path, http.may_choose
        if not may_choose:
            http.identity = info.identity  # errors have it, too
        if self._path_of_model is not None and (name := name_in(self._path_of_model, path)) is not None:
            if not may_choose:
                info.prompt_of_model_name(name)
                models = Models((info,), refuses_unknown=False)
            info = models.choose(name, (), refuses_unknown=True)
            path = self._path_of_model.replace("*", models.own_name(info, name))
        elif may_choose and operation.describes_all:
            return models.all, path
        http.identity = info.identity
        return [info], path

    def _choose(
        self, info: ModelInfo, models: Models, choice: ModelChoice, body: JsonMapping
    ) -> tuple[ModelInfo, JsonMapping]:
        """The model that answers a request, and the body with the model's own name. `info`: the model which the path or
        the header names, or the first. Raises what `Models.choose` raises."""
        claimed = self._claimed(body) if len(self.claims) > 1 else None
        claims = [claimed] if claimed is not None else [claim for claim in self.claims if not claim.operation.claims]
        operations = [claim.operation for claim in claims or self.claims]
        words = [word for operation in operations for word in operation.fields.words_for(MODEL)]
        field = next((word for word in words if body.get(word)), MODEL.name)
        given = body.get(field) if words else None
        name = given if isinstance(given, str) else None
        if not choice.is_made:
            asked = [(each.asks_for(body) if each.asks_for is not None else ()) or each.needs for each in operations]
            needs = [need for each in asked for need in each] if all(asked) else []
            try:
                info = models.choose(choice.named or name, needs)
            except ApiError as error:
                error.dialect = (claims or self.claims)[0].dialect.name
                raise
        elif models.have_defaults:
            info = models.as_named(info, choice.named)
        if choice.named:
            own = models.own_name(info, choice.named)
            if own not in info.names:  # it chooses a prompt, too, which the body then does not
                return info, {**body, field: own}
        return info, body if name is None else {**body, field: models.own_name(info, name)}

    def _parse(self, service: Service, models: Models, http: HttpRequest, body: JsonMapping) -> "Parsed":
        """Called in a thread if the body is large."""
        info, choice = service.info, http.choice
        if self._path_of_model is not None:  # Azure's clients send both, and it is the path that names the deployment
            body = {**body, MODEL.name: name_in(self._path_of_model, http.path)}
        if choice is not None:
            info, body = self._choose(info, models, choice, body)
            http.timeline.model, http.identity = info.model, info.identity
            service = service.services.all[info.generation]
        claim = self.claim_of(body, info.card.capabilities)
        http.timeline.endpoint = claim.endpoint
        operation = claim.operation
        if REQUEST_ID.name in operation.fields.small and "x-request-id" not in http.headers:
            own_id = body.get(REQUEST_ID.name)
            if isinstance(own_id, str) and VALID_ID.fullmatch(own_id):
                http.request_id = own_id  # an error in another field has that name, too
        try:
            if choice is not None or len(self.claims) > 1:
                check_model(operation, info.card.capabilities, self._routes)
            assert operation.parse is not None
            call = read(operation.fields, body, http.headers, info)
            work = operation.parse(call)
            field = (isinstance(work, ParsedEmbed) and work.field) or call.wanted.word(INPUT)
            return Parsed(info, claim, work, _estimate(service, work), field)
        except ApiError as error:
            error.dialect = claim.dialect.name
            add_others(error, operation, info, models.all, self._routes)
            raise


def claims_of(route: Route) -> tuple[Claim, ...]:
    """None of a route that belongs to no dialect."""
    return route.handler.claims if isinstance(route.handler, OperationsHandler) else ()


class Parsed(NamedTuple):
    info: ModelInfo
    claim: Claim
    work: Work
    num_estimated: int
    """Tokens of the inputs to embed, guessed from characters."""
    field: str
    """The client's word for the inputs."""

    def having(self, work: Work, service: Service) -> "Parsed":
        return self._replace(work=work, num_estimated=_estimate(service, work))


async def respond(service: Service, parsed: Parsed, http: HttpRequest, principal: Principal) -> Response:
    pipeline = service.pipeline
    match work := parsed.work:
        case Response():
            return work
        case ParsedEmbed():
            is_large = work.is_large or len(work.request.inputs) > _INLINE_ITEMS  # `embed` removes them
            embedded = await pipeline.embed(work.request, parsed.num_estimated, http.timeline, principal)
            if is_large:
                return await service.tokenizer.threads.run(_render_steps(parsed, embedded, http), principal.tenant)
            return _render(parsed, embedded, http)
        case ParsedStay():
            return await _respond_to_stay(service, parsed, work, http, principal)
        case ParsedMessages():
            further = work.proceed(await pipeline.render(work, _deadline(service, http), principal))
            return await respond(service, parsed.having(further, service), http, principal)
        case ParsedTokenize():
            await pipeline.describe(work, _deadline(service, http), principal)
            return work.render()
        case ParsedDecode():
            return work.render(await pipeline.decode(work, _deadline(service, http), principal))


def _estimate(service: Service, work: Work) -> int:
    if not isinstance(work, ParsedEmbed):
        return 0
    return service.tokenizer.estimate_tokens(work.request.inputs, work.request.tokenizing)


def _render(parsed: Parsed, embedded: Embedded, http: HttpRequest, *, is_whole: bool = True) -> Response:
    """`is_whole`: False leaves a body in pieces that are still to be written."""
    assert isinstance(parsed.work, ParsedEmbed)
    info, headers = parsed.info, parsed.claim.dialect.headers
    embedded.model, embedded.request_id = info.model, http.request_id
    response = parsed.work.render(embedded)
    if headers is not None:
        response.headers.update(headers(embedded, info))
    add_headers(response.headers, embedded)
    if is_whole and not isinstance(response.body, bytes | list):
        response.body = list(response.body)
    return response


def _render_steps(parsed: Parsed, embedded: Embedded, http: HttpRequest) -> Generator[None, None, Response]:
    response, pieces = _render(parsed, embedded, http, is_whole=False), Pieces()
    if not isinstance(response.body, bytes | list):
        for piece in response.body:
            pieces.append(piece)
            yield
        response.body = pieces
    return response


async def _respond_to_stay(
    service: Service, parsed: Parsed, work: ParsedStay, http: HttpRequest, principal: Principal
) -> Response:
    if work.work is not None:
        response = await respond(service, parsed.having(work.work, service), http, principal)
    elif work.loads and service.residence.is_awaited:
        started_at = time.monotonic()
        await service.residence.until_ready(_deadline(service, http) - time.monotonic())
        response = work.render(round((time.monotonic() - started_at) * 1e9))
    else:
        response = work.render(0)
    if work.sets_keep_alive:  # only now: a model that is to stay for 0 s would be unloaded before
        service.residence.keep_alive(work.keep_alive_s)
    return response
