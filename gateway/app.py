"""The handlers: from a parsed HTTP request to an answer. `App` is what `gateway.server` serves.

Owns the path of a request through admission, tokenizer, scheduler and dispatcher, and the table of routes. Knows no
socket and no ZeroMQ frame.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.admission import Admission
from gateway.auth import Auth
from gateway.config import GatewayConfig
from gateway.dialects import openai
from gateway.dispatch import Dispatcher
from gateway.encoding import ENCODERS
from gateway.errors import ApiError, NotFound, Unavailable, render_openai_error
from gateway.health import describe_health, describe_info
from gateway.http1 import HttpRequest, Response
from gateway.request import EmbedRequest, Gathering, TokenizedInput
from gateway.request import Sequence as QueuedSequence
from gateway.routes import Route, find_route
from gateway.scheduler import Scheduler
from gateway.tokenizer import Tokenizer


class App:
    def __init__(
        self,
        config: GatewayConfig,
        *,
        admission: Admission,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        dispatcher: Dispatcher,
    ) -> None:
        self.config = config
        self.admission = admission
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.dispatcher = dispatcher
        self.is_draining = False
        self.started_at = time.monotonic()
        self.created_at = int(time.time())
        self._auth = Auth(config.api_key)
        self._gatherings: set[Gathering] = set()

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
        for gathering in list(self._gatherings):
            gathering.fail(Unavailable("The server is shutting down and did not get to this request", retry_after_s=1))

    def _route(self, request: HttpRequest) -> Route:
        route = find_route(ROUTES, request.method, request.path)
        if route.needs_key:
            self._auth.check(request.headers)
        return route

    # --- embeddings -----------------------------------------------------------------------------------------

    async def embed(self, request: EmbedRequest) -> tuple[list[bytes], list[TokenizedInput]]:
        """The encoded rows of a request in input order, and its tokenized inputs.

        Raises ApiError: TooManyRequests at the door, BadRequest for an input, Unavailable when the deadline passes,
        ServerError when the engine fails. Side effect when cancelled: what is still queued is abandoned.
        """
        with self.admission.permit(self.tokenizer.estimate_tokens(request.inputs)):
            try:
                async with asyncio.timeout(self.config.request_timeout_s):
                    tokenized = await self._tokenize(request.inputs)
                    return await self._gather(request, tokenized), tokenized
            except TimeoutError:
                why = self.dispatcher.why_unavailable() or "the queue is too long"
                raise Unavailable(
                    f"No answer within {self.config.request_timeout_s:g} s: {why}", retry_after_s=5
                ) from None

    async def _tokenize(self, inputs: list[str] | list[list[int]]) -> list[TokenizedInput]:
        if isinstance(inputs[0], str):
            return await self.tokenizer.tokenize_texts(inputs)
        return self.tokenizer.check_token_ids(inputs)

    async def _gather(self, request: EmbedRequest, tokenized: Sequence[TokenizedInput]) -> list[bytes]:
        gathering = Gathering(len(tokenized), ENCODERS[request.encoding], asyncio.get_running_loop())
        self.scheduler.add(QueuedSequence(gathering, index, item) for index, item in enumerate(tokenized))
        self.dispatcher.pump_soon()
        self._gatherings.add(gathering)
        try:
            await gathering.finished
        finally:
            self._gatherings.discard(gathering)
            gathering.abandon()
            if gathering.num_missing:
                self.scheduler.note_abandoned(gathering.num_missing)
        return gathering.fragments


# --- routes -----------------------------------------------------------------------------------------------------


async def create_embeddings(app: App, http: HttpRequest) -> Response:
    config = app.config
    request = openai.parse_embeddings(http.body, max_inputs=config.max_inputs, dim=config.card.dim)
    fragments, tokenized = await app.embed(request)
    num_tokens = sum(item.num_tokens for item in tokenized)
    body = openai.render_embeddings(fragments, model=config.model, num_tokens=num_tokens)
    num_truncated = sum(item.is_truncated for item in tokenized)
    return Response(200, body, headers={"x-vecd-truncated": str(num_truncated)} if num_truncated else {})


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
}
