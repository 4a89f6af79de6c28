"""The generations of the configuration that a gateway serves, and the wiring of each.

Owns `Service`, all that a request of one generation goes through, and `Services`: which generation takes the new
requests for each model, and how one is prepared, activated, retired and discarded. A request stays with the generation
that it began with; where several models are served, it counts for all of them until its model is known. Knows no
connection and no listening socket.
"""

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import NoReturn

from vecd.base.tasks import NoTasks
from vecd.gateway.api.body import Bodies
from vecd.gateway.api.served import HEADER, PREFIX, ModelInfo, Models, header_value, readings_of, unlisted
from vecd.gateway.app.app import ENDPOINTS, Api
from vecd.gateway.app.routes import Context
from vecd.gateway.config import ApiKey, GatewayConfig
from vecd.gateway.dispatch.dispatcher import Dispatcher
from vecd.gateway.dispatch.residence import Residence
from vecd.gateway.dispatch.vector_cache import VectorCache
from vecd.gateway.encoding.sparse import read_query_weights
from vecd.gateway.errors import ApiError, Unavailable
from vecd.gateway.pipeline import Pipeline
from vecd.gateway.request import HttpRequest, Identity, ModelChoice, Overflow, Response
from vecd.gateway.scheduling.admission import Admission
from vecd.gateway.scheduling.cores import Cores
from vecd.gateway.scheduling.keys import Principals
from vecd.gateway.scheduling.policy import BatchingPolicy
from vecd.gateway.telemetry.finished import Tracing, import_opentelemetry
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.gateway.telemetry.prometheus import Processes
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import ModelError
from vecd.shm.control import (
    Activate,
    Discard,
    InputDeaths,
    InputsCleared,
    Message,
    ModelBroken,
    ModelFiles,
    ModelIdentity,
    ModelIs,
    ModelState,
    NewKeys,
    Prepare,
    Prepared,
    Progress,
    Quarantined,
    ReloadAsked,
    Retired,
    Withdrawn,
    WorkerDown,
    WorkerUp,
)
from vecd.shm.output import Output
from vecd.shm.shared_metrics import Gauge, ServiceKey
from vecd.shm.vector_cache import VectorCacheMemory
from vecd.shm.views import map_arena
from vecd.shm.wire import Incarnation

log = logging.getLogger("vecd.gateway")

_RETIRE_POLL_S = 0.02
_UNKNOWN_KEY = 401
"""The status of responses that tell no model's name."""
_MODELS_TIMEOUT_S = 10.0
"""How long a request waits for models that are still to come. A gateway that is started again has read the tokenizers
of all models within a second or two."""


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """What all generations of one gateway have in common."""

    epoch: int
    """Which of the gateway's lives this is."""
    quarantine_key: bytes
    shared_metrics: SharedMetrics
    send: Callable[[Message], None]
    cores: Cores = field(default_factory=lambda: Cores(1))
    vector_cache: VectorCacheMemory | None = None


class Service:
    def __init__(self, config: GatewayConfig, generation: int, tokenizer: Tokenizer, gateway: GatewayFacts) -> None:
        """Holds no socket yet: see `Dispatcher.start`. Raises ModelError for weights of queries that cannot be read."""
        self.config = config
        self.generation = generation
        self._tokenizer = tokenizer
        self._shared_metrics = gateway.shared_metrics
        counting = gateway.shared_metrics.of_model(config.model)
        self._cores = gateway.cores
        self.policy = BatchingPolicy(
            config.max_batch_tokens,
            config.arena.rows_per_slot,
            config.max_tokens,
            num_gateways=config.num_gateways,
            queued_elsewhere=lambda: self._shared_metrics.others(Gauge.QUEUED_TOKENS),
        )
        service = ServiceKey(generation, config.model_index)
        vector_cache = None
        if gateway.vector_cache is not None and "dense" in config.card.capabilities:
            vector_cache = VectorCache(
                gateway.vector_cache,
                service,
                dim=config.card.dim,
                is_shared_by_tenants=config.share_computed == "all",
                shared_metrics=counting,
            )
        self.dispatcher = Dispatcher(
            policy=self.policy,
            epoch=gateway.epoch,
            service=service,
            max_batch_tokens=config.max_batch_tokens,
            batch_timeout_s=config.batch_timeout_s,
            num_gateways=config.num_gateways,
            is_shared_by_tenants=config.share_computed == "all",
            widths={output: output.width_of(config.card) for output in Output},
            report=gateway.send,
            model=config.model,
            quarantine_key=_quarantine_key(gateway.quarantine_key, config.model),
            shared_metrics=counting,
            cores=gateway.cores,
            vector_cache=vector_cache,
            weight=None if config.compute_type == "gpu" else config.weight,
        )
        self.residence = Residence(
            generation, keep_alive_s=config.keep_alive_s, num_gateways=config.num_gateways, send=gateway.send
        )
        self.admission = Admission(
            max_requests=config.share(config.max_requests),
            max_wait_s=config.max_wait_s,
            policy=self.policy,
            workers=self.dispatcher,
        )
        self.pipeline = Pipeline(
            config,
            admission=self.admission,
            tokenizer=tokenizer,
            policy=self.policy,
            dispatcher=self.dispatcher,
            residence=self.residence,
            shared_metrics=counting,
            vector_cache=vector_cache,
            query_weights=read_query_weights(config.card, tokenizer.id_of, config.query_weights),
        )
        self.is_draining = False
        self.identity = Identity(defaults.alias for defaults in config.alias_defaults)
        self.api = Api(self._make_context(lambda: gateway.send(ReloadAsked())))
        self.num_handled = 0
        self.join(None)

    def _make_context(self, on_reload: Callable[[], None]) -> Context:
        config, tokenizer = self.config, self._tokenizer
        return Context(
            config=config,
            model_info=ModelInfo(
                config, self.residence, self.identity, int(time.time()), tokenizer.least_tokens, tokenizer.vocabulary
            ),
            bodies=Bodies(
                tokenizer.threads,
                max_inputs=config.max_inputs,
                max_chars=tokenizer.max_chars,
                max_ids=tokenizer.max_ids,
                max_bytes=config.max_body_bytes,
            ),
            threads=tokenizer.threads,
            estimate_tokens=tokenizer.estimate_tokens,
            embedder=self.pipeline,
            residence=self.residence,
            principals=Principals(config.keys, config.num_gateways),
            shared_metrics=self._shared_metrics,
            endpoints=ENDPOINTS,
            processes=Processes(),
            started_at=time.monotonic(),
            links=lambda: self.dispatcher.links,
            why_unavailable=self._why_unavailable,
            changed_files=lambda: self.dispatcher.changed_files,
            num_tenants=lambda: self.admission.num_tenants,
            describe_cores=lambda: self._cores.describe() | {"learned": self.dispatcher.thread_model.describe()},
            load_of=lambda tenant: (self.admission.num_requests_of(tenant), self.policy.queued_tokens_of(tenant)),
            openapi=lambda request, principal: self.api.describe(request, principal),  # noqa: PLW0108 (it is made afterwards)
            on_reload=on_reload,
            identity=self.identity,
        )

    def join(self, models: Models[Context] | None) -> None:
        """Serve beside other models, or as the only one; then its use is of interest only if it may be unloaded."""
        self.api.join(models)
        config = self.config
        may_leave = config.loads_on_demand or config.keep_alive_s is not None or config.allows_keep_alive
        self.dispatcher.on_sweep = self._note_use if may_leave or models is not None else None

    def _note_use(self) -> None:
        self.residence.note_use(self.admission.num_admitted, self.admission.num_requests, self.dispatcher.core_s)

    def change_state(self, status: ModelIs) -> None:
        """What waits for the model waits on, but after a failed load."""
        if not self.residence.change(status):
            return
        state = self.residence.state
        self.admission.has_workers = state is ModelState.READY
        match state:
            case ModelState.READY:
                self.dispatcher.resume()
            case ModelState.DRAINING:
                self.dispatcher.drain()
            case _:
                self.dispatcher.hold()
        if state is ModelState.FAILED:
            self.pipeline.fail_all(self.residence.failed_error)
        elif state is ModelState.UNLOADED and (self.admission.num_requests or self.residence.has_waiting_clients):
            self.residence.want()  # requests came before nothing was sent any more

    @property
    def is_in_use(self) -> bool:
        return self.num_handled > 0 or self.admission.num_requests > 0

    def stop(self) -> None:
        self.dispatcher.stop()
        if self.pipeline.chat is not None:
            self.pipeline.chat.close()
        # Waits for the step that is being taken, which on a huge text may be a second.
        asyncio.get_running_loop().run_in_executor(None, self._tokenizer.threads.close)

    def _why_unavailable(self) -> str | None:
        """A model that can be loaded is available."""
        if self.is_draining:
            return "the server is shutting down"
        if self.residence.is_awaited:
            return self.residence.why_failed()
        return None if self.dispatcher.awaits_workers else self.dispatcher.why_unavailable()


SERVICE_GAUGES: Mapping[Gauge, Callable[[Service], int]] = {
    Gauge.REQUESTS: lambda service: service.admission.num_requests,
    Gauge.QUEUED_SEQUENCES: lambda service: service.policy.queued_sequences,
    Gauge.QUEUED_TOKENS: lambda service: service.policy.queued_tokens,
    Gauge.IN_FLIGHT_TOKENS: lambda service: service.dispatcher.in_flight_tokens,
}
"""Those that are the sum over generations."""
_OTHER_GAUGES = (Gauge.QUEUE_AGE_US, Gauge.WORKERS)


class Services:
    """The generations, as the `vecd.gateway.http.connection.Application` that the server serves."""

    def __init__(
        self,
        first: Service,
        gateway: GatewayFacts,
        *,
        read_tokenizer: Callable[[GatewayConfig], Tokenizer],
        make_service: Callable[[GatewayConfig, int, Tokenizer, GatewayFacts], Service] = Service,
        num_models: int = 1,
    ) -> None:
        """`first`: the active generation of the first model. `read_tokenizer` is called in a thread; raises ModelError.
        `num_models`: those that are served once each has been activated."""
        self.active = first
        """That of the first model. Its configuration is the server's."""
        self.of_models: tuple[Service, ...] = (first,)
        """The active generation of each model, in the order of the configuration."""
        self.all = {first.generation: first}
        """Those that have requests, or may get them."""
        self.tracing: Tracing | None = None
        self.on_activated: Callable[[GatewayConfig], None] = lambda config: None
        """Gets a new configuration of the first model."""
        self._gateway = gateway
        self._read_tokenizer = read_tokenizer
        self._make_service = make_service
        self._keys: Sequence[ApiKey] = first.config.keys
        self.preparing: dict[int, asyncio.Task[None]] = {}
        self.told: dict[int, ModelIs] = {}
        """The states of models whose generations are being prepared."""
        self._num_awaited = num_models - 1
        self._have_come = asyncio.Event()
        self._models: Models[Context] | None = None
        """None where there is one model, whose aliases have no request defaults."""
        self._logged_models: set[str] = set()
        self._join_models()

    def total(self, value: Callable[[Service], int]) -> int:
        return sum(map(value, self.all.values()))

    def schedule_dispatch(self) -> None:
        for service in self.all.values():
            service.dispatcher.schedule_dispatch()

    def stop(self) -> None:
        for service in self.all.values():
            service.dispatcher.stop()
            if service.pipeline.chat is not None:
                service.pipeline.chat.close()

    # --- what the server calls ------------------------------------------------------------------------------

    def check_head(self, request: HttpRequest) -> Response | None:
        models, path = self._models, request.path
        if models is None:
            return self.active.api.check_head(request)
        if models.is_complete or not path.startswith(PREFIX) or models.split(path) is not None:
            return self._enter(models, request).api.check_head(request)
        # Its model may be still to come, and the body arrives meanwhile.
        request.path = self._likeliest_reading(path)[1]
        response = self.active.api.check_head(request)
        request.path = path
        return response

    async def handle(self, request: HttpRequest) -> Response:
        if self._models is not None:
            return await self._handle_among(self._models, request)
        choice, service = request.choice, self.active
        if choice is not None and choice.is_made and request.timeline.model != service.config.model:
            # Its model was withdrawn while its body arrived: the one that is left would answer in its place.
            raise unlisted(choice.named)
        service.num_handled += 1
        if self.tracing is not None:
            self.tracing.begin(request)
        try:
            return await service.api.handle(request)
        finally:
            service.num_handled -= 1

    def render_error(self, error: ApiError, path: str | None) -> Response:
        return self.active.api.render_error(error, path)

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        if request is not None and request.timeline.model and response.status != _UNKNOWN_KEY:
            response.headers[HEADER] = header_value(request.timeline.model)
        self.active.api.add_headers(response, request)

    # --- several models -------------------------------------------------------------------------------------

    async def _handle_among(self, models: Models[Context], request: HttpRequest) -> Response:
        if not models.is_complete:
            await self._await_models(request)
            models = self._models or models
        if self.tracing is not None:
            self.tracing.begin(request)
        service = self._enter(models, request)
        choice = request.choice
        assert choice is not None
        held = [service] if choice.is_made else list(self.of_models)
        for each in held:
            each.num_handled += 1

        def release(kept: str | None) -> None:
            for each in [each for each in held if each.config.model != kept]:
                held.remove(each)
                each.num_handled -= 1

        choice.on_chosen = release
        try:
            return await service.api.handle(request)
        finally:
            release(None)

    async def _await_models(self, request: HttpRequest) -> None:
        """Let a request that may be for a model which is still to come wait for it. During the server's own start no
        request waits."""
        path = self._likeliest_reading(request.path)[1] if request.path.startswith(PREFIX) else request.path
        if self.active.dispatcher.start_stage is None and self.active.api.is_for_model(request.method, path):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._have_come.wait(), _MODELS_TIMEOUT_S)

    def _enter(self, models: Models[Context], request: HttpRequest) -> Service:
        """The service of the model that a request's path or header names, or else the first one, of those that its API
        key reaches. Raises ApiError for an unknown name in the path. Side effects: the prefix that names a model is
        taken from the path, and the request gets its `choice`."""
        principals = self.active.api.principals
        if principals.limit_models:
            names = principals.models_of(request.headers, is_admin=request.is_admin)
            models = models if names is None else models.only(names)
        # A key that reaches some models alone learns nothing of others.
        first = self.active if models is self._models or not models.all else self._service_of(models.all[0])
        choice = request.choice
        if choice is None:
            named, is_by_path = request.headers.get(HEADER, ""), request.path.startswith(PREFIX)
            if is_by_path:
                named, request.path = models.split(request.path) or self._refuse(models, first, request)
            choice = request.choice = ModelChoice(named, is_made=False, is_by_path=is_by_path)
        # Found again when the rest of a body has arrived: another generation may be the active one then.
        found = models.find(choice.named) if choice.named else None
        if found is None:
            if choice.is_made:  # the model was withdrawn meanwhile
                raise models.refusal(choice.named)
            return first
        choice.is_made, request.timeline.model = True, found.model_info.model
        return self._service_of(found)

    def _service_of(self, context: Context) -> Service:
        """The one that has this context, or sees it by an alias."""
        return next(service for service in self.of_models if service.config is context.config)

    def _refuse(self, models: Models[Context], first: Service, request: HttpRequest) -> NoReturn:
        """Raises ApiError. Side effect: the request's path is the rest, in whose shape the error is rendered."""
        name, request.path = self._likeliest_reading(request.path)
        first.api.check_head(request)
        raise models.refusal(name)

    def _likeliest_reading(self, path: str) -> tuple[str, str]:
        """A name, and the rest of a path that begins with PREFIX, which has a route if possible."""
        readings = readings_of(path)
        return next((each for each in readings if self.active.api.has_route(each[1])), readings[0])

    def _join_models(self) -> None:
        before, self._models = self._models, None
        have_defaults = any(service.config.alias_defaults for service in self.of_models)
        if len(self.of_models) > 1 or self._num_awaited or have_defaults:
            config, contexts = self.active.config, [service.api.context for service in self.of_models]
            self._models = Models(
                contexts,
                refuses_unknown=config.unknown_model == "refuse" or config.is_strict,
                by_alias=[each for context in contexts for each in _by_alias(context)],
                is_complete=not self._num_awaited,
                logged=self._logged_models,
            )
        if before is not None or self._models is not None:
            for service in self.of_models:
                service.join(self._models)

    # --- the drain ------------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        for service in self.all.values():
            service.is_draining = True

    def give_up(self) -> None:
        for service in self.all.values():
            service.pipeline.give_up()

    # --- messages of the supervisor -------------------------------------------------------------------------

    def on_message(self, message: Message, fds: Sequence[int]) -> None:
        """Obey a message, without waiting. The descriptors stay the caller's."""
        match message:
            case WorkerUp():
                service = self.all[message.generation]
                slots = map_arena(fds[0], service.config.arena, writable=False)[self._gateway.shared_metrics.gateway]
                service.dispatcher.worker_up(Incarnation(message.worker, message.life), slots, message.facts)
                if (number_format := message.facts.get("dtype")) is not None:
                    service.identity.add_format(number_format)
            case ModelIdentity():
                identity = self.all[message.generation].identity
                if message.digest:
                    identity.set_digests(message.digest, message.by_alias)
                else:
                    identity.set_unknown(message.problem)
            case ModelFiles():
                self.all[message.generation].dispatcher.changed_files = message.changed
            case WorkerDown():
                who = Incarnation(message.worker, message.life)
                for service in self.all.values():
                    service.dispatcher.worker_down(
                        who, message.reason, has_crashed=message.has_crashed, is_planned=message.is_planned
                    )
            case ModelIs():
                if (known := self.all.get(message.generation)) is not None:
                    known.change_state(message)
                elif message.generation in self.preparing:
                    self.told[message.generation] = message
            case ModelBroken():
                service = self.all[message.generation]
                service.dispatcher.set_broken(message.reason)
                service.pipeline.fail_all(service.dispatcher.broken_error)
            case Quarantined():
                for dispatcher in self._dispatchers_of(message.model):
                    dispatcher.quarantine.add(message.digest)
            case InputDeaths():
                for dispatcher in self._dispatchers_of(message.model):
                    dispatcher.note_deaths(message)
            case InputsCleared():
                for dispatcher in self._dispatchers_of(message.model):
                    dispatcher.note_cleared(message.digests)
            case Progress():
                if self.active.dispatcher.start_stage is not None:
                    self.active.dispatcher.start_stage = message.stage
            case NewKeys():
                self.set_keys(tuple(map(ApiKey.from_json, message.keys)))
            case Prepare():
                self.prepare(message, socket.socket(fileno=os.dup(fds[0])))
            case Activate():
                self.activate(message.generation)
            case Withdrawn():
                self.withdraw(message.generation)
            case Discard():
                self.discard(message.generation)

    def _dispatchers_of(self, model: str) -> list[Dispatcher]:
        """Of all generations of a model: they have one key for digests."""
        return [service.dispatcher for service in self.all.values() if service.config.model == model]

    def set_keys(self, keys: Sequence[ApiKey]) -> None:
        self._keys = keys
        for service in self.all.values():
            service.api.set_keys(keys)

    def prepare(self, message: Prepare, zmq_listening: socket.socket) -> None:
        """Make ready for another generation, and report it. Takes the ownership of `zmq_listening`."""
        # A socket object closes itself if the task is cancelled before it begins.
        task = self.preparing[message.generation] = asyncio.ensure_future(self._prepare(message, zmq_listening))
        task.add_done_callback(lambda _: self.forget_preparing(message.generation))

    def forget_preparing(self, generation: int) -> None:
        self.preparing.pop(generation, None)
        self.told.pop(generation, None)

    async def _prepare(self, message: Prepare, zmq_listening: socket.socket) -> None:
        generation, send = message.generation, self._gateway.send
        tokenizer: Tokenizer | None = None
        try:
            config = GatewayConfig.from_json(message.config)
            tokenizer = await asyncio.get_running_loop().run_in_executor(None, self._read_tokenizer, config)
            if config.otlp_endpoint is not None:
                with suppress(ImportError):  # `start_tracing` logs it
                    await asyncio.to_thread(import_opentelemetry)
            service = self._make_service(config, generation, tokenizer, self._gateway)
            service.dispatcher.start(zmq_listening.fileno())
        except asyncio.CancelledError:
            raise
        except (ModelError, NoTasks) as error:
            send(Prepared(generation, str(error)))
        except BaseException as error:  # libraries in Rust raise other classes than Exception
            log.error("generation %d cannot be prepared", generation, exc_info=True)
            send(Prepared(generation, f"a gateway failed with {type(error).__name__}"))
        else:
            zmq_listening.detach()  # the dispatcher owns it from now on
            service.is_draining = self.active.is_draining
            self.all[generation] = service
            if (status := self.told.pop(generation, None)) is not None:
                service.change_state(status)
            send(Prepared(generation))
        finally:
            if tokenizer is not None and generation not in self.all:
                tokenizer.threads.close()

    def activate(self, generation: int) -> None:
        """Give new requests for its model to a generation, and retire the one before."""
        service, config = self.all[generation], self.all[generation].config
        before = [
            each
            for each in self.of_models
            if each.config.model_index == config.model_index or each.config.model == config.model
        ]
        if not before and self._num_awaited:
            self._num_awaited -= 1
        service.dispatcher.activate()
        service.api.adopt(self.active.api.principals, self._keys)
        self._set_of_models([*(each for each in self.of_models if each not in before), service])
        if service is self.active:
            self.on_activated(config)
        for each in before:
            self._end_of(each)

    def withdraw(self, generation: int) -> None:
        """Give a generation no new request, nor another of its model, and retire it."""
        service, first = self.all[generation], self.active
        self._set_of_models([each for each in self.of_models if each is not service])
        if self.active is not first:
            self.on_activated(self.active.config)
        self._end_of(service)

    def _set_of_models(self, services: Sequence[Service]) -> None:
        self.of_models = tuple(sorted(services, key=lambda service: service.config.model_index))
        self.active = self.of_models[0]
        self._join_models()
        if not self._num_awaited:
            self._have_come.set()

    def _end_of(self, service: Service) -> None:
        """Requests that wait for its model to be loaded end: it will not."""
        if service.residence.is_awaited:
            message = "The model is being reloaded"
            service.pipeline.end(partial(Unavailable, message, retry_after_s=1, code="reloading"))
        self._retire(service)

    def _retire(self, service: Service) -> None:
        """Report as soon as its last request is answered."""
        if service.is_in_use:
            asyncio.get_running_loop().call_later(_RETIRE_POLL_S, self._retire, service)
        else:
            self._gateway.send(Retired(service.generation))

    def discard(self, generation: int) -> None:
        """Forget a generation, whether it is being prepared or has been retired."""
        if (preparing := self.preparing.get(generation)) is not None:
            preparing.cancel()
        service = self.all.pop(generation, None)
        if service is not None:
            service.pipeline.end(lambda: Unavailable("The server has changed its configuration", retry_after_s=1))
            service.stop()
            gc.collect()  # a tokenizer, and views of arenas

    # --- what is measured -----------------------------------------------------------------------------------

    def read_models(self) -> dict[str, dict[Gauge, int]]:
        """The gauges of each model, by its name; none where there is one model."""
        if self._models is None:
            return {}
        now = time.monotonic()
        found: dict[str, dict[Gauge, int]] = {}
        for service in self.all.values():
            gauges = found.setdefault(service.config.model, dict.fromkeys((*SERVICE_GAUGES, *_OTHER_GAUGES), 0))
            for gauge, value in SERVICE_GAUGES.items():
                gauges[gauge] += value(service)
            age_us = int(service.policy.oldest_wait_s(now) * 1e6)
            gauges[Gauge.QUEUE_AGE_US] = max(gauges[Gauge.QUEUE_AGE_US], age_us)
            if service in self.of_models:
                gauges[Gauge.WORKERS] = service.dispatcher.num_usable_workers
        return found

    def num_usable_workers(self) -> int:
        return sum(service.dispatcher.num_usable_workers for service in self.of_models)

    def num_waiting(self) -> int:
        """Sequences. What waits without a worker is not counted: cores granted for it would be idle."""
        return sum(service.policy.queued_sequences for service in self.all.values() if service.dispatcher.is_sending)

    def queue_age_us(self) -> int:
        now = time.monotonic()
        return int(max(service.policy.oldest_wait_s(now) for service in self.all.values()) * 1e6)


def _quarantine_key(key: bytes, model: str) -> bytes:
    """The key of one model: the same token ids may end the workers of one and be harmless to another."""
    return blake2b(model.encode(), key=key, digest_size=len(key)).digest()


def _by_alias(context: Context) -> list[Context]:
    """The model once more for each alias that has request defaults, as `Models` takes them."""
    infos = [context.model_info.by_alias(defaults) for defaults in context.config.alias_defaults]
    return [replace(context, model_info=info, identity=info.identity) for info in infos]


def read_tokenizer(config: GatewayConfig) -> Tokenizer:
    """Raises ModelError. Takes up to seconds."""
    return Tokenizer(
        config.card,
        config.max_tokens,
        config.token_ids,
        overflow=Overflow(config.overflow),
        max_embed_len=config.max_embed_len,
        literal_special_tokens=config.literal_special_tokens,
    )
