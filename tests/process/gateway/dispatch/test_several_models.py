"""Two models whose workers share the cores of one gateway: whose batch leaves, and when."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.dispatching import DEADLINE_S, EPOCH, Bench, Worker, admitting, running_bench
from vecd.gateway.request import Priority
from vecd.gateway.scheduling.cores import Cores
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.shm.control import THREAD_CHOICES
from vecd.shm.shared_metrics import SharedMetricsSpec
from vecd.shm.wire import Batch, Done

QUIET_S = 0.05


@asynccontextmanager
async def two_models(
    num_cores: int = 2, num_workers: int = 2, choices: tuple[int, ...] = (1,), **options: Any
) -> AsyncIterator[tuple[Cores, Bench, Bench]]:
    """Each with `num_workers`, which are connected. `options` are the second one's."""
    cores = Cores(num_cores)
    async with (
        running_bench(cores=cores) as first,
        running_bench(cores=cores, generation=2, model_index=1, **options) as other,
    ):
        for start, bench in ((0, first), (num_workers, other)):
            for index in range(start, start + num_workers):
                bench.add_worker(index, facts={THREAD_CHOICES: list(choices)})
            await bench.all_connected()
        yield cores, first, other


async def receive_any(*benches: Bench) -> tuple[Worker, Batch]:
    """The next batch that one of the workers gets."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for worker in [worker for bench in benches for worker in bench.workers]:
                if (batch := worker.receive_nowait()) is not None:
                    return worker, batch
            await asyncio.sleep(0.001)


async def nothing_comes(bench: Bench) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(QUIET_S):
            await receive_any(bench)


def answer(worker: Worker, batch: Batch, *, compute_s: float = 0.001) -> None:
    num_rows = worker.compute(batch)
    worker.begun[batch.slot] = 0
    worker.send(Done(EPOCH, batch.number, batch.slot, num_rows, int(compute_s * 1e6), 0, batch.num_threads))


async def test_workers_of_both_models_never_compute_more_batches_than_there_are_cores():
    async with two_models() as (cores, first, other):
        requests = [first.request(1, 2)]
        batches = [await receive_any(first), await receive_any(first)]
        requests.append(other.request(3, 4))
        await nothing_comes(other)
        assert cores.leased == 2
        answer(*batches[0])  # a worker of the first ends, and one of the other begins
        of_other = await receive_any(other)
        assert of_other[1].num_sequences == 2, "there is one core for both"
        assert cores.leased == 2
        for each in (batches[1], of_other):
            answer(*each)
        await asyncio.gather(*(request.finished for request in requests))
        assert requests[1].fragments == [b"3", b"4"]
        assert cores.leased == 0


async def test_one_model_alone_gives_every_idle_worker_a_batch_whatever_the_cores():
    async with running_bench(cores=(cores := Cores(2))) as bench:
        for index in range(3):
            bench.add_worker(index)
        await bench.all_connected()
        request = bench.request(1, 2, 3)
        batches = [await receive_any(bench) for _ in range(3)]
        assert cores.leased == 3
        for each in batches:
            answer(*each)
        await request.finished


async def test_a_worker_on_a_gpu_needs_no_core():
    async with two_models(num_cores=1, num_workers=1, compute_type="gpu") as (cores, first, on_gpu):
        requests = [first.request(1), on_gpu.request(2), on_gpu.request(3, length=16)]
        of_first = await receive_any(first)
        [worker] = on_gpu.workers
        batches = [await worker.receive(), await worker.receive()]  # one of them ahead
        assert cores.leased == 1
        for batch in batches:
            answer(worker, batch)
        answer(*of_first)
        await asyncio.gather(*(request.finished for request in requests))
        assert cores.leased == 0


async def test_models_take_turns_by_what_was_measured():
    """The first one's batches take three times as long as the other's, of the same number of tokens."""
    async with two_models(num_cores=1, num_workers=1) as (_, first, other):
        requests = [bench.request(n, length=16) for bench in (first, other) for n in range(1, 31)]
        nums = {False: 0, True: 0}
        for _ in range(24):
            worker, batch = await receive_any(first, other)
            nums[worker in other.workers] += 1
            answer(worker, batch, compute_s=0.01 if worker in other.workers else 0.03)
        assert nums[True] / nums[False] == pytest.approx(3.0, rel=0.35)
        del requests


async def test_the_core_of_a_dead_worker_goes_to_the_other_model():
    async with two_models(num_cores=1, num_workers=1) as (cores, first, other):
        lost, waiting = first.request(1), other.request(2)
        worker, _ = await receive_any(first)
        await nothing_comes(other)
        first.dispatcher.worker_down(worker.incarnation, "was killed")
        answer(*await receive_any(other))
        await waiting.finished
        assert cores.leased == 0
        lost.abandon()


async def test_a_lone_batch_gets_all_cores_and_the_other_model_waits_for_them():
    async with two_models(num_workers=1, choices=(1, 2)) as (cores, first, other):
        for number in range(6):  # until two threads have paid
            request = first.request(number + 1)
            worker, batch = await receive_any(first)
            answer(worker, batch, compute_s=0.001 / batch.num_threads)
            await request.finished
        requests = [first.request(1)]
        worker, wide = await receive_any(first)
        assert (wide.num_threads, cores.leased) == (2, 2)
        requests.append(other.request(2))
        await nothing_comes(other)
        answer(worker, wide)
        of_other = await receive_any(other)
        requests.append(first.request(3))
        of_first = await receive_any(first)
        assert (of_first[1].num_threads, cores.leased) == (1, 2), "no core is lent after a batch has waited"
        for each in (of_other, of_first):
            answer(*each)
        await asyncio.gather(*(request.finished for request in requests))


async def test_workers_with_threads_of_their_own_take_a_core_for_each():
    async with two_models(num_workers=1, choices=(2,)) as (cores, first, other):
        requests = [first.request(1), other.request(2)]
        batch = await receive_any(first)
        assert (batch[1].num_threads, cores.leased) == (0, 2)
        await nothing_comes(other)
        answer(*batch)
        answer(*await receive_any(other))
        await asyncio.gather(*(request.finished for request in requests))
        assert (cores.leased, cores.num_lent) == (0, 0)


@pytest.mark.parametrize("gateway", [0, 1])
async def test_two_gateways_begin_with_different_workers(gateway):
    spec = SharedMetricsSpec(2, 4, 2)
    metrics = SharedMetrics(memoryview(bytearray(spec.nbytes)).cast("q"), spec, gateway)
    async with two_models(shared_metrics=metrics, gateways=2) as (_, _, other):
        request = other.request(1)
        worker, batch = await receive_any(other)
        assert worker is other.workers[gateway]
        answer(worker, batch)
        await request.finished


async def test_speed_is_estimated_with_the_cores_that_the_other_model_leaves():
    async with two_models() as (_, first, other):
        alone = first.dispatcher.tokens_per_s
        admission = admitting(10, 1.0, first.policy, first.dispatcher)
        requests = [other.request(1)]
        batch = await receive_any(other)
        assert first.dispatcher.tokens_per_s == pytest.approx(alone / 2)
        permit = admission.try_enter(1000, Priority.NORMAL, float("inf"))
        assert permit is not None
        with permit:
            assert admission.wait_s(permit) == pytest.approx(1000 / (alone / 2))
        answer(*batch)
        await requests[0].finished
        assert first.dispatcher.tokens_per_s == alone
