"""The loop over a real ROUTER, in a thread, with engines that do what a test wants."""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shm.arena import ArenaSpec, create_arena
from shm.card import ModelCard
from shm.control import Channel, Drain
from shm.failure import FailureCode
from shm.view import Rows, map_slots
from shm.wire import Alive, Done, Failed, Incarnation, Probe
from workers.engine import PackedBatch
from workers.engines.weightless import WeightlessEngine, weightless_vectors
from workers.loop import DeviceLost, Loop, connected

WHO = Incarnation(0, 1)
DIM = 8
ARENA = ArenaSpec(num_slots=2, rows_per_slot=4, dim=DIM)
CARD = ModelCard("", "", "bert", DIM, DIM, 16, 100, ("mean",), (), False, "")
BATCH = PackedBatch(np.array([2, 1], dtype=np.int32), np.array([41, 42, 43], dtype=np.int32))


class Engine(WeightlessEngine):
    """Raises what it is told to, once."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.error: Exception | None = None

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        super().embed(batch, rows)


class RunningLoop:
    """A loop in a thread. Owns the supervisor's end of its control channel."""

    def __init__(self, address_fd: int) -> None:
        self.engine = Engine()
        self.supervisor, self._theirs = Channel.pair()
        self.slots = map_slots(create_arena(ARENA), ARENA, writable=True)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(address_fd,))
        self._thread.start()

    def _run(self, address_fd: int) -> None:
        try:
            with connected(address_fd, WHO) as socket:
                Loop(socket, self._theirs, self.engine, self.slots, ARENA, CARD).run()
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
    running = RunningLoop(endpoint.address_fd)
    gateway.meet(WHO)
    yield running
    running.close()


def test_a_batch_is_answered_and_its_rows_are_in_its_slot(loop: RunningLoop, gateway: Any, as_message: Any) -> None:
    for number, slot in ((7, 0), (8, 1)):
        gateway.send(WHO, as_message(BATCH, number=number, slot=slot))
        done = gateway.receive(WHO)
        assert isinstance(done, Done)
        assert (done.epoch, done.number, done.slot, done.num_rows) == (1, number, slot, 2)
        assert 0 < done.compute_us < 30_000_000
        assert np.array_equal(loop.slots[slot][:2], weightless_vectors(BATCH, DIM))
        assert not loop.slots[slot][2:].any()


def test_a_batch_that_does_not_fit_is_refused_and_the_next_is_served(
    loop: RunningLoop, gateway: Any, as_message: Any, caplog: pytest.LogCaptureFixture
) -> None:
    outside = PackedBatch(BATCH.lengths, np.array([41, 777, 43], dtype=np.int32))
    gateway.send(WHO, as_message(outside, number=1))
    assert gateway.receive(WHO) == Failed(1, 1, 0, FailureCode.BAD_MESSAGE)
    gateway.send(WHO, as_message(BATCH, number=2, slot=9))
    assert gateway.receive(WHO) == Failed(1, 2, 9, FailureCode.BAD_MESSAGE)
    gateway.send(WHO, as_message(BATCH, number=3))
    assert isinstance(gateway.receive(WHO), Done)
    assert "777" not in caplog.text


@pytest.mark.parametrize("frames", [[b""], [b"nonsense"], [b"x" * 16, b"y"], [b"\x02" * 24, b"", b""]])
def test_what_is_not_a_message_is_logged_and_ignored(
    loop: RunningLoop, gateway: Any, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    gateway.send(WHO, frames)
    gateway.send(WHO, Probe(1))
    assert gateway.receive(WHO) == Alive(1)
    assert "not the gateway's" in caplog.text


def test_batches_of_an_older_epoch_are_dropped(loop: RunningLoop, gateway: Any, as_message: Any) -> None:
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


def test_a_gateway_s_successor_is_found(
    endpoint: Any, gateway: Any, new_gateway: Any, loop: RunningLoop, as_message: Any
) -> None:
    gateway.close()
    successor = new_gateway(endpoint.listening)
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
        (ValueError("4711"), FailureCode.ENGINE_ERROR),
        (MemoryError("4711"), FailureCode.OUT_OF_MEMORY),
        (OutOfMemoryError("4711"), FailureCode.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: 4711"), FailureCode.OUT_OF_MEMORY),
    ],
)
def test_an_engine_that_raises_is_one_line_of_log_without_content(
    loop: RunningLoop,
    gateway: Any,
    as_message: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    code: FailureCode,
) -> None:
    loop.engine.error = error
    gateway.send(WHO, as_message(BATCH, number=5))
    assert gateway.receive(WHO) == Failed(1, 5, 0, code)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "batch 5" in record.getMessage()
    assert type(error).__name__ in record.getMessage()
    for content in ("4711", "41", "42", "43"):
        assert f" {content}" not in record.getMessage()
    assert record.exc_info is None
    gateway.send(WHO, as_message(BATCH, number=6))
    assert isinstance(gateway.receive(WHO), Done)


def test_a_lost_device_ends_the_worker(loop: RunningLoop, gateway: Any, as_message: Any) -> None:
    loop.engine.error = AcceleratorError("device-side assert on 4711")
    gateway.send(WHO, as_message(BATCH))
    loop.join()
    assert isinstance(loop.error, DeviceLost)


def test_the_end_of_the_supervisor_ends_the_loop(loop: RunningLoop) -> None:
    loop.supervisor.close()
    loop.join()
    assert loop.error is None


def test_a_control_message_that_is_not_for_a_worker_changes_nothing(
    loop: RunningLoop, gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loop.supervisor.send(Drain(1.0))
    gateway.send(WHO, Probe(1))
    assert gateway.receive(WHO) == Alive(1)
    gateway.send(WHO, Probe(1))
    assert gateway.receive(WHO) == Alive(1)
    assert "Drain" in caplog.text
