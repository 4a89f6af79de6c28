"""The generations of the configuration that a gateway serves, and the wiring of each.

Owns `Service`, all that a request of one generation goes through, and `Services`: which generation takes the new
requests for each model, how one is prepared, activated, retired and discarded, and what all of them have in common.
Knows no route, no connection and no listening socket.
"""

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial

from vecd.base.files import load
from vecd.base.tasks import NoTasks
from vecd.gateway.api.body import Bodies
from vecd.gateway.api.served import ModelInfo, Models
from vecd.gateway.config import ApiKey, GatewayConfig
from vecd.gateway.dispatch.dispatcher import Dispatcher
from vecd.gateway.dispatch.residence import Residence
from vecd.gateway.encoding.sparse import read_query_weights
from vecd.gateway.errors import Unavailable
from vecd.gateway.pipeline import Pipeline
from vecd.gateway.request import Identity, Overflow
from vecd.gateway.scheduling.admission import Admission
from vecd.gateway.scheduling.cores import Cores
from vecd.gateway.scheduling.keys import Principal, Principals
from vecd.gateway.scheduling.policy import BatchingPolicy
from vecd.gateway.telemetry.finished import import_opentelemetry
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.gateway.telemetry.prometheus import Processes
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import ModelError
from vecd.shm.control import (
    Activate,
    Discard,
    GatewayStart,
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
    Retired,
    Withdrawn,
    WorkerDown,
    WorkerUp,
)
from vecd.shm.shared_metrics import Gauge
from vecd.shm.vector_cache import VectorCacheMemory
from vecd.shm.views import map_arena
from vecd.shm.wire import Incarnation

log = logging.getLogger("vecd.gateway")

_RETIRE_POLL_S = 0.02


class Service:
    """One generation of the configuration of a model. Handlers of requests get it."""

    def __init__(self, config: GatewayConfig, generation: int, tokenizer: Tokenizer, services: "Services") -> None:
        """Holds no socket yet: see `Dispatcher.start`. Raises ModelError for weights of queries that cannot be read."""
        self.config = config
        self.generation = generation
        self.tokenizer = tokenizer
        self.services = services
        self.made_at = time.monotonic()
        self.num_handled = 0
        counting = services.shared_metrics.of_model(config.model)
        self.policy = BatchingPolicy(config, lambda: services.shared_metrics.others(Gauge.QUEUED_TOKENS))
        self.dispatcher = Dispatcher(
            config,
            generation,
            self.policy,
            start=services.start,
            report=services.send,
            shared_metrics=counting,
            cores=services.cores,
            vector_memory=services.vector_cache,
        )
        self.known = self.dispatcher.known
        self.residence = Residence(
            generation, keep_alive_s=config.keep_alive_s, num_gateways=config.gateways, send=services.send
        )
        self.admission = Admission(config, self.policy, self.dispatcher)
        self.pipeline = Pipeline(
            config,
            admission=self.admission,
            tokenizer=tokenizer,
            policy=self.policy,
            dispatcher=self.dispatcher,
            residence=self.residence,
            shared_metrics=counting,
            vector_cache=self.dispatcher.vector_cache,
            query_weights=read_query_weights(config.card, tokenizer.id_of, config.query_weights),
        )
        self.bodies = Bodies(config, tokenizer)
        identity = Identity(defaults.alias for defaults in config.alias_defaults)
        self.info = ModelInfo(
            config, self.residence, identity, int(time.time()), generation, tokenizer.least_tokens, tokenizer.vocabulary
        )
        # The use of the only model is of interest only if it may be unloaded.
        self.may_leave = config.is_loaded_on_demand or config.keep_alive_s is not None or config.client_keep_alive
        self.watch_use(is_one_of_several=False)

    def models_for(self, principal: Principal) -> Models:
        """Of all models those that a sender reaches."""
        models = self.services.models
        return models if principal.models is None else models.only(principal.models)

    # --- its state ------------------------------------------------------------------------------------------

    def watch_use(self, *, is_one_of_several: bool) -> None:
        self.dispatcher.on_sweep = self._note_use if self.may_leave or is_one_of_several else None

    def _note_use(self) -> None:
        self.residence.note_use(self.admission.num_admitted, self.admission.num_requests, self.dispatcher.core_s)

    def change_state(self, status: ModelIs) -> None:
        """What waits for the model waits on, but after a failed load."""
        if not self.residence.change(status):
            return
        state = self.residence.state
        self.admission.has_workers = state is ModelState.READY
        self.dispatcher.follow(state)
        if state is ModelState.FAILED:
            self.pipeline.fail_all(self.residence.failed_error)
        elif state is ModelState.UNLOADED and (self.admission.num_requests or self.residence.has_waiting_clients):
            self.residence.want()  # requests came before nothing was sent any more

    @property
    def is_in_use(self) -> bool:
        return self.num_handled > 0 or self.admission.num_requests > 0

    def why_unavailable(self) -> str | None:
        """The reason why no embedding request can be served now; None while one can. A model that can be loaded is
        available."""
        if self.services.is_draining:
            return "the server is shutting down"
        if self.residence.is_awaited:
            return self.residence.why_failed()
        return None if self.dispatcher.awaits_workers else self.dispatcher.why_unavailable()

    def gauges(self) -> dict[Gauge, int]:
        """Those that are the sum over generations."""
        return {
            Gauge.REQUESTS: self.admission.num_requests,
            Gauge.QUEUED_SEQUENCES: self.policy.queued_sequences,
            Gauge.QUEUED_TOKENS: self.policy.queued_tokens,
            Gauge.IN_FLIGHT_TOKENS: self.dispatcher.in_flight_tokens,
            Gauge.ARENA_ROWS: self.dispatcher.num_rows,
            Gauge.ARENA_ROWS_IN_USE: self.dispatcher.num_rows_in_use,
        }

    def stop(self) -> None:
        self.dispatcher.stop()
        if self.pipeline.chat is not None:
            self.pipeline.chat.close()


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


class Services:
    def __init__(
        self,
        config: GatewayConfig,
        start: GatewayStart,
        *,
        shared_metrics: SharedMetrics,
        send: Callable[[Message], None],
        cores: Cores | None = None,
        vector_cache: VectorCacheMemory | None = None,
        read_tokenizer: Callable[[GatewayConfig], Tokenizer] = read_tokenizer,
        make_service: "Callable[[GatewayConfig, int, Tokenizer, Services], Service]" = Service,
    ) -> None:
        """`config`: of the first model, which is active at once. `read_tokenizer` is called in a thread for each other
        generation. Raises ModelError."""
        self.start = start
        self.shared_metrics = shared_metrics
        self.send = send
        self.cores = Cores(1) if cores is None else cores
        self.vector_cache = vector_cache
        self.principals = Principals(config.keys, config.gateways)
        self.processes = Processes()
        self.documents: dict[Hashable, bytes] = {}
        """What `/openapi.json` keeps until models or keys change."""
        self.is_draining = False
        self.on_activated: Callable[[GatewayConfig], None] = lambda config: None
        """Gets a new configuration of the first model."""
        self.preparing: dict[int, asyncio.Task[None]] = {}
        self.have_come = asyncio.Event()
        """All models have been activated."""
        self._read_tokenizer = read_tokenizer
        self._make_service = make_service
        self._num_awaited = start.num_models - 1
        self.active = first = make_service(config, start.generation, read_tokenizer(config), self)
        """That of the first model. Its configuration is the server's."""
        self.of_models: tuple[Service, ...] = (first,)
        """The active generation of each model, in the order of the configuration."""
        self.all = {start.generation: first}
        """Those that have requests, or may get them."""
        self._join_models()

    def schedule_dispatch(self) -> None:
        for service in self.all.values():
            service.dispatcher.schedule_dispatch()

    def stop(self) -> None:
        for service in self.all.values():
            service.stop()

    def _join_models(self) -> None:
        self.documents.clear()
        self.models = Models(
            [service.info for service in self.of_models],
            refuses_unknown=self.active.config.unknown_model == "refuse",
            is_complete=not self._num_awaited,
        )
        for service in self.of_models:
            service.watch_use(is_one_of_several=self.models.are_several)
            # A large body is read before its model is known.
            service.bodies.widen([each.bodies for each in self.of_models])

    # --- the drain ------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """The drain's deadline is near."""
        message = "The server is shutting down and did not get to this request"
        for service in self.all.values():
            service.pipeline.end(lambda: Unavailable(message, retry_after_s=1))

    # --- messages of the supervisor -------------------------------------------------------------------------

    def on_message(self, message: Message, fds: Sequence[int]) -> None:
        """Obey a message, without waiting. The descriptors stay the caller's."""
        match message:
            case WorkerUp():
                service = self.all[message.generation]
                slots = map_arena(fds[0], service.config.arena, writable=False)[self.shared_metrics.gateway]
                service.dispatcher.worker_up(Incarnation(message.worker, message.life), slots, message.facts)
                if (number_format := message.facts.get("dtype")) is not None:
                    service.info.identity.add_format(number_format)
            case ModelIdentity():
                identity = self.all[message.generation].info.identity
                identity.set(message.digest, message.by_alias, message.problem)
            case ModelFiles():
                self.all[message.generation].known.changed_files = message.changed
            case WorkerDown():
                who = Incarnation(message.worker, message.life)
                for service in self.all.values():
                    service.dispatcher.worker_down(
                        who, message.reason, has_crashed=message.has_crashed, is_planned=message.is_planned
                    )
            case ModelIs():
                self.all[message.generation].change_state(message)
            case ModelBroken():
                service = self.all[message.generation]
                service.dispatcher.set_broken(message.reason)
                service.pipeline.fail_all(service.dispatcher.broken_error)
            case Quarantined() | InputDeaths() | InputsCleared():
                for service in self.all.values():
                    if service.config.model == message.model:  # its generations have one key for digests
                        service.known.note(message)
            case Progress():
                if self.active.dispatcher.start_stage is not None:
                    self.active.dispatcher.start_stage = message.stage
            case NewKeys():
                self.set_keys(tuple(load(ApiKey, key) for key in message.keys))
            case Prepare():
                self.prepare(message, socket.socket(fileno=os.dup(fds[0])))
            case Activate():
                self.activate(message.generation)
            case Withdrawn():
                self.withdraw(message.generation)
            case Discard():
                self.discard(message.generation)

    def set_keys(self, keys: Sequence[ApiKey]) -> None:
        """Accept these keys from now on. What has been admitted goes on, and what has been used stays used."""
        self.principals.set_keys(keys)
        self.documents.clear()

    def prepare(self, message: Prepare, zmq_listening: socket.socket) -> None:
        """Make ready for another generation, and report it. Takes the ownership of `zmq_listening`."""
        # A socket object closes itself if the task is cancelled before it begins.
        task = self.preparing[message.generation] = asyncio.ensure_future(self._prepare(message, zmq_listening))
        task.add_done_callback(lambda _: self.preparing.pop(message.generation))

    async def _prepare(self, message: Prepare, zmq_listening: socket.socket) -> None:
        generation, send = message.generation, self.send
        tokenizer: Tokenizer | None = None
        try:
            config = load(GatewayConfig, message.config)
            tokenizer = await asyncio.get_running_loop().run_in_executor(None, self._read_tokenizer, config)
            if config.otlp_endpoint:
                with suppress(ImportError):  # `make_sender` logs it
                    await asyncio.to_thread(import_opentelemetry)
            service = self._make_service(config, generation, tokenizer, self)
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
            self.all[generation] = service
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
        self._replace(before, service)

    def withdraw(self, generation: int) -> None:
        """Give a generation no new request, nor another of its model, and retire it."""
        self._replace([self.all[generation]])

    def _replace(self, before: Sequence[Service], *new: Service) -> None:
        first = self.active
        services = [*(each for each in self.of_models if each not in before), *new]
        self.of_models = tuple(sorted(services, key=lambda service: service.config.model_index))
        self.active = self.of_models[0]
        self._join_models()
        if not self._num_awaited:
            self.have_come.set()
        if self.active is not first:
            self.on_activated(self.active.config)
        for service in before:
            service.dispatcher.retire()
            if service.residence.is_awaited:  # what waits for its model to be loaded ends: it will not be
                message = "The model is being reloaded"
                service.pipeline.end(partial(Unavailable, message, retry_after_s=1, code="reloading"))
            self._retire(service)

    def _retire(self, service: Service) -> None:
        """Report as soon as its last request is answered."""
        if service.is_in_use:
            asyncio.get_running_loop().call_later(_RETIRE_POLL_S, self._retire, service)
        else:
            self.send(Retired(service.generation))

    def discard(self, generation: int) -> None:
        """Forget a generation, whether it is being prepared or has been retired."""
        if (preparing := self.preparing.get(generation)) is not None:
            preparing.cancel()
        service = self.all.pop(generation, None)
        if service is not None:
            service.pipeline.end(lambda: Unavailable("The server has changed its configuration", retry_after_s=1))
            service.stop()
            # Waits for the step that is being taken, which on a huge text may be a second.
            asyncio.get_running_loop().run_in_executor(None, service.tokenizer.threads.close)
            gc.collect()  # a tokenizer, and views of arenas

    # --- what is measured -----------------------------------------------------------------------------------

    def gauges(self) -> dict[Gauge, int]:
        return self._gauges_of([*self.all.values()])

    def gauges_of_models(self) -> dict[str, dict[Gauge, int]]:
        """By the model's name; none where there is one model."""
        generations: dict[str, list[Service]] = {}
        for service in self.all.values() if self.models.are_several else ():
            generations.setdefault(service.config.model, []).append(service)
        return {model: self._gauges_of(services) for model, services in generations.items()}

    def _gauges_of(self, services: Sequence[Service]) -> dict[Gauge, int]:
        now, gauges = time.monotonic(), [service.gauges() for service in services]
        num_workers = [each.dispatcher.num_usable_workers for each in services if each in self.of_models]
        return {
            **{gauge: sum(each[gauge] for each in gauges) for gauge in gauges[0]},
            Gauge.QUEUE_AGE_US: int(max(service.policy.oldest_wait_s(now) for service in services) * 1e6),
            Gauge.WORKERS: sum(num_workers),
        }

    def num_waiting(self) -> int:
        """Sequences. What waits without a worker is not counted: cores granted for it would be idle."""
        return sum(service.policy.queued_sequences for service in self.all.values() if service.dispatcher.is_sending)
