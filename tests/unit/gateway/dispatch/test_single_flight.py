"""Identical sequences are computed once, and each request gets what it would have got alone.

The dispatcher, the policy and the delivery are real; the transport and the workers are played here.
"""

import asyncio
import random
from array import array
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.dispatching import Request, sequences_of, tokenized
from vecd.gateway.dispatch.dispatcher import Dispatcher
from vecd.gateway.encoding.pending import ChunkedInput
from vecd.gateway.scheduling.policy import BatchingPolicy
from vecd.gateway.scheduling.queue import QueuedSequence, RequestQueue
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.types.errors import EngineFailed, PoisonInput, Unavailable
from vecd.gateway.types.request import Chunk, Priority
from vecd.shm.control import InputDeaths
from vecd.shm.failure_code import FailureCode
from vecd.shm.output import Output
from vecd.shm.shared_metrics import Counter, ServiceKey
from vecd.shm.views import SlotViews
from vecd.shm.wire import Alive, Batch, Done, Failed, Incarnation

EPOCH, SERVICE, DIM, ROWS = 7, ServiceKey(1), 4, 8
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


class Flights:
    """A dispatcher on the running loop, and its workers."""

    def __init__(self, **options: Any) -> None:
        self.policy = BatchingPolicy(16, ROWS, max_sequence_tokens=16)
        self.shared_metrics = SharedMetrics.private()
        self.dispatcher = Dispatcher(
            policy=self.policy,
            epoch=EPOCH,
            service=SERVICE,
            max_batch_tokens=16,
            batch_timeout_s=60,
            report=lambda message: None,
            shared_metrics=self.shared_metrics,
            **options,
        )
        self.sent = Sent()
        self.dispatcher._transport = self.sent  # type: ignore[assignment]
        self.dispatcher._loop = asyncio.get_running_loop()
        self.dispatcher._place = self.shared_metrics.open_service(SERVICE)
        self.slots: dict[bytes, SlotViews] = {}
        self.num_lives = 0
        self.requests: list[Request] = []

    def add_worker(self) -> None:
        self.num_lives += 1
        incarnation = Incarnation(0, self.num_lives)
        slots = SlotViews([np.zeros((ROWS, DIM), np.float32) for _ in range(2)], np.zeros(2, np.uint64))
        self.slots[incarnation.identity] = slots
        self.dispatcher.worker_up(incarnation, slots, {})
        self.dispatcher._on_message(incarnation.identity, Alive(EPOCH))

    def request(
        self,
        *first_ids: int,
        length: int = 2,
        priority: Priority = NORMAL,
        tenant: str = "",
        output: Output = Output.VECTORS,
    ) -> Request:
        request = Request(len(first_ids))
        request.request_queue = request_queue = RequestQueue(request, priority, tenant=tenant)
        inputs = [tokenized([n] * length) for n in first_ids]
        sequences = [QueuedSequence(request_queue, index, item, output) for index, item in enumerate(inputs)]
        self.submit(request, sequences)
        return request

    def submit(self, request: Request, sequences: list[QueuedSequence]) -> None:
        self.requests.append(request)
        try:
            self.dispatcher.submit(request.request_queue, sequences)
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
        assert not self.dispatcher._flights.has_unseated
        assert self.waiting == (0, 0, 0)
        for priority_class in self.policy._classes:
            assert (priority_class.num_tokens, priority_class.num_backlog_tokens) == (0, 0)


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def error_of(request: Request) -> BaseException | None:
    assert request.finished.done()
    return request.finished.exception()


async def test_identical_sequences_that_wait_are_computed_once_over_requests():
    flights = Flights()
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
    flights.assert_nothing_is_left()


async def test_an_input_that_comes_twice_in_a_request_is_computed_once():
    flights = Flights()
    request = flights.request(5, 6, 5, 5)
    flights.add_worker()
    assert await flights.answer_all() == [[5, 5], [6, 6]]
    assert request.fragments == [b"5", b"6", b"5", b"5"]
    assert request.is_over
    flights.assert_nothing_is_left()


async def test_a_batch_of_identical_ones_is_not_empty_and_leaves_the_others_to_the_next():
    flights = Flights()
    request = flights.request(*[5] * 20, 6)
    flights.add_worker()
    assert await flights.answer() == [[5, 5]]
    assert flights.waiting == (0, 0, 0)  # 6 has been sent
    assert await flights.answer() == [[6, 6]]
    assert request.fragments == [*[b"5"] * 20, b"6"]
    flights.assert_nothing_is_left()


async def test_one_that_comes_while_another_is_computed_follows_it_and_is_not_queued():
    flights = Flights()
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
    flights.assert_nothing_is_left()


@pytest.mark.parametrize(("options", "num_computed"), [({}, 2), ({"is_shared_by_tenants": True}, 1)])
@on_loop
async def test_tenants_share_only_if_the_operator_allows_it(options, num_computed):
    flights = Flights(**options)
    requests = [flights.request(5, tenant=tenant) for tenant in ("a", "b", "a")]
    flights.add_worker()
    assert await flights.answer_all() == [[5, 5]] * num_computed
    assert [request.fragments for request in requests] == [[b"5"]] * 3
    flights.assert_nothing_is_left()


async def test_other_outputs_and_other_tokens_are_other_sequences():
    flights = Flights()
    flights.request(5)
    flights.request(5, output=Output.UNNORMALIZED)
    flights.request(5, length=3)
    flights.add_worker()
    assert len(await flights.answer_all()) == 3
    assert flights.count(Counter.COALESCED) == 0


async def test_rows_of_tokens_are_computed_for_each():
    flights = Flights()
    requests = [flights.request(5, output=Output.TOKENS) for _ in range(2)]
    flights.add_worker()
    assert len(await flights.answer_all()) == 2
    assert all(request.is_over for request in requests)
    flights.assert_nothing_is_left()


async def test_outputs_of_a_mixed_batch_are_copied_from_their_own_rows():
    flights = Flights()
    tokens = flights.request(9, length=3, output=Output.TOKENS)
    plain = [flights.request(5) for _ in range(2)]
    other = [flights.request(6, output=Output.UNNORMALIZED) for _ in range(2)]
    flights.add_worker()
    assert len(await flights.answer_all()) == 3
    assert [request.fragments for request in plain + other] == [[b"5"]] * 2 + [[b"6"]] * 2
    assert tokens.is_over


async def test_a_chunk_follows_and_keeps_its_weight():
    flights = Flights()
    request = Request(1)
    request.request_queue = request_queue = RequestQueue(request, NORMAL)
    chunked = ChunkedInput(2, is_normalized=False)
    chunks = [Chunk(tokenized([n, n]).token_ids, 2, weight) for n, weight in ((4, 1), (8, 3))]
    flights.request(8)
    flights.submit(request, [QueuedSequence(request_queue, 0, chunk, chunked=chunked) for chunk in chunks])
    flights.add_worker()
    assert await flights.answer_all() == [[8, 8], [4, 4]]
    assert request.fragments == [b"7"]  # (4 · 1 + 8 · 3) / 4


# --- turns -----------------------------------------------------------------------------------------------------


async def test_an_interactive_one_does_not_wait_for_a_bulk_requests_turn():
    flights = Flights()
    bulk = flights.request(*range(20, 40), 5, priority=BULK)
    interactive = flights.request(5, priority=INTERACTIVE)
    flights.add_worker()
    assert (await flights.answer())[0] == [5, 5]
    assert interactive.fragments == [b"5"]
    assert bulk.fragments[-1] == b"5"
    computed = await flights.answer_all()
    assert [5, 5] not in computed
    assert bulk.is_over
    flights.assert_nothing_is_left()


async def test_a_request_that_follows_is_charged_as_if_it_had_been_computed():
    flights = Flights()
    requests = [flights.request(5, length=3) for _ in range(2)]
    flights.add_worker()
    await flights.answer()
    queues = [request.request_queue for request in requests]
    assert [request_queue.num_sent_tokens for request_queue in queues] == [3, 3]
    assert queues[0].first_sent_at == queues[1].first_sent_at is not None
    assert queues[0].last_done_at == queues[1].last_done_at > 0


# --- requests that end before ----------------------------------------------------------------------------------


async def test_a_follower_that_goes_takes_nothing_from_the_others():
    flights = Flights()
    flights.add_worker()
    first, gone, last = (flights.request(5) for _ in range(3))
    await flights.next_batch()
    flights.cancel(gone)
    await flights.answer()
    assert first.fragments == last.fragments == [b"5"]
    assert gone.fragments == [b""]
    assert flights.count(Counter.COALESCED) == 1
    flights.assert_nothing_is_left()


async def test_one_that_goes_while_all_wait_is_only_dropped():
    flights = Flights()
    gone, stays = flights.request(5), flights.request(5)
    flights.cancel(gone)
    assert flights.waiting == (1, 2, 1)
    flights.add_worker()
    assert await flights.answer_all() == [[5, 5]]
    assert stays.fragments == [b"5"]
    flights.assert_nothing_is_left()


async def test_a_leader_that_goes_is_still_computed_for_its_followers():
    flights = Flights()
    flights.add_worker()
    gone = flights.request(5)
    await flights.next_batch()
    stays = flights.request(5)
    flights.cancel(gone)
    await flights.answer()
    assert stays.fragments == [b"5"]
    flights.assert_nothing_is_left()


async def test_when_a_leader_that_has_gone_is_lost_a_follower_takes_its_place():
    flights = Flights()
    flights.add_worker()
    gone = flights.request(5)
    await flights.next_batch()
    stays, urgent = flights.request(5), flights.request(5, priority=INTERACTIVE)
    flights.cancel(gone)
    await flights.die()
    assert [len(request.request_queue.sequences) for request in (stays, urgent)] == [0, 1]
    assert await flights.answer_all() == [[5, 5]]
    assert stays.fragments == urgent.fragments == [b"5"]
    flights.assert_nothing_is_left()


async def test_when_one_that_waits_for_others_goes_the_next_takes_its_place():
    flights = Flights()
    flights.add_worker()
    requests = [flights.request(5)]
    await flights.next_batch()
    requests += [flights.request(5) for _ in range(3)]
    flights.dispatcher.schedule_dispatch = lambda: None  # type: ignore[method-assign]
    await flights.die()
    del flights.dispatcher.schedule_dispatch
    for request in requests[:2]:
        flights.cancel(request)
        flights.dispatcher._dispatch()
    assert await flights.answer_all() == [[5, 5]]
    assert [request.fragments for request in requests] == [[b""], [b""], [b"5"], [b"5"]]
    flights.assert_nothing_is_left()


async def test_nothing_is_queued_again_for_requests_that_have_all_gone():
    flights = Flights()
    flights.add_worker()
    requests = [flights.request(5) for _ in range(3)]
    await flights.next_batch()
    for request in requests:
        flights.cancel(request)
    await flights.die()
    assert await flights.next_batch() == []
    flights.assert_nothing_is_left()


# --- errors ----------------------------------------------------------------------------------------------------


async def test_followers_get_the_leaders_error_each_with_its_own_index():
    flights = Flights()
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
    flights.assert_nothing_is_left()


async def test_a_row_that_is_not_finite_fails_all_that_wait_for_it_and_no_other():
    flights = Flights()
    first, second, well = flights.request(5), flights.request(6, 5), flights.request(6)
    flights.add_worker()
    await flights.answer(first_id_of_nan=5)
    assert "input[0]" in str(error_of(first))
    assert "input[1]" in str(error_of(second))
    assert well.fragments == [b"6"]
    flights.assert_nothing_is_left()


async def test_halves_of_a_failed_batch_keep_their_followers():
    flights = Flights()
    requests = [flights.request(5), flights.request(6), flights.request(6), flights.request(5)]
    flights.add_worker()
    assert len(await flights.fail()) == 2
    assert sorted(await flights.answer_all()) == [[5, 5], [6, 6]]
    assert [request.fragments for request in requests] == [[b"5"], [b"6"], [b"6"], [b"5"]]
    flights.assert_nothing_is_left()


async def test_a_lost_leader_is_queued_again_once_and_its_followers_stay_with_it():
    flights = Flights()
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
    flights.assert_nothing_is_left()


async def test_when_nothing_pays_for_lost_work_followers_fail_with_their_leader():
    flights = Flights()
    flights.add_worker()
    flights.dispatcher._retries.num_tokens = 0
    requests = [flights.request(5) for _ in range(3)]
    await flights.die()
    assert {type(error_of(request)) for request in requests} == {Unavailable}
    flights.assert_nothing_is_left()


async def test_those_that_wait_for_a_sequence_that_kills_fail_with_it_and_cost_no_worker():
    flights = Flights()
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
    flights.assert_nothing_is_left()


async def test_what_waits_for_an_input_that_is_quarantined_meanwhile_is_failed():
    flights = Flights()
    requests = [flights.request(1, 5), flights.request(5)]
    quarantine = flights.dispatcher.quarantine
    quarantine.add(quarantine.digest(array("i", [5, 5]).tobytes()))
    beside = flights.request(1)
    flights.add_worker()
    assert await flights.answer_all() == [[1, 1]]
    assert {type(error_of(request)) for request in requests} == {PoisonInput}
    assert beside.fragments == [b"1"]
    for request in requests:
        flights.policy.close(request.request_queue)
    flights.assert_nothing_is_left()


async def test_those_that_follow_an_input_beside_a_quarantined_one_are_computed():
    flights = Flights()
    flights.add_worker()
    first = flights.request(5, 6)
    await flights.next_batch()
    second = flights.request(6)
    await flights.die()
    quarantine = flights.dispatcher.quarantine
    quarantine.add(quarantine.digest(array("i", [5, 5]).tobytes()))
    assert await flights.answer_all() == [[6, 6]]
    assert isinstance(error_of(first), PoisonInput)
    assert second.fragments == [b"6"]
    flights.assert_nothing_is_left()


async def test_those_that_follow_an_input_of_a_request_that_is_not_paid_for_are_computed():
    flights = Flights()
    flights.add_worker()
    first = flights.request(5, 6)
    await flights.next_batch()
    second = flights.request(5)
    flights.dispatcher._retries.num_tokens = 2
    await flights.die()
    assert isinstance(error_of(first), Unavailable)
    assert await flights.answer_all() == [[5, 5]]
    assert second.fragments == [b"5"]
    flights.assert_nothing_is_left()


async def test_isolated_ones_are_computed_once_as_well():
    flights = Flights()
    digest = flights.dispatcher.quarantine.digest(array("i", [5, 5]).tobytes())
    for _ in range(2):
        flights.dispatcher.note_deaths(InputDeaths("", [digest], is_isolated=False, has_crashed=False))
    requests = [flights.request(5) for _ in range(3)]
    gone = flights.request(5)
    flights.cancel(gone)
    assert flights.waiting == (3, 6, 3)
    flights.add_worker()
    assert await flights.answer_all() == [[5, 5]]
    assert [request.fragments for request in requests] == [[b"5"]] * 3
    flights.assert_nothing_is_left()


# --- bounds ----------------------------------------------------------------------------------------------------


async def test_copies_are_encoded_over_several_turns_of_the_loop(monkeypatch):
    monkeypatch.setattr("vecd.gateway.dispatch.delivery._FLOATS_PER_TURN", 10 * DIM)
    flights = Flights()
    flights.add_worker()
    requests = [flights.request(5) for _ in range(35)]
    await flights.answer()
    turns = []
    while not all(request.is_over for request in requests):
        turns.append(sum(request.is_over for request in requests))
        await asyncio.sleep(0)
    assert turns == [10, 20, 30]
    flights.assert_nothing_is_left()


async def test_the_index_is_empty_after_thousands_of_requests():
    flights = Flights()
    flights.add_worker()
    rng = random.Random(0)
    for number in range(3000):
        request = flights.request(*[rng.randrange(1, 30) for _ in range(3)], tenant=rng.choice("ab"))
        if rng.random() < 0.3:
            flights.cancel(request)
        if number % 3 == 0 and await flights.next_batch():
            if rng.random() < 0.05:
                await flights.die()
            else:
                await flights.answer()
    await flights.answer_all()
    assert all(request.is_over for request in flights.requests)
    flights.assert_nothing_is_left()


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
@on_loop
async def test_every_live_request_gets_one_right_answer_whatever_happens(steps, is_shared):
    flights = Flights(is_shared_by_tenants=is_shared)
    flights.dispatcher._retries.num_tokens = 100
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
