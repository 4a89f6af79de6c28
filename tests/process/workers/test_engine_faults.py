"""A dispatcher and a worker's loop, with an engine that fails in every way that a forward pass can."""

import asyncio
from array import array
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.dispatching import DEADLINE_S, SPEC, Bench, Request, live_worker, running_bench
from vecd.gateway.encoding.forms import Matrix
from vecd.model.card import ModelCard
from vecd.shm.views import Rows
from vecd.workers.batch import COMPLETE, Finish, PackedBatch
from vecd.workers.dummy import DummyEngine, dummy_vectors

BAD = 13
"""The token that is the matter."""
CARD = ModelCard("", "", "bert", SPEC.dim, SPEC.dim, 16, 1000, ("mean",), (), False, "")


class FaultyEngine(DummyEngine):
    """Does `fault(batch, rows)` before a batch; what it raises is the pass's."""

    def __init__(self, fault: Callable[[PackedBatch, Rows], None]) -> None:
        super().__init__(CARD)
        self._fault = fault
        self.num_batches = 0

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        self.num_batches += 1
        self.embed(batch, rows)
        self._fault(batch, rows)
        return COMPLETE


def raises(batch: PackedBatch, rows: Rows) -> None:
    if BAD in batch.token_ids:
        rows[:] = 666  # half written
        raise ValueError("a bad token")


def runs_out_of_memory(batch: PackedBatch, rows: Rows) -> None:
    if batch.token_ids.size > 4:
        rows[:] = 666
        raise MemoryError


def gives_nan(batch: PackedBatch, rows: Rows) -> None:
    starts = np.cumsum(batch.lengths) - batch.lengths
    rows[: batch.lengths.size][batch.token_ids[starts] == BAD] = np.nan


def is_lost(batch: PackedBatch, rows: Rows) -> None:
    if BAD in batch.token_ids:
        raise RuntimeError("could not create a primitive")


def ask(bench: Bench, *first_ids: int) -> Request:
    request = bench.request(*first_ids)
    matrix = Matrix(len(first_ids), SPEC.dim)
    request._makes = request.made = (matrix,)
    return request


def assert_right(request: Request, *first_ids: int) -> None:
    assert request.finished.exception() is None
    ids = np.repeat(np.array(first_ids, dtype=np.int32), 2)
    batch = PackedBatch(np.full(len(first_ids), 2, dtype=np.int32), ids)
    assert np.array_equal(request.made[0].rows, dummy_vectors(batch, SPEC.dim))


async def all_over(*requests: Request) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.wait([request.finished for request in requests])


def code_of(request: Request) -> object:
    return getattr(request.finished.exception(), "code", None)


@pytest.mark.parametrize(("fault", "code"), [(raises, "engine_error"), (gives_nan, "not_finite")])
async def test_one_input_that_fails_fails_alone_and_the_worker_stays(fault, code, bench):
    good = [ask(bench, n) for n in range(1, 4)]
    bad = ask(bench, 20, BAD)
    good += [ask(bench, n) for n in range(4, 7)]
    with live_worker(bench, FaultyEngine(fault), CARD):
        await all_over(bad, *good)
        assert code_of(bad) == code
        assert "'input[1]'" in str(bad.finished.exception())
        later = ask(bench, 7, 8)
        await all_over(later)
    assert_right(later, 7, 8)
    for number, request in enumerate(good, 1):
        assert_right(request, number)
    assert bench.stuck == []


async def test_a_batch_too_large_for_memory_is_computed_in_parts_and_an_input_too_large_fails_alone(bench):
    requests, large = [ask(bench, n) for n in range(1, 9)], bench.request(2, length=8)
    with live_worker(bench, FaultyEngine(runs_out_of_memory), CARD):
        await all_over(large, *requests)
    assert code_of(large) == "out_of_memory"
    for number, request in enumerate(requests, 1):
        assert_right(request, number)
    assert bench.stuck == []


async def test_an_input_whose_engine_is_lost_every_time_is_given_up_and_refused():
    async with running_bench() as bench:
        bad, good, life = ask(bench, BAD), ask(bench, 1), 0
        while not (bad.is_over and good.is_over):
            life += 1
            with live_worker(bench, FaultyEngine(is_lost), CARD, life) as worker:
                async with asyncio.timeout(DEADLINE_S):
                    while worker.is_alive() and not (bad.is_over and good.is_over):
                        await asyncio.sleep(0.01)
                    if not worker.is_alive():
                        while bench.dispatcher.links:
                            await asyncio.sleep(0.01)
        assert code_of(bad) == "poison_input"
        assert_right(good, 1)
        assert bench.quarantined == [bench.dispatcher.known.digest(array("i", [BAD, BAD]).tobytes())]
