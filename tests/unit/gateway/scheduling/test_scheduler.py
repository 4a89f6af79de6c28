import asyncio
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.dispatching import batching
from vecd.gateway.encoding.result import Result
from vecd.gateway.request import Priority, TokenizedInput
from vecd.gateway.scheduling.cost import CostModel
from vecd.gateway.scheduling.policy import AGING_S, BatchingPolicy
from vecd.gateway.scheduling.queue import Deaths, QueuedSequence, RequestQueue, TenantQueue
from vecd.shm.output import Output

_loop = asyncio.new_event_loop()
BIG = 100_000
TOKENS, SPARSE = Output.TOKENS, Output.SPARSE
SPAN = 2
"""Rows of a sequence that asks for SPARSE."""


class Queue:
    """A batching policy and its clock."""

    def __init__(self, max_tokens=BIG, max_rows=1000, longest=100):
        self.policy = BatchingPolicy(batching(max_tokens, max_rows, longest))
        self.now = 100.0

    def request(self, *lengths: int, priority=Priority.NORMAL, tenant="", output=Output.VECTORS) -> RequestQueue:
        request_queue = RequestQueue(Result(len(lengths), (), _loop), priority, tenant=tenant)
        self.policy.add(request_queue, make_sequences(request_queue, *lengths, output=output), self.now)
        return request_queue

    def take(self, max_tokens=BIG, idle=1, after_s=0.0, is_short=False) -> list[QueuedSequence]:
        self.now += after_s
        return self.policy.take(self.now, self.policy.share(max_tokens, idle), is_short=is_short).sequences

    def close(self, request_queue: RequestQueue) -> None:
        request_queue.result.abandon()
        self.policy.close(request_queue)


def late_request(queue: Queue, deadline: float, tenant="") -> RequestQueue:
    request_queue = RequestQueue(Result(1, (), _loop), Priority.NORMAL, deadline, tenant)
    queue.policy.add(request_queue, make_sequences(request_queue, 10), queue.now)
    return request_queue


def make_sequences(request_queue: RequestQueue, *lengths: int, output=Output.VECTORS) -> list[QueuedSequence]:
    inputs = [TokenizedInput(array("i", [1] * n).tobytes(), n, False) for n in lengths]
    return [QueuedSequence(request_queue, index, item, output, span=SPAN) for index, item in enumerate(inputs)]


def request_queues_of(batch: list[QueuedSequence]) -> list[RequestQueue]:
    return [sequence.request_queue for sequence in batch]


def num_rows(batch) -> int:
    return sum(s.num_rows for s in batch)


def num_tokens(batch, request_queue=None) -> int:
    return sum(s.num_tokens for s in batch if request_queue is None or s.request_queue is request_queue)


def tokens_of(batch, tenant: str) -> int:
    return sum(s.num_tokens for s in batch if s.request_queue.tenant == tenant)


# --- the size of a batch ----------------------------------------------------------------------------------------------


def test_short_requests_go_in_the_order_in_which_they_came():
    queue = Queue(max_tokens=10)
    a, b, c, d = (queue.request(n) for n in (4, 6, 1, 1))
    assert request_queues_of(queue.take()) == [a, b]
    assert request_queues_of(queue.take()) == [c, d]
    assert queue.take() == []


def test_what_waits_is_divided_among_the_idle_workers():
    queue = Queue()
    for _ in range(8):
        queue.request(10)
    assert [len(queue.take(idle=n)) for n in (4, 3, 2, 1)] == [2, 2, 2, 2]


def test_a_batch_comes_as_near_to_its_budget_as_sequences_allow():
    queue = Queue()
    queue.request(40, 40, 40, 40)
    assert len(queue.take(max_tokens=90)) == 2
    assert len(queue.take(max_tokens=70)) == 2, "80 is nearer to 70 than 40 is"


def test_never_above_the_limit_but_for_a_lone_sequence_that_is_longer():
    queue = Queue(max_tokens=100, longest=500)
    queue.request(60, 60, 300, 10)
    assert [num_tokens(queue.take()) for _ in range(4)] == [60, 60, 300, 10]


def test_a_batch_asks_for_no_more_rows_than_a_slot_has():
    queue = Queue(max_rows=10)
    queue.request(4, 4, 4, 10, 1, 9, 9, output=TOKENS)
    assert [[s.num_rows for s in queue.take()] for _ in range(5)] == [[4, 4], [4], [10], [1, 9], [9]]
    assert queue.take() == []


@pytest.mark.parametrize(
    ("output", "lengths", "fills"),
    [
        (TOKENS, [5, 4], False),
        (TOKENS, [5, 5], True),
        (TOKENS, [10], True),
        (Output.VECTORS, [9] * 9, False),
        (Output.VECTORS, [1] * 10, True),
        (SPARSE, [1] * 4, False),
        (SPARSE, [1] * 5, True),
    ],
)
def test_rows_fill_a_batch(output, lengths, fills):
    queue = Queue(max_rows=10)
    queue.request(*lengths, output=output)
    assert queue.policy.fills(BIG) is fills


def test_many_rows_are_not_passed_over_for_ever():
    """What is left of a batch is not enough for them, so one begins with them."""
    num_batches = 0
    queue = Queue(max_rows=512)
    for tenant in ("a", "b"):
        queue.request(*[1] * 5000, tenant=tenant)
    for _ in range(4):
        queue.take()
    queue.request(*[200] * 5, output=TOKENS, tenant="c")
    served: list[QueuedSequence] = []
    while not any(sequence.request_queue.tenant == "c" for sequence in served):
        for tenant in ("d", "e"):
            queue.request(100, output=TOKENS, tenant=tenant)
        served = queue.take()
        assert num_rows(served) <= 512
        num_batches += 1
    assert num_batches <= 3


def test_a_short_input_in_chunks_is_a_short_request():
    """It has more sequences than inputs, and is waited for all the same."""
    queue = Queue()
    queue.request(*[100] * 100)
    queue.take(max_tokens=512)
    request_queue = RequestQueue(Result(1, (), _loop), Priority.NORMAL)
    chunks = [TokenizedInput(array("i", [1] * 10).tobytes(), 10, False, weight=8)] * 2
    assert not queue.policy.wants_short_batches(queue.now)
    queue.policy.add(request_queue, [QueuedSequence(request_queue, 0, chunk) for chunk in chunks], queue.now)
    assert queue.policy.wants_short_batches(queue.now)


# --- fairness ---------------------------------------------------------------------------------------------------------


def test_a_short_request_is_in_the_next_batch_however_much_waits():
    queue = Queue(max_tokens=512)
    bulk = [queue.request(*[100] * 100) for _ in range(20)]
    for _ in range(30):
        queue.take()
    short = queue.request(10)
    assert short in request_queues_of(queue.take())
    round_of_turns = [request_queue for _ in range(20) for request_queue in request_queues_of(queue.take())]
    assert set(round_of_turns) == set(bulk), "and the others go on"


def test_large_requests_share_by_tokens_and_not_by_sequences():
    queue = Queue(max_tokens=512)
    long, short = queue.request(*[100] * 400), queue.request(*[10] * 4000)
    batches = [queue.take() for _ in range(40)]
    shares = [sum(num_tokens(batch, request_queue) for batch in batches) for request_queue in (long, short)]
    assert abs(shares[0] - shares[1]) <= 2 * queue.policy.quantum


@pytest.mark.parametrize("is_short", [False, True])
def test_a_backlog_keeps_a_quarter_under_a_flood_of_short_requests(is_short):
    """Of every batch; among short ones, of every other."""
    queue = Queue(max_tokens=400)
    bulk = queue.request(*[10] * 2000)
    queue.take()
    shares = []
    for _ in range(20):
        for _ in range(60):
            queue.request(10)
        shares.append(num_tokens(queue.take(400, is_short=is_short), bulk))
    if is_short:
        assert shares[0::2] == [0] * 10
    assert all(90 <= share <= 110 for share in shares[1::2] + ([] if is_short else shares[0::2]))


def test_a_higher_priority_goes_first_and_a_lower_one_gets_what_is_left():
    queue = Queue(max_tokens=100)
    bulk = queue.request(*[10] * 100, priority=Priority.BULK)
    normal = queue.request(*[10] * 4)
    interactive = queue.request(*[10] * 3, priority=Priority.INTERACTIVE)
    assert request_queues_of(queue.take()) == [interactive] * 3 + [normal] * 4 + [bulk] * 3


def test_nothing_starves():
    queue = Queue(max_tokens=100)
    bulk = queue.request(*[10] * 100, priority=Priority.BULK)
    normal = queue.request(*[10] * 100, priority=Priority.NORMAL)
    served = {bulk: 0, normal: 0}
    for _ in range(100):
        while queue.policy.tokens_ahead(1, Priority.INTERACTIVE, 1000.0) < 200:
            queue.request(10, priority=Priority.INTERACTIVE)
        batch = queue.take(after_s=AGING_S / 10)
        for request_queue in served:
            served[request_queue] += num_tokens(batch, request_queue)
    # One batch in ten has a quarter for each.
    assert all(150 <= tokens <= 350 for tokens in served.values()), served


def test_a_backlog_of_long_sequences_is_served_beside_short_requests():
    """A long one finds no room in any batch that has begun with short ones."""
    queue = Queue(max_tokens=128, longest=512)
    backlog = queue.request(*[512] * 100)
    served = 0
    for _ in range(40):
        for _ in range(10):
            queue.request(20)
        queue.request(256)
        served += num_tokens(queue.take(), backlog)
    assert served >= 10 * 512


def test_no_lower_priority_takes_what_a_backlog_has_been_passed_over_for():
    queue = Queue(max_tokens=128, longest=512)
    request_queues = [
        queue.request(*[512] * 100, priority=priority) for priority in (Priority.INTERACTIVE, Priority.NORMAL)
    ]
    shares = [0, 0]
    for _ in range(60):
        for _ in range(8):
            queue.request(20, priority=Priority.INTERACTIVE)
        batch = queue.take(after_s=0.1)
        shares = [
            share + num_tokens(batch, request_queue)
            for share, request_queue in zip(shares, request_queues, strict=True)
        ]
    assert shares[0] >= shares[1] > 0


def test_rows_are_kept_for_a_backlog_as_tokens_are():
    queue = Queue(max_tokens=10_000, max_rows=40)
    backlog = queue.request(*[10] * 2000)
    queue.take()
    for _ in range(10):
        for _ in range(60):
            queue.request(10)
        assert len([s for s in queue.take() if s.request_queue is backlog]) == 10


def test_an_overdue_priority_serves_its_backlog_too():
    queue = Queue(max_tokens=100)
    backlog = queue.request(*[10] * 200, priority=Priority.BULK)
    served = 0
    for _ in range(40):
        for _ in range(12):
            queue.request(10, priority=Priority.INTERACTIVE)
        queue.request(10, priority=Priority.BULK)
        served += num_tokens(queue.take(after_s=AGING_S / 2), backlog)
    assert served >= 100


def test_short_batches_are_wanted_while_short_requests_come_beside_a_backlog():
    queue = Queue(max_tokens=300)
    queue.request(5)
    assert not queue.policy.wants_short_batches(queue.now), "none waits behind another"
    queue.request(*[100] * 50)
    queue.take()
    assert queue.policy.wants_short_batches(queue.now)
    assert not queue.policy.wants_short_batches(queue.now + 60)


def test_short_batches_are_wanted_while_a_tenant_comes_with_short_requests_beside_one_that_has_many():
    queue = Queue(max_tokens=300)
    flood(queue, "greedy", [10], 200)
    queue.take()
    assert not queue.policy.wants_short_batches(queue.now), "there is no other tenant"
    queue.request(10, tenant="polite")
    queue.take()
    flood(queue, "greedy", [10], 200)
    assert queue.policy.wants_short_batches(queue.now), "it will come again"
    assert not queue.policy.wants_short_batches(queue.now + 60), "it comes no more"


def test_tenants_that_all_have_much_want_large_batches():
    queue = Queue(max_tokens=300)
    for n in range(3):
        flood(queue, f"tenant-{n}", [10], 200)
    assert not queue.policy.wants_short_batches(queue.now)


def test_tenants_that_have_a_turn_each_waiting_want_large_batches():
    queue = Queue(max_tokens=300)
    for _ in range(20):
        for n in range(10):
            flood(queue, f"tenant-{n}", [10], 5)
        assert not queue.policy.wants_short_batches(queue.now)
        queue.take()
        queue.take()


def test_among_short_batches_every_other_has_fresh_requests_alone():
    queue = Queue(max_tokens=300)
    backlog = queue.request(*[100] * 500)
    for _ in range(3):
        queue.take()

    def take():
        return request_queues_of(queue.take(300, is_short=True))

    first, second = queue.request(10), queue.request(10)
    assert take() == [first, second]
    third = queue.request(10)
    assert take() == [third, backlog, backlog], "the backlog has its turn"
    assert take() == [backlog] * 3, "there are none"


def test_requests_of_several_turns_do_not_ask_for_short_batches():
    queue = Queue(max_tokens=300)
    for _ in range(3):
        queue.request(*[100] * 5)
        queue.take()
    assert not queue.policy.wants_short_batches(queue.now)


# --- tenants ----------------------------------------------------------------------------------------------------------


def flood(queue: Queue, tenant: str, lengths: list[int], num_requests: int = 1, **ask) -> None:
    for _ in range(num_requests):
        queue.request(*lengths, tenant=tenant, **ask)


@pytest.mark.slow
@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize(
    ("greedy", "polite"),
    [
        (([10], 20_000), ([10] * 20_000, 1)),  # many short ones, all in their first turn, and a large one
        (([100] * 2_000, 1), ([10], 20_000)),
    ],
)
def test_tenants_with_work_get_the_same_however_many_requests_they_have(greedy, polite, is_short):
    queue = Queue(max_tokens=1024)
    flood(queue, "greedy", *greedy)
    flood(queue, "polite", *polite)
    ahead = 0
    for _ in range(100):
        batch = queue.take(is_short=is_short)
        ahead += tokens_of(batch, "greedy") - tokens_of(batch, "polite")
        assert abs(ahead) <= 3 * queue.policy.quantum


def test_a_newcomers_text_is_in_the_next_batch_beside_any_number_of_tenants_with_any_number_of_requests():
    queue = Queue(max_tokens=1024)
    for n in range(40):
        flood(queue, f"greedy-{n}", [10] * 300, 10)
    for _ in range(50):
        queue.take()
    text = queue.request(10, tenant="polite")
    assert text in request_queues_of(queue.take())


def test_one_text_after_the_other_waits_a_turn_of_each_other_tenant_and_never_a_turn_of_each_request():
    queue = Queue(max_tokens=512)
    flood(queue, "greedy", [10] * 100, 100)
    waits = []
    for _ in range(50):
        text, waited = queue.request(10, tenant="polite"), 0
        while text not in request_queues_of(batch := queue.take()):
            waited += num_tokens(batch)
        waits.append(waited)
    assert max(waits) <= 2 * queue.policy.quantum


def test_a_tenant_that_always_runs_out_is_not_always_new():
    """Else it would go before others each time, and have three quarters of every batch."""
    queue = Queue(max_tokens=300)
    flood(queue, "steady", [10] * 4000)
    served = {"steady": 0, "again": 0}
    for _ in range(100):
        flood(queue, "again", [10] * 25)
        batch = queue.take()
        for tenant in served:
            served[tenant] += tokens_of(batch, tenant)
    assert served["again"] <= served["steady"] + 3 * queue.policy.quantum


def test_many_newcomers_leave_the_others_their_quarter():
    queue = Queue(max_tokens=400)
    flood(queue, "steady", [10] * 4000)
    queue.take()
    for n in range(20):
        for m in range(60):
            queue.request(10, tenant=f"new-{n}-{m}")
        assert 90 <= tokens_of(queue.take(), "steady") <= 110


def test_a_tenants_backlog_has_one_of_four_of_its_turns():
    queue = Queue(max_tokens=1024)
    flood(queue, "other", [10] * 40_000)
    backlog = queue.request(*[10] * 10_000, tenant="both")
    shares = {"backlog": 0, "all": 0}
    for _ in range(100):
        flood(queue, "both", [10], 60)
        batch = queue.take()
        shares["backlog"] += num_tokens(batch, backlog)
        shares["all"] += tokens_of(batch, "both")
    assert 0.2 <= shares["backlog"] / shares["all"] <= 0.3


def test_an_overdue_priority_is_shared_by_its_tenants():
    queue = Queue(max_tokens=1024)
    flood(queue, "greedy", [10] * 400, 100, priority=Priority.BULK)
    flood(queue, "polite", [10] * 4000, priority=Priority.BULK)
    served = {"greedy": 0, "polite": 0}
    for _ in range(30):
        flood(queue, "first", [10], 150, priority=Priority.INTERACTIVE)
        batch = queue.take(after_s=AGING_S)
        for tenant in served:
            served[tenant] += tokens_of(batch, tenant)
    assert served["polite"] > 2000
    assert abs(served["greedy"] - served["polite"]) <= 3 * queue.policy.quantum


def test_a_tenants_long_sequence_is_not_passed_over_twice():
    queue = Queue(max_tokens=512, longest=500)
    queue.request(*[500] * 40, tenant="long")
    flood(queue, "short", [10] * 2000)
    taken = []
    for n in range(20):
        for m in range(20):
            queue.request(10, tenant=f"new-{n}-{m}")
        taken += queue.take()
    assert abs(tokens_of(taken, "long") - tokens_of(taken, "short")) <= queue.policy.quantum


def test_what_a_dead_worker_had_goes_first_and_costs_its_tenants_nothing():
    queue = Queue(max_tokens=512)
    flood(queue, "a", [10] * 2000)
    flood(queue, "b", [10] * 2000)
    balance = 0
    for n in range(60):
        batches = [queue.take()]
        if n % 3 == 0:
            lost = batches.pop()
            queue.policy.put_back(lost)
            batches = [queue.take()]
            assert set(batches[0]) == set(lost)
        for batch in batches:
            balance += tokens_of(batch, "a") - tokens_of(batch, "b")
        assert abs(balance) <= 3 * queue.policy.quantum


def test_a_tenant_whose_requests_can_only_be_late_does_not_hold_up_others():
    queue = Queue(max_tokens=100)
    late = [late_request(queue, queue.now, "late") for _ in range(9)]
    in_time = queue.request(10, tenant="in time")
    batch = queue.policy.take(queue.now, 100, done_by=queue.now + 1)
    assert request_queues_of(batch.sequences) == [in_time]
    assert batch.too_late == late


def test_tenants_that_are_gone_do_not_pile_up():
    queue = Queue(max_tokens=100)
    flood(queue, "stays", [10] * 10_000)
    for n in range(2000):
        request_queue = queue.request(10, tenant=f"goes-{n}")
        if n % 2:
            queue.close(request_queue)
        else:
            queue.take()
    assert len(queue.policy.classes[Priority.NORMAL].tenant_queues) < 200


def test_a_greedy_tenant_is_hardly_ahead_of_a_polite_one():
    queue = Queue(max_tokens=512)
    flood(queue, "greedy", [100] * 100, 100)
    queue.take()

    def ahead(num_tokens, tenant):
        return queue.policy.tokens_ahead(num_tokens, Priority.NORMAL, 1000.0, tenant)

    quantum = queue.policy.quantum
    assert ahead(10, "polite") <= 2 * quantum
    assert ahead(20_000, "polite") <= 20_000 + quantum
    assert ahead(20_000, "greedy") > 900_000
    assert ahead(10**7, "polite") == queue.policy.queued_tokens
    queue.request(10, tenant="polite")
    assert ahead(10, "polite") <= 4 * quantum
    assert ahead(10, "another") <= 4 * quantum


def test_of_other_tenants_as_much_is_ahead_as_one_gets_meanwhile_and_no_more_than_they_have():
    queue = Queue(max_tokens=512)
    flood(queue, "large", [100] * 1000)
    for n in range(9):
        queue.request(10, tenant=f"small-{n}")
    assert queue.policy.tokens_ahead(25_600, Priority.NORMAL, 1000.0, "asks") == 25_600 + 90


def test_of_very_many_tenants_few_are_looked_at_for_what_is_ahead(monkeypatch):
    queue, num_looks = Queue(max_tokens=512), 0
    flood(queue, "large", [100] * 1000)
    for n in range(1000):
        queue.request(10, tenant=f"small-{n}")

    def look(share: TenantQueue) -> int:
        nonlocal num_looks
        num_looks += 1
        return share.fresh.num_tokens + share.backlog.num_tokens

    monkeypatch.setattr(TenantQueue, "num_tokens", property(look))
    assert queue.policy.tokens_ahead(25_600, Priority.NORMAL, 1000.0, "asks") == 25_600 + 10_000
    assert queue.policy.tokens_ahead(25_600, Priority.NORMAL, 1000.0, "small-5") == 25_856 + 10_000
    assert num_looks < 200


def test_of_very_many_tenants_with_much_as_much_is_ahead_as_they_get_meanwhile():
    queue = Queue(max_tokens=512)
    for n in range(100):
        flood(queue, f"large-{n}", [100] * 10)
    assert queue.policy.tokens_ahead(500, Priority.NORMAL, 1000.0, "asks") == 100 * 512


LENGTHS = st.lists(st.integers(5, 100), min_size=1, max_size=40)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(LENGTHS, LENGTHS, st.integers(1, 600), st.booleans(), st.booleans()), max_size=40))
def test_whatever_two_busy_tenants_send_neither_gets_ahead(steps):
    """Each step: the sequences of a request of either tenant, the budget of a batch, whether batches are short, and
    whether this one is lost."""
    queue = Queue(max_tokens=600)
    waiting, ahead = {"a": 0, "b": 0}, 0
    for a, b, budget, is_short, is_lost in steps:
        for tenant, lengths in (("a", a), ("b", b)):
            while waiting[tenant] < 1500:  # no batch can take all of it
                queue.request(*lengths, tenant=tenant)
                waiting[tenant] += sum(lengths)
        batch = queue.take(budget, is_short=is_short)
        if is_lost:
            queue.policy.put_back(batch)
            continue
        for tenant in waiting:
            waiting[tenant] -= tokens_of(batch, tenant)
        ahead += tokens_of(batch, "a") - tokens_of(batch, "b")
        assert abs(ahead) <= 3 * queue.policy.quantum


# --- what is ahead of whom --------------------------------------------------------------------------------------------


def test_a_huge_request_is_hardly_ahead_of_a_short_one():
    queue = Queue(max_tokens=512)
    queue.request(*[100] * 1000)
    queue.take()
    assert queue.policy.tokens_ahead(10, Priority.NORMAL, 1000.0) == 0
    assert queue.policy.tokens_ahead(20_000, Priority.NORMAL, 1000.0) == 20_000
    assert queue.policy.tokens_ahead(10**6, Priority.NORMAL, 1000.0) == queue.policy.queued_tokens


def test_aging_bounds_what_a_higher_priority_is_ahead_by():
    queue = Queue(max_tokens=512)
    queue.request(*[100] * 1000, priority=Priority.INTERACTIVE)
    assert queue.policy.tokens_ahead(10, Priority.BULK, tokens_per_s=1000.0) == AGING_S * 1000
    for _ in range(32):
        queue.request(10, priority=Priority.BULK)
    assert queue.policy.tokens_ahead(10, Priority.BULK, tokens_per_s=1000.0) == 3 * AGING_S * 1000 + 320
    assert queue.policy.tokens_ahead(1000, Priority.BULK, tokens_per_s=1000.0) == 11 * AGING_S * 1000 + 320


# --- what is over, and what comes back --------------------------------------------------------------------------------


def test_requests_that_can_only_be_late_are_passed_over():
    queue = Queue(max_tokens=100)
    request_queues = [late_request(queue, queue.now + in_s) for in_s in (0.1, 0.3)]
    batch = queue.policy.take(queue.now, 100, done_by=queue.now + 0.2)
    assert request_queues_of(batch.sequences) == [request_queues[1]]
    assert batch.too_late == [request_queues[0]]
    assert (queue.policy.queued_tokens, queue.policy.queued_sequences) == (0, 0)


def test_the_last_one_is_served_even_if_it_is_expected_to_be_late():
    """What is expected comes from batches: if none were sent, a wrong expectation would stay for ever."""
    queue = Queue(max_tokens=100)
    request_queue = late_request(queue, queue.now + 0.1)
    batch = queue.policy.take(queue.now, 100, done_by=queue.now + 5)
    assert request_queues_of(batch.sequences) == [request_queue]
    assert batch.too_late == []


def test_what_is_isolated_is_a_batch_of_its_own_and_takes_turns_with_the_rest():
    queue = Queue(max_tokens=2)
    queue.request(*[1] * 6)
    isolated = queue.take()
    for sequence in isolated:
        queue.policy.isolate([sequence])
    batches = [queue.take() for _ in range(4)]
    assert [len(batch) for batch in batches if batch[0] not in isolated] == [2, 2]
    assert [batch for batch in batches if batch[0] in isolated] == [[isolated[1]], [isolated[0]]]


def test_what_is_put_back_goes_first_in_its_old_order():
    queue = Queue(max_rows=2)
    queue.request(1, 1, 1)
    lost = queue.take()
    queue.request(1)
    queue.policy.put_back(lost)
    assert queue.take() == lost


class SchedulerMachine(RuleBasedStateMachine):
    """Whatever happens, each sequence leaves once, in its request's order, or that is over; the books are right."""

    MAX_TOKENS, MAX_ROWS = 300, 6

    def __init__(self):
        super().__init__()
        self.queue = Queue(self.MAX_TOKENS, self.MAX_ROWS, longest=400)
        self.waiting: dict[RequestQueue, list[QueuedSequence]] = {}
        self.outputs: dict[RequestQueue, Output] = {}
        self.isolated: list[list[QueuedSequence]] = []
        self.out: list[list[QueuedSequence]] = []

    @rule(
        lengths=st.lists(st.integers(1, 400), min_size=1, max_size=8),
        priority=st.sampled_from(Priority),
        tenant=st.sampled_from("aabc"),
    )
    def request(self, lengths, priority, tenant):
        self.request_many_rows(lengths, priority, tenant, Output.VECTORS)

    @rule(
        lengths=st.lists(st.integers(1, MAX_ROWS), min_size=1, max_size=8),
        priority=st.sampled_from(Priority),
        tenant=st.sampled_from("abc"),
        output=st.sampled_from([TOKENS, SPARSE]),
    )
    def request_many_rows(self, lengths, priority, tenant, output):
        request_queue = RequestQueue(Result(len(lengths) + 8, (), _loop), priority, tenant=tenant)
        self.waiting[request_queue] = []
        self.outputs[request_queue] = output
        self.more(request_queue, lengths)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), lengths=st.lists(st.integers(1, 400), max_size=4))
    def piece(self, data, lengths):
        self.more(data.draw(st.sampled_from(list(self.waiting))), lengths)

    def more(self, request_queue, lengths):
        output = self.outputs[request_queue]
        if output is TOKENS:
            lengths = [min(length, self.MAX_ROWS) for length in lengths]
        sequences = make_sequences(request_queue, *lengths, output=output)
        self.queue.policy.add(request_queue, sequences, self.queue.now)
        self.waiting[request_queue] += sequences

    @rule(
        budget=st.integers(1, 400),
        idle=st.integers(0, 4),
        after_s=st.sampled_from([0.0, 0.1, AGING_S]),
        is_short=st.booleans(),
    )
    def take(self, budget, idle, after_s, is_short):
        batch = self.queue.take(budget, idle, after_s, is_short)
        assert batch or not (any(self.waiting.values()) or self.isolated), "work-conserving"
        assert num_rows(batch) <= self.MAX_ROWS
        assert len(batch) <= 1 or num_tokens(batch) <= self.MAX_TOKENS
        if batch in self.isolated:
            self.isolated.remove(batch)
        else:
            for sequence in batch:
                assert sequence is self.waiting[sequence.request_queue].pop(0), "in the order of its request"
        self.out.append(batch)

    @precondition(lambda self: self.out)
    @rule(is_isolated=st.booleans())
    def lose(self, is_isolated):
        lost = [s for s in self.out.pop() if not s.is_abandoned]
        if is_isolated and lost:
            self.queue.policy.isolate(lost)
            self.isolated.append(lost)
        else:
            self.queue.policy.put_back(lost)
            for sequence in reversed(lost):
                self.waiting[sequence.request_queue].insert(0, sequence)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def close(self, data):
        request_queue = data.draw(st.sampled_from(list(self.waiting)))
        self.queue.close(request_queue)
        del self.waiting[request_queue]
        left = [[s for s in batch if s.request_queue is not request_queue] for batch in self.isolated]
        self.isolated = [batch for batch in left if batch]

    @invariant()
    def books_are_right(self):
        policy = self.queue.policy
        waiting = [s for sequences in self.waiting.values() for s in sequences]
        isolated = [s for batch in self.isolated for s in batch]
        assert policy.queued_sequences == len(waiting) + len(isolated)
        assert policy.queued_tokens == num_tokens(waiting) + num_tokens(isolated)
        assert policy.queued_rows == num_rows(waiting) + num_rows(isolated)
        rotations = []
        for priority_class in policy.classes:
            tenants = list(priority_class.tenant_queues.values())
            new, old = priority_class.new, priority_class.old
            assert {*new.tenant_queues, *old.tenant_queues} == set(tenants)
            assert len(new.tenant_queues) + len(old.tenant_queues) == len(tenants)
            for turns in (new, old):
                assert all(tenant.rotation is turns for tenant in turns.tenant_queues)
                assert sum(tenant.num_tokens for tenant in turns.tenant_queues) == turns.num_tokens
            assert sum(tenant.num_tokens for tenant in tenants) == priority_class.num_tokens
            assert sum(tenant.backlog.num_tokens for tenant in tenants) == priority_class.num_backlog_tokens
            assert all(tenant.deficit >= 0 for tenant in tenants)
            rotations += [rotation for tenant in tenants for rotation in (tenant.fresh, tenant.backlog)]
        assert sum(rotation.num_tokens for rotation in rotations) == num_tokens(waiting)
        for rotation in rotations:
            assert all(request_queue.rotation is rotation for request_queue in rotation.queues)
            assert all(request_queue.sequences for request_queue in rotation.queues)
            assert sum(request_queue.num_tokens for request_queue in rotation.queues) == rotation.num_tokens


TestScheduler = SchedulerMachine.TestCase


@pytest.fixture(autouse=True, scope="module")
def _close_loop():
    yield
    _loop.close()


# --- how long the oldest has waited -------------------------------------------------------------------------------


def test_the_oldest_wait_is_that_of_the_request_that_came_first():
    queue = Queue()
    assert queue.policy.oldest_wait_s(queue.now) == 0
    first = queue.request(10)
    queue.now += 3
    queue.request(10, 10, tenant="b", priority=Priority.BULK)
    queue.now += 2
    assert queue.policy.oldest_wait_s(queue.now) == 5
    queue.close(first)
    assert queue.policy.oldest_wait_s(queue.now) == 2


def test_what_is_left_of_a_large_request_has_waited_since_it_came():
    queue = Queue(max_tokens=100)
    request_queue = queue.request(*[50] * 4)
    assert len(queue.take(100, after_s=1)) == 2
    assert queue.policy.oldest_wait_s(queue.now + 1) == 2
    batch = queue.take(100, after_s=1)
    assert queue.policy.oldest_wait_s(queue.now + 1) == 0
    queue.policy.put_back(batch)
    assert queue.policy.oldest_wait_s(queue.now) == 2, "what a worker has lost has waited from the beginning"
    queue.close(request_queue)
    request_queue = queue.request(10)
    queue.policy.isolate(queue.take())
    assert queue.policy.oldest_wait_s(queue.now + 4) == 4


def test_the_highest_waiting_priority_is_known():
    queue = Queue()
    assert queue.policy.waiting_priority == Priority.BULK
    bulk = queue.request(10, priority=Priority.BULK)
    assert queue.policy.waiting_priority == Priority.BULK
    queue.request(10)
    assert queue.policy.waiting_priority == Priority.NORMAL
    queue.take()
    assert queue.policy.waiting_priority == Priority.BULK
    interactive = queue.request(priority=Priority.INTERACTIVE)
    queue.policy.isolate(make_sequences(interactive, 10))
    assert queue.policy.waiting_priority == Priority.INTERACTIVE
    queue.close(interactive)
    queue.close(bulk)
    assert queue.policy.waiting_priority == Priority.BULK


def test_a_short_request_and_a_backlog_are_told_apart_for_other_models():
    queue = Queue(max_tokens=300)
    assert queue.policy.next_batch(queue.now, CostModel(BIG), 1).sequences == []
    assert not queue.policy.expects_short(queue.now)
    assert not queue.policy.has_backlog
    queue.request(5)
    assert queue.policy.expects_short(queue.now)
    assert not queue.policy.expects_short(queue.now + 60)
    queue.request(*[100] * 50)
    queue.take()
    assert queue.policy.has_backlog
    cost_model = CostModel(BIG, first_tokens_per_s=1000.0)
    later = queue.now + 60
    assert queue.policy.next_batch(later, cost_model, 1, is_short=True).is_short
    assert not queue.policy.next_batch(later, cost_model, 1).is_short


# --- sequences that workers have died of run alone, however they come ------------------------------------------------


def suspects(queue: Queue, *nums_deaths: int) -> list[QueuedSequence]:
    request_queue = RequestQueue(Result(len(nums_deaths), (), _loop), Priority.NORMAL)
    sequences = make_sequences(request_queue, *[10] * len(nums_deaths))
    for sequence, num in zip(sequences, nums_deaths, strict=True):
        sequence.deaths = Deaths(num) if num else None
    queue.policy.add(request_queue, sequences, queue.now)
    return sequences


def test_a_known_suspect_of_a_new_request_is_isolated():
    queue = Queue()
    first, suspect, last = suspects(queue, 1, 2, 0)
    policy = queue.policy
    assert (policy.queued_sequences, policy.queued_tokens, policy.queued_rows) == (3, 30, 3)
    assert policy.oldest_wait_s(queue.now + 3) == 3
    assert [queue.take() for _ in range(2)] == [[suspect], [first, last]]
    assert (policy.queued_sequences, policy.queued_tokens, policy.queued_rows) == (0, 0, 0)


def test_of_a_lost_batch_each_suspect_is_isolated_and_the_rest_goes_first():
    queue = Queue()
    sequences = suspects(queue, 0, 0, 0)
    lost = queue.take()
    for sequence in lost[:2]:
        sequence.deaths = Deaths(2)
    queue.policy.put_back(lost)
    assert [queue.take() for _ in range(3)] == [[sequences[1]], [sequences[2]], [sequences[0]]]
