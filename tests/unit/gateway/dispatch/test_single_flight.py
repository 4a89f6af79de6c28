"""Identical sequences are computed once, and each request gets what it would have got alone.

The dispatcher, the policy and the delivery are real; the transport and the workers are played here.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.dispatching import EPOCH, SPEC, Dispatched, Request, sequences_of, tokenized
from vecd.gateway.errors import EngineFailed, PoisonInput, Unavailable
from vecd.gateway.request import Priority
from vecd.gateway.scheduling.queue import QueuedSequence, RequestQueue
from vecd.shm.control import InputDeaths, Quarantined
from vecd.shm.output import Output
from vecd.shm.shared_metrics import Counter
from vecd.shm.views import SlotViews
from vecd.shm.wire import Alive, Batch, Done, Failed, FailureCode, Incarnation

DIM, ROWS = SPEC.dim, SPEC.rows_per_slot
BULK, NORMAL, INTERACTIVE = Priority.BULK, Priority.NORMAL, Priority.INTERACTIVE


class Sent:
    """A transport that keeps what is sent."""

    def __init__(self) -> None:
        self.batches: list[tuple[bytes, Batch]] = []

    def send(self, identity: bytes, message: Batch) -> bool:
        self.batches.append((identity, message))
        return True

    def probe(self, identity: bytes, is_awaited: Callable[[], bool]) -> None:
        pass


class Flights(Dispatched):
    """A dispatcher on the running loop, and its workers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sent = Sent()
        self.dispatcher.transport = self.sent  # type: ignore[assignment]
        self.dispatcher._loop = asyncio.get_running_loop()
        self.slots: dict[bytes, SlotViews] = {}
        self.num_lives = 0
        self.requests: list[Request] = []

    def add_worker(self) -> None:
        self.num_lives += 1
        incarnation = Incarnation(0, self.num_lives)
        rows = [np.zeros((ROWS, DIM), np.float32) for _ in range(2)]
        slots = SlotViews(rows, np.zeros(2, np.int64), np.zeros(1, np.int64))
        self.slots[incarnation.identity] = slots
        self.dispatcher.worker_up(incarnation, slots, {})
        self.dispatcher._on_message(incarnation.identity, Alive(EPOCH))

    def queue(self, request_queue: RequestQueue, sequences: list[QueuedSequence]) -> None:
        request = cast(Request, request_queue.result)
        self.requests.append(request)
        try:
            super().queue(request_queue, sequences)
        except PoisonInput as error:
            request.fail(error)

    def cancel(self, request: Request) -> None:
        """As the pipeline does at the end of a request."""
        request.abandon()
        self.policy.close(request.request_queue)

    async def next_batch(self) -> list[list[int]]:
        """The token ids of the oldest batch that has not been answered; of none, []."""
        await asyncio.sleep(0)
        return sequences_of(self.sent.batches[0][1]) if self.sent.batches else []

    async def answer(self, *, first_id_of_nan: int | None = None) -> list[list[int]]:
        ids = await self.next_batch()
        identity, batch = self.sent.batches.pop(0)
        rows = self.slots[identity].rows[batch.slot]
        numbers: list[float] = []
        for output, of_sequence in zip(batch.outputs_bytes or bytes(len(ids)), ids, strict=True):
            numbers += of_sequence if output == Output.TOKENS else of_sequence[:1]
        rows[: len(numbers)] = np.array(numbers)[:, None]
        if first_id_of_nan is not None:
            rows[: len(numbers)][np.array(numbers) == first_id_of_nan] = np.nan
        self.dispatcher._on_message(identity, Done(EPOCH, batch.number, batch.slot, len(numbers), 1000))
        return ids

    async def fail(self) -> list[list[int]]:
        ids = await self.next_batch()
        identity, batch = self.sent.batches.pop(0)
        self.dispatcher._on_message(identity, Failed(EPOCH, batch.number, batch.slot, FailureCode.OUT_OF_MEMORY))
        return ids

    async def die(self, *, has_crashed: bool = False) -> list[list[int]]:
        """The worker of the oldest batch dies while it computes it, and another comes."""
        ids = await self.next_batch()
        identity, batch = self.sent.batches[0]
        self.slots[identity].begun[batch.slot] = batch.number
        self.sent.batches = [(other, of_other) for other, of_other in self.sent.batches if other != identity]
        incarnation = next(link.incarnation for link in self.dispatcher.links if link.incarnation.identity == identity)
        self.dispatcher.worker_down(incarnation, "died", has_crashed=has_crashed)
        self.add_worker()
        return ids

    async def answer_all(self) -> list[list[int]]:
        """All sequences that were computed until nothing was left, in order."""
        computed: list[list[int]] = []
        while await self.next_batch():
            computed += await self.answer()
        for _ in range(3):
            await asyncio.sleep(0)  # what is encoded in later turns
        return computed

    def count(self, counter: Counter) -> int:
        return self.shared_metrics.total(counter)

    @property
    def waiting(self) -> tuple[int, int, int]:
        return self.policy.queued_sequences, self.policy.queued_tokens, self.policy.queued_rows

    def assert_nothing_is_left(self) -> None:
        assert len(self.dispatcher._flights) == 0
        assert not self.dispatcher._flights.unseated
        assert self.waiting == (0, 0, 0)
        for priority_class in self.policy.classes:
            assert (priority_class.num_tokens, priority_class.num_backlog_tokens) == (0, 0)


@pytest.fixture
async def flights() -> AsyncIterator[Flights]:
    made = Flights()
    yield made
    made.assert_nothing_is_left()


def error_of(request: Request) -> BaseException | None:
    assert request.finished.done()
    return request.finished.exception()


async def test_identical_sequences_that_wait_are_computed_once_over_requests(flights):
    requests = [flights.request(5, 6), flights.request(6, 7), flights.request(5)]
    assert flights.waiting == (5, 10, 5)
    flights.add_worker()
    assert await flights.next_batch() == [[5, 5], [6, 6], [7, 7]]
    assert flights.waiting == (0, 0, 0)
    await flights.answer_all()
    assert [request.fragments for request in requests] == [[b"5", b"6"], [b"6", b"7"], [b"5"]]
    assert all(request.is_over for request in requests)
    assert flights.count(Counter.COALESCED) == 2
    assert (flights.count(Counter.SEQUENCES), flights.count(Counter.TOKENS)) == (3, 6)


async def test_a_batch_of_identical_ones_is_not_empty_and_leaves_the_others_to_the_next(flights):
    request = flights.request(*[5] * 20, 6)
    flights.add_worker()
    assert await flights.answer() == [[5, 5]]
    assert flights.waiting == (0, 0, 0)  # 6 has been sent
    assert await flights.answer() == [[6, 6]]
    assert request.fragments == [*[b"5"] * 20, b"6"]


async def test_one_that_comes_while_another_is_computed_follows_it_and_is_not_queued(flights):
    flights.add_worker()
    first = flights.request(5)
    assert await flights.next_batch() == [[5, 5]]
    second = flights.request(6, 5, 7)
    assert flights.waiting == (2, 4, 2)
    assert second.request_queue.num_sent_tokens == 2
    await flights.answer()
    assert first.is_over
    assert second.fragments == [b"", b"5", b""]
    assert await flights.answer_all() == [[6, 6], [7, 7]]
    assert second.fragments == [b"6", b"5", b"7"]
    # The row is there: what comes now is computed again.
    third = flights.request(5)
    assert await flights.answer_all() == [[5, 5]]
    assert third.fragments == [b"5"]


@pytest.mark.parametrize(("options", "num_computed"), [({}, 2), ({"share_computed": "all"}, 1)])
async def test_tenants_share_only_if_the_operator_allows_it(options, num_computed):
    flights = Flights(**options)
    requests = [flights.request(5, tenant=tenant) for tenant in ("a", "b", "a")]
    flights.add_worker()
    assert await flights.answer_all() == [[5, 5]] * num_computed
    assert [request.fragments for request in requests] == [[b"5"]] * 3
    flights.assert_nothing_is_left()


async def test_other_outputs_and_other_tokens_are_other_sequences(flights):
    flights.request(5)
    flights.request(5, output=Output.UNNORMALIZED)
    flights.request(5, length=3)
    flights.add_worker()
    assert len(await flights.answer_all()) == 3
    assert flights.count(Counter.COALESCED) == 0


async def test_a_chunk_follows_and_keeps_its_weight(flights):
    request = Request(1)
    request.request_queue = request_queue = RequestQueue(request, NORMAL)
    chunks = [tokenized([n, n])._replace(weight=weight) for n, weight in ((4, 1), (8, 3))]
    request.count(0, [tokenized([4])._replace(chunks=tuple(chunks))], wants_report=False)
    flights.request(8)
    flights.queue(request_queue, [QueuedSequence(request_queue, 0, chunk) for chunk in chunks])
    flights.add_worker()
    assert await flights.answer_all() == [[8, 8], [4, 4]]
    assert request.fragments == [b"7"]  # (4 · 1 + 8 · 3) / 4


# --- turns -----------------------------------------------------------------------------------------------------


async def test_an_interactive_one_does_not_wait_for_a_bulk_requests_turn(flights):
    bulk = flights.request(*range(20, 40), 5, priority=BULK)
    interactive = flights.request(5, priority=INTERACTIVE)
    flights.add_worker()
    assert (await flights.answer())[0] == [5, 5]
    assert interactive.fragments == [b"5"]
    assert bulk.fragments[-1] == b"5"
    computed = await flights.answer_all()
    assert [5, 5] not in computed
    assert bulk.is_over


async def test_a_request_that_follows_is_charged_as_if_it_had_been_computed(flights):
    requests = [flights.request(5, length=3) for _ in range(2)]
    flights.add_worker()
    await flights.answer()
    queues = [request.request_queue for request in requests]
    assert [request_queue.num_sent_tokens for request_queue in queues] == [3, 3]
    assert queues[0].first_sent_at == queues[1].first_sent_at is not None
    assert queues[0].last_done_at == queues[1].last_done_at > 0


# --- requests that end before ----------------------------------------------------------------------------------


async def test_when_a_leader_that_has_gone_is_lost_a_follower_takes_its_place(flights):
    flights.add_worker()
    gone = flights.request(5)
    await flights.next_batch()
    stays, urgent = flights.request(5), flights.request(5, priority=INTERACTIVE)
    flights.cancel(gone)
    await flights.die()
    assert [len(request.request_queue.sequences) for request in (stays, urgent)] == [0, 1]
    assert await flights.answer_all() == [[5, 5]]
    assert stays.fragments == urgent.fragments == [b"5"]


async def test_when_one_that_waits_for_others_goes_the_next_takes_its_place(flights):
    flights.add_worker()
    requests = [flights.request(5)]
    await flights.next_batch()
    requests += [flights.request(5) for _ in range(3)]
    flights.dispatcher.schedule_dispatch = lambda: None
    await flights.die()
    del flights.dispatcher.schedule_dispatch
    for request in requests[:2]:
        flights.cancel(request)
        flights.dispatcher._dispatch()
    assert await flights.answer_all() == [[5, 5]]
    assert [request.fragments for request in requests] == [[b""], [b""], [b"5"], [b"5"]]


async def test_a_follower_whose_request_is_over_gets_no_copy(flights):
    flights.add_worker()
    flights.request(5)
    await flights.next_batch()
    gone, stays = flights.request(5), flights.request(5)
    flights.cancel(gone)
    await flights.answer_all()
    assert (gone.fragments, stays.fragments) == ([b""], [b"5"])
    assert flights.count(Counter.COALESCED) == 1


# --- errors ----------------------------------------------------------------------------------------------------


async def test_followers_get_the_leaders_error_each_with_its_own_index(flights):
    flights.add_worker()
    first = flights.request(5)
    await flights.next_batch()
    second = flights.request(6, 5)
    await flights.fail()
    for request, index in ((first, 0), (second, 1)):
        error = error_of(request)
        assert isinstance(error, EngineFailed)
        assert f"input[{index}]" in str(error)
    flights.policy.close(second.request_queue)


async def test_a_row_that_is_not_finite_fails_all_that_wait_for_it_and_no_other(flights):
    first, second, well = flights.request(5), flights.request(6, 5), flights.request(6)
    flights.add_worker()
    await flights.answer(first_id_of_nan=5)
    assert "input[0]" in str(error_of(first))
    assert "input[1]" in str(error_of(second))
    assert well.fragments == [b"6"]


async def test_a_lost_leader_is_queued_again_once_and_its_followers_stay_with_it(flights):
    flights.add_worker()
    requests = [flights.request(5) for _ in range(3)]
    await flights.die()
    assert [request.request_queue.num_sent_tokens for request in requests] == [0, 0, 0]
    assert flights.count(Counter.RETRIED) == 1
    assert flights.waiting == (1, 2, 1)
    assert await flights.next_batch() == [[5, 5]]
    assert [request.request_queue.num_sent_tokens for request in requests] == [2, 2, 2]
    await flights.answer()
    assert [request.fragments for request in requests] == [[b"5"]] * 3


async def test_when_nothing_pays_for_lost_work_followers_fail_with_their_leader(flights):
    flights.add_worker()
    flights.dispatcher.retries.num_tokens = 0
    requests = [flights.request(5) for _ in range(3)]
    await flights.die()
    assert {type(error_of(request)) for request in requests} == {Unavailable}


async def test_those_that_wait_for_a_sequence_that_kills_fail_with_it_and_cost_no_worker(flights):
    flights.add_worker()
    requests = [flights.request(1, 5) for _ in range(4)]
    num_deaths = 0
    while not requests[0].is_over:
        requests.append(flights.request(5))
        batch = await flights.next_batch()
        if [5, 5] in batch:
            await flights.die(has_crashed=True)
            num_deaths += 1
        else:
            await flights.answer()
        for request in requests:
            if request.is_over:
                flights.policy.close(request.request_queue)
    assert num_deaths == 3  # as many as for one request
    for request in requests:
        error = error_of(request)
        assert isinstance(error, PoisonInput)
        assert f"input[{len(request.fragments) - 1}]" in str(error)
    await flights.answer_all()  # the others of its batches


async def test_what_waits_for_an_input_that_is_quarantined_meanwhile_is_failed(flights):
    requests = [flights.request(1, 5), flights.request(5)]
    known = flights.dispatcher.known
    known.note(Quarantined("", known.digest(array("i", [5, 5]).tobytes())))
    beside = flights.request(1)
    flights.add_worker()
    assert await flights.answer_all() == [[1, 1]]
    assert {type(error_of(request)) for request in requests} == {PoisonInput}
    assert beside.fragments == [b"1"]
    for request in requests:
        flights.policy.close(request.request_queue)


async def test_those_that_follow_an_input_beside_a_quarantined_one_are_computed(flights):
    flights.add_worker()
    first = flights.request(5, 6)
    await flights.next_batch()
    second = flights.request(6)
    await flights.die()
    known = flights.dispatcher.known
    known.note(Quarantined("", known.digest(array("i", [5, 5]).tobytes())))
    assert await flights.answer_all() == [[6, 6]]
    assert isinstance(error_of(first), PoisonInput)
    assert second.fragments == [b"6"]


async def test_those_that_follow_an_input_of_a_request_that_is_not_paid_for_are_computed(flights):
    flights.add_worker()
    first = flights.request(5, 6)
    await flights.next_batch()
    second = flights.request(5)
    flights.dispatcher.retries.num_tokens = 2
    await flights.die()
    assert isinstance(error_of(first), Unavailable)
    assert await flights.answer_all() == [[5, 5]]
    assert second.fragments == [b"5"]


async def test_isolated_ones_are_computed_once_as_well(flights):
    digest = flights.dispatcher.known.digest(array("i", [5, 5]).tobytes())
    for _ in range(2):
        flights.dispatcher.known.note(InputDeaths("", [digest], is_isolated=False, has_crashed=False))
    requests = [flights.request(5) for _ in range(3)]
    gone = flights.request(5)
    flights.cancel(gone)
    assert flights.waiting == (3, 6, 3)
    flights.add_worker()
    assert await flights.answer_all() == [[5, 5]]
    assert [request.fragments for request in requests] == [[b"5"]] * 3


# --- which workers' lives count ----------------------------------------------------------------------------------


async def test_the_lives_of_workers_count_of_the_generation_that_new_requests_are_for(flights):
    metrics = flights.shared_metrics
    flights.add_worker()
    assert metrics.known_workers() == []
    flights.dispatcher.activate()
    assert (metrics.known_workers(), metrics.worker_life(0)) == ([0], 1)
    flights.add_worker()
    assert metrics.worker_life(0) == 2
    flights.dispatcher.retire()
    flights.add_worker()
    assert metrics.worker_life(0) == 2


# --- bounds ----------------------------------------------------------------------------------------------------


async def test_copies_are_encoded_over_several_turns_of_the_loop(flights, monkeypatch):
    monkeypatch.setattr("vecd.gateway.dispatch.delivery.FLOATS_PER_TURN", 10 * DIM)
    flights.add_worker()
    requests = [flights.request(5) for _ in range(35)]
    await flights.answer()
    turns = []
    while not all(request.is_over for request in requests):
        turns.append(sum(request.is_over for request in requests))
        await asyncio.sleep(0)
    assert turns == [10, 20, 30]


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("request"),
            st.lists(st.integers(1, 4), min_size=1, max_size=4),
            st.sampled_from(Priority),
            st.sampled_from("ab"),
            st.sampled_from([Output.VECTORS, Output.UNNORMALIZED, Output.TOKENS]),
        ),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.sampled_from(("answer", "fail", "die", "wait", "worker"))),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.booleans())
async def test_every_live_request_gets_one_right_answer_whatever_happens(steps, is_shared):
    flights = Flights(is_shared_by_tenants=is_shared)
    flights.dispatcher.retries.num_tokens = 100
    wanted: list[list[int]] = []
    cancelled: set[int] = set()

    def close_all_that_are_over() -> None:
        for request in flights.requests:
            if request.is_over:
                flights.policy.close(request.request_queue)

    for step in steps:
        match step:
            case ("request", ids, priority, tenant, output):
                wanted.append(ids)
                flights.request(*ids, priority=priority, tenant=tenant, output=output)
            case ("cancel", number) if number < len(wanted):
                if not flights.requests[number].is_over:
                    cancelled.add(number)
                flights.cancel(flights.requests[number])
            case ("worker",) if len(flights.dispatcher.links) < 2:
                flights.add_worker()
            case ("answer" | "fail" | "die" as what,) if flights.sent.batches:
                await getattr(flights, what)()
            case _:
                await asyncio.sleep(0)
        if step[0] in ("wait", "cancel"):
            close_all_that_are_over()
    flights.add_worker()
    await flights.answer_all()
    close_all_that_are_over()
    await flights.answer_all()
    for number, (request, ids) in enumerate(zip(flights.requests, wanted, strict=True)):
        assert request.is_over
        if number in cancelled:
            continue
        if request.finished.exception() is not None:
            assert {("fail",), ("die",)} & set(map(tuple, (step[:1] for step in steps)))
            continue
        assert [fragment.split()[0] for fragment in request.fragments] == [b"%d" % first_id for first_id in ids]
    flights.assert_nothing_is_left()
