"""A pipeline in front of a bench's dispatcher, and a tokenizer of what is tokenized already."""

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any, cast

from tests.support.dispatching import DEADLINE_S, EPOCH, Bench, admitting, private_metrics, tokenized
from vecd.gateway.app.app import App
from vecd.gateway.app.table import ROUTES
from vecd.gateway.config import GatewayConfig
from vecd.gateway.pipeline import Pipeline
from vecd.gateway.request import Embedded, EmbedRequest, RequestTimeline, TokenizedInput
from vecd.gateway.scheduling.keys import Principal
from vecd.gateway.service import GatewayProcess
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.launch.config.plan import make_plan
from vecd.launch.config.settings import load_settings
from vecd.model.card import ModelCard
from vecd.shm.control import GatewayStart, Message

SPLIT = 1000
"""The first id of an input in chunks, of a token each."""


@cache
def planned_config() -> GatewayConfig:
    """What a gateway is told, of the bundled model."""
    return make_plan(load_settings(["--port", "0"])).gateway


def app_of(
    config: GatewayConfig,
    tokenizer: Any = None,
    *,
    sent: list[Message] | None = None,
    shared_metrics: SharedMetrics | None = None,
    num_models: int = 1,
    **options: Any,
) -> App:
    """A gateway's app, with this as the first generation. `tokenizer`: that of the configuration, without. `sent`
    gets what the supervisor is told."""
    if tokenizer:
        options["read_tokenizer"] = lambda config: tokenizer
    start = GatewayStart({}, 0, EPOCH, generation=1, quarantine_key="aa" * 32, num_models=num_models)
    process = GatewayProcess(start, shared_metrics or private_metrics(), ([] if sent is None else sent).append)
    return App(ROUTES, config, process, **options)


class Ids:
    """A tokenizer of what is tokenized already."""

    max_chars = 16

    def tokenize_now(self, inputs: list[Any], tokenizing: object) -> list[TokenizedInput] | None:
        return [self.tokenized(ids) for ids in inputs]

    def tokenized(self, ids: list[int]) -> TokenizedInput:
        if ids[0] != SPLIT:
            return tokenized(ids)
        chunks = tuple(tokenized([n])._replace(weight=1) for n in ids[1:])
        return TokenizedInput(chunks[0].token_ids, len(chunks), False, chunks=chunks)


class Piped:
    """A bench's dispatcher behind a pipeline."""

    def __init__(
        self,
        bench: Bench,
        tokenizer: Any = None,
        *,
        card: ModelCard | None = None,
        options: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        """`tokenizer`, `card`: `Ids`, and a card of the bench's rows, without. `options` are the pipeline's, `changes`
        its configuration's."""
        card = card or replace(planned_config().card, dim=bench.spec.dim, hidden_size=bench.spec.dim)
        changes = {"request_timeout": DEADLINE_S, "card": card, "arena": bench.spec, **changes}
        self.bench = bench
        self.admission = admitting(100, 60, bench.policy, bench.dispatcher)
        self.pipeline = Pipeline(
            replace(planned_config(), **changes),
            admission=self.admission,
            tokenizer=tokenizer if tokenizer is not None else cast(Any, Ids()),
            policy=bench.policy,
            dispatcher=bench.dispatcher,
            residence=bench.residence,
            shared_metrics=bench.shared_metrics,
            **(options or {}),
        )
        self.principal = Principal("a")

    def embed(
        self,
        *inputs: Any,
        num_estimated: int = 100,
        principal: Principal | None = None,
        timeline: RequestTimeline | None = None,
        **fields: Any,
    ) -> asyncio.Task[Embedded]:
        """`fields` are the request's."""
        timeline = timeline or RequestTimeline()
        timeline.arrived_at = asyncio.get_running_loop().time()
        request = EmbedRequest(list(inputs), **fields)
        return asyncio.ensure_future(self.pipeline.run(request, num_estimated, timeline, principal or self.principal))
