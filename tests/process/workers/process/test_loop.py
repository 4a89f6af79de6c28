"""The loop over a real ROUTER, in a thread, with engines that do what a test wants."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.workers import ARENA, BATCH, CARD, DIM, FakeGateway, as_message
from vecd.shm.arena import ArenaSpec, create_arena
from vecd.shm.control import Channel
from vecd.shm.output import Output
from vecd.shm.views import Rows, map_arena
from vecd.shm.wire import Alive, Done, Failed, FailureCode, Incarnation, Probe
from vecd.workers.batch import Finish, PackedBatch
from vecd.workers.dummy import DummyEngine, dummy_vectors
from vecd.workers.process.loop import EngineLost, Loop, connected

WHO = Incarnation(0, 1)
ARENA_OF_TWO = replace(ARENA, num_gateways=2)


class Engine(DummyEngine):
    """Raises what it is told to, once."""

    def __init__(self) -> None:
        super().__init__(CARD)
        self.error: Exception | None = None

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        super().embed(batch, rows)


class RunningLoop:
    """A loop in a thread. Owns the supervisor's end of its control channel."""

    def __init__(self, address_fds: list[int], engine: Any, arena: ArenaSpec = ARENA) -> None:
        self.engine = engine
        self.supervisor, self._theirs = Channel.pair()
        self.views = map_arena(create_arena(arena), arena, writable=True)
        self.slots, self.begun = self.views[0].rows, self.views[0].begun
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(address_fds, arena))
        self._thread.start()

    def _run(self, address_fds: list[int], arena: ArenaSpec) -> None:
        try:
            with connected(address_fds, WHO) as sockets:
                self.engine.sockets = sockets
                Loop(sockets, self._theirs, self.engine, self.views, arena, CARD, trim_after_ms=20).run()
        except Exception as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.supervisor.close()
        self.join()
        self._theirs.close()


@pytest.fixture
def loop(endpoint: Any, gateway: Any) -> Iterator[RunningLoop]:
    running = RunningLoop([endpoint.address_fd], Engine())
    gateway.meet(WHO)
    yield running
    running.close()


def test_a_batch_is_answered_and_its_rows_are_in_its_slot(loop, gateway):
    for number, slot in ((7, 0), (8, 1)):
        gateway.send(WHO, as_message(BATCH, number=number, slot=slot))
        done = gateway.receive(WHO)
        assert isinstance(done, Done)
        assert (done.epoch, done.number, done.slot, done.num_rows) == (1, number, slot, 2)
        assert 0 < done.compute_us < 30_000_000
        assert np.array_equal(loop.slots[slot][:2], dummy_vectors(BATCH, DIM))
        assert not loop.slots[slot][2:].any()


def test_done_says_how_many_rows_the_sequences_asked_for(loop, gateway):
    batch = replace(BATCH, outputs=np.array([Output.TOKENS, Output.UNNORMALIZED], dtype=np.uint8))
    gateway.send(WHO, as_message(batch))
    done = gateway.receive(WHO)
    assert isinstance(done, Done)
    assert done.num_rows == 3
    last_of_first, alone = loop.slots[0][1], loop.slots[0][2]
    np.testing.assert_allclose(last_of_first, dummy_vectors(BATCH, DIM)[0], atol=1e-7)
    np.testing.assert_allclose(alone, dummy_vectors(BATCH, DIM)[1], atol=1e-7)  # this card does not normalize
    assert not loop.slots[0][3:].any()


def test_a_batch_that_does_not_fit_is_refused_and_the_next_is_served(loop, gateway, caplog):
    outside = PackedBatch(BATCH.lengths, np.array([41, 777, 43], dtype=np.int32))
    gateway.send(WHO, as_message(outside, number=1))
    assert gateway.receive(WHO) == Failed(1, 1, 0, FailureCode.BAD_MESSAGE)
    gateway.send(WHO, as_message(BATCH, number=2, slot=9))
    assert gateway.receive(WHO) == Failed(1, 2, 9, FailureCode.BAD_MESSAGE)
    many = PackedBatch(np.array([3, 2], dtype=np.int32), np.arange(5, dtype=np.int32))
    gateway.send(WHO, as_message(replace(many, outputs=np.full(2, Output.TOKENS, dtype=np.uint8)), number=4))
    assert gateway.receive(WHO) == Failed(1, 4, 0, FailureCode.BAD_MESSAGE)
    assert not loop.slots[0].any()
    gateway.send(WHO, as_message(BATCH, number=3))
    assert isinstance(gateway.receive(WHO), Done)
    assert "777" not in caplog.text


@pytest.mark.parametrize("frames", [[b""], [b"x" * 16, b"y"]])
def test_what_is_not_a_message_is_logged_and_ignored(loop, gateway, frames, caplog):
    gateway.send(WHO, frames)
    gateway.send(WHO, Probe(1))
    assert gateway.receive(WHO) == Alive(1)
    assert "not the gateway's" in caplog.text


def test_batches_of_an_older_epoch_are_dropped(loop, gateway):
    gateway.send(WHO, Probe(3))
    gateway.send(WHO, as_message(BATCH, number=1, epoch=2))
    gateway.send(WHO, as_message(BATCH, number=2, epoch=3))
    assert gateway.receive(WHO) == Alive(3)
    done = gateway.receive(WHO)
    assert (done.epoch, done.number) == (3, 2)
    gateway.send(WHO, Probe(2))  # a late probe of the old gateway does not bring its batches back
    gateway.send(WHO, as_message(BATCH, number=3, epoch=2))
    gateway.send(WHO, Probe(3))
    assert gateway.receive(WHO) == Alive(2)
    assert gateway.receive(WHO) == Alive(3)


def test_a_gateway_s_successor_is_found(endpoint, gateway, loop):
    gateway.close()
    successor = FakeGateway(endpoint)
    try:
        successor.meet(WHO, epoch=2)
        successor.send(WHO, as_message(BATCH, number=1, epoch=2))
        assert isinstance(successor.receive(WHO), Done)
    finally:
        successor.close()


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


class AcceleratorError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("index 4711 is out of bounds"), FailureCode.ENGINE_ERROR),
        (MemoryError("4711"), FailureCode.OUT_OF_MEMORY),
        (OutOfMemoryError("4711"), FailureCode.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: 4711"), FailureCode.OUT_OF_MEMORY),
    ],
)
def test_an_engine_that_raises_is_one_line_of_log_without_content(loop, gateway, caplog, error, code):
    loop.engine.error = error
    gateway.send(WHO, as_message(BATCH, number=5))
    assert gateway.receive(WHO) == Failed(1, 5, 0, code)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "batch 5" in record.getMessage()
    assert type(error).__name__ in record.getMessage()
    message = re.sub(r"line \d+", "", record.getMessage())
    for content in ("4711", "41", "42", "43"):
        assert f" {content}" not in message
    assert record.exc_info is None
    gateway.send(WHO, as_message(BATCH, number=6))
    assert isinstance(gateway.receive(WHO), Done)


@pytest.mark.parametrize(
    "error", [AcceleratorError("device-side assert on 4711"), RuntimeError("could not create a primitive")]
)
def test_a_lost_device_and_one_that_can_compile_nothing_more_end_the_worker(error, loop, gateway):
    loop.engine.error = error
    gateway.send(WHO, as_message(BATCH))
    loop.join()
    assert isinstance(loop.error, EngineLost)
    assert ("memory" in str(loop.error)) is ("primitive" in str(error))
    assert "4711" not in str(loop.error)


def test_the_end_of_the_supervisor_ends_the_loop(loop):
    loop.supervisor.close()
    loop.join()
    assert loop.error is None


# --- an engine that is not done when it has begun ---------------------------------------------------------------


class Accelerated(DummyEngine):
    """As on an accelerator: the finish writes the rows. What a batch does goes by its first token id."""

    def __init__(self) -> None:
        super().__init__(CARD)
        self.sockets: list[Any] = []
        self.journal: list[Any] = []
        self.while_beginning: dict[int, Callable[[], Any]] = {}
        self.errors: dict[tuple[str, int], Exception] = {}
        self.is_fast = False
        self.before_finish: Callable[[], Any] = lambda: None
        self.heard: list[Any] = []

    def until_another_message_waits(self) -> None:
        assert self.sockets[0].poll(30_000)

    def step(self, name: str, batch: PackedBatch) -> None:
        self.journal.append((name, int(batch.token_ids[0])))
        if self.journal[-1] in self.errors:
            raise self.errors[self.journal[-1]]

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        self.step("begin", batch)
        self.while_beginning.get(int(batch.token_ids[0]), lambda: None)()
        return Copying(self, batch, rows)


class Copying(Finish):
    def __init__(self, engine: Accelerated, batch: PackedBatch, rows: Rows) -> None:
        self._engine, self._batch, self._rows = engine, batch, rows

    def is_ready(self) -> bool:
        return self._engine.is_fast

    def __call__(self) -> None:
        self._engine.heard.append(self._engine.before_finish())
        self._engine.step("finish", self._batch)
        self._engine.embed(self._batch, self._rows)


@pytest.fixture
def accelerated(endpoint: Any, gateway: Any) -> Iterator[RunningLoop]:
    running = RunningLoop([endpoint.address_fd], Accelerated())
    gateway.meet(WHO)
    yield running
    running.close()


def batch_number(number: int) -> PackedBatch:
    return PackedBatch(np.array([2, 1], dtype=np.int32), np.array([number, 50, 51], dtype=np.int32))


@pytest.fixture
def send(gateway: Any) -> Callable[..., None]:
    def send_numbers(*numbers: int, epoch: int = 1) -> None:
        """Odd numbers in slot 0, even ones in slot 1."""
        for number in numbers:
            message = as_message(batch_number(number), number=number, slot=1 - number % 2, epoch=epoch)
            gateway.send(WHO, message)

    return send_numbers


def numbers_of(gateway: Any, count: int) -> list[int]:
    replies = [gateway.receive(WHO) for _ in range(count)]
    assert all(isinstance(reply, Done) for reply in replies)
    return [reply.number for reply in replies]


def test_a_batch_that_waits_is_begun_before_the_one_under_way_is_finished(accelerated, gateway, send):
    engine = accelerated.engine
    engine.while_beginning = {1: engine.until_another_message_waits, 2: engine.until_another_message_waits}
    send(1, 2, 3)
    assert numbers_of(gateway, 3) == [1, 2, 3]
    assert engine.journal == [
        ("begin", 1),
        ("begin", 2),
        ("finish", 1),  # two at most
        ("begin", 3),
        ("finish", 2),
        ("finish", 3),
    ]
    assert np.array_equal(accelerated.slots[0][:2], dummy_vectors(batch_number(3), DIM))
    assert np.array_equal(accelerated.slots[1][:2], dummy_vectors(batch_number(2), DIM))


def test_rows_that_are_complete_are_answered_before_the_next_batch_is_begun(accelerated, gateway, send):
    engine = accelerated.engine
    engine.is_fast = True
    engine.while_beginning = {1: engine.until_another_message_waits}
    send(1, 2)
    assert numbers_of(gateway, 2) == [1, 2]
    assert engine.journal == [("begin", 1), ("finish", 1), ("begin", 2), ("finish", 2)]


def test_a_slot_that_is_being_written_is_not_begun_again(accelerated, gateway):
    engine = accelerated.engine
    engine.while_beginning = {1: engine.until_another_message_waits}
    for number in (1, 2):
        gateway.send(WHO, as_message(batch_number(number), number=number, slot=0))
    assert numbers_of(gateway, 2) == [1, 2]
    assert engine.journal == [("begin", 1), ("finish", 1), ("begin", 2), ("finish", 2)]


@pytest.mark.parametrize("step", ["begin", "finish"])
@pytest.mark.parametrize("failing", [1, 2])
def test_of_two_under_way_only_the_one_that_fails_fails_and_they_are_answered_in_order(
    step, failing, accelerated, gateway, send
):
    engine = accelerated.engine
    engine.while_beginning = {1: engine.until_another_message_waits}
    engine.errors = {(step, failing): MemoryError()}
    send(1, 2)
    replies = [gateway.receive(WHO), gateway.receive(WHO)]
    assert [reply.number for reply in replies] == [1, 2]
    assert replies[failing - 1] == Failed(1, failing, 1 - failing % 2, FailureCode.OUT_OF_MEMORY)
    assert isinstance(replies[2 - failing], Done)


def test_a_batch_under_way_is_finished_before_a_new_gateway_is_answered(accelerated, gateway, send):
    engine = accelerated.engine
    engine.while_beginning = {1: engine.until_another_message_waits}
    send(1)
    gateway.send(WHO, Probe(2))
    send(2)  # of the gateway before: dropped
    send(3, epoch=2)
    done = gateway.receive(WHO)
    assert (type(done), done.epoch, done.number) == (Done, 1, 1)
    assert gateway.receive(WHO) == Alive(2)
    assert numbers_of(gateway, 1) == [3]
    assert engine.journal == [("begin", 1), ("finish", 1), ("begin", 3), ("finish", 3)]


@pytest.mark.parametrize("step", ["begin", "finish"])
def test_a_device_lost_at_any_step_ends_the_worker(step, accelerated, send):
    engine = accelerated.engine
    engine.while_beginning = {1: engine.until_another_message_waits}
    engine.errors = {(step, 2): AcceleratorError()}
    send(1, 2)
    accelerated.join()
    assert isinstance(accelerated.error, EngineLost)


def test_the_end_of_the_supervisor_waits_for_what_is_under_way(accelerated, send):
    engine = accelerated.engine
    engine.while_beginning = {1: accelerated.supervisor.close}
    send(1)
    accelerated.join()
    assert accelerated.error is None
    assert engine.journal == [("begin", 1), ("finish", 1)]


def test_the_times_of_batches_that_overlap_add_up_to_the_clock_s(accelerated, gateway, send, monkeypatch):
    engine, now_us = accelerated.engine, 0

    def advance(by_us: int) -> None:
        nonlocal now_us
        now_us += by_us

    def begin_1() -> None:
        advance(1_000)
        engine.until_another_message_waits()

    def embed(batch: PackedBatch, rows: Rows) -> None:
        advance(5_000)

    monkeypatch.setattr("vecd.workers.process.loop.time", SimpleNamespace(perf_counter_ns=lambda: now_us * 1000))
    monkeypatch.setattr(engine, "embed", embed)
    engine.while_beginning = {1: begin_1, 2: lambda: advance(1_000)}
    send(1, 2)
    assert [gateway.receive(WHO).compute_us for _ in range(2)] == [7_000, 5_000]


def test_a_worker_that_rests_gives_memory_back_once(monkeypatch, loop, gateway):
    given_back = threading.Semaphore(0)
    monkeypatch.setattr("vecd.workers.process.loop.return_free_memory", given_back.release)
    for number in (1, 2):
        gateway.send(WHO, as_message(BATCH, number=number))
        assert isinstance(gateway.receive(WHO), Done)
        assert given_back.acquire(timeout=10)
        assert not given_back.acquire(timeout=0.2), "once is enough"


# --- several gateways -------------------------------------------------------------------------------------------


@pytest.fixture
def gateways(gateway: FakeGateway, new_endpoint: Any) -> Iterator[list[FakeGateway]]:
    other = FakeGateway(new_endpoint())
    yield [gateway, other]
    other.close()


@pytest.fixture
def shared(gateways: list[Any]) -> Iterator[RunningLoop]:
    """A loop for two gateways."""
    running = RunningLoop([gateway.address_fd for gateway in gateways], Accelerated(), ARENA_OF_TWO)
    for gateway in gateways:
        gateway.meet(WHO)
    yield running
    running.close()


def send_to(gateway: Any, number: int, slot: int = 0, epoch: int = 1) -> None:
    gateway.send(WHO, as_message(batch_number(number), number=number, slot=slot, epoch=epoch))


def held_at_first_batch(engine: Any, gateway: Any) -> threading.Event:
    """Batch 1 of a gateway is being begun, and stays so until the returned event is set and both have sent more."""
    waiting, all_sent = threading.Event(), threading.Event()

    def until_all_is_sent() -> None:
        waiting.set()
        assert all_sent.wait(30)
        assert all(socket.poll(30_000) for socket in engine.sockets)
        time.sleep(0.1)  # for the rest of what was sent

    engine.while_beginning = {1: until_all_is_sent}
    send_to(gateway, 1)
    assert waiting.wait(30)
    return all_sent


def test_gateways_take_turns_and_are_answered_each_on_its_own_socket(shared, gateways):
    engine = shared.engine
    engine.is_fast = True  # one after the other, as on a processor
    all_sent = held_at_first_batch(engine, gateways[0])
    for number in (2, 3, 4, 5):  # of the first, while the second has sent nothing
        send_to(gateways[0], number)
    for number in (11, 12):
        send_to(gateways[1], number)
    all_sent.set()
    assert numbers_of(gateways[0], 5) == [1, 2, 3, 4, 5]
    assert numbers_of(gateways[1], 2) == [11, 12]
    begun = [number for step, number in engine.journal if step == "begin"]
    assert begun == [1, 11, 2, 12, 3, 4, 5]


def test_two_batches_under_way_may_be_of_two_gateways(shared, gateways):
    """In slots of the same number, which is not the same slot."""
    engine = shared.engine
    begun: list[list[int]] = []

    def until_the_other_has_sent() -> None:
        send_to(gateways[1], 11)
        assert engine.sockets[1].poll(30_000)

    engine.while_beginning = {
        1: until_the_other_has_sent,
        11: lambda: begun.extend(views.begun.tolist() for views in shared.views),
    }
    send_to(gateways[0], 1)
    assert numbers_of(gateways[0], 1) == [1]
    assert numbers_of(gateways[1], 1) == [11]
    assert engine.journal == [("begin", 1), ("begin", 11), ("finish", 1), ("finish", 11)]
    assert begun == [[1, 0], [11, 0]]
    for views, number in zip(shared.views, (1, 11), strict=True):
        assert np.array_equal(views.rows[0][:2], dummy_vectors(batch_number(number), DIM))
        assert not views.rows[1].any()
    assert not any(views.begun.any() for views in shared.views)


def test_the_epochs_of_gateways_have_nothing_to_do_with_each_other(shared, gateways):
    gateways[0].send(WHO, Probe(9))
    assert gateways[0].receive(WHO) == Alive(9)
    send_to(gateways[0], 1, epoch=8)
    send_to(gateways[1], 2, epoch=1)
    assert numbers_of(gateways[1], 1) == [2]
    send_to(gateways[0], 3, epoch=9)
    assert numbers_of(gateways[0], 1) == [3]


def test_a_probe_does_not_wait_for_another_gateway_s_batch(shared, gateways):
    engine = shared.engine

    def until_the_other_has_probed() -> None:
        gateways[1].send(WHO, Probe(2))
        assert engine.sockets[1].poll(30_000)

    engine.while_beginning = {1: until_the_other_has_probed}
    engine.before_finish = lambda: gateways[1].receive(WHO)
    send_to(gateways[0], 1)
    assert numbers_of(gateways[0], 1) == [1]
    assert engine.heard == [Alive(2)]


def test_probes_take_no_turn(shared, gateways):
    """A gateway that has just started sends one every few milliseconds, and one batch of another may take many."""
    engine = shared.engine
    engine.is_fast = True
    all_sent = held_at_first_batch(engine, gateways[0])
    for number in (2, 3, 4):
        send_to(gateways[0], number)
    for epoch in (1, 2, 3):
        gateways[1].send(WHO, Probe(epoch))
    send_to(gateways[1], 11, epoch=3)
    all_sent.set()
    assert gateways[1].receive(WHO) == Alive(3), "the newest alone"
    assert numbers_of(gateways[1], 1) == [11]
    assert numbers_of(gateways[0], 4) == [1, 2, 3, 4]
    assert [number for step, number in engine.journal if step == "begin"] == [1, 11, 2, 3, 4]
    assert shared.views[0].num_done == shared.views[1].num_done == [5]


def test_what_an_engine_refused_is_no_longer_begun(loop, gateway):
    begun: list[int] = []

    def refuse(batch: PackedBatch, rows: Rows) -> None:
        begun.extend(loop.begun.tolist())
        raise MemoryError

    loop.engine.embed = refuse
    gateway.send(WHO, as_message(BATCH, number=7, slot=1))
    assert isinstance(gateway.receive(WHO), Failed)
    assert begun == [0, 7]
    assert not loop.begun.any()
    assert loop.views[0].num_done == [0]
