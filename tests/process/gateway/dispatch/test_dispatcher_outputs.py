"""Sequences that ask for more than a vector, and inputs in chunks: whatever happens to their workers, each row comes to
its request once, or the request is failed."""

import asyncio
import random

import numpy as np
import pytest

from tests.support.dispatching import EPOCH, SPEC, Bench, Request, Worker, sequences_of
from vecd.gateway.dispatch import delivery
from vecd.gateway.errors import ServerError, Unavailable
from vecd.shm.output import Output
from vecd.shm.shared_metrics import Counter
from vecd.shm.wire import Batch, Done, Failed, FailureCode

VECTORS, RAW, TOKENS = Output.VECTORS, Output.UNNORMALIZED, Output.TOKENS


def outputs_of(batch: Batch) -> list[int]:
    return list(batch.outputs_bytes)


def crash(bench: Bench, worker: Worker) -> None:
    bench.dispatcher.worker_down(worker.incarnation, "was killed by SIGSEGV", has_crashed=True)


# --- rows to their requests -------------------------------------------------------------------------------------


async def test_all_kinds_go_in_one_batch_and_come_back_to_their_requests(bench):
    worker = bench.add_worker()
    await bench.all_connected()
    vectors = bench.request(1, 2, length=1)
    tokens = bench.tokens_of([3, 4], [5])
    raw = bench.request(6, length=1, output=RAW)
    chunked = bench.chunked([10, 20])
    batch = await worker.receive()
    assert outputs_of(batch) == [VECTORS, VECTORS, TOKENS, TOKENS, RAW, VECTORS, VECTORS]
    worker.answer(batch)
    await asyncio.gather(vectors.finished, tokens.finished, raw.finished, chunked.finished)
    assert vectors.fragments == [b"1", b"2"]
    assert tokens.fragments == [b"3 3 3 3 4 4 4 4", b"5 5 5 5"]
    assert raw.fragments == [b"6"]
    assert chunked.fragments == [b"15"]


@pytest.mark.parametrize("inputs", [[[2, 4], [7]], [[7], [2, 4]], [[2, 4], [6, 8], [7], [9]], [[7], [9], [1, 2, 3]]])
async def test_a_chunk_is_not_taken_for_its_neighbour_s_vector(inputs: list[list[int]], bench):
    worker = bench.add_worker()
    request = bench.chunked(*inputs)
    while not request.is_over:
        batch = await worker.receive()
        worker.answer(batch)
        await bench.settled(batch)
    assert request.fragments == [b"%d" % (sum(ids) // len(ids)) for ids in inputs]


async def test_the_rows_of_one_sequence_are_encoded_over_several_turns_of_the_loop(monkeypatch, bench):
    monkeypatch.setattr(delivery, "FLOATS_PER_TURN", 3 * SPEC.dim)
    turns: list[int] = []
    worker = bench.add_worker()
    await bench.all_connected()
    tokens, vector = bench.tokens_of([1, 2, 3, 4, 5, 6, 7]), bench.request(8, length=1)

    def count() -> None:
        turns.append(len(tokens.num_rows_left))
        if not tokens.is_over:
            asyncio.get_running_loop().call_soon(count)

    worker.answer(await worker.receive())
    count()
    await asyncio.gather(tokens.finished, vector.finished)
    assert tokens.num_rows_left == [4, 1, 0]
    numbers = [int(number) for part in tokens.fragments[0].split(b",") for number in part.split()]
    assert numbers == [n for n in range(1, 8) for _ in range(SPEC.dim)]
    assert vector.fragments == [b"8"]
    assert {1, 2} <= set(turns), "others had their turn in between"


async def test_a_worker_s_death_does_not_disturb_what_is_being_encoded(monkeypatch, bench):
    """Its rows were complete; sent again, they would come twice."""
    monkeypatch.setattr(delivery, "FLOATS_PER_TURN", 2 * SPEC.dim)
    worker = bench.add_worker()
    await bench.all_connected()
    tokens, chunked = bench.tokens_of([1, 2, 3, 4]), bench.chunked([2, 4])
    batch = await worker.receive()
    assert batch.num_sequences == 3
    worker.answer(batch)
    while not tokens.num_rows_left:
        await asyncio.sleep(0)
    assert not tokens.is_over
    crash(bench, worker)
    await asyncio.gather(tokens.finished, chunked.finished)
    assert (tokens.num_rows_left, chunked.fragments) == ([2, 0], [b"3"])
    assert bench.policy.queued_sequences == 0


@pytest.mark.parametrize("floats_per_turn", [1000, SPEC.dim])
async def test_a_token_s_row_that_is_not_finite_fails_its_own_request_only(floats_per_turn, monkeypatch, bench):
    monkeypatch.setattr(delivery, "FLOATS_PER_TURN", floats_per_turn)
    worker = bench.add_worker()
    await bench.all_connected()
    sick, well, chunked = bench.tokens_of([1], [2, 3, 4]), bench.tokens_of([5, 6]), bench.request(7)
    batch = await worker.receive()
    worker.compute(batch)
    worker.slots[batch.slot][2, 1] = np.inf
    worker.send(Done(EPOCH, batch.number, batch.slot, 7, 1))
    with pytest.raises(ServerError, match=r"not finite for 'input\[1\]'"):
        await sick.finished
    await asyncio.gather(well.finished, chunked.finished)
    assert well.fragments[0].replace(b",", b" ") == b"5 5 5 5 6 6 6 6"


# --- when workers die, fail and lie -----------------------------------------------------------------------------


async def test_a_dead_worker_s_tokens_are_asked_for_again_and_paid_for_once(bench):
    doomed = bench.add_worker(0)
    request = bench.tokens_of([1, 2], [3])
    batch = await doomed.receive()
    assert request.request_queue.num_sent_tokens == 3
    doomed.slots[batch.slot][:] = 666
    crash(bench, doomed)
    assert request.request_queue.num_sent_tokens == 0
    heir = bench.add_worker(0, life=2)
    again = await heir.receive()
    assert outputs_of(again) == [TOKENS, TOKENS]
    heir.answer(again)
    await request.finished
    assert request.fragments == [b"1 1 1 1 2 2 2 2", b"3 3 3 3"]
    assert request.request_queue.num_sent_tokens == 3
    assert bench.shared_metrics.total(Counter.RETRIED) == 2


@pytest.mark.parametrize("is_first_lost", [True, False])
async def test_a_chunk_that_is_lost_and_sent_again_counts_once(is_first_lost: bool, bench):
    workers = [bench.add_worker(0), bench.add_worker(1)]
    await bench.all_connected()
    request = bench.chunked([10, 20])
    held = {sequences_of(batch)[0][0]: (worker, batch) for worker in workers for batch in [await worker.receive()]}
    assert sorted(held) == [10, 20], "a chunk each"
    lost, kept = held[10 if is_first_lost else 20], held[20 if is_first_lost else 10]
    crash(bench, lost[0])
    kept[0].answer(kept[1])
    again = await kept[0].receive()
    assert sequences_of(again) == sequences_of(lost[1])
    assert not request.is_over
    lost[0].answer(lost[1])  # too late: nobody listens to the dead
    kept[0].answer(again)
    await request.finished
    assert request.fragments == [b"15"]
    assert bench.policy.queued_sequences == 0


@pytest.mark.parametrize("kind", ["vectors", "tokens", "chunk"])
async def test_what_kills_is_tried_alone_and_then_given_up_and_no_other(kind: str, bench):
    kinds = {
        "vectors": lambda: bench.request(1, 13),
        "tokens": lambda: bench.tokens_of([1], [13, 13]),
        "chunk": lambda: bench.chunked([1], [2, 13]),
    }
    poison = kinds[kind]()
    good = [bench.tokens_of([3, 4]), bench.chunked([10, 20]), bench.request(5)]
    deaths = 0
    for life in range(1, 12):
        worker = bench.add_worker(0, life)
        while not (poison.is_over and all(request.is_over for request in good)):
            batch = await worker.receive()
            if [13, 13] in sequences_of(batch):
                deaths += 1
                assert deaths < 3 or batch.num_sequences == 1, "the last try is alone"
                crash(bench, worker)
                break
            worker.answer(batch)
            await bench.settled(batch)
    assert deaths == 3
    assert [request.fragments for request in good] == [[b"3 3 3 3 4 4 4 4"], [b"15"], [b"5"]]
    with pytest.raises(ServerError, match=r"'input\[1\]' ended its worker") as caught:
        await poison.finished
    assert caught.value.code == "poison_input"


# --- anything, in any order -------------------------------------------------------------------------------------


def random_request(bench: Bench, dice: random.Random, number: int) -> tuple[Request, list[bytes]]:
    """A request of any kind, and what it is to be answered with."""
    ids = [number * 10 + n for n in range(dice.randint(1, 4))]
    match dice.randrange(3):
        case 0:
            return bench.request(*ids, output=dice.choice([VECTORS, RAW])), [b"%d" % n for n in ids]
        case 1:
            inputs = [[n] * dice.randint(1, SPEC.rows_per_slot) for n in ids]
            return bench.tokens_of(*inputs), [b" ".join([b"%d" % n for n in i] * SPEC.dim) for i in inputs]
        case _:
            inputs = [[n - 1, n + 1] if dice.random() < 0.5 else [n] for n in ids]
            return bench.chunked(*inputs), [b"%d" % n for n in ids]


async def something(dice: random.Random, bench: Bench, worker: Worker, batch: Batch) -> bool:
    """What becomes of a batch. Whether the worker lives on."""
    chance = dice.random()
    if chance < 0.8:
        worker.answer(batch)
        return True
    if chance < 0.85:
        worker.begun[batch.slot] = 0
        worker.send(Failed(EPOCH, batch.number, batch.slot, FailureCode.ENGINE_ERROR))
        return True
    if chance < 0.95:
        worker.slots[batch.slot][:] = 666
        if dice.random() < 0.5:
            worker.begun[:] = 0
    else:
        worker.send(Done(EPOCH, batch.number, batch.slot, worker.compute(batch) + 1, 1))
        while worker.incarnation not in bench.stuck:
            await asyncio.sleep(0.001)
    bench.dispatcher.worker_down(worker.incarnation, "was killed", has_crashed=dice.random() < 0.3)
    return False


@pytest.mark.parametrize("seed", range(6))
async def test_every_request_is_answered_rightly_or_failed_whatever_happens(seed: int, monkeypatch, bench):
    monkeypatch.setattr(delivery, "FLOATS_PER_TURN", 3 * SPEC.dim)
    num_answered = 0

    async def play(bench: Bench, dice: random.Random) -> None:
        for life in range(1, 1000):
            worker, is_alive = bench.add_worker(0, life), True
            while is_alive:
                is_alive = await something(dice, bench, worker, await worker.receive())

    dice = random.Random(seed)
    playing = asyncio.ensure_future(play(bench, dice))
    requests = []
    for number in range(1, 31):
        request, expected = random_request(bench, dice, number)
        requests.append((request, expected))
        if dice.random() < 0.3:
            await asyncio.wait({request.finished, playing}, return_when=asyncio.FIRST_COMPLETED)
    for request, _ in requests:
        await asyncio.wait({request.finished, playing}, return_when=asyncio.FIRST_COMPLETED)
    playing.cancel()
    for request, expected in requests:
        if (error := request.finished.exception()) is None:
            assert [fragment.replace(b",", b" ") for fragment in request.fragments] == expected
            num_answered += 1
        else:
            assert isinstance(error, ServerError | Unavailable)
    assert num_answered >= 10
