import asyncio
from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.request import Gathering, Sequence, TokenizedInput
from gateway.scheduler import Scheduler

_loop = asyncio.new_event_loop()


def make_sequences(*lengths: int) -> list[Sequence]:
    """Sequences of one request each."""
    return [
        Sequence(Gathering(1, bytes, _loop), 0, TokenizedInput(array("i", [1] * n).tobytes(), n, False))
        for n in lengths
    ]


def test_first_in_first_out_within_the_budget():
    scheduler = Scheduler(max_batch_tokens=10, max_batch_sequences=100)
    a, b, c, d = make_sequences(4, 6, 1, 1)
    scheduler.add([a, b, c, d])
    assert scheduler.next_batch(1) == [a, b]
    assert scheduler.next_batch(1) == [c, d]
    assert scheduler.next_batch(1) == []


def test_what_waits_is_divided_among_the_idle_workers():
    scheduler = Scheduler(max_batch_tokens=1000, max_batch_sequences=100)
    sequences = make_sequences(*[10] * 8)
    scheduler.add(sequences)
    assert [len(scheduler.next_batch(idle)) for idle in (4, 3, 2, 1)] == [2, 2, 2, 2]


def test_a_sequence_longer_than_the_budget_is_a_batch_of_its_own():
    scheduler = Scheduler(max_batch_tokens=10, max_batch_sequences=100)
    a, b = make_sequences(50, 1)
    scheduler.add([a, b])
    assert scheduler.next_batch(1) == [a]
    assert scheduler.next_batch(1) == [b]


def test_a_batch_holds_no_more_sequences_than_a_slot_has_rows():
    scheduler = Scheduler(max_batch_tokens=1000, max_batch_sequences=3)
    scheduler.add(make_sequences(*[1] * 7))
    assert scheduler.has_full_batch
    assert [len(scheduler.next_batch(1)) for _ in range(4)] == [3, 3, 1, 0]


def test_abandoned_sequences_are_dropped_when_the_batch_is_built():
    scheduler = Scheduler(max_batch_tokens=100, max_batch_sequences=100)
    a, b, c = make_sequences(1, 2, 3)
    scheduler.add([a, b, c])
    b.gathering.abandon()
    assert scheduler.next_batch(1) == [a, c]
    assert scheduler.queued_tokens == 0


def test_abandoned_sequences_do_not_pile_up_while_no_batch_is_built():
    scheduler = Scheduler(max_batch_tokens=100, max_batch_sequences=100)
    [stays] = make_sequences(5)
    scheduler.add([stays])
    for _ in range(1000):
        gone = make_sequences(1)
        scheduler.add(gone)
        gone[0].gathering.abandon()
        scheduler.note_abandoned(1)
        assert scheduler.queued_sequences <= 3
    assert scheduler.next_batch(1) == [stays]


def test_a_suspect_runs_alone():
    scheduler = Scheduler(max_batch_tokens=100, max_batch_sequences=100)
    a, b, c = make_sequences(1, 1, 1)
    b.must_run_alone = True
    scheduler.add([a, b, c])
    assert [scheduler.next_batch(1) for _ in range(3)] == [[a], [b], [c]]


def test_what_is_put_back_goes_first_in_its_old_order():
    scheduler = Scheduler(max_batch_tokens=100, max_batch_sequences=2)
    a, b, c = make_sequences(1, 1, 1)
    scheduler.add([a, b, c])
    scheduler.put_back(scheduler.next_batch(1))
    assert scheduler.next_batch(1) == [a, b]


class SchedulerMachine(RuleBasedStateMachine):
    """Whatever happens, every sequence leaves exactly once or is abandoned, and the books are right."""

    MAX_TOKENS, MAX_SEQUENCES = 20, 5

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(self.MAX_TOKENS, self.MAX_SEQUENCES)
        self.queued: list[Sequence] = []
        self.out: list[list[Sequence]] = []

    @rule(lengths=st.lists(st.integers(1, 30), max_size=8))
    def add(self, lengths):
        sequences = make_sequences(*lengths)
        self.scheduler.add(sequences)
        self.queued += sequences

    @rule(idle=st.integers(0, 4))
    def take(self, idle):
        batch = self.scheduler.next_batch(idle)
        alive = [s for s in self.queued if not s.is_abandoned]
        assert batch == alive[: len(batch)], "in order, nothing skipped but the abandoned"
        assert batch or not alive, "work-conserving"
        assert len(batch) <= self.MAX_SEQUENCES
        assert len(batch) == 1 or sum(s.num_tokens for s in batch) <= self.MAX_TOKENS
        assert len(batch) == 1 or not any(s.must_run_alone for s in batch)
        taken = self.queued.index(batch[-1]) + 1 if batch else len(self.queued)
        self.queued = self.queued[taken:]
        self.out.append(batch)
        # The scheduler may have looked past abandoned ones behind the batch.
        while self.queued and self.scheduler.queued_sequences < len(self.queued):
            assert self.queued.pop(0).is_abandoned

    @precondition(lambda self: self.out)
    @rule()
    def put_back(self):
        batch = self.out.pop()
        self.scheduler.put_back(batch)
        self.queued = batch + self.queued

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def abandon(self, data):
        data.draw(st.sampled_from(self.queued)).gathering.abandon()

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def suspect(self, data):
        data.draw(st.sampled_from(self.queued)).must_run_alone = True

    @invariant()
    def books_are_right(self):
        assert self.scheduler.queued_sequences == len(self.queued)
        assert self.scheduler.queued_tokens == sum(s.num_tokens for s in self.queued)


TestScheduler = SchedulerMachine.TestCase


@pytest.fixture(autouse=True, scope="module")
def _close_loop():
    yield
    _loop.close()
