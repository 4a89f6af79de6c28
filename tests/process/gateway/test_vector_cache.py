"""The vector cache on the way of requests: what is found reaches no worker, and what workers compute is kept."""

import asyncio
import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import orjson
import pytest

from tests.support.dispatching import (
    EPOCH,
    SPEC,
    Bench,
    Dispatched,
    Worker,
    private_metrics,
    running_bench,
    sequences_of,
)
from tests.support.pipelines import SPLIT, Ids, Piped
from vecd.gateway.config import ApiKey
from vecd.gateway.errors import BadRequest, EngineFailed
from vecd.gateway.request import Embedded, RequestTimeline, TokenizedInput
from vecd.gateway.scheduling.keys import Principals
from vecd.shm.output import Output
from vecd.shm.shared_metrics import Counter, Gauge
from vecd.shm.vector_cache import VectorCacheMemory, VectorCacheSpec
from vecd.shm.wire import Done

RUN, WRONG, BORDERED = 2000, 3000, 4000
"""First ids of a request that is tokenized in runs of two inputs, of an input that is refused, and of one whose border
is the id behind it."""
CACHE = VectorCacheSpec(1 << 16, 1)


class Inputs(Ids):
    def tokenize_now(self, inputs: list[list[int]], tokenizing: object) -> list[TokenizedInput] | None:
        return None if inputs[0][0] == RUN else super().tokenize_now(inputs, tokenizing)

    async def tokenize(
        self, inputs: list[list[int]], tokenizing: object, tenant: str
    ) -> AsyncIterator[list[TokenizedInput]]:
        for start in range(0, len(inputs), 2):
            await asyncio.sleep(0)
            yield [self.tokenized(ids) for ids in inputs[start : start + 2]]

    def tokenized(self, ids: list[int]) -> TokenizedInput:
        if ids[0] == WRONG:
            raise BadRequest("wrong", param="input")
        if ids[0] != BORDERED:
            return super().tokenized(ids)
        return super().tokenized(ids[2:])._replace(border=ids[1])


class Service(Piped):
    """A pipeline with a vector cache, in front of a bench's dispatcher; and two keys."""

    def __init__(self, bench: Bench) -> None:
        assert bench.dispatcher.vector_cache is not None
        self.vector_cache = bench.dispatcher.vector_cache
        super().__init__(bench, Inputs(), options={"vector_cache": self.vector_cache})
        keys = tuple(ApiKey(name, sha256(name.encode()).hexdigest()) for name in "ab")
        self.principal, self.other = Principals(keys, 1).with_keys

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
    return [orjson.loads(fragment)[0] for fragment in embedded.made[0]]


def memory() -> VectorCacheMemory:
    return VectorCacheMemory(mmap.mmap(-1, CACHE.nbytes), CACHE, 0, b"key")


def succeed(service: Service, generation: int, dim: int, model: int = 0) -> None:
    """Activate another generation, or another model, with rows of `dim` floats in the memory of a service's cache."""
    Dispatched(
        generation=generation, model_index=model, spec=replace(SPEC, dim=dim),
        vector_memory=service.vector_cache.shared, shared_metrics=service.bench.shared_metrics,
    ).dispatcher.activate()  # fmt: skip
    if not model:
        service.bench.dispatcher.retire()


@asynccontextmanager
async def running_service(share_computed: str = "tenant") -> AsyncIterator[Service]:
    async with running_bench(vector_memory=memory(), share_computed=share_computed) as bench, asyncio.timeout(30):
        bench.dispatcher.activate()
        yield Service(bench)


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
    assert (timeline.sent_at - timeline.tokenized_at, timeline.num_inputs, timeline.num_tokens) == (0, 3, 4)
    assert not timeline.batches
    assert service.principal.describe()["use"]["tokens"] == 3 + 4, "charged as if computed"


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
    [permit] = service.admission.permits
    assert permit.request_queue.is_complete
    embedding.cancel()


async def test_a_tenant_does_not_learn_what_another_has_sent_unless_the_operator_wants_that(service):
    worker = service.bench.add_worker()
    await service.computed(worker, [1])
    await service.computed(worker, [1], principal=service.other)
    assert service.counts() == (0, 2, 2)
    assert numbers_of(await service.embed([1], principal=service.other)) == [1]
    async with running_service("all") as service:
        await service.computed(service.bench.add_worker(), [1])
        assert numbers_of(await service.embed([1], principal=service.other)) == [1]


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
    worker.compute(batch)
    worker.slots[batch.slot][0] = np.nan
    worker.send(Done(EPOCH, batch.number, batch.slot, 1, 1))
    with pytest.raises(EngineFailed):
        await embedding
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
    succeed(service, 2, 2 * SPEC.dim)
    assert service.bench.shared_metrics.total(Gauge.VECTOR_CACHE_BYTES) == 0
    worker.answer(batch)
    assert numbers_of(await embedding) == [2]
    assert await service.computed(worker, [1]) == [1], "computed again"
    assert service.counts() == (0, 2, 1)


# --- several models -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def two_models() -> AsyncIterator[tuple[Service, Service]]:
    """With rows of other lengths, in one memory. The longer ones become active last."""
    common: dict[str, Any] = {"shared_metrics": private_metrics(), "vector_memory": memory()}
    async with (
        running_bench(**common) as short,
        running_bench(generation=2, model_index=1, spec=replace(SPEC, dim=2 * SPEC.dim), **common) as long,
        asyncio.timeout(30),
    ):
        for index, bench in enumerate((short, long)):
            bench.dispatcher.activate()
            bench.add_worker(index)
        yield Service(short), Service(long)


async def test_models_with_rows_of_other_lengths_share_the_memory_and_no_row():
    async with two_models() as (short, long):
        services = (short, long, short)  # what is stored last is not what is asked first
        for service in services[:2]:
            [worker] = service.bench.workers
            assert await service.computed(worker, [1], [2]) == [1, 2]
        assert short.counts()[:2] == (0, 4)
        for service in services:
            embedded = await service.embed([2], [1])
            assert numbers_of(embedded) == [2, 1]
            assert {len(orjson.loads(fragment)) for fragment in embedded.made[0]} == {service.bench.spec.dim}
        assert short.counts()[:2] == (6, 4)
        num_bytes = short.bench.shared_metrics.total(Gauge.VECTOR_CACHE_BYTES)
        assert num_bytes == 4 * CACHE.way_nbytes(long.bench.spec.dim)


async def test_another_generation_of_one_model_leaves_the_other_s_rows():
    async with two_models() as (short, long):
        for service in (short, long):
            [worker] = service.bench.workers
            await service.computed(worker, [1])
        succeed(short, 3, SPEC.dim)
        assert numbers_of(await long.embed([1])) == [1], "found"
        assert await short.computed(short.bench.workers[0], [1]) == [1], "computed again"
        succeed(short, 4, 4 * SPEC.dim, model=2)
        assert short.bench.shared_metrics.total(Gauge.VECTOR_CACHE_BYTES) == 0
        assert await long.computed(long.bench.workers[0], [1]) == [1], "laid out anew"
