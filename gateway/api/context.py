"""What the handlers of requests may use. One `Context` for each generation of the configuration.

Owns the type alone. `vecd.gateway.service` makes it, `vecd.gateway.api.application` passes it to the handler of every
route. No handler reaches more than is named here: no queue, no socket and no connection to a worker.
"""

import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from vecd.gateway.admission.principals import Principal, Principals
from vecd.gateway.api.bodies import Bodies
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.models import Models
from vecd.gateway.api.operations import ParsedDecode, ParsedMessages, ParsedTokenize
from vecd.gateway.dispatch.residence import Residence
from vecd.gateway.dispatch.worker_link import WorkerLink
from vecd.gateway.telemetry.processes import Processes
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.tokenization.fair_pool import Threads
from vecd.gateway.types.config import GatewayConfig
from vecd.gateway.types.endpoints import Endpoint
from vecd.gateway.types.errors import ApiError
from vecd.gateway.types.identity import Identity
from vecd.gateway.types.messages import HttpRequest
from vecd.gateway.types.request import Embedded, EmbedRequest, Inputs, Tokenizing
from vecd.gateway.types.timeline import RequestTimeline


class Embedder(Protocol):
    """The work behind the handlers: `vecd.gateway.pipeline`."""

    def embed(
        self, request: EmbedRequest, num_estimated: int, timeline: RequestTimeline, principal: Principal
    ) -> Coroutine[Any, Any, Embedded]:
        """Compute the rows of a request. `num_estimated`: its tokens, by `Context.estimate_tokens`. Raises ApiError.

        Side effects: the times are noted on `timeline`; `request.inputs` is empty afterwards.
        """

    async def describe(
        self, parsed: ParsedTokenize, timeout_s: float | None, arrived_at: float, principal: Principal
    ) -> None:
        """Give the tokens of texts to `parsed.collector`. Raises ApiError."""

    async def decode(
        self, parsed: ParsedDecode, timeout_s: float | None, arrived_at: float, principal: Principal
    ) -> list[str]:
        """The texts of lists of token ids. Raises ApiError."""

    async def render(
        self, parsed: ParsedMessages, timeout_s: float | None, arrived_at: float, principal: Principal
    ) -> list[str]:
        """The texts that the model's chat template makes of conversations. Raises ApiError."""

    async def load(self, timeout_s: float | None, arrived_at: float) -> None:
        """Wait until the model is ready. Raises ApiError."""

    def keep_alive(self, seconds: float | None) -> None:
        """Keep the model for so long after its last request; None: for ever."""

    def count_unread(self, error: ApiError) -> None:
        """Count an embedding request that was refused before its body could be parsed."""


@dataclass(slots=True, kw_only=True)
class Context:
    config: GatewayConfig
    model_info: ModelInfo
    bodies: Bodies
    threads: Threads
    """For work that would hold up the event loop."""
    estimate_tokens: Callable[[Inputs, Tokenizing], int]
    """Guesses the tokens of inputs from their characters. May be called in any thread."""
    embedder: Embedder
    residence: Residence
    """The state of the model, and operators' orders to load and unload it."""
    principals: Principals
    """Replaced on a reload by those of the generation before, because what they have used stays used."""
    shared_metrics: SharedMetrics
    endpoints: Sequence[Endpoint]
    """The names that requests are counted under, by the index that a `RequestTimeline` has."""
    processes: Processes
    started_at: float
    """By `time.monotonic`."""
    links: Callable[[], Collection[WorkerLink]]
    """The workers that are up. Handlers only read them."""
    why_unavailable: Callable[[], str | None]
    """The reason why no embedding request can be served now; None while one can."""
    changed_files: Callable[[], str]
    """Which files of the model are no longer those that were loaded, in words; "" if there is none."""
    describe_cores: Callable[[], dict[str, Any]]
    """The budget of cores, and how many threads pay for a batch; JSON values."""
    num_tenants: Callable[[], int]
    """Tenants with a request in this gateway."""
    load_of: Callable[[str], tuple[int, int]]
    """The requests and the queued tokens that one tenant has in this gateway."""
    openapi: Callable[[HttpRequest, Principal], bytes]
    """The OpenAPI document of the listener that a request came by, as its sender may see it, as JSON."""
    on_reload: Callable[[], None]
    """Requests that the supervisor reads its configuration again."""
    identity: Identity
    """Of the model, or of the alias that it is seen by."""
    models: "Models[Context] | None" = None
    """All served models, this one among them. None where it is the only one. Replaced when another begins to serve."""

    def describe_model(self) -> ModelInfo:
        """The model info with the model's state at this moment."""
        expires_in_s = self.residence.expires_in_s
        return replace(
            self.model_info,
            state=self.residence.state.value,
            is_resident=self.residence.is_resident,
            expires_at=None if expires_in_s is None else time.time() + expires_in_s,
            identity=self.identity.text,
            identity_by_alias={alias: identity.text for alias, identity in self.identity.by_alias.items()},
        )

    def models_for(self, principal: Principal) -> "Models[Context] | None":
        """Of `models`, those that a sender reaches."""
        if self.models is None or principal.models is None:
            return self.models
        return self.models.only(principal.models)

    def models_named(self, name: str, http: HttpRequest, principal: Principal) -> "Models[Context]":
        """Those that `name` in the path may mean: of `models_for`, or this one alone where only one can be meant, by
        the configuration or by what stands before the path. Raises BadRequest for a name that this one refuses."""
        models = self.models_for(principal)
        if models is None or http.choice is None or http.choice.is_made:
            self.model_info.prompt_of_model_name(name)
            return Models((self,), refuses_unknown=False)
        return models
