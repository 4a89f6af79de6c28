"""Runs the operations of all dialects: from an HTTP request to its answer.

Owns what they have in common: the body's way into fields, the choice among dialects that share a path, and who is asked
for what. Knows no dialect by name. Called by `vecd.gateway.pipeline` through the routes that
`vecd.gateway.api.registry` makes.
"""

import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from vecd.gateway.admission.principals import Principal
from vecd.gateway.api.context import Context
from vecd.gateway.api.dialects.headers import parse_timeout_s
from vecd.gateway.api.operations import Ask, Call, DecodeAsk, Dialect, Operation, TokenizeAsk
from vecd.gateway.api.routes import name_in
from vecd.gateway.types.errors import ApiError
from vecd.gateway.types.messages import HttpRequest, Response
from vecd.gateway.types.timeline import RequestTimeline

_INLINE_ITEMS = 4096
"""Answers of so many items are put together on the event loop: 1 ms, 4 ms with a report of each."""

_INPUT = "input"
_QUOTED_INPUT = re.compile(r"'input(?=['\[])")
"""As parts that know no dialect name the field with what is embedded."""


class Claim(NamedTuple):
    """What one dialect has at a path."""

    dialect: Dialect
    operation: Operation
    endpoint: int = 0
    """As a `RequestTimeline` has it."""


class OperationsHandler:
    """What is at one path, for one method: a handler, as `vecd.gateway.api.routes` calls it."""

    def __init__(self, claims: tuple[Claim, ...], path: str = "") -> None:
        """Of several, a body is taken by the first of whose `claims` it has the field; the first takes the rest. A `*`
        within `path` is the name of a model, whatever name the body has."""
        self.claims = claims
        self._path_of_model = path if "*" in path and not path.endswith("*") else None
        self._input_fields = {claim.dialect.name: _input_fields(claim.operation) for claim in claims}
        self._large = frozenset[str]().union(*(claim.operation.fields.large for claim in claims))
        self._small = frozenset[str]().union(*(claim.operation.fields.small for claim in claims))

    async def __call__(self, context: Context, http: HttpRequest, principal: Principal) -> Response:
        first = self.claims[0]
        if first.operation.describe is not None:
            return first.operation.describe(context.model_info, http.path)
        timeline = http.timeline
        timeline.arrived_at = time.monotonic()
        try:
            principal.check_limits()  # before anything is made of the body
            asked = await context.bodies.parse(
                http.body, self._large, lambda body: self._parse(context, http, body), principal.tenant, self._small,
                http.coding,
            )  # fmt: skip
        except ApiError as error:
            if first.operation.embed is not None:
                context.embedder.count_unread(error)
            raise
        timeline.parsed_at = time.monotonic()
        http.body = b""  # tens of megabytes that nobody needs any more
        try:
            return await _answer(context, asked, timeline, principal)
        except ApiError as error:
            error.dialect = asked.claim.dialect.name
            if asked.field is not None and error.param == _INPUT:
                _name(error, asked.field, is_list=asked.field in asked.claim.operation.fields.large)
            raise

    def claim_of(self, body: Mapping[str, Any]) -> Claim:
        """Whose the body is."""
        for claim in self.claims:
            if claim.operation.claims is not None and body.get(claim.operation.claims) is not None:
                return claim
        return self.claims[0]

    def _field(self, claim: Claim, body: Mapping[str, Any]) -> str | None:
        names = self._input_fields[claim.dialect.name]
        if len(names) <= 1:
            return names[0] if names else None
        return next((name for name in names if body.get(name) is not None), None)

    def _parse(self, context: Context, http: HttpRequest, body: Mapping[str, Any]) -> "_Asked":
        """In a thread, if the body is large."""
        if self._path_of_model is not None:  # Azure's clients send both, and it is the path that names the deployment
            body = {**body, "model": name_in(self._path_of_model, http.path)}
        claim = self.claim_of(body)
        http.timeline.endpoint = claim.endpoint
        operation = claim.operation
        try:
            call = Call(operation.fields.read(body), http.headers, context.model_info, http.request_id)
            if operation.embed is not None:
                ask = operation.embed(call)
                if isinstance(ask, Response):
                    return _Asked(claim, ask)
                num_estimated = context.estimate_tokens(ask.request.inputs, ask.request.tokenizing)
                return _Asked(claim, ask, num_estimated, None, self._field(claim, body))
            if operation.tokenize is not None:
                timeout_s = parse_timeout_s(http.headers)
                return _Asked(claim, operation.tokenize(call), 0, timeout_s, self._field(claim, body))
            if operation.decode is not None:
                timeout_s = parse_timeout_s(http.headers)
                return _Asked(claim, operation.decode(call), 0, timeout_s, self._field(claim, body))
            assert operation.reply is not None
            return _Asked(claim, operation.reply(call))
        except ApiError as error:
            error.dialect = claim.dialect.name
            raise


def _input_fields(operation: Operation) -> tuple[str, ...]:
    """Where the inputs may be; none where it is called `input`, as everywhere within."""
    names = tuple(field.name for field in operation.fields if field.is_large or field.is_required)
    return () if names == (_INPUT,) else names


class _Asked(NamedTuple):
    claim: Claim
    ask: Ask | TokenizeAsk | DecodeAsk | Response
    num_estimated: int = 0
    """Tokens of what is to be embedded, guessed from characters."""
    timeout_s: float | None = None
    """Of what the tokenizer is asked; `EmbedRequest` has its own."""
    field: str | None = None
    """Where the caller has put the inputs, if it is not called `input`."""


async def _answer(context: Context, asked: _Asked, timeline: RequestTimeline, principal: Principal) -> Response:
    match asked.ask:
        case Response() as response:
            return response
        case Ask() as ask:
            is_large = len(ask.request.inputs) > _INLINE_ITEMS  # they will be gone
            embedded = await context.embedder.embed(ask.request, asked.num_estimated, timeline, principal)
            if is_large:
                return await context.threads.call(partial(ask.render, embedded), principal.tenant)
            return ask.render(embedded)
        case TokenizeAsk() as ask:
            await context.embedder.describe(ask, asked.timeout_s, timeline.arrived_at, principal)
            return ask.render()
        case DecodeAsk() as ask:
            return ask.render(await context.embedder.decode(ask, asked.timeout_s, timeline.arrived_at, principal))


def _name(error: ApiError, field: str, *, is_list: bool) -> None:
    """Let an error about the inputs name them as the caller does. `is_list`: they are counted as those of the field."""
    error.param = field
    if is_list:
        error.message = _QUOTED_INPUT.sub(f"'{field}", error.message)
