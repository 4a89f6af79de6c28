"""The vector cache on the way of requests: what is found reaches no worker, and what workers compute is kept."""

import asyncio
import mmap
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np
import orjson
import pytest

from tests.support.dispatching import SERVICE, SPEC, Bench, Worker, running_bench, sequences_of
from vecd.gateway import pipeline as pipeline_module
from vecd.gateway.admission.admission import Admission
from vecd.gateway.admission.principals import Principals
from vecd.gateway.dispatch.vector_cache import VectorCache
from vecd.gateway.encoding.fragments import JsonRows
from vecd.gateway.pipeline import Pipeline
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.types.config import ApiKey, GatewayConfig
from vecd.gateway.types.errors import BadRequest, EngineFailed
from vecd.gateway.types.request import Chunk, Embedded, EmbedRequest, TokenIds, TokenizedInput
from vecd.gateway.types.timeline import RequestTimeline
from vecd.launch.config.plan import make_plan
from vecd.launch.config.settings import load_settings
from vecd.shm.output import Output
from vecd.shm.shared_metrics import Counter, Gauge, ServiceKey
from vecd.shm.vector_cache import VectorCacheMemory, VectorCacheSpec

SPLIT, RUN, WRONG, BORDERED = 1000, 2000, 3000, 4000
"""First ids of an input in chunks of a token each, of a request that is tokenized in runs of two inputs, of an input
that is refused, and of one whose border is the id behind it."""
CACHE = VectorCacheSpec(1 << 16, 1)


def tokenized(ids: TokenIds) -> TokenizedInput:
    if ids[0] == WRONG:
        raise BadRequest("wrong", param="input")
    if ids[0] == BORDERED:
        return TokenizedInput(array("i", ids[2:]).tobytes(), len(ids) - 2, False, border=ids[1])
    if ids[0] != SPLIT:
        return TokenizedInput(array("i", ids).tobytes(), len(ids), False)
    chunks = tuple(Chunk(array("i", [n]).tobytes(), 1, 1) for n in ids[1:])
    return TokenizedInput(chunks[0].token_ids, len(chunks), False, chunks=chunks)


class Ids:
    """A tokenizer of what is tokenized already."""

    def tokenize_now(self, inputs: list[TokenIds], how: object) -> list[TokenizedInput] | None:
        return None if inputs[0][0] == RUN else [tokenized(ids) for ids in inputs]

    async def tokenize(self, inputs: list[TokenIds], how: object, tenant: str) -> AsyncIterator[list[TokenizedInput]]:
        for start in range(0, len(inputs), 2):
            await asyncio.sleep(0)
            yield [tokenized(ids) for ids in inputs[start : start + 2]]


@cache
def planned_config() -> GatewayConfig:
    return make_plan(load_settings(["--port", "0"])).gateway


class Service:
    """A pipeline with a vector cache, in front of a bench's dispatcher; and two keys."""

    def __init__(self, bench: Bench, vector_cache: VectorCache) -> None:
        keys = tuple(ApiKey(name, sha256(name.encode()).hexdigest()) for name in "ab")
        card = replace(planned_config().card, dim=SPEC.dim, hidden_size=SPEC.dim)
        config = replace(planned_config(), keys=keys, card=card, arena=SPEC)
        tokenizer: Any = Ids()
        self.bench = bench
        self.vector_cache = vector_cache
        self.admission = Admission(max_requests=100, max_wait_s=60, policy=bench.policy, workers=bench.dispatcher)
        self.pipeline = Pipeline(
            config,
            admission=self.admission,
            tokenizer=tokenizer,
            policy=bench.policy,
            dispatcher=bench.dispatcher,
            residence=bench.residence,
            shared_metrics=bench.shared_metrics,
            vector_cache=vector_cache,
        )
        self.principals = Principals(keys, 1).with_keys

    def embed(
        self,
        *inputs: list[int],
        key: int = 0,
        output: Output = Output.VECTORS,
        timeline: RequestTimeline | None = None,
    ) -> asyncio.Task[Embedded]:
        ids: list[TokenIds] = list(inputs)
        timeline = RequestTimeline() if timeline is None else timeline
        timeline.arrived_at = asyncio.get_running_loop().time()
        request = EmbedRequest(ids, output=output)
        return asyncio.ensure_future(self.pipeline.embed(request, 100, timeline, self.principals[key]))

    async def computed(self, worker: Worker, *inputs: list[int], **options: Any) -> list[float]:
        """The rows' first numbers, of a request of which a worker computes what is not known."""

        async def answer() -> None:
            while True:
                worker.answer(await worker.receive())

        answering = asyncio.ensure_future(answer())
        try:
            return numbers_of(await self.embed(*inputs, **options))
        finally:
            answering.cancel()

    @property
    def num_batches(self) -> int:
        return self.bench.shared_metrics.total(Counter.BATCHES)

    def counts(self) -> tuple[int, ...]:
        """Hits, misses, rows stored."""
        counters = Counter.VECTOR_CACHE_HITS, Counter.VECTOR_CACHE_MISSES, Counter.VECTOR_CACHE_STORED
        return tuple(map(self.bench.shared_metrics.total, counters))


def numbers_of(embedded: Embedded) -> list[float]:
    [rows] = embedded.collectors
    assert isinstance(rows, JsonRows)
    return [orjson.loads(fragment)[0] for fragment in rows.fragments]


@asynccontextmanager
async def running_service(*, is_shared_by_tenants: bool = False) -> AsyncIterator[Service]:
    shared_metrics = SharedMetrics.private()
    shared = VectorCacheMemory(mmap.mmap(-1, CACHE.nbytes), CACHE, 0, b"key")
    made = VectorCache(
        shared, SERVICE, dim=SPEC.dim, is_shared_by_tenants=is_shared_by_tenants, shared_metrics=shared_metrics
    )
    async with running_bench(vector_cache=made, shared_metrics=shared_metrics) as bench, asyncio.timeout(30):
        bench.dispatcher.activate()
        yield Service(bench, made)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running_service() as service:
        yield service


async def test_what_has_been_computed_reaches_no_worker_again(service):
    worker = service.bench.add_worker()
    assert await service.computed(worker, [5, 1], [6]) == [5, 6]
    assert service.counts() == (0, 2, 2)
    assert service.bench.shared_metrics.total(Gauge.VECTOR_CACHE_BYTES) == 2 * CACHE.way_nbytes(SPEC.dim)
    timeline = RequestTimeline()
    embedded = await service.embed([6], [5, 1], [6], timeline=timeline)
    assert numbers_of(embedded) == [6, 5, 6]
    assert service.counts() == (3, 2, 2)
    assert service.num_batches == 1
    assert embedded.num_tokens == 4
    assert (embedded.stages.queue_s, timeline.num_inputs, timeline.num_tokens) == (0, 3, 4)
    assert not timeline.batches
    instants = (timeline.arrived_at, timeline.entered_at, timeline.tokenized_at, timeline.sent_at, timeline.done_at)
    assert list(instants) == sorted(instants)
    assert service.principals[0].describe()["use"]["tokens"] == 3 + 4, "charged as if computed"


async def test_a_border_is_a_part_of_the_input(service):
    worker = service.bench.add_worker()
    for _ in range(2):
        await service.computed(worker, [5, 6, 7], [BORDERED, 1, 5, 6, 7], [BORDERED, 2, 5, 6, 7])
    assert service.counts() == (3, 3, 3)


async def test_only_what_is_not_known_is_computed(service):
    worker = service.bench.add_worker()
    await service.computed(worker, [1], [2])
    embedding = service.embed([1], [3], [2], [4])
    batch = await worker.receive()
    assert sequences_of(batch) == [[3], [4]]
    worker.answer(batch)
    assert numbers_of(await embedding) == [1, 3, 2, 4]


@pytest.mark.parametrize("inputs", [[[1], [3], [2]], [[3], [1], [2]], [[SPLIT, 3, 1, 4], [2]]])
async def test_a_request_is_complete_when_all_that_is_not_known_waits(inputs, service):
    await service.computed(service.bench.add_worker(), [1], [2])
    service.bench.dispatcher.worker_down(service.bench.workers[0].incarnation, "died")
    embedding = service.embed(*inputs)
    await asyncio.sleep(0)
    [permit] = service.admission._permits
    assert permit.request_queue.is_complete
    embedding.cancel()


async def test_a_tenant_does_not_learn_what_another_has_sent(service):
    worker = service.bench.add_worker()
    await service.computed(worker, [1])
    await service.computed(worker, [1], key=1)
    assert service.counts() == (0, 2, 2)
    assert numbers_of(await service.embed([1], key=1)) == [1]


async def test_tenants_share_if_the_operator_wants_that():
    async with running_service(is_shared_by_tenants=True) as service:
        await service.computed(service.bench.add_worker(), [1])
        assert numbers_of(await service.embed([1], key=1)) == [1]


async def test_another_output_is_another_row_and_tokens_are_not_kept(service):
    worker = service.bench.add_worker()
    await service.computed(worker, [1, 2])
    await service.computed(worker, [1, 2], output=Output.UNNORMALIZED)
    assert service.counts() == (0, 2, 2)
    for _ in range(2):
        embedding = service.embed([1, 2], output=Output.TOKENS)
        worker.answer(await worker.receive())
        await embedding
    assert service.counts() == (0, 2, 2)


async def test_chunks_are_kept_one_by_one(service):
    worker = service.bench.add_worker()
    await service.computed(worker, [7], [8])
    [first] = await service.computed(worker, [SPLIT, 7, 8, 9])
    assert service.counts() == (2, 3, 3)
    assert numbers_of(await service.embed([SPLIT, 7, 8, 9], [9])) == [first, 9]
    assert service.counts() == (6, 3, 3)


async def test_many_are_looked_up_in_several_turns_of_the_loop(monkeypatch, service):
    monkeypatch.setattr(pipeline_module, "_FLOATS_PER_TURN", 2 * SPEC.dim)
    service = Service(service.bench, service.vector_cache)
    worker = service.bench.add_worker()
    inputs = [[n] for n in range(1, 8)]
    await service.computed(worker, *inputs)
    turns, num_batches = 0, service.num_batches

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.ensure_future(count_turns())
    assert numbers_of(await service.embed(*inputs)) == list(range(1, 8))
    counting.cancel()
    assert turns >= 3
    assert service.num_batches == num_batches


@pytest.mark.parametrize("error", [None, BadRequest])
async def test_a_large_request_is_looked_up_run_by_run(error, service):
    worker = service.bench.add_worker()
    await service.computed(worker, [RUN], [1], [2], [3])
    num_batches = service.num_batches
    embedding = service.embed([RUN], [1], [2], [3], *([] if error is None else [[WRONG]]))
    if error is None:
        assert numbers_of(await embedding) == [RUN, 1, 2, 3]
    else:
        with pytest.raises(error):
            await embedding
    assert service.num_batches == num_batches


async def test_a_row_that_is_not_finite_is_not_kept(service):
    worker = service.bench.add_worker()
    embedding = service.embed([1])
    batch = await worker.receive()
    compute = worker.compute

    def compute_wrongly(batch) -> int:
        num_rows = compute(batch)
        worker.slots[batch.slot][0] = np.nan
        return num_rows

    worker.compute = compute_wrongly
    worker.answer(batch)
    with pytest.raises(EngineFailed):
        await embedding
    worker.compute = compute
    assert service.counts() == (0, 1, 0)
    assert await service.computed(worker, [1]) == [1]


async def test_rows_of_requests_that_nobody_waits_for_are_kept(service):
    worker = service.bench.add_worker()
    embedding = service.embed([1])
    batch = await worker.receive()
    embedding.cancel()
    await asyncio.wait([embedding])
    worker.answer(batch)
    await service.bench.settled(batch)
    assert numbers_of(await service.embed([1])) == [1]


async def test_a_generation_that_is_replaced_neither_asks_nor_fills_the_cache(service):
    worker = service.bench.add_worker()
    await service.computed(worker, [1])
    embedding = service.embed([2])
    batch = await worker.receive()
    successor = VectorCache(
        service.vector_cache._shared, ServiceKey(2), dim=2 * SPEC.dim, is_shared_by_tenants=False,
        shared_metrics=service.bench.shared_metrics,
    )  # fmt: skip
    successor.activate()
    assert service.bench.shared_metrics.total(Gauge.VECTOR_CACHE_BYTES) == 0
    worker.answer(batch)
    assert numbers_of(await embedding) == [2]
    assert await service.computed(worker, [1]) == [1], "computed again"
    assert service.counts() == (0, 2, 1)
