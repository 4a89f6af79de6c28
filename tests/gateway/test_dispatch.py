"""The dispatcher over real ZeroMQ, with workers played by the test."""

import asyncio
import os
import time
from array import array
from collections.abc import Callable

import numpy as np
import pytest
import zmq

from gateway.dispatch import Dispatcher
from gateway.errors import ServerError
from gateway.request import Flow, Gathering, Priority, Sequence, TokenizedInput
from gateway.scheduler import Scheduler
from launch.sockets import make_zmq_endpoint
from shm.arena import ArenaSpec, create_arena
from shm.failure import FailureCode
from shm.view import map_arena
from shm.wire import Alive, Batch, Done, Failed, Incarnation, Probe, decode_to_worker, encode

SPEC = ArenaSpec(num_slots=2, rows_per_slot=8, dim=4)
EPOCH = 7
DEADLINE_S = 10.0


class Worker:
    """A worker as the gateway sees it. Row i of a batch is filled with the first token id of sequence i."""

    def __init__(self, address_fd: int, index: int = 0, life: int = 1) -> None:
        self.incarnation = Incarnation(index, life)
        self.fd = create_arena(SPEC)
        [views] = map_arena(self.fd, SPEC, writable=True)
        self.slots, self.begun = views.rows, views.begun
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self.incarnation.identity)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc:///proc/self/fd/{address_fd}")

    async def receive(self) -> Batch:
        """The next batch. Probes are answered on the way."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    message = decode_to_worker(self._socket.recv_multipart(zmq.DONTWAIT))
                except zmq.Again:
                    await asyncio.sleep(0.001)
                    continue
                if isinstance(message, Batch):
                    if not self.begun.any():
                        self.begun[message.slot] = message.number
                    return message
                assert message == Probe(EPOCH)
                self.send(Alive(EPOCH))

    def send(self, message) -> None:
        self._socket.send_multipart(encode(message))

    def compute(self, batch: Batch) -> None:
        lengths = np.frombuffer(batch.lengths_bytes, dtype="<i4")
        ids = np.frombuffer(batch.token_ids_bytes, dtype="<i4")
        firsts = ids[np.concatenate([[0], np.cumsum(lengths)[:-1]])]
        self.slots[batch.slot][: len(firsts)] = firsts[:, None]

    def answer(self, batch: Batch) -> None:
        self.compute(batch)
        self.begun[batch.slot] = 0
        self.send(Done(EPOCH, batch.number, batch.slot, batch.num_sequences, 1))

    def close(self) -> None:
        self._context.destroy(linger=0)
        os.close(self.fd)


class Rows:
    """Of each row its first number."""

    def __init__(self, num_rows: int) -> None:
        self.fragments = [b""] * num_rows

    def put(self, index, rows) -> None:
        for row in rows:
            self.fragments[index] = b"%d" % row[0]
            index += 1


class Request(Gathering):
    flow: Flow

    def __init__(self, num_rows: int) -> None:
        self._rows = Rows(num_rows)
        super().__init__(num_rows, self._rows, asyncio.get_running_loop())

    @property
    def fragments(self) -> list[bytes]:
        return self._rows.fragments


class Bench:
    """A dispatcher and its workers, for the length of one test."""

    def __init__(self, **options) -> None:
        self.scheduler = Scheduler(16, SPEC.rows_per_slot, max_sequence_tokens=16)
        self.stuck: list[Incarnation] = []
        self.listening, self.address_fd = make_zmq_endpoint()
        self.dispatcher = Dispatcher(
            scheduler=self.scheduler,
            epoch=EPOCH,
            max_batch_tokens=16,
            batch_timeout_s=options.get("batch_timeout_s", 60),
            on_stuck=self.stuck.append,
        )
        self.workers: list[Worker] = []

    def add_worker(self, index: int = 0, life: int = 1) -> Worker:
        worker = Worker(self.address_fd, index, life)
        self.workers.append(worker)
        self.dispatcher.worker_up(worker.incarnation, map_arena(worker.fd, SPEC, writable=False)[0], {})
        return worker

    async def all_connected(self) -> None:
        """Answer probes until the dispatcher may use every worker."""
        while not all(link.is_usable for link in self.dispatcher.links):
            for worker in self.workers:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(worker.receive(), 0.05)

    def request(self, *first_ids: int, length: int = 2) -> Request:
        request = Request(len(first_ids))
        flow = request.flow = self.scheduler.open(request, Priority.NORMAL)
        inputs = [TokenizedInput(array("i", [n] * length).tobytes(), length, False) for n in first_ids]
        self.scheduler.add(flow, [Sequence(flow, i, item) for i, item in enumerate(inputs)], time.monotonic())
        self.dispatcher.pump_soon()
        return request

    def close(self) -> None:
        self.dispatcher.stop()
        for worker in self.workers:
            worker.close()
        self.listening.close()
        os.close(self.address_fd)


def run(test: Callable, **options) -> None:
    async def main() -> None:
        bench = Bench(**options)
        bench.dispatcher.start(bench.listening.detach())
        try:
            async with asyncio.timeout(3 * DEADLINE_S):
                await test(bench)
        finally:
            bench.close()

    asyncio.run(main())


def test_rows_come_back_in_order():
    async def test(bench):
        worker = bench.add_worker()
        gathering = bench.request(3, 1, 2)
        worker.answer(await worker.receive())
        await gathering.finished
        assert gathering.fragments == [b"3", b"1", b"2"]

    run(test)


def test_nothing_is_sent_to_a_worker_that_has_not_answered_a_probe():
    async def test(bench):
        assert bench.dispatcher.why_unavailable() == "workers are loading"
        worker = bench.add_worker()
        assert bench.dispatcher.why_unavailable() is not None
        bench.request(1)
        await worker.receive()
        assert bench.dispatcher.why_unavailable() is None

    run(test)


def test_what_waits_is_divided_among_idle_workers_and_grows_while_they_are_busy():
    async def test(bench):
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

    run(test)


def test_a_second_batch_is_sent_ahead_only_when_it_is_full():
    async def test(bench):
        worker = bench.add_worker()
        bench.request(1, length=16)
        held = await worker.receive()
        bench.request(2, length=15)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.receive(), 0.1)
        bench.request(3, length=1)
        ahead = await worker.receive()
        assert (ahead.num_tokens, ahead.slot) == (16, 1 - held.slot)

    run(test)


def test_a_dead_workers_batch_is_sent_to_another():
    async def test(bench):
        doomed = bench.add_worker(0)
        gathering = bench.request(5, 6)
        await doomed.receive()
        bench.dispatcher.worker_down(doomed.incarnation, "was killed")
        heir = bench.add_worker(0, life=2)
        heir.answer(await heir.receive())
        await gathering.finished
        assert gathering.fragments == [b"5", b"6"]

    run(test)


def test_what_a_dead_worker_says_late_is_not_believed():
    async def test(bench):
        late = bench.add_worker(0)
        gathering = bench.request(5)
        batch = await late.receive()
        bench.dispatcher.worker_down(late.incarnation, "was killed")
        heir = bench.add_worker(0, life=2)
        taken = await heir.receive()
        late.slots[batch.slot][:] = 666
        late.send(Done(EPOCH, batch.number, batch.slot, 1, 1))
        late.send(Done(EPOCH, taken.number, taken.slot, 1, 1))
        heir.answer(taken)
        await gathering.finished
        assert gathering.fragments == [b"5"]

    run(test)


def test_a_sequence_that_kills_is_tried_alone_and_then_given_up_and_no_other():
    async def test(bench):
        poison, good = bench.request(13), bench.request(1)
        deaths = 0
        for life in range(1, 10):
            worker = bench.add_worker(0, life)
            while not good.is_over or not poison.is_over:
                batch = await worker.receive()
                if 13 in np.frombuffer(batch.token_ids_bytes, dtype="<i4"):
                    deaths += 1
                    if deaths == 3:
                        assert batch.num_sequences == 1, "the last try is alone"
                    bench.dispatcher.worker_down(worker.incarnation, "was killed")
                    break
                worker.answer(batch)
                await good.finished
            if good.is_over and poison.is_over:
                break
        assert deaths == 3
        assert good.fragments == [b"1"]
        with pytest.raises(ServerError) as caught:
            await poison.finished
        assert caught.value.code == "poison_input"

    run(test)


def test_a_batch_that_was_only_sent_ahead_is_innocent():
    async def test(bench):
        worker = bench.add_worker()
        first = bench.request(1, length=16)
        await worker.receive()
        second = bench.request(2, length=16)
        await worker.receive()
        bench.dispatcher.worker_down(worker.incarnation, "was killed")
        suspects = [bench.scheduler.next_batch(time.monotonic(), max_tokens=16)[0] for _ in range(2)]
        assert [(s.gathering, s.num_deaths) for s in suspects] == [(first, 1), (second, 0)]

    run(test)


@pytest.mark.parametrize("begun", [[], [0], [0, 1]])
def test_only_what_a_dead_worker_had_begun_is_suspected(begun):
    """It may have been busy with another gateway's batch, or, on an accelerator, with two."""

    async def test(bench):
        worker = bench.add_worker()
        requests, batches = [], []
        for first_id in (1, 2):
            requests.append(bench.request(first_id, length=16))
            batches.append(await worker.receive())
        worker.begun[:] = 0
        for index in begun:
            worker.begun[batches[index].slot] = batches[index].number
        bench.dispatcher.worker_down(worker.incarnation, "was killed")
        lost = [bench.scheduler.next_batch(time.monotonic(), max_tokens=16)[0] for _ in range(2)]
        assert {requests.index(s.gathering): s.num_deaths for s in lost} == {n: int(n in begun) for n in (0, 1)}

    run(test)


def test_a_failed_batch_is_tried_one_by_one():
    async def test(bench):
        worker = bench.add_worker()
        bad, good = bench.request(13), bench.request(1)
        while not (bad.is_over and good.is_over):
            batch = await worker.receive()
            is_bad = 13 in np.frombuffer(batch.token_ids_bytes, dtype="<i4")
            if is_bad:
                worker.send(Failed(EPOCH, batch.number, batch.slot, FailureCode.ENGINE_ERROR))
            else:
                worker.answer(batch)
            if batch.num_sequences == 1:
                await asyncio.wait({bad.finished if is_bad else good.finished})
        with pytest.raises(ServerError, match=r"failed on 'input\[0\]'"):
            await bad.finished
        assert good.fragments == [b"1"]

    run(test)


def test_a_row_that_is_not_finite_fails_its_own_request_only():
    async def test(bench):
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

    run(test)


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lambda b: Done(EPOCH, b.number + 1, b.slot, b.num_sequences, 1), id="another batch"),
        pytest.param(lambda b: Done(EPOCH, b.number, 1 - b.slot, b.num_sequences, 1), id="another slot"),
        pytest.param(lambda b: Done(EPOCH, b.number, b.slot, b.num_sequences + 1, 1), id="another number of rows"),
        pytest.param(lambda b: Done(EPOCH, b.number, b.slot, 0, 1), id="no rows"),
    ],
)
def test_a_worker_that_lies_is_reported_and_gets_nothing_more(lie):
    async def test(bench):
        liar = bench.add_worker()
        gathering = bench.request(5)
        liar.send(lie(await liar.receive()))
        while not bench.stuck:
            await asyncio.sleep(0.001)
        assert bench.stuck == [liar.incarnation]
        bench.dispatcher.worker_down(liar.incarnation, "was killed")
        honest = bench.add_worker(0, life=2)
        honest.answer(await honest.receive())
        await gathering.finished
        assert gathering.fragments == [b"5"]

    run(test)


def test_an_answer_to_the_gateway_before_this_one_is_ignored():
    async def test(bench):
        worker = bench.add_worker()
        gathering = bench.request(5)
        batch = await worker.receive()
        worker.send(Done(EPOCH - 1, batch.number, batch.slot, 1, 1))
        worker.answer(batch)
        await gathering.finished
        assert gathering.fragments == [b"5"]
        assert not bench.stuck

    run(test)


def test_a_worker_past_its_deadline_is_reported_once():
    async def test(bench):
        worker = bench.add_worker()
        bench.request(5)
        await worker.receive()
        while not bench.stuck:
            await asyncio.sleep(0.01)
        assert bench.dispatcher.why_unavailable() == "worker 0 (life 1) is stuck"
        await asyncio.sleep(1.5)
        assert bench.stuck == [worker.incarnation]

    run(test, batch_timeout_s=0.01)


def test_a_worker_that_never_answers_a_probe_is_reported():
    async def test(bench):
        silent = bench.add_worker()
        while not bench.stuck:
            await asyncio.sleep(0.01)
        assert bench.stuck == [silent.incarnation]

    run(test, batch_timeout_s=0.01)


def test_a_worker_that_only_fails_is_reported():
    async def test(bench):
        worker = bench.add_worker()
        while not bench.stuck:
            request = bench.request(1)
            batch = await worker.receive()
            worker.send(Failed(EPOCH, batch.number, batch.slot, FailureCode.ENGINE_ERROR))
            with pytest.raises(ServerError):
                await request.finished
        assert bench.stuck == [worker.incarnation]

    run(test)


def test_a_bad_one_among_many_is_found_by_halves():
    async def test(bench):
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

    run(test)


def test_no_empty_batch_is_sent_when_what_was_set_aside_has_gone():
    async def test(bench):
        worker = bench.add_worker()
        requests = [bench.request(n) for n in (1, 2)]
        batch = await worker.receive()
        stays = bench.request(3, length=16)
        worker.send(Failed(EPOCH, batch.number, batch.slot, FailureCode.ENGINE_ERROR))
        for request in requests:
            request.abandon()
            bench.scheduler.close(request.flow)
        assert bench.scheduler.queued_tokens == 16
        batch = await worker.receive()
        assert batch.num_sequences == 1
        worker.answer(batch)
        await stays.finished

    run(test)


def test_the_speed_stays_known_while_no_worker_is_usable():
    async def test(bench):
        worker = bench.add_worker()
        request = bench.request(1)
        batch = await worker.receive()
        [link] = bench.dispatcher.links
        link.is_stuck = True
        worker.answer(batch)
        await request.finished
        assert bench.dispatcher.tokens_per_s > 0

    run(test)


def test_a_failed_send_does_not_hide_what_has_arrived():
    """Probes to a worker that is not there yet fail; the answers of another must be seen all the same."""

    async def test(bench):
        worker = bench.add_worker(0)
        nobody = Incarnation(9, 1)
        bench.dispatcher.worker_up(nobody, map_arena(worker.fd, SPEC, writable=False)[0], {})
        for n in range(200):
            gathering = bench.request(n)
            worker.answer(await worker.receive())
            await asyncio.wait_for(gathering.finished, 1)

    run(test)


def test_an_abandoned_request_is_dropped_and_its_rows_go_nowhere():
    async def test(bench):
        worker = bench.add_worker()
        gone, stays = bench.request(1), bench.request(2)
        batch = await worker.receive()
        gone.abandon()
        worker.answer(batch)
        if batch.num_sequences == 1:
            worker.answer(await worker.receive())
        await stays.finished
        assert gone.fragments == [b""]

    run(test)


def test_a_large_answer_is_encoded_over_several_turns_of_the_loop():
    turns = 0

    async def test(bench):
        nonlocal turns
        worker = bench.add_worker()
        gathering = bench.request(*range(1, 8))
        batch = await worker.receive()
        worker.answer(batch)

        def count() -> None:
            nonlocal turns
            if 0 < sum(map(bool, gathering.fragments)) < 7:
                turns += 1
            if not gathering.is_over:
                asyncio.get_running_loop().call_soon(count)

        count()
        await gathering.finished
        assert gathering.fragments == [b"%d" % i for i in range(1, 8)]

    from gateway import dispatch

    before, dispatch._FLOATS_PER_TURN = dispatch._FLOATS_PER_TURN, 2 * SPEC.dim
    try:
        run(test)
    finally:
        dispatch._FLOATS_PER_TURN = before
    assert turns >= 2
