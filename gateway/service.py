"""One generation of the configuration of a model: its wiring, and all that a request of it goes through. Knows no route
and no other generation."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vecd.gateway.api.fields import parse_timeout_s
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.config import GatewayConfig
from vecd.gateway.dispatch.dispatcher import Dispatcher
from vecd.gateway.dispatch.residence import Residence
from vecd.gateway.encoding.sparse import read_query_weights
from vecd.gateway.pipeline import Pipeline, deadline_of
from vecd.gateway.request import HttpRequest, Identity
from vecd.gateway.scheduling.admission import Admission
from vecd.gateway.scheduling.cores import Cores
from vecd.gateway.scheduling.policy import BatchingPolicy
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.shm.control import GatewayStart, Message, ModelIs, ModelState
from vecd.shm.shared_metrics import Gauge
from vecd.shm.vector_cache import VectorCacheMemory


@dataclass(eq=False)
class GatewayProcess:
    """What all generations in a gateway process have in common."""

    start: GatewayStart
    shared_metrics: SharedMetrics
    send: Callable[[Message], None]
    """Tells the supervisor."""
    cores: Cores = field(default_factory=lambda: Cores(1))
    vector_cache: VectorCacheMemory | None = None
    is_draining: bool = False


class Service:
    """One generation of the configuration of a model. Handlers of requests get it."""

    def __init__(self, config: GatewayConfig, generation: int, tokenizer: Tokenizer, process: GatewayProcess) -> None:
        """Holds no socket yet: see `Dispatcher.start`. Raises ModelError for weights of queries that cannot be read."""
        self.config = config
        self.generation = generation
        self.tokenizer = tokenizer
        self.process = process
        self.made_at = time.monotonic()
        self.num_handled = 0
        counting = process.shared_metrics.of_model(config.model)
        self.policy = BatchingPolicy(config, lambda: process.shared_metrics.others(Gauge.QUEUED_TOKENS))
        self.dispatcher = Dispatcher(
            config,
            generation,
            self.policy,
            start=process.start,
            report=process.send,
            shared_metrics=counting,
            cores=process.cores,
            vector_memory=process.vector_cache,
        )
        self.known = self.dispatcher.known
        self.residence = Residence(
            generation, keep_alive_s=config.keep_alive_s, num_gateways=config.gateways, send=process.send
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
        identity = Identity(defaults.alias for defaults in config.alias_defaults)
        self.info = ModelInfo(
            config, self.residence, identity, int(time.time()), generation, tokenizer.least_tokens, tokenizer.vocabulary
        )
        # The use of the only model is of interest only if it may be unloaded.
        self.may_leave = config.is_loaded_on_demand or config.keep_alive_s is not None or config.client_keep_alive
        self.watch_use(is_one_of_several=False)

    def deadline_of(self, http: HttpRequest) -> float:
        """By `time.monotonic`. Raises BadRequest for a header that is no time."""
        return deadline_of(self.config, parse_timeout_s(http.headers), http.timeline.arrived_at)

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
        if self.process.is_draining:
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
        self.pipeline.inspection.stop()


def read_tokenizer(config: GatewayConfig) -> Tokenizer:
    """Raises ModelError. Takes up to seconds."""
    return Tokenizer(
        config.card,
        config.max_tokens,
        config.token_ids,
        max_embed_len=config.max_embed_len,
        literal_special_tokens=config.literal_special_tokens,
    )
