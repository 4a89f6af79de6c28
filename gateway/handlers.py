"""Runs the operations of all dialects: from an HTTP request to its answer.

Owns what they have in common: the body's way into fields, the choice among dialects that share a path, and who is asked
for what. Knows no dialect by name. Called by `gateway.app` through the routes that `gateway.api` makes.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.callers import Caller
from gateway.errors import ApiError
from gateway.http1 import HttpRequest, Response
from gateway.operations import Ask, Call, DecodeAsk, Dialect, Operation, TokenizeAsk
from gateway.routes import name_in

if TYPE_CHECKING:
    from gateway.app import App


_INLINE_TOKENS = 1000
"""Up to so many are written into an answer on the event loop, each in 1 to 2 µs; more in a thread."""


class Claim(NamedTuple):
    """What one dialect has at a path."""

    dialect: Dialect
    operation: Operation


class Operations:
    """What is at one path, for one method: a handler, as `gateway.routes` calls it."""

    def __init__(self, claims: tuple[Claim, ...], path: str = "") -> None:
        """Of several, a body is taken by the first of whose `claims` it has the field; the first takes the rest. A `*`
        within `path` is the name of a model, which bodies may leave out."""
        self.claims = claims
        self._path_of_model = path if "*" in path and not path.endswith("*") else None
        self._large = frozenset[str]().union(*(claim.operation.fields.large for claim in claims))
        self._small = frozenset[str]().union(*(claim.operation.fields.small for claim in claims))

    async def __call__(self, app: "App", http: HttpRequest, caller: Caller) -> Response:
        first = self.claims[0]
        if first.operation.describe is not None:
            return first.operation.describe(app.served, http.path)
        arrived_at = time.monotonic()
        try:
            caller.check_limits()  # before anything is made of the body
            asked = await app.bodies.parse(
                http.body, self._large, lambda body: self._parse(app, http, body), caller.tenant, self._small,
                http.coding,
            )  # fmt: skip
        except ApiError as error:
            if first.operation.embed is not None:
                app.count_unread(error)
            raise
        http.body = b""  # tens of megabytes that nobody needs any more
        try:
            return await _answer(app, asked, arrived_at, caller)
        except ApiError as error:
            error.dialect = asked.claim.dialect.name
            raise

    def claim_of(self, body: Mapping[str, Any]) -> Claim:
        """Whose the body is."""
        for claim in self.claims:
            if claim.operation.claims is not None and body.get(claim.operation.claims) is not None:
                return claim
        return self.claims[0]

    def _parse(self, app: "App", http: HttpRequest, body: Mapping[str, Any]) -> "_Asked":
        """In a thread, if the body is large."""
        if self._path_of_model is not None and body.get("model") is None:
            body = {**body, "model": name_in(self._path_of_model, http.path)}
        claim = self.claim_of(body)
        operation = claim.operation
        try:
            call = Call(operation.fields.read(body), http.headers, app.served, http.request_id)
            if operation.embed is not None:
                ask = operation.embed(call)
                if isinstance(ask, Response):
                    return _Asked(claim, ask)
                return _Asked(claim, ask, app.tokenizer.estimate_tokens(ask.request.inputs, ask.request.tokenizing))
            if operation.tokenize is not None:
                return _Asked(claim, operation.tokenize(call))
            if operation.decode is not None:
                return _Asked(claim, operation.decode(call))
            assert operation.reply is not None
            return _Asked(claim, operation.reply(call))
        except ApiError as error:
            error.dialect = claim.dialect.name
            raise


class _Asked(NamedTuple):
    claim: Claim
    ask: Ask | TokenizeAsk | DecodeAsk | Response
    num_estimated: int = 0
    """Tokens, guessed from characters."""


async def _answer(app: "App", asked: _Asked, arrived_at: float, caller: Caller) -> Response:
    match asked.ask:
        case Response() as response:
            return response
        case Ask() as ask:
            return ask.render(await app.embed(ask.request, asked.num_estimated, arrived_at, caller))
        case TokenizeAsk() as ask:
            tokens = await app.tokenizer.describe(ask.texts, ask.prompt, ask.add_special_tokens, caller.tenant)
            if sum(map(len, tokens)) <= _INLINE_TOKENS:
                return ask.render(tokens)
            return await app.tokenizer.threads.call(partial(ask.render, tokens), caller.tenant)
        case DecodeAsk() as ask:
            return ask.render(await app.tokenizer.decode(ask.lists, ask.skip_special_tokens, caller.tenant))
