"""Leases of cores: which batch computes with how many, and when others wait for them."""

import asyncio
import time

import pytest

from tests.support.dispatching import EPOCH, Bench, Worker, running_bench
from vecd.gateway.scheduling import cores as cores_module
from vecd.gateway.scheduling.cores import Cores
from vecd.shm.control import THREAD_CHOICES
from vecd.shm.shared_metrics import Counter
from vecd.shm.wire import Batch, Done, Failed, FailureCode


def answer(worker: Worker, batch: Batch, *, num_threads: int | None = None, compute_us: int = 1000) -> None:
    """Answer as a worker whose threads share the work evenly; `num_threads`: those it has used."""
    used = batch.num_threads if num_threads is None else num_threads
    num_rows = worker.compute(batch)
    worker.begun[batch.slot] = 0
    worker.send(Done(EPOCH, batch.number, batch.slot, num_rows, compute_us // max(1, used), 0, used))


async def add_workers(bench: Bench, *choices: list[int]) -> list[Worker]:
    workers = [bench.add_worker(index, facts={THREAD_CHOICES: of_it}) for index, of_it in enumerate(choices)]
    await bench.all_connected()
    return workers


async def alone(bench: Bench, worker: Worker, num_batches: int, length: int = 2, slow_threads: int = 0) -> list[int]:
    """Send lone texts, one after the other; with how many threads each was computed. With `slow_threads` a batch takes
    three times as long as with one."""
    used = []
    for number in range(num_batches):
        request = bench.request(number + 1, length=length)
        batch = await worker.receive()
        used.append(batch.num_threads)
        answer(worker, batch, compute_us=6000 if batch.num_threads == slow_threads else 1000)
        await request.finished
    return used


async def test_a_lone_batch_gets_all_cores_once_they_have_paid():
    async with running_bench(cores=(cores := Cores(2))) as bench:
        [worker, _] = await add_workers(bench, [1, 2], [1])
        used = await alone(bench, worker, 12)
        assert used[:3] == [1, 1, 1]
        assert used[3:] == [2] * 9
        assert (cores.leased, cores.num_lent) == (0, 0)
        assert bench.shared_metrics.total(Counter.LEASED_BATCHES) == 9


@pytest.mark.parametrize(("num_cores", "choices", "num_threads"), [(2, [[1, 2]] * 2, 1), (8, [[1, 2, 4, 8]] * 8, 4)])
async def test_free_cores_are_divided_among_the_batches_that_there_are(num_cores, choices, num_threads):
    async with running_bench(cores=Cores(num_cores)) as bench:
        workers = await add_workers(bench, *choices)
        await alone(bench, workers[-1], 20)
        pending = bench.request(1, 2)
        for worker in (workers[-1], workers[-2]):
            batch = await worker.receive()
            assert batch.num_threads == num_threads
            answer(worker, batch)
        await pending.finished


@pytest.mark.parametrize("are_expected", [False, True])
async def test_a_few_texts_are_one_batch_where_all_cores_are_faster_unless_others_are_expected(are_expected):
    async with running_bench(cores=(cores := Cores(8))) as bench:
        workers = await add_workers(bench, [1, 8], *([[1]] * 7))
        await alone(bench, workers[0], 8, length=6)
        if are_expected:
            cores.note_contention(time.monotonic(), batch_s=10.0)
        pending = bench.request(1, 2, 3)
        used = [workers[0], workers[7], workers[6]] if are_expected else [workers[0]]
        batches = [(worker, await worker.receive()) for worker in used]
        assert [batch.num_sequences for _, batch in batches] == ([1, 1, 1] if are_expected else [3])
        assert are_expected or batches[0][1].num_threads == 8
        for worker, batch in batches:
            answer(worker, batch)
        await pending.finished


async def test_a_batch_that_comes_later_waits_for_the_end_of_the_lease():
    async with running_bench(cores=Cores(2)) as bench:
        [worker, other] = await add_workers(bench, [1, 2], [1])
        await alone(bench, worker, 6)
        first = bench.request(1)
        wide = await worker.receive()
        assert wide.num_threads == 2
        second, third = bench.request(2), bench.request(3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(other.receive(), 0.1)
        answer(worker, wide)
        # Now two wait, so each gets a core.
        batches = [(worker, await worker.receive()), (other, await other.receive())]
        assert [batch.num_threads for _, batch in batches] == [1, 0]  # the other one has no choice
        for each, batch in batches:
            answer(each, batch)
        await asyncio.gather(first.finished, second.finished, third.finished)


async def test_after_a_batch_has_waited_each_gets_one_core_for_a_while(monkeypatch):
    monkeypatch.setattr(cores_module, "CONTENDED_BATCHES", 1_000_000)
    async with running_bench(cores=Cores(2)) as bench:
        [worker, other] = await add_workers(bench, [1, 2], [1])
        await alone(bench, worker, 6)
        first = bench.request(1)
        wide = await worker.receive()
        second = bench.request(2)
        await asyncio.sleep(0.05)
        answer(worker, wide)
        batch = await worker.receive()
        assert batch.num_threads == 1
        third = bench.request(3)  # is not kept waiting
        other.answer(await other.receive())
        await third.finished
        answer(worker, batch)
        await asyncio.gather(first.finished, second.finished)


async def test_what_a_busy_moment_has_taught_does_not_decide_in_quiet(monkeypatch):
    monkeypatch.setattr(cores_module, "QUIET_AFTER_S", 60.0)
    cores = Cores(2)
    async with running_bench(cores=cores) as bench:
        [worker, other] = await add_workers(bench, [1, 2], [1])
        pending = bench.request(1, 2)  # two batches meet
        for each in (worker, other):
            answer(each, await each.receive())
        await pending.finished
        busy = await alone(bench, worker, 60, slow_threads=2)
        assert busy.count(2) < 10
        cores.note_meeting(time.monotonic() - 60.0)
        assert (await alone(bench, worker, 12))[3:] == [2] * 9
        assert {row["quiet"] for row in bench.dispatcher.thread_model.describe()} == {True, False}


@pytest.mark.parametrize("end", ["death", "failure", "stop"])
async def test_cores_of_a_batch_that_is_not_answered_are_free_again(end):
    async with running_bench(cores=(cores := Cores(2))) as bench:
        [worker] = await add_workers(bench, [1, 2])
        await alone(bench, worker, 6)
        request = bench.request(1)
        batch = await worker.receive()
        assert cores.leased == 2
        if end == "death":
            bench.dispatcher.worker_down(worker.incarnation, "was killed")
        elif end == "failure":
            worker.send(Failed(EPOCH, batch.number, batch.slot, FailureCode.ENGINE_ERROR))
            await asyncio.wait([request.finished])
            assert request.finished.exception() is not None
    assert (cores.leased, cores.num_lent) == (0, 0)


async def test_a_batch_that_is_sent_ahead_keeps_one_core_when_its_turn_comes():
    async with running_bench(cores=(cores := Cores(2))) as bench:
        [worker] = await add_workers(bench, [1, 2])
        await alone(bench, worker, 6)
        first = bench.request(1)
        wide = await worker.receive()
        second = bench.request(2, length=16)  # fills a batch
        ahead = await worker.receive()
        assert (wide.num_threads, ahead.num_threads, cores.leased) == (2, 1, 2)
        answer(worker, wide)
        await first.finished
        assert (cores.leased, cores.num_lent) == (1, 0)
        answer(worker, ahead)
        await second.finished
        assert cores.leased == 0


async def test_a_machine_that_others_use_computes_with_one_thread_and_does_not_try_more():
    async with running_bench(cores=(cores := Cores(2))) as bench:
        [worker] = await add_workers(bench, [1, 2])
        cores.others_use = 1.0
        assert await alone(bench, worker, 30) == [1] * 30


async def test_a_worker_that_cannot_use_its_cores_yet_is_believed():
    async with running_bench(cores=Cores(2)) as bench:
        [worker] = await add_workers(bench, [1, 2])
        asked = 0
        for number in range(40):
            request = bench.request(number + 1)
            batch = await worker.receive()
            asked += batch.num_threads == 2
            answer(worker, batch, num_threads=1)
            await request.finished
        assert 1 <= asked <= 4
        assert bench.shared_metrics.total(Counter.LEASED_BATCHES) == 0
