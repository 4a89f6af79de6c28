"""The handlers: from a parsed HTTP request to an answer. `App` is what `gateway.server` serves.

Owns the path of a request through admission, tokenizer, scheduler and dispatcher, and the table of routes. Knows no
socket and no ZeroMQ frame.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import orjson

from gateway.admission import Admission, Permit
from gateway.board import Board
from gateway.bodies import Bodies
from gateway.callers import Caller, Callers, Spending
from gateway.config import ApiKey, GatewayConfig
from gateway.deadlines import Deadlines
from gateway.dialects import openai
from gateway.dispatch import Dispatcher
from gateway.encoding import JsonRows, Matrix, make_collector
from gateway.errors import (
    ApiError,
    DeadlinePassed,
    NotFound,
    NotImplementedByServer,
    TooManyRequests,
    Unavailable,
    render_openai_error,
)
from gateway.health import describe_health, describe_info
from gateway.http1 import HttpRequest, Response
from gateway.metrics import CONTENT_TYPE, render_metrics
from gateway.request import EmbedRequest, Flow, Gathering, Priority, TokenizedInput
from gateway.request import Sequence as QueuedSequence
from gateway.routes import Place, Route, admin_table, find_route, public_table
from gateway.scheduler import Scheduler
from gateway.tokenizer import Tokenizer
from shm.board import Counter

T = TypeVar("T")

_LARGE_BODY_BYTES = 64 * 1024


class Embedded(NamedTuple):
    """What came of a request."""

    collector: JsonRows | Matrix
    num_tokens: int
    num_truncated: int
    """Inputs that were longer than the model takes."""


class App:
    def __init__(
        self,
        config: GatewayConfig,
        *,
        admission: Admission,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        dispatcher: Dispatcher,
        board: Board,
    ) -> None:
        self.config = config
        self.admission = admission
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.dispatcher = dispatcher
        self.board = board
        self.bodies = Bodies(
            tokenizer.threads,
            max_inputs=config.max_inputs,
            max_chars=tokenizer.max_chars,
            max_ids=tokenizer.max_tokens,
        )
        self.is_draining = False
        self._make_end: Callable[[], ApiError] | None = None
        """Makes the error for whoever still comes, once this has ended."""
        self.started_at = time.monotonic()
        self.created_at = int(time.time())
        self.on_reload: Callable[[], None] | None = None
        """What `POST /admin/reload` asks for."""
        self._admin_table = admin_table(ROUTES)
        self.callers = Callers(config.keys, config.num_gateways)
        self.set_keys(config.keys)
        self._max_priority = Priority[config.max_priority.upper()]
        self._gatherings: set[Gathering] = set()
        self._deadlines = Deadlines(self._expire)
        dispatcher.when_broken(self.fail_all)

    # --- what the server calls ------------------------------------------------------------------------------

    def check_head(self, request: HttpRequest) -> Response | None:
        """Refuse what can be refused before the body has arrived. Raises ApiError."""
        route, caller = self._admit(request)
        if route.scope == "embed" and _is_large(request):
            caller.check_limits()  # a small body is taken all the same, which leaves the caller his connection
        return None

    async def handle(self, request: HttpRequest) -> Response:
        route, caller = self._admit(request)
        return await route.handler(self, request, caller)

    def render_error(self, error: ApiError, path: str | None) -> Response:
        return Response(error.status, render_openai_error(error), headers=error.headers())

    def give_up(self) -> None:
        """Answer every request that still waits for rows with a 503: the drain's deadline is about to pass."""
        self.end(_shutting_down)

    def end(self, make_error: Callable[[], ApiError]) -> None:
        """Answer every request that waits for rows, or comes to that from now on, each with an error of its own."""
        self._make_end = make_error
        self.fail_all(make_error)

    def fail_all(self, make_error: Callable[[], ApiError]) -> None:
        """Answer every request that still waits for rows, each with an error of its own."""
        for gathering in list(self._gatherings):
            gathering.fail(make_error())

    def set_keys(self, keys: Sequence[ApiKey]) -> None:
        """From now on these are the keys that callers may send. What has been admitted goes on."""
        self.callers.set_keys(keys)
        self._public_table = public_table(
            ROUTES, has_admin_listener=self.config.has_admin_listener, has_keys=self.callers.are_known
        )

    def _admit(self, request: HttpRequest) -> tuple[Route, Caller]:
        """Where a request goes, and who sends it. Of a request that comes in parts this is asked twice, because its key
        may be gone by the time that its body has come; it takes 4 µs."""
        is_admin = request.is_admin
        route = find_route(self._admin_table if is_admin else self._public_table, request.method, request.path)
        return route, self.callers.identify(request.headers, request.client, route.scope, is_admin=is_admin)

    # --- embeddings -----------------------------------------------------------------------------------------

    async def embed(self, request: EmbedRequest, num_estimated: int, arrived_at: float, caller: Caller) -> Embedded:
        """The rows of a request, and what was embedded. `num_estimated`: its tokens, guessed from characters.

        `arrived_at`, by `time.monotonic`, is what its deadline counts from. Raises ApiError: RateLimited for a key that
        is over its limits, TooManyRequests at the door, BadRequest for an input, Unavailable when the deadline passes
        or no worker stays alive, ServerError when the engine fails. Side effects: its inputs are gone once they are
        tokenized; when cancelled, what is still queued is dropped.
        """
        self.dispatcher.raise_if_broken()
        limit_s = self.config.request_timeout_s
        deadline = arrived_at + (limit_s if request.timeout_s is None else min(request.timeout_s, limit_s))
        priority = Priority.NORMAL if request.priority is None else request.priority
        priority = max(self._max_priority, caller.max_priority, priority)
        with caller.spend(num_estimated) as spending:
            permit = self.admission.try_enter(num_estimated, priority, deadline, caller.tenant)
            if permit is None:
                permit = await self._enter(num_estimated, priority, deadline, caller)
            with permit:
                return await self._gather(request, permit, caller, spending)

    async def _enter(self, num_estimated: int, priority: Priority, deadline: float, caller: Caller) -> Permit:
        try:
            return await self.admission.enter(num_estimated, priority, deadline, caller.tenant)
        except TooManyRequests:
            self.board.add(Counter.REFUSED)
            raise

    async def _gather(self, request: EmbedRequest, permit: Permit, caller: Caller, spending: Spending) -> Embedded:
        if self._make_end is not None:
            raise self._make_end()
        self.dispatcher.raise_if_broken()  # it may have been found out while this request was at the door
        num_rows = len(request.inputs)
        collector = make_collector(request.encoding, num_rows, self.config.card.dim)
        gathering = Gathering(num_rows, collector, asyncio.get_running_loop())
        flow = self.scheduler.open(gathering, permit.priority, permit.deadline, caller.tenant)
        self._gatherings.add(gathering)
        tick = self._deadlines.set(gathering, permit.deadline)
        try:
            num_tokens, num_truncated = await self._queue(request, flow, permit)
            spending.settle(num_tokens)
            await gathering.finished
        finally:
            self._deadlines.drop(gathering, tick)
            self._gatherings.discard(gathering)
            gathering.abandon()
            self.scheduler.close(flow)
            spending.note_sent(flow.num_sent_tokens)
        return Embedded(collector, num_tokens, num_truncated)

    def _expire(self, gathering: Gathering) -> None:
        if not gathering.is_over:
            self.board.add(Counter.EXPIRED)
            gathering.fail(DeadlinePassed(self.dispatcher.why_unavailable()))

    async def _queue(self, request: EmbedRequest, flow: Flow, permit: Permit) -> tuple[int, int]:
        """Tokenize and queue all inputs; returns how many tokens they are, and how many inputs were cut."""
        tokenized = self.tokenizer.tokenize_now(request.inputs)
        if tokenized is not None:
            counts = self._queue_run(flow, 0, tokenized, permit)
        else:
            counts = await _unless_over(flow.gathering, self._queue_runs(request, flow, permit))
        permit.note_queued()  # whatever the estimate was
        request.inputs.clear()  # megabytes that need not wait for the answer
        return counts

    async def _queue_runs(self, request: EmbedRequest, flow: Flow, permit: Permit) -> tuple[int, int]:
        """Run by run: the first inputs are with the workers while the last are being tokenized."""
        num_queued = num_tokens = num_truncated = 0
        async with aclosing(self.tokenizer.tokenize(request.inputs, flow.tenant)) as runs:
            async for tokenized in runs:
                more_tokens, more_truncated = self._queue_run(flow, num_queued, tokenized, permit)
                num_queued += len(tokenized)
                num_tokens += more_tokens
                num_truncated += more_truncated
        return num_tokens, num_truncated

    def _queue_run(self, flow: Flow, start: int, tokenized: list[TokenizedInput], permit: Permit) -> tuple[int, int]:
        sequences = [QueuedSequence(flow, index, item) for index, item in enumerate(tokenized, start)]
        num_tokens = sum([item.num_tokens for item in tokenized])
        self.dispatcher.quarantine.check(tokenized, start)
        self.scheduler.add(flow, self.dispatcher.without_suspects(sequences), time.monotonic())
        permit.note_queued(num_tokens)
        self.dispatcher.pump_soon()
        return num_tokens, sum([item.is_truncated for item in tokenized])


async def _unless_over(gathering: Gathering, queueing: Coroutine[Any, Any, T]) -> T:
    """What `queueing` returns; it is ended when the request is over before, and this raises why."""
    task = asyncio.ensure_future(queueing)
    try:
        await asyncio.wait((task, gathering.finished), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await gathering.finished
        return await task
    finally:
        task.cancel()


def _is_large(request: HttpRequest) -> bool:
    """Whether more of a body is to come than is read for the sake of a connection."""
    length = request.headers.get("content-length", "")
    return not length.isdecimal() or int(length) > _LARGE_BODY_BYTES


def _shutting_down() -> Unavailable:
    return Unavailable("The server is shutting down and did not get to this request", retry_after_s=1)


# --- routes -----------------------------------------------------------------------------------------------------


async def create_embeddings(app: App, http: HttpRequest, caller: Caller) -> Response:
    config, arrived_at = app.config, time.monotonic()
    caller.check_limits()  # before anything is made of the body

    def parse(fields: dict[str, Any]) -> tuple[EmbedRequest, int]:
        request = openai.parse_embeddings(fields, http.headers, max_inputs=config.max_inputs, dim=config.card.dim)
        return request, app.tokenizer.estimate_tokens(request.inputs)

    request, num_estimated = await app.bodies.parse(
        http.body, openai.LARGE_FIELDS, parse, caller.tenant, openai.SMALL_FIELDS
    )
    http.body = b""  # tens of megabytes that nobody needs any more
    embedded = await app.embed(request, num_estimated, arrived_at, caller)
    return openai.render_embeddings(
        embedded.collector,
        request.encoding,
        model=config.model,
        num_tokens=embedded.num_tokens,
        num_truncated=embedded.num_truncated,
    )


async def list_models(app: App, http: HttpRequest, caller: Caller) -> Response:
    return _json(200, openai.render_models(app.config.model, app.created_at))


async def retrieve_model(app: App, http: HttpRequest, caller: Caller) -> Response:
    name = http.path.partition("/models/")[2].strip("/")
    if name != app.config.model:
        raise NotFound(
            f"The model `{name}` does not exist; this server serves `{app.config.model}`",
            param="model",
            code="model_not_found",
        )
    return _json(200, openai.render_model(app.config.model, app.created_at))


async def health(app: App, http: HttpRequest, caller: Caller) -> Response:
    status, body = describe_health(app)
    return _json(status, body, headers={} if status == 200 else {"retry-after": "1"})


async def live(app: App, http: HttpRequest, caller: Caller) -> Response:
    return _json(200, {"status": "ok"})


async def info(app: App, http: HttpRequest, caller: Caller) -> Response:
    return _json(200, describe_info(app, shows_tenants=http.is_admin or caller.is_admin))


async def metrics(app: App, http: HttpRequest, caller: Caller) -> Response:
    body = render_metrics(app.board, version=app.config.version, model=app.config.model)
    return Response(200, body, content_type=CONTENT_TYPE)


async def reload(app: App, http: HttpRequest, caller: Caller) -> Response:
    if app.on_reload is None:
        raise NotImplementedByServer("This gateway has nobody who could reload its configuration")
    app.on_reload()
    return _json(202, {"status": "reloading"})


async def keys(app: App, http: HttpRequest, caller: Caller) -> Response:
    """Of each key what it may and has used, by its name: nothing that it could be told from."""
    return _json(200, {"gateway": app.board.gateway, "keys": [holder.describe() for holder in app.callers.holders]})


def _json(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(status, orjson.dumps(body), headers=dict(headers or {}))


_EMBEDDINGS = {"POST": Route(create_embeddings)}
_MODELS = {"GET": Route(list_models)}
_MODEL = {"GET": Route(retrieve_model)}

ROUTES = {
    "/v1/embeddings": _EMBEDDINGS,
    "/embeddings": _EMBEDDINGS,
    "/v1/models": _MODELS,
    "/models": _MODELS,
    "/v1/models/*": _MODEL,
    "/models/*": _MODEL,
    "/health": {"GET": Route(health, scope=None, place=Place.BOTH)},
    "/live": {"GET": Route(live, scope=None, place=Place.BOTH)},
    "/info": {"GET": Route(info, scope="metrics", place=Place.OPERATOR)},
    "/metrics": {"GET": Route(metrics, scope="metrics", place=Place.OPERATOR)},
    "/admin/reload": {"POST": Route(reload, scope="admin", place=Place.ADMIN)},
    "/admin/keys": {"GET": Route(keys, scope="admin", place=Place.ADMIN)},
}
