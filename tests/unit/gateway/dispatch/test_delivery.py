"""What delivery does with the rows of answered batches: how much in one turn of the event loop, and for whom."""

import asyncio
import logging
from array import array
from collections import Counter

import numpy as np
import pytest

from vecd.gateway.dispatch.delivery import Delivery
from vecd.gateway.dispatch.worker_link import InFlight, WorkerLink
from vecd.gateway.encoding.pending import PendingResult
from vecd.gateway.scheduling.cost_model import CostModel
from vecd.gateway.scheduling.queue import QueuedSequence, RequestQueue
from vecd.gateway.types.errors import ServerError
from vecd.gateway.types.request import Priority, TokenizedInput
from vecd.shm.output import Output
from vecd.shm.shared_metrics import ServiceKey
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


class Rows:
    """A collector that notes each row's first number, and in which turn it came. It cannot take `refused`."""

    def __init__(self, turns: Turns, refused: float | None = None) -> None:
        self.turns = turns
        self.refused = refused
        self.seen: list[tuple[int, float]] = []

    def put(self, index: int, rows: np.ndarray) -> None:
        for row in rows:
            if row[0] == self.refused:
                raise ZeroDivisionError("no such number")
            self.seen.append((self.turns.now, float(row[0])))

    def put_tokens(self, index: int, rows: np.ndarray, num_left: int) -> None:
        self.put(index, rows)


class Case:
    """A delivery, and a worker with a slot for each batch. All that is made here belongs to one running loop."""

    def __init__(self, num_slots: int, rows_per_slot: int) -> None:
        self.turns = Turns()
        self.delivered: list[int] = []
        self.delivery = Delivery(widths={}, on_delivered=lambda _, batch: self.delivered.append(batch.number))
        self.rows = [np.zeros((rows_per_slot, DIM), np.float32) for _ in range(num_slots)]
        slots = SlotViews(self.rows, np.zeros(num_slots, np.uint64))
        self.link = WorkerLink(ServiceKey(1), Incarnation(0, 1), slots, {}, CostModel(1000))
        self.num_requests = 0

    def request(self, num_rows: int, refused: float | None = None) -> tuple[PendingResult, Rows, RequestQueue]:
        rows = Rows(self.turns, refused)
        pending = PendingResult(num_rows, (rows,), asyncio.get_running_loop())
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


def test_batches_answered_at_once_share_the_budget_of_a_turn():
    """16 batches of 80 rows are 15 budgets, though each of them fits into one."""

    async def play() -> tuple[list[tuple[int, float]], list[int]]:
        case = Case(num_slots=16, rows_per_slot=80)
        pending, rows, request_queue = case.request(16 * 80)
        queued = sequences(request_queue, 16 * 80)
        counting = asyncio.ensure_future(case.turns.count())
        for slot in range(16):
            case.delivery.add(case.link, case.answered(slot, queued[80 * slot : 80 * (slot + 1)]))
        await pending.finished
        counting.cancel()
        assert case.delivery.num_rows == 0
        return rows.seen, case.delivered

    seen, delivered = asyncio.run(play())
    floats_per_turn = {turn: num * DIM for turn, num in Counter(turn for turn, _ in seen).items()}
    assert max(floats_per_turn.values()) < FLOATS_PER_TURN + DIM, "the last row may go beyond it"
    assert len(floats_per_turn) == 15, "and no turn is left out before the work is done"
    assert [number for _, number in seen] == [*range(80)] * 16
    assert delivered == [*range(1, 17)]


def test_a_batch_that_comes_later_in_a_turn_gets_what_the_first_has_left():
    async def play() -> list[int]:
        case = Case(num_slots=3, rows_per_slot=80)
        counting = asyncio.ensure_future(case.turns.count())
        await asyncio.sleep(0)
        requests = [case.request(num_rows) for num_rows in (10, 80, 10)]
        for slot, (_, _, request_queue) in enumerate(requests[:2]):
            num_rows = (10, 80)[slot]
            case.delivery.add(case.link, case.answered(slot, sequences(request_queue, num_rows)))
        seen_at_once = [len(rows.seen) for _, rows, _ in requests]
        await asyncio.gather(*(pending.finished for pending, _, _ in requests[:2]))
        await asyncio.sleep(0)
        case.delivery.add(case.link, case.answered(2, sequences(requests[2][2], 10)))
        seen_at_once.append(len(requests[2][1].seen))
        counting.cancel()
        return seen_at_once

    assert asyncio.run(play()) == [10, FLOATS_PER_TURN // DIM + 1 - 10, 0, 10]


@pytest.mark.parametrize("output", [Output.VECTORS, Output.TOKENS])
def test_a_request_whose_rows_cannot_be_encoded_fails_alone(output: Output, caplog: pytest.LogCaptureFixture):
    async def play() -> list[list[float]]:
        case = Case(num_slots=1, rows_per_slot=1000)
        first, sick, last = case.request(2), case.request(200, refused=101), case.request(2)
        batch = case.answered(
            0,
            [
                *sequences(first[2], 2),
                *sequences(sick[2], 100, output, num_tokens=2),
                *sequences(last[2], 2, Output.UNNORMALIZED),
            ],
        )
        case.delivery.add(case.link, batch)
        await asyncio.gather(first[0].finished, last[0].finished)
        with pytest.raises(ServerError, match="The server failed on this request") as caught:
            await sick[0].finished
        assert caught.value.status == 500
        assert case.delivered == [1]
        return [[number for _, number in rows.seen] for _, rows, _ in (first, last)]

    with caplog.at_level(logging.ERROR):
        seen = asyncio.run(play())
    num_rows = 100 if output is Output.VECTORS else 200
    assert seen == [[0, 1], [num_rows + 2, num_rows + 3]]
    assert [record.message for record in caplog.records] == [
        "the rows of a request cannot be encoded: ZeroDivisionError"
    ]
