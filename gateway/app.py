"""The handlers: from a parsed HTTP request to an answer. `App` is what `gateway.server` serves.

Owns the path of a request through admission, tokenizer, scheduler and dispatcher, and the table of routes. Knows no
socket and no ZeroMQ frame.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import orjson

from gateway.admission import Admission, Permit
from gateway.auth import Auth
from gateway.board import Board
from gateway.bodies import Bodies
from gateway.config import GatewayConfig
from gateway.deadlines import Deadlines
from gateway.dialects import openai
from gateway.dispatch import Dispatcher
from gateway.encoding import JsonRows, Matrix, make_collector
from gateway.errors import ApiError, DeadlinePassed, NotFound, TooManyRequests, Unavailable, render_openai_error
from gateway.health import describe_health, describe_info
from gateway.http1 import HttpRequest, Response
from gateway.metrics import CONTENT_TYPE, render_metrics
from gateway.request import EmbedRequest, Flow, Gathering, Priority, TokenizedInput
from gateway.request import Sequence as QueuedSequence
from gateway.routes import Route, find_route
from gateway.scheduler import Scheduler
from gateway.tokenizer import Tokenizer
from shm.board import Counter

T = TypeVar("T")


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
        self._has_given_up = False
        self.started_at = time.monotonic()
        self.created_at = int(time.time())
        self._auth = Auth(config.api_key)
        self._max_priority = Priority[config.max_priority.upper()]
        self._gatherings: set[Gathering] = set()
        self._deadlines = Deadlines(self._expire)

    # --- what the server calls ------------------------------------------------------------------------------

    def check_head(self, request: HttpRequest) -> Response | None:
        """Refuse what can be refused before the body has arrived. Raises ApiError."""
        self._route(request)
        return None

    async def handle(self, request: HttpRequest) -> Response:
        return await self._route(request).handler(self, request)

    def render_error(self, error: ApiError, path: str | None) -> Response:
        return Response(error.status, render_openai_error(error), headers=error.headers())

    def give_up(self) -> None:
        """Answer every request that still waits for rows with a 503: the drain's deadline is about to pass."""
        self._has_given_up = True
        for gathering in list(self._gatherings):
            gathering.fail(_shutting_down())

    def _route(self, request: HttpRequest) -> Route:
        route = find_route(ROUTES, request.method, request.path)
        if route.needs_key:
            self._auth.check(request.headers)
        return route

    # --- embeddings -----------------------------------------------------------------------------------------

    async def embed(self, request: EmbedRequest, num_estimated: int, arrived_at: float) -> Embedded:
        """The rows of a request, and what was embedded. `num_estimated`: its tokens, guessed from characters.

        `arrived_at`, by `time.monotonic`, is what its deadline counts from. Raises ApiError: TooManyRequests at the
        door, BadRequest for an input, Unavailable when the deadline passes, ServerError when the engine fails. Side
        effects: its inputs are gone once they are tokenized; when cancelled, what is still queued is dropped.
        """
        limit_s = self.config.request_timeout_s
        deadline = arrived_at + (limit_s if request.timeout_s is None else min(request.timeout_s, limit_s))
        priority = max(self._max_priority, Priority.NORMAL if request.priority is None else request.priority)
        permit = self.admission.try_enter(num_estimated, priority, deadline)
        if permit is None:
            permit = await self._enter(num_estimated, priority, deadline)
        with permit:
            return await self._gather(request, priority, permit, deadline)

    async def _enter(self, num_estimated: int, priority: Priority, deadline: float) -> Permit:
        try:
            return await self.admission.enter(num_estimated, priority, deadline)
        except TooManyRequests:
            self.board.add(Counter.REFUSED)
            raise

    async def _gather(self, request: EmbedRequest, priority: Priority, permit: Permit, deadline: float) -> Embedded:
        if self._has_given_up:
            raise _shutting_down()
        num_rows = len(request.inputs)
        collector = make_collector(request.encoding, num_rows, self.config.card.dim)
        gathering = Gathering(num_rows, collector, asyncio.get_running_loop())
        flow = self.scheduler.open(gathering, priority, deadline)
        self._gatherings.add(gathering)
        tick = self._deadlines.set(gathering, deadline)
        try:
            num_tokens, num_truncated = await self._queue(request, flow, permit)
            await gathering.finished
        finally:
            self._deadlines.drop(gathering, tick)
            self._gatherings.discard(gathering)
            gathering.abandon()
            self.scheduler.close(flow)
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
        async with aclosing(self.tokenizer.tokenize(request.inputs)) as runs:
            async for tokenized in runs:
                more_tokens, more_truncated = self._queue_run(flow, num_queued, tokenized, permit)
                num_queued += len(tokenized)
                num_tokens += more_tokens
                num_truncated += more_truncated
        return num_tokens, num_truncated

    def _queue_run(self, flow: Flow, start: int, tokenized: list[TokenizedInput], permit: Permit) -> tuple[int, int]:
        sequences = [QueuedSequence(flow, index, item) for index, item in enumerate(tokenized, start)]
        num_tokens = sum([item.num_tokens for item in tokenized])
        self.scheduler.add(flow, sequences, time.monotonic())
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


def _shutting_down() -> Unavailable:
    return Unavailable("The server is shutting down and did not get to this request", retry_after_s=1)


# --- routes -----------------------------------------------------------------------------------------------------


async def create_embeddings(app: App, http: HttpRequest) -> Response:
    config, arrived_at = app.config, time.monotonic()

    def parse(fields: dict[str, Any]) -> tuple[EmbedRequest, int]:
        request = openai.parse_embeddings(fields, http.headers, max_inputs=config.max_inputs, dim=config.card.dim)
        return request, app.tokenizer.estimate_tokens(request.inputs)

    request, num_estimated = await app.bodies.parse(http.body, openai.LARGE_FIELDS, parse)
    http.body = b""  # tens of megabytes that nobody needs any more
    embedded = await app.embed(request, num_estimated, arrived_at)
    return openai.render_embeddings(
        embedded.collector,
        request.encoding,
        model=config.model,
        num_tokens=embedded.num_tokens,
        num_truncated=embedded.num_truncated,
    )


async def list_models(app: App, http: HttpRequest) -> Response:
    return _json(200, openai.render_models(app.config.model, app.created_at))


async def retrieve_model(app: App, http: HttpRequest) -> Response:
    name = http.path.partition("/models/")[2].strip("/")
    if name != app.config.model:
        raise NotFound(
            f"The model `{name}` does not exist; this server serves `{app.config.model}`",
            param="model",
            code="model_not_found",
        )
    return _json(200, openai.render_model(app.config.model, app.created_at))


async def health(app: App, http: HttpRequest) -> Response:
    status, body = describe_health(app)
    return _json(status, body, headers={} if status == 200 else {"retry-after": "1"})


async def live(app: App, http: HttpRequest) -> Response:
    return _json(200, {"status": "ok"})


async def info(app: App, http: HttpRequest) -> Response:
    return _json(200, describe_info(app))


async def metrics(app: App, http: HttpRequest) -> Response:
    body = render_metrics(app.board, version=app.config.version, model=app.config.model)
    return Response(200, body, content_type=CONTENT_TYPE)


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
    "/health": {"GET": Route(health, needs_key=False)},
    "/live": {"GET": Route(live, needs_key=False)},
    "/info": {"GET": Route(info)},
    "/metrics": {"GET": Route(metrics)},
}
