"""The dispatcher over real ZeroMQ, with workers played by the test."""

import asyncio
import os
import time
from array import array
from unittest.mock import ANY

import numpy as np
import pytest

from tests.support.dispatching import DEADLINE_S, EPOCH, SPEC, Bench, Worker, running_bench
from vecd.gateway.dispatch import dispatcher as dispatch
from vecd.gateway.errors import ServerError, Unavailable
from vecd.shm.control import InputDeaths, InputsCleared, Quarantined, WorkerConnected
from vecd.shm.shared_metrics import BatchCell, Counter, Histogram, WorkerCell
from vecd.shm.views import map_arena
from vecd.shm.wire import NO_SCOPE, SCOPE_OF_ALL, Alive, Done, Failed, FailureCode, Incarnation, Probe, encode


async def test_what_waits_is_divided_among_idle_workers_and_grows_while_they_are_busy(bench):
    workers = [bench.add_worker(0), bench.add_worker(1)]
    await bench.all_connected()
    first = bench.request(1, 2)
    held = [await worker.receive() for worker in workers]
    assert [batch.num_sequences for batch in held] == [1, 1]
    second = bench.request(3, 4, 5)
    workers[0].answer(held[0])
    grown = await workers[0].receive()
    assert grown.num_sequences == 3
    workers[0].answer(grown)
    workers[1].answer(held[1])
    await asyncio.gather(first.finished, second.finished)


async def test_a_second_batch_is_sent_ahead_only_when_it_is_full(bench):
    worker = bench.add_worker()
    bench.request(1, length=16)
    held = await worker.receive()
    bench.request(2, length=15)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.receive(), 0.1)
    bench.request(3, length=1)
    ahead = await worker.receive()
    assert (ahead.num_tokens, ahead.slot) == (16, 1 - held.slot)


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_batch_says_whose_it_is_but_no_name(is_shared):
    """A request of each of two tenants alone, then both in one batch."""
    async with running_bench(share_computed="all" if is_shared else "tenant") as bench:
        worker = bench.add_worker()
        await bench.all_connected()
        scopes = []
        for number, tenants in enumerate(("a", "b", "a", "ab")):
            for at, tenant in enumerate(tenants):
                bench.request(10 * number + at + 1, tenant=tenant)
            batch = await worker.receive()
            scopes.append(batch.scope)
            worker.answer(batch)
            await bench.settled(batch)
    if is_shared:
        assert scopes == [SCOPE_OF_ALL] * 4
    else:
        first, second, again, both = scopes
        assert len({first, second, NO_SCOPE, SCOPE_OF_ALL}) == 4
        assert (again, both) == (first, NO_SCOPE)


async def test_what_a_dead_worker_says_late_is_not_believed(bench):
    late = bench.add_worker(0)
    pending = bench.request(5)
    batch = await late.receive()
    bench.dispatcher.worker_down(late.incarnation, "was killed")
    heir = bench.add_worker(0, life=2)
    taken = await heir.receive()
    late.slots[batch.slot][:] = 666
    late.send(Done(EPOCH, batch.number, batch.slot, 1, 1))
    late.send(Done(EPOCH, taken.number, taken.slot, 1, 1))
    heir.answer(taken)
    await pending.finished
    assert pending.fragments == [b"5"]


@pytest.mark.parametrize("begun", [[], [0], [0, 1]])
async def test_a_death_counts_for_what_the_worker_had_begun_alone(begun, bench):
    """It may have been busy with another gateway's batch, or, on an accelerator, with two."""

    worker = bench.add_worker()
    requests, batches = [], []
    for first_id in (1, 2):
        requests.append(bench.request(first_id, length=16))
        batches.append(await worker.receive())
    worker.begun[:] = 0
    for index in begun:
        worker.begun[batches[index].slot] = batches[index].number
    bench.dispatcher.worker_down(worker.incarnation, "was killed")
    lost = [bench.policy.take(time.monotonic(), 16).sequences[0] for _ in range(2)]
    assert {requests.index(s.result): s.deaths is not None for s in lost} == {n: n in begun for n in (0, 1)}


async def test_a_row_that_is_not_finite_fails_its_own_request_only(bench):
    worker = bench.add_worker()
    sick, well = bench.request(1, 2), bench.request(3)
    batch = await worker.receive()
    worker.compute(batch)
    worker.slots[batch.slot][1, 2] = np.nan
    worker.send(Done(EPOCH, batch.number, batch.slot, batch.num_sequences, 1))
    with pytest.raises(ServerError, match=r"not finite for 'input\[1\]'"):
        await sick.finished
    await well.finished
    assert well.fragments == [b"3"]


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lambda b: Done(EPOCH, b.number + 1, b.slot, b.num_sequences, 1), id="another batch"),
        pytest.param(lambda b: Done(EPOCH, b.number, 1 - b.slot, b.num_sequences, 1), id="another slot"),
        pytest.param(lambda b: Done(EPOCH, b.number, b.slot, b.num_sequences + 1, 1), id="another number of rows"),
        pytest.param(lambda b: Done(EPOCH, b.number, b.slot, 0, 1), id="no rows"),
        pytest.param(lambda b: Failed(EPOCH, b.number + 1, b.slot, FailureCode.ENGINE_ERROR), id="another failure"),
    ],
)
async def test_a_worker_that_lies_is_reported_and_gets_nothing_more(lie, bench):
    liar = bench.add_worker()
    pending = bench.request(5)
    liar.send(lie(await liar.receive()))
    await bench.one_is_stuck()
    assert bench.stuck == [liar.incarnation]
    await bench.replace(liar)
    await pending.finished
    assert pending.fragments == [b"5"]


async def test_an_answer_to_the_gateway_before_this_one_is_ignored(bench):
    worker = bench.add_worker()
    pending = bench.request(5)
    batch = await worker.receive()
    worker.send(Done(EPOCH - 1, batch.number, batch.slot, 1, 1))
    worker.answer(batch)
    await pending.finished
    assert pending.fragments == [b"5"]
    assert not bench.stuck


async def test_a_worker_that_never_answers_a_probe_is_reported():
    async with running_bench(batch_timeout_s=0.01) as bench:
        silent = bench.add_worker()
        await bench.one_is_stuck()
        assert bench.stuck == [silent.incarnation]


async def test_a_worker_that_only_fails_is_reported(bench):
    worker = bench.add_worker()
    while not bench.stuck:
        request = bench.request(1)
        batch = await worker.receive()
        worker.send(Failed(EPOCH, batch.number, batch.slot, FailureCode.ENGINE_ERROR))
        with pytest.raises(ServerError):
            await request.finished
    assert bench.stuck == [worker.incarnation]


async def test_a_bad_one_among_many_is_found_by_halves_which_cost_nothing(bench):
    bench.dispatcher.retries.num_tokens = 0
    worker = bench.add_worker()
    requests = {first_id: bench.request(first_id) for first_id in (1, 2, 3, 4, 13, 5, 6, 7)}
    num_failures = 0
    while not all(request.is_over for request in requests.values()):
        batch = await worker.receive()
        if 13 in np.frombuffer(batch.token_ids_bytes, dtype="<i4"):
            num_failures += 1
            worker.send(Failed(EPOCH, batch.number, batch.slot, FailureCode.ENGINE_ERROR))
        else:
            worker.answer(batch)
        await asyncio.sleep(0.05)
    assert num_failures == 4, "of 8, 4, 2 and 1"
    with pytest.raises(ServerError):
        await requests.pop(13).finished
    assert all(request.fragments == [b"%d" % first_id] for first_id, request in requests.items())


async def test_no_empty_batch_is_sent_when_what_was_set_aside_has_gone(bench):
    worker = bench.add_worker()
    requests = [bench.request(n) for n in (1, 2)]
    batch = await worker.receive()
    stays = bench.request(3, length=16)
    worker.send(Failed(EPOCH, batch.number, batch.slot, FailureCode.ENGINE_ERROR))
    for request in requests:
        request.abandon()
        bench.policy.close(request.request_queue)
    assert bench.policy.queued_tokens == 16
    batch = await worker.receive()
    assert batch.num_sequences == 1
    worker.answer(batch)
    await stays.finished


async def test_until_a_batch_is_measured_the_speed_is_that_of_the_workers_load(bench):
    bench.add_worker(0, facts={"load_tokens_per_s": 80.0})
    bench.add_worker(1, facts={"load_tokens_per_s": 70.0})
    await bench.all_connected()
    assert bench.dispatcher.tokens_per_s == pytest.approx(150)
    request = bench.request(1)
    worker = bench.workers[1]
    worker.answer(await worker.receive())
    await request.finished
    before = bench.dispatcher.tokens_per_s
    assert before != pytest.approx(150)
    bench.add_worker(2, facts={"load_tokens_per_s": 70.0})
    await bench.all_connected()
    assert bench.dispatcher.tokens_per_s - before == pytest.approx(before - 80), "it begins with what is measured"
    for each in bench.workers:
        bench.dispatcher.worker_down(each.incarnation, "was killed")
    assert bench.dispatcher.tokens_per_s > 0


async def test_a_failed_send_does_not_hide_what_has_arrived(bench):
    """Probes to a worker that is not there yet fail; the answers of another must be seen all the same."""

    worker = bench.add_worker(0)
    nobody = Incarnation(9, 1)
    bench.dispatcher.worker_up(nobody, map_arena(worker.fd, SPEC, writable=False)[0], {})
    for n in range(200):
        pending = bench.request(n)
        worker.answer(await worker.receive())
        await asyncio.wait_for(pending.finished, 1)


async def test_an_abandoned_request_is_dropped_and_its_rows_go_nowhere(bench):
    worker = bench.add_worker()
    gone, stays = bench.request(1), bench.request(2)
    batch = await worker.receive()
    gone.abandon()
    worker.answer(batch)
    if batch.num_sequences == 1:
        worker.answer(await worker.receive())
    await stays.finished
    assert gone.fragments == [b""]


# --- deadlines --------------------------------------------------------------------------------------------------


class Clock:
    """Stands still but for what a test lets pass."""

    def __init__(self) -> None:
        self.now = time.monotonic()  # as what takes the real time, which begins with the machine

    def monotonic(self) -> float:
        return self.now

    def passes(self, bench: Bench, seconds: float) -> None:
        """Sweeps have come when they were due, and now comes the next."""
        self.now += seconds
        bench.dispatcher.sweep_due_at = self.now
        bench.dispatcher.sweep()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(dispatch, "time", made)
    return made


async def served_once(bench: Bench, worker: Worker) -> None:
    """What is known of the worker is that it takes 1 µs."""
    request = bench.request(1)
    worker.answer(await worker.receive())
    await request.finished


@pytest.mark.parametrize(
    ("num_gateways", "num_lives", "within_s"),
    [
        pytest.param(1, 0, 59.9, id="while no speed is known it has the whole timeout"),
        pytest.param(1, 1, 1.9, id="once its speed is known it is stuck soon"),
        pytest.param(1, 2, 11.9, id="a new life has more time for its first batch"),
        pytest.param(3, 1, 5.9, id="there is time for the batches of other gateways"),
    ],
)
async def test_how_long_a_batch_may_take(num_gateways, num_lives, within_s, clock):
    async with running_bench(gateways=num_gateways) as bench:
        worker = bench.add_worker()
        if num_lives > 0:
            await served_once(bench, worker)
        if num_lives > 1:
            bench.dispatcher.worker_down(worker.incarnation, "was killed")
            worker = bench.add_worker(life=2)
        bench.request(5)
        await worker.receive()
        clock.passes(bench, within_s)
        assert not bench.stuck
        clock.passes(bench, 0.3)
        assert bench.stuck == [worker.incarnation]
        assert bench.dispatcher.why_unavailable() == f"worker 0 (life {worker.incarnation.life}) is stuck"
        clock.passes(bench, 100)
        assert bench.stuck == [worker.incarnation], "it is reported once"
        assert bench.shared_metrics.total(Counter.STUCK) == 1


async def test_a_batch_sent_ahead_has_its_time_from_the_answer_to_the_one_before_it(clock, bench):
    worker = bench.add_worker()
    await served_once(bench, worker)
    first = bench.request(1, length=16)
    held = await worker.receive()
    bench.request(2, length=16)
    await worker.receive()
    clock.passes(bench, 1.9)
    worker.answer(held)
    await first.finished
    clock.passes(bench, 1.9)
    assert not bench.stuck
    clock.passes(bench, 0.2)
    assert bench.stuck == [worker.incarnation]


async def test_a_gateway_that_has_stood_still_accuses_nobody(clock, caplog, bench):
    """Of a worker that is silent and one that was never heard: neither may have had the time."""

    worker = bench.add_worker(0)
    await served_once(bench, worker)
    bench.request(5)
    await worker.receive()
    bench.add_worker(1)
    clock.now += 1000  # no sweep came in all this time
    bench.dispatcher.sweep()
    assert "stood still for 999." in caplog.text
    assert not bench.stuck
    clock.passes(bench, 3)
    assert bench.stuck == [worker.incarnation], "the time that passes now is its own"


async def test_what_has_arrived_is_read_before_anybody_is_judged(clock, bench):
    worker = bench.add_worker()
    request = bench.request(5)
    worker.answer(await worker.receive())
    deadline = time.monotonic() + DEADLINE_S
    while not bench.dispatcher.transport.has_message():
        assert time.monotonic() < deadline  # and the event loop has no turn
    clock.passes(bench, 100)
    assert not bench.stuck
    await request.finished


# --- who is not believed ----------------------------------------------------------------------------------------


async def test_a_liar_s_other_batch_is_not_believed_either(bench):
    liar = bench.add_worker()
    lied_about, other = bench.request(1, length=16), bench.request(2, length=16)
    first, second = await liar.receive(), await liar.receive()
    liar.send(Done(EPOCH, first.number, first.slot, 5, 1))
    liar.compute(second)
    liar.send(Done(EPOCH, second.number, second.slot, 1, 1))
    await bench.one_is_stuck()
    await asyncio.sleep(0.05)
    assert not other.is_over
    bench.dispatcher.worker_down(liar.incarnation, "was killed")
    honest = bench.add_worker(life=2)
    for _ in range(2):
        honest.answer(await honest.receive())
    await asyncio.gather(lied_about.finished, other.finished)
    assert (lied_about.fragments, other.fragments) == ([b"1"], [b"2"])


@pytest.mark.parametrize(
    "frames", [[b""], [b"nonsense"], [b"x" * 16, b"y"], encode(Probe(EPOCH)), [*encode(Alive(EPOCH)), b"more"]]
)
async def test_a_worker_that_cannot_be_understood_is_reported_and_its_batch_goes_to_another(frames, bench):
    worker = bench.add_worker()
    request = bench.request(5)
    await worker.receive()
    worker.send_frames(frames)
    await bench.one_is_stuck()
    await bench.replace(worker)
    await request.finished
    assert request.fragments == [b"5"]


async def test_a_batch_that_every_worker_answers_wrongly_is_given_up(bench):
    request = bench.request(5)
    for life in range(1, 4):
        liar = bench.add_worker(life=life)
        batch = await liar.receive()
        liar.begun[:] = 0
        liar.send(Done(EPOCH, batch.number, batch.slot, 5, 1))
        while len(bench.stuck) < life:
            await asyncio.sleep(0.001)
        bench.dispatcher.worker_down(liar.incarnation, "was killed")
    with pytest.raises(ServerError) as caught:
        await request.finished
    assert caught.value.code == "poison_input"


# --- poison -----------------------------------------------------------------------------------------------------


async def poisoned(bench: Bench, life: int = 1) -> None:
    """Let three workers die with a request that is alone, and be given up with it."""
    request = bench.request(13)
    for each in range(life, life + 3):
        assert not request.is_over
        worker = bench.add_worker(9, each)
        await worker.receive()
        bench.dispatcher.worker_down(worker.incarnation, "was killed by SIGSEGV", has_crashed=True)
    with pytest.raises(ServerError) as caught:
        await request.finished
    assert caught.value.code == "poison_input"


async def test_what_was_given_up_is_reported_and_refused():
    async with running_bench() as bench:
        await poisoned(bench)
        digest = bench.dispatcher.known.digest(array("i", [13, 13]).tobytes())
        assert bench.quarantined == [digest]
        assert bench.shared_metrics.total(Counter.POISONED) == 1
        assert bench.shared_metrics.total(Counter.RETRIED) == 2


async def test_inputs_whose_worker_is_stopped_again_and_again_run_alone_and_are_not_blamed(bench):
    requests = [bench.request(13), bench.request(7)]
    sizes = []
    for life in range(1, 12):
        worker = bench.add_worker(9, life)
        sizes.append((batch := await worker.receive()).num_sequences)
        if life < 11:
            bench.dispatcher.worker_down(worker.incarnation, "was killed by SIGKILL", has_crashed=None)
    assert sizes == [2, 2] + 9 * [1]
    worker.answer(batch)
    worker.answer(await worker.receive())
    for request in requests:
        await request.finished
    assert not bench.quarantined


async def test_while_files_are_changed_a_death_blames_no_input():
    async with running_bench() as bench:
        request = bench.request(13)
        bench.dispatcher.known.changed_files = "model.safetensors has changed"
        for life in (1, 2, 3):
            worker = bench.add_worker(9, life)
            await worker.receive()
            bench.dispatcher.worker_down(worker.incarnation, "was killed by SIGBUS", has_crashed=True)
        with pytest.raises(Unavailable, match=r"not as loaded: model\.safetensors has") as caught:
            await request.finished
        assert (caught.value.status, caught.value.code) == (503, "model_files_changed")
        assert not bench.quarantined
        assert not [message for message in bench.reported if isinstance(message, InputDeaths)]
        assert bench.shared_metrics.total(Counter.POISONED) == 0
        bench.dispatcher.known.changed_files = ""
        await poisoned(bench, life=4)


async def test_what_was_queued_before_its_like_was_given_up_reaches_no_worker(bench):
    poison, good = bench.request(13), bench.request(1)
    bench.dispatcher.known.note(Quarantined("", bench.dispatcher.known.digest(array("i", [13, 13]).tobytes())))
    worker = bench.add_worker()
    worker.answer(await worker.receive())
    await good.finished
    assert good.fragments == [b"1"]
    with pytest.raises(ServerError, match=r"'input\[0\]'") as caught:
        await poison.finished
    assert caught.value.code == "poison_input"
    assert caught.value.headers == {"x-should-retry": "false"}
    assert (bench.policy.queued_tokens, bench.dispatcher.in_flight_tokens) == (0, 0)


async def test_a_batch_of_nothing_but_poison_does_not_keep_others_waiting(bench):
    for _ in range(3):
        bench.request(13, length=16)
    good = bench.request(1, length=16)
    bench.dispatcher.known.note(Quarantined("", bench.dispatcher.known.digest(array("i", [13] * 16).tobytes())))
    worker = bench.add_worker()
    worker.answer(await worker.receive())
    await good.finished


async def test_deaths_count_over_all_gateways():
    """A client that gives up and comes again by another gateway does not begin anew: five deaths in all."""
    async with running_bench() as bench:
        other = Bench()
        other.dispatcher.start(other.listening.detach())
        bench.others.append(other.dispatcher)
        other.others.append(bench.dispatcher)
        for life, gateway in enumerate((bench, other, bench, other, bench), 1):
            request = gateway.request(13)
            worker = gateway.add_worker(0, life)
            await worker.receive()
            assert not request.is_over
            if life < 5:
                request.abandon()
            gateway.dispatcher.worker_down(worker.incarnation, "was killed by SIGKILL")
        with pytest.raises(ServerError) as caught:
            await request.finished
        assert caught.value.code == "poison_input"
        other.close()


async def test_an_input_with_deaths_at_another_gateway_is_isolated_until_any_worker_has_computed_it():
    async with running_bench() as bench:
        digest = bench.dispatcher.known.digest(array("i", [13, 13]).tobytes())
        worker = bench.add_worker()
        await bench.all_connected()
        for computed_by in ("this gateway's worker", "another's"):
            for _ in range(2):
                bench.dispatcher.known.note(InputDeaths("", [digest], is_isolated=False, has_crashed=True))
            if computed_by == "another's":
                bench.dispatcher.known.note(InputsCleared("", [digest]))
            requests = [bench.request(1), bench.request(13)]
            num_sequences = []
            while not all(request.is_over for request in requests):
                batch = await worker.receive()
                num_sequences.append(batch.num_sequences)
                worker.answer(batch)
                await bench.settled(batch)
            assert num_sequences == ([2] if computed_by == "another's" else [1, 1])
            cleared = [message for message in bench.reported if isinstance(message, InputsCleared)]
            assert cleared == [InputsCleared("", [digest])]


async def test_a_request_that_waits_remembers_deaths_that_another_gateway_has_cleared(bench):
    bench.request(13)
    digest = bench.dispatcher.known.digest(array("i", [13, 13]).tobytes())
    for life in (1, 2):
        bench.dispatcher.known.note(InputsCleared("", [digest]))
        worker = bench.add_worker(0, life)
        await worker.receive()
        bench.dispatcher.worker_down(worker.incarnation, "was killed")
    [sequence] = bench.policy.take(time.monotonic(), 16).sequences
    assert sequence.deaths is not None
    assert sequence.deaths.num == 2


# --- deaths without end -----------------------------------------------------------------------------------------


async def test_a_storm_of_deaths_is_not_paid_for_without_end(bench):
    """The workers of this test begin nothing, so that no death counts for a sequence and isolates it."""

    request, num_deaths = bench.request(1, length=16), 0
    while not request.is_over:
        worker = bench.add_worker(0, num_deaths + 1)
        await worker.receive()
        worker.begun[:] = 0
        bench.dispatcher.worker_down(worker.incarnation, "was killed")
        num_deaths += 1
    with pytest.raises(Unavailable, match="keep dying") as caught:
        await request.finished
    assert caught.value.code == "retry_budget_exhausted"
    assert caught.value.headers == {"retry-after": "5"}
    assert num_deaths == 17, "16 batches of 16 tokens may be lost"
    assert bench.shared_metrics.total(Counter.RETRIED) == 16


async def test_isolated_batches_are_free_however_much_has_been_lost(bench):
    bench.dispatcher.retries.num_tokens = 2 * 2  # of two tries in a batch with others
    request = bench.request(1)
    for life in (1, 2):
        worker = bench.add_worker(0, life)
        await worker.receive()
        bench.dispatcher.worker_down(worker.incarnation, "was killed")
    last = bench.add_worker(0, 3)
    last.answer(await last.receive())
    await request.finished


# --- without workers --------------------------------------------------------------------------------------------


async def test_a_broken_model_fails_everybody_until_a_worker_is_up():
    async with running_bench() as bench:
        bench.dispatcher.raise_if_broken()
        bench.dispatcher.set_broken("worker 0 keeps dying")
        assert bench.dispatcher.why_unavailable() == bench.dispatcher.broken == "worker 0 keeps dying"
        with pytest.raises(Unavailable, match="worker 0 keeps dying") as caught:
            bench.dispatcher.raise_if_broken()
        assert (caught.value.status, caught.value.code) == (503, "model_broken")
        assert caught.value.headers == {"retry-after": "30"}
        error = bench.dispatcher.broken_error()
        assert error.code == "model_broken"
        assert bench.dispatcher.broken_error() is not error, "an exception that many raise keeps all their frames"
        bench.add_worker()
        assert bench.dispatcher.broken is None
        bench.dispatcher.raise_if_broken()


async def test_a_worker_connects_once():
    async with running_bench() as bench:
        worker = bench.add_worker()
        connected = WorkerConnected(worker.incarnation)
        assert connected not in bench.reported
        await served_once(bench, worker)
        for _ in range(3):
            worker.send(Alive(EPOCH))
        await served_once(bench, worker)
        assert bench.reported.count(connected) == 1


# --- several in one process -------------------------------------------------------------------------------------


async def live_beside(bench: Bench, worker: Worker) -> None:
    """Another dispatcher from its start to its end, with a worker of the same name, while this one serves."""
    other = Bench()
    other.dispatcher.start(other.listening.detach())
    others_worker = other.add_worker()
    await served_once(other, others_worker)
    ours, theirs = bench.request(3), other.request(4)
    held = await others_worker.receive()
    worker.answer(await worker.receive())
    others_worker.answer(held)
    await asyncio.gather(ours.finished, theirs.finished)
    assert (ours.fragments, theirs.fragments) == ([b"3"], [b"4"])
    other.add_worker(1)  # is still being asked whether it is there
    other.request(5)
    other.dispatcher.schedule_dispatch()
    asyncio.get_running_loop().call_soon(other.dispatcher.transport.receive_all)  # as after a send that hid a message
    other.close()
    other.dispatcher.worker_up(worker.incarnation, bench.dispatcher.links[0].slots, {})
    other.dispatcher.worker_down(worker.incarnation, "was killed")
    assert other.dispatcher.links == []


async def test_a_dispatcher_stops_beside_another_and_leaves_nothing_behind(bench):
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    worker = bench.add_worker()
    await served_once(bench, worker)
    for _ in range(2):
        open_fds = len(os.listdir("/proc/self/fd"))
        await live_beside(bench, worker)
        async with asyncio.timeout(DEADLINE_S):  # a last timer keeps an arena for a moment
            while len(os.listdir("/proc/self/fd")) > open_fds:
                await asyncio.sleep(0.01)
        await asyncio.sleep(2 * dispatch._SWEEP_INTERVAL_S)
        await served_once(bench, worker)
    assert errors == []


async def test_batches_of_two_dispatchers_of_a_gateway_have_different_numbers(bench):
    other = Bench(generation=2, shared_metrics=bench.shared_metrics)
    other.dispatcher.start(other.listening.detach())
    worker, others_worker = bench.add_worker(), other.add_worker(life=2)
    seen = []
    for _ in range(2):
        for one, its_worker in ((bench, worker), (other, others_worker)):
            request = one.request(1)
            batch = await its_worker.receive()
            seen.append(batch.number)
            its_worker.answer(batch)
            await request.finished
    other.close()
    assert seen == [1, 2, 3, 4]
    assert [cells["NUMBER"] for cells in cells_of(bench)] == seen


# --- what is noted of batches -------------------------------------------------------------------------------------


def cells_of(bench) -> list[dict[str, int]]:
    return [
        dict(zip(BatchCell.__members__, batch[1:], strict=True)) for batch in bench.shared_metrics.recent_batches(0)
    ]


async def test_a_batch_is_in_the_shared_metrics_while_it_runs_and_after(bench):
    worker = bench.add_worker(3)
    pending = bench.request(1, 2)
    batch = await worker.receive()
    [running] = cells_of(bench)
    assert (running["WORKER"], running["SEQUENCES"], running["TOKENS"]) == (3, 2, 4)
    assert running["DONE_NS"] == 0 < running["SENT_NS"] < time.monotonic_ns()
    assert bench.dispatcher.num_rows_in_use == 2
    assert bench.dispatcher.num_rows == SPEC.num_slots * SPEC.rows_per_slot
    worker.compute(batch)
    worker.send(Done(EPOCH, batch.number, batch.slot, 2, compute_us=70, num_padding_tokens=4))
    await pending.finished
    [done] = cells_of(bench)
    assert done["SENT_NS"] == running["SENT_NS"] < done["DONE_NS"]
    assert done["COMPUTE_US"] == 70
    assert bench.shared_metrics.total(Counter.PADDING_TOKENS) == 4
    assert bench.shared_metrics.worker_total(3, WorkerCell.TOKENS) == 4
    assert bench.shared_metrics.histogram(Histogram.BATCH_FILL) == (ANY, 4 / 16)
    await bench.settled(batch)
    assert bench.dispatcher.num_rows_in_use == 0


async def test_a_lost_batch_does_not_run_for_ever_on_the_board(bench):
    worker = bench.add_worker()
    bench.request(1)
    await worker.receive()
    bench.dispatcher.worker_down(worker.incarnation, "killed")
    [lost] = cells_of(bench)
    assert lost["DONE_NS"] > 0
    assert bench.shared_metrics.total(Counter.BATCHES) == 0
