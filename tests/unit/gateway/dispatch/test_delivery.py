"""What delivery does with the rows of answered batches: how much in one turn of the event loop, and for whom."""

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import AsyncIterator

import numpy as np
import pytest

from vecd.gateway.dispatch.delivery import Delivery
from vecd.gateway.dispatch.workers import InFlight, WorkerLink
from vecd.gateway.encoding.result import Result
from vecd.gateway.errors import ServerError
from vecd.gateway.request import Make, Priority, TokenizedInput
from vecd.gateway.scheduling.cost import CostModel
from vecd.gateway.scheduling.queue import QueuedSequence, RequestQueue
from vecd.shm.output import Output
from vecd.shm.views import SlotViews
from vecd.shm.wire import Incarnation

DIM = 384
FLOATS_PER_TURN = 32 * 1024


class Turns:
    """The number of the event loop's turn, while `count` runs."""

    def __init__(self) -> None:
        self.now = 0

    async def count(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)


class Rows(Make):
    """Notes each row's first number, and in which turn it came. It cannot take `refused`."""

    def __init__(self, turns: Turns, refused: float | None = None) -> None:
        self.turns = turns
        self.refused = refused
        self.seen: list[tuple[int, float]] = []

    def put(self, index: int, rows: np.ndarray, num_left: int) -> None:
        for row in rows:
            if row[0] == self.refused:
                raise ZeroDivisionError("no such number")
            self.seen.append((self.turns.now, float(row[0])))


class Case:
    """A delivery, and a worker with a slot for each batch. All that is made here belongs to one running loop."""

    def __init__(self, turns: Turns, num_slots: int, rows_per_slot: int) -> None:
        self.turns = turns
        self.delivered: list[int] = []
        self.delivery = Delivery(widths={}, on_delivered=lambda _, batch: self.delivered.append(batch.number))
        self.rows = [np.zeros((rows_per_slot, DIM), np.float32) for _ in range(num_slots)]
        slots = SlotViews(self.rows, np.zeros(num_slots, np.int64), np.zeros(1, np.int64))
        self.link = WorkerLink(Incarnation(0, 1), slots, {}, CostModel(1000))

    def request(self, num_rows: int, refused: float | None = None) -> tuple[Result, Rows, RequestQueue]:
        rows = Rows(self.turns, refused)
        pending = Result(num_rows, (rows,), asyncio.get_running_loop())
        return pending, rows, RequestQueue(pending, Priority.NORMAL, float("inf"), "")

    def answered(self, slot: int, sequences: list[QueuedSequence]) -> InFlight:
        """A batch whose rows stand in its slot, in ascending numbers."""
        if any(sequence.output is Output.TOKENS for sequence in sequences):
            row_ends: list[int] | range = np.cumsum([sequence.num_rows for sequence in sequences]).tolist()
        else:
            row_ends = range(1, len(sequences) + 1)
        num_rows = row_ends[-1]
        self.rows[slot][:num_rows] = np.arange(num_rows)[:, None]
        return InFlight(slot + 1, slot, sequences, 1, row_ends, 0.0, 0.0)


def sequences(
    request_queue: RequestQueue, num: int, output: Output = Output.VECTORS, num_tokens: int = 1
) -> list[QueuedSequence]:
    tokenized = TokenizedInput(array("i", [7] * num_tokens).tobytes(), num_tokens, False)
    return [QueuedSequence(request_queue, index, tokenized, output) for index in range(num)]


@pytest.fixture
async def turns() -> AsyncIterator[Turns]:
    made = Turns()
    counting = asyncio.ensure_future(made.count())
    yield made
    counting.cancel()


async def test_batches_answered_at_once_share_the_budget_of_a_turn(turns):
    """16 batches of 80 rows are 15 budgets, though each of them fits into one."""
    case = Case(turns, num_slots=16, rows_per_slot=80)
    pending, rows, request_queue = case.request(16 * 80)
    queued = sequences(request_queue, 16 * 80)
    for slot in range(16):
        case.delivery.add(case.link, case.answered(slot, queued[80 * slot : 80 * (slot + 1)]))
    await pending.finished
    assert case.delivery.num_rows == 0
    floats_per_turn = {turn: num * DIM for turn, num in Counter(turn for turn, _ in rows.seen).items()}
    assert max(floats_per_turn.values()) < FLOATS_PER_TURN + DIM, "the last row may go beyond it"
    assert len(floats_per_turn) == 15, "and no turn is left out before the work is done"
    assert [number for _, number in rows.seen] == [*range(80)] * 16
    assert case.delivered == [*range(1, 17)]


async def test_a_batch_that_comes_later_in_a_turn_gets_what_the_first_has_left(turns):
    case = Case(turns, num_slots=3, rows_per_slot=80)
    await asyncio.sleep(0)
    requests = [case.request(num_rows) for num_rows in (10, 80, 10)]
    for slot, num_rows in enumerate((10, 80)):
        case.delivery.add(case.link, case.answered(slot, sequences(requests[slot][2], num_rows)))
    assert [len(rows.seen) for _, rows, _ in requests] == [10, FLOATS_PER_TURN // DIM + 1 - 10, 0]
    await asyncio.gather(*(pending.finished for pending, _, _ in requests[:2]))
    await asyncio.sleep(0)
    case.delivery.add(case.link, case.answered(2, sequences(requests[2][2], 10)))
    assert len(requests[2][1].seen) == 10


@pytest.mark.parametrize("output", [Output.VECTORS, Output.TOKENS])
async def test_a_request_whose_rows_cannot_be_encoded_fails_alone(turns, output: Output, caplog):
    case = Case(turns, num_slots=1, rows_per_slot=1000)
    first, sick, last = case.request(2), case.request(200, refused=101), case.request(2)
    queued = [
        *sequences(first[2], 2),
        *sequences(sick[2], 100, output, num_tokens=2),
        *sequences(last[2], 2, Output.UNNORMALIZED),
    ]
    with caplog.at_level(logging.ERROR):
        case.delivery.add(case.link, case.answered(0, queued))
        await asyncio.gather(first[0].finished, last[0].finished)
    with pytest.raises(ServerError, match="The server failed on this request") as caught:
        await sick[0].finished
    assert caught.value.status == 500
    assert case.delivered == [1]
    num_rows = 100 if output is Output.VECTORS else 200
    seen = [[number for _, number in rows.seen] for _, rows, _ in (first, last)]
    assert seen == [[0, 1], [num_rows + 2, num_rows + 3]]
    assert caplog.messages == ["the rows of a request cannot be encoded: ZeroDivisionError"]


@pytest.mark.parametrize("sick_is_copied", [False, True])
async def test_a_copy_of_a_row_that_cannot_be_encoded_fails_alone(turns, sick_is_copied: bool, caplog):
    """Of the request that computes the row, and of one that gets a copy, one cannot take it."""
    case = Case(turns, num_slots=1, rows_per_slot=4)
    refused = [None, 1.0] if sick_is_copied else [1.0, None]
    (leader, seen, queue), (follower, copied, other_queue) = (case.request(2, each) for each in refused)
    batch = case.answered(0, sequences(queue, 2))
    batch.copies = [*zip(sequences(other_queue, 2), range(2), strict=True)]
    case.delivery.add(case.link, batch)
    well, sick = (leader, follower) if sick_is_copied else (follower, leader)
    await well.finished
    with pytest.raises(ServerError, match="The server failed on this request"):
        await sick.finished
    assert [number for _, number in (seen if sick_is_copied else copied).seen] == [0, 1]
    assert (case.delivered, case.delivery.num_rows) == ([1], 0)
    assert caplog.messages == ["the rows of a request cannot be encoded: ZeroDivisionError"]


async def test_a_chunk_whose_row_cannot_be_added_fails_its_request_alone(turns, caplog):
    """As an input whose chunks nobody has announced."""
    case = Case(turns, num_slots=1, rows_per_slot=4)
    (sick, _, queue), (well, _, other_queue) = case.request(1), case.request(1)
    chunk = QueuedSequence(queue, 0, TokenizedInput(b"", 1, False, weight=1))
    case.delivery.add(case.link, case.answered(0, [chunk, *sequences(other_queue, 1)]))
    await well.finished
    with pytest.raises(ServerError, match="The server failed on this request"):
        await sick.finished
    assert caplog.messages == ["the rows of a request cannot be encoded: KeyError"]


async def test_rows_that_cannot_be_kept_are_delivered_all_the_same(turns, caplog):
    """They are to be kept once, though copies of them come in a later turn."""
    case = Case(turns, num_slots=1, rows_per_slot=80)

    def keep(*_: object) -> None:
        raise MemoryError

    case.delivery = Delivery(widths={}, on_delivered=lambda *_: None, keep=keep)
    (_, _, queue), (follower, rows, other_queue) = case.request(80), case.request(80)
    batch = case.answered(0, sequences(queue, 80))
    batch.copies = [*zip(sequences(other_queue, 80), range(80), strict=True)]
    case.delivery.add(case.link, batch)
    await follower.finished
    assert [number for _, number in rows.seen] == [*range(80)]
    assert caplog.messages == ["rows cannot be kept"]
