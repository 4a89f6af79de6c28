"""Which of several models gets a core, played with models whose queues and batches are numbers."""

import heapq
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.gateway.request import Priority
from vecd.gateway.scheduling.cores import Cores
from vecd.gateway.scheduling.model_shares import CoreTurn, ModelShare, ModelShares, worker_order
from vecd.gateway.scheduling.policy import AGING_S, BatchingPolicy

ENDLESS = 10**9


class Policy:
    """What a model has waiting: sequences, each a batch of its own."""

    def __init__(self, num: int, priority: Priority) -> None:
        self.queued_sequences = num
        self.waiting_priority = priority
        self.is_short_expected = self.has_backlog = self.has_many_turns = self.has_newcomer = False

    def expects_short(self, now: float) -> bool:
        return self.is_short_expected

    def wants_short_batches(self, now: float) -> bool:
        return self.has_newcomer or (self.is_short_expected and self.has_backlog)


class Model:
    def __init__(self, machine: "Machine", index: int, *, weight: float | None, cost_s: float, workers: int) -> None:
        self._machine = machine
        self.policy = Policy(0, Priority.NORMAL)
        self.share = ModelShare(index, weight, cast(BatchingPolicy, self.policy), self)
        self.cost_s = cost_s
        self.num_idle = workers
        self.in_flight_tokens = 0
        self.used_s = 0.0
        """Of cores, by batches that have begun."""
        self.num_ahead = 0
        self.begun_at: list[float] = []
        self.turns: list[CoreTurn] = []
        self.num_scheduled = 0
        self.num_noted = 0

    def find_idle(self) -> int:
        return self.num_idle if self.policy.queued_sequences else 0

    def send_in_turn(self, now: float, turn: CoreTurn) -> int:
        self.turns.append(turn)
        self.policy.queued_sequences -= 1
        self.num_idle -= 1
        self.in_flight_tokens += 1
        self.begun_at.append(now)
        if self.share.needs_cores:
            self.used_s += self.cost_s
            self._machine.cores.lease(1)
            self._machine.shares.charge(self.share, self.cost_s, now)
        self._machine.begin(self)
        return self.find_idle()

    def send_ahead(self, now: float, *, is_short: bool | None) -> None:
        self.num_ahead += 1

    def note_waiting(self, now: float) -> None:
        self.num_noted += 1

    def schedule_dispatch(self) -> None:
        self.num_scheduled += 1


class Machine:
    """Cores, the models that share them, and batches that end after their time."""

    def __init__(self, num_cores: int) -> None:
        self.cores = Cores(num_cores)
        self.shares: ModelShares = self.cores.models
        self.models: list[Model] = []
        self.now = 0.0
        self._ends: list[tuple[float, int, Model]] = []
        self._num_begun = 0

    def add(
        self, *, weight: float | None = 1.0, cost_s: float = 0.1, workers: int | None = None, index: int | None = None
    ) -> Model:
        number = len(self.models) if index is None else index
        model = Model(self, number, weight=weight, cost_s=cost_s, workers=workers or self.cores.num_cores)
        self.models.append(model)
        self.shares.join(model.share)
        return model

    def queue(self, model: Model, num: int = ENDLESS, priority: Priority = Priority.NORMAL) -> None:
        model.policy.queued_sequences = num
        model.policy.waiting_priority = priority
        self.dispatch()

    def dispatch(self) -> None:
        self.shares.dispatch(self.now)
        leased = sum(model.in_flight_tokens for model in self.models if model.share.needs_cores)
        assert leased == self.cores.leased <= self.cores.num_cores
        if leased < self.cores.num_cores:
            assert not any(model.find_idle() for model in self.models), "no core is free while a batch waits for one"

    def begin(self, model: Model) -> None:
        self._num_begun += 1
        heapq.heappush(self._ends, (self.now + model.cost_s, self._num_begun, model))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._ends and self._ends[0][0] <= until:
            self.now, _, model = heapq.heappop(self._ends)
            model.num_idle += 1
            model.in_flight_tokens -= 1
            if model.share.needs_cores:
                self.cores.give_back(1)
            self.dispatch()
        self.now = until


def test_one_model_shares_with_nobody_also_while_it_is_reloaded():
    machine = Machine(2)
    machine.add()
    assert not machine.shares.are_several
    other = machine.add(index=0)
    assert not machine.shares.are_several
    machine.add(index=1)
    assert machine.shares.are_several
    machine.shares.leave(other.share)
    machine.shares.leave(machine.models[2].share)
    assert not machine.shares.are_several


def test_workers_on_a_gpu_need_no_core():
    machine = Machine(1)
    model, on_gpu = machine.add(), machine.add(weight=None, workers=3)
    machine.queue(model)
    machine.queue(on_gpu)
    assert (len(model.begun_at), len(on_gpu.begun_at), machine.cores.leased) == (1, 3, 1)
    assert on_gpu.turns[0] == (3, 0, None)
    assert on_gpu.num_ahead > 0
    assert machine.shares.part(on_gpu.share) == machine.shares.part(model.share) == 1.0


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from([0.25, 1.0, 3.0, 8.0]), st.floats(0.05, 0.5)), min_size=2, max_size=4),
)
def test_models_that_always_have_work_get_cores_by_their_weights_within_one_batch(num_cores, models):
    machine = Machine(num_cores)
    for weight, cost_s in models:
        machine.add(weight=weight, cost_s=cost_s).policy.queued_sequences = ENDLESS
    machine.dispatch()
    for _ in range(15):
        machine.run(0.37)
        for one in machine.models:
            for other in machine.models:
                ahead_s = one.used_s / one.share.clock.weight - other.used_s / other.share.clock.weight
                assert ahead_s <= one.cost_s / one.share.clock.weight + 1e-6


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(Priority), st.floats(0.05, 0.3)), min_size=2, max_size=4),
)
def test_nothing_starves_whatever_the_priorities(num_cores, models):
    machine = Machine(num_cores)
    for priority, cost_s in models:
        model = machine.add(cost_s=cost_s)
        model.policy.queued_sequences, model.policy.waiting_priority = ENDLESS, priority
    machine.dispatch()
    machine.run(8.0)
    for model in machine.models:
        times = [0.0, *model.begun_at, machine.now]
        longest_s = max(after - before for before, after in pairwise(times))
        assert longest_s < AGING_S + 2 * sum(cost_s for _, cost_s in models)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.sampled_from(Priority)), max_size=30))
def test_no_core_is_free_while_a_batch_waits_for_one(arrivals):
    machine = Machine(2)
    for cost_s in (0.05, 0.2, 0.7):
        machine.add(cost_s=cost_s)
    total = 0
    for index, num, priority in arrivals:
        model = machine.models[index]
        machine.queue(model, model.policy.queued_sequences + num, priority)  # which looks
        machine.run(0.1)
        total += num
    machine.run(200.0)
    assert sum(len(model.begun_at) for model in machine.models) == total


def test_a_higher_priority_goes_first_over_all_models():
    machine = Machine(1)
    bulk, interactive = machine.add(), machine.add()
    machine.queue(bulk, priority=Priority.BULK)
    machine.run(1.05)  # and the other one's clock is far behind
    machine.queue(interactive, 5, Priority.INTERACTIVE)
    num_before = len(bulk.begun_at)
    machine.run(0.5)
    assert (len(interactive.begun_at), len(bulk.begun_at) - num_before) == (5, 0)
    interactive.used_s = 0.0
    machine.queue(interactive, ENDLESS, Priority.INTERACTIVE)
    machine.run(10.0)
    num_aged = len(bulk.begun_at) - num_before
    assert 4 <= num_aged <= 5, "one batch each AGING_S"


def test_a_model_that_comes_when_nothing_waits_owes_and_is_owed_nothing():
    machine = Machine(1)
    first, other = machine.add(), machine.add()
    machine.queue(first, 500)
    machine.run(100.0)  # it is idle for half of it
    machine.queue(other)
    machine.run(1.0)
    machine.queue(first)
    num_before = len(other.begun_at)
    machine.run(2.0)
    assert len(first.begun_at) - 500 == pytest.approx(len(other.begun_at) - num_before, abs=2)


def test_a_model_that_was_passed_over_for_long_is_owed_a_second():
    machine = Machine(1)
    flood, bulk = machine.add(), machine.add()
    machine.queue(flood, priority=Priority.INTERACTIVE)
    machine.queue(bulk, priority=Priority.BULK)
    machine.run(60.0)
    flood.policy.waiting_priority = Priority.BULK
    num_before = len(flood.begun_at)
    machine.run(2.0)
    assert len(flood.begun_at) - num_before >= 4, "in the second second they take turns"


def test_what_was_measured_corrects_what_was_predicted():
    machine = Machine(1)
    first, other = machine.add(), machine.add()
    machine.queue(first, 1)
    machine.run(0.2)
    machine.shares.correct(first.share, 0.1, 0.3)  # it took longer
    assert first.share.clock.virtual_s == pytest.approx(0.3)
    first.policy.queued_sequences = other.policy.queued_sequences = 1
    machine.dispatch()
    assert other.begun_at == [machine.now]
    machine.shares.correct(first.share, 0.1, 1000.0)  # its worker was stopped
    assert first.share.clock.virtual_s == pytest.approx(1.0), "at most eight times as long"


def test_a_new_generation_has_the_clock_and_the_weight_of_its_model():
    machine = Machine(1)
    before, other = machine.add(), machine.add()
    machine.queue(before)
    machine.queue(other)
    machine.run(5.0)
    after = machine.add(index=0, weight=3.0)
    machine.queue(after)
    nums = len(before.begun_at), len(other.begun_at)
    machine.run(40.0)
    of_model = len(before.begun_at) - nums[0] + len(after.begun_at)
    assert of_model / (len(other.begun_at) - nums[1]) == pytest.approx(3.0, rel=0.1)
    assert len(after.begun_at) == pytest.approx(len(before.begun_at) - nums[0], abs=2), "they take turns"


def test_free_cores_are_left_for_batches_of_other_models():
    machine = Machine(8)
    first, other = machine.add(), machine.add()
    first.policy.queued_sequences, other.policy.queued_sequences = 8, 3
    machine.dispatch()
    assert first.turns[0] == (4, 3, False)
    assert other.turns[0].num_beside == 7
    assert (len(first.begun_at), len(other.begun_at)) == (5, 3)


def test_a_lower_priority_does_not_divide_what_a_higher_one_gets():
    machine = Machine(8)
    first, other = machine.add(), machine.add()
    first.policy.queued_sequences, other.policy.queued_sequences = 8, 8
    other.policy.waiting_priority = Priority.BULK
    machine.dispatch()
    assert first.turns[0].num_places == 8
    assert (len(first.begun_at), len(other.begun_at)) == (8, 0)


def test_batches_are_sent_ahead_only_while_none_waits_for_a_core():
    machine = Machine(1)
    first, other = machine.add(), machine.add()
    machine.queue(first)
    assert (first.num_ahead, first.num_noted) == (1, 0)
    machine.queue(other)
    assert (first.num_ahead, other.num_ahead, other.num_noted) == (1, 0, 1)


def test_batches_are_short_while_short_requests_of_one_model_wait_for_the_backlog_of_another():
    machine = Machine(2)
    first, other = machine.add(), machine.add()
    assert not machine.shares.wants_short_batches(0.0)
    first.policy.is_short_expected = True
    assert not machine.shares.wants_short_batches(0.0)
    other.policy.has_backlog = True
    assert machine.shares.wants_short_batches(0.0)
    machine.queue(other, 1)
    assert other.turns[0].is_short
    first.policy.is_short_expected = False
    assert not machine.shares.wants_short_batches(0.0)
    first.policy.has_newcomer = True
    assert machine.shares.wants_short_batches(0.0)


def test_batches_are_short_while_a_model_with_little_waits_for_one_with_much():
    machine = Machine(2)
    first, other = machine.add(), machine.add()
    first.policy.is_short_expected = other.policy.is_short_expected = True
    assert not machine.shares.wants_short_batches(0.0)
    other.policy.has_many_turns = True
    assert machine.shares.wants_short_batches(0.0)
    first.policy.has_many_turns = True
    assert not machine.shares.wants_short_batches(0.0), "both have much"
    first.policy.is_short_expected = first.policy.has_many_turns = False
    assert not machine.shares.wants_short_batches(0.0), "none comes for the other"


def test_a_model_counts_on_its_part_by_weight_of_those_that_have_work():
    machine = Machine(2)
    first, other, third = machine.add(weight=2.0), machine.add(), machine.add(weight=5.0)
    part = machine.shares.part
    assert part(first.share) == 1.0
    machine.queue(other)
    assert part(first.share) == pytest.approx(2 / 3)
    assert part(other.share) == 1.0
    third.in_flight_tokens = 1
    assert part(first.share) == pytest.approx(2 / 8)
    again = machine.add(weight=2.0, index=0)
    again.in_flight_tokens = 1
    assert part(first.share) == pytest.approx(2 / 8), "its own generations count once"


def test_what_waits_for_a_model_without_a_worker_costs_the_others_nothing():
    machine = Machine(2)
    first, other = machine.add(), machine.add()
    other.num_idle = 0  # it loads, or its workers are dead
    machine.queue(other)
    assert machine.shares.part(first.share) == 1.0
    other.policy.has_backlog = other.policy.has_many_turns = other.policy.has_newcomer = True
    first.policy.is_short_expected = True
    assert not machine.shares.wants_short_batches(machine.now)
    other.policy.is_short_expected = True
    first.policy.has_backlog = True
    first.policy.is_short_expected = False
    assert not machine.shares.wants_short_batches(machine.now)
    other.num_idle = 1
    machine.dispatch()
    assert machine.shares.part(first.share) == 0.5
    assert machine.shares.wants_short_batches(machine.now)
    machine.run(1)
    assert machine.shares.part(first.share) == 0.5


def test_those_that_stay_look_at_once_for_what_one_leaves():
    machine = Machine(1)
    first, other = machine.add(), machine.add()
    machine.shares.leave(first.share)
    machine.shares.leave(first.share)
    assert other.num_scheduled == 1


def test_a_gateway_without_a_grant_still_has_a_core_for_a_batch():
    machine = Machine(4)
    machine.cores.granted = 0
    first, other = machine.add(), machine.add()
    machine.shares.join(first.share)
    first.policy.queued_sequences = other.policy.queued_sequences = 2
    machine.shares.dispatch(0.0)
    assert machine.cores.leased == 1
    machine.cores.granted = 3
    machine.shares.dispatch(0.0)
    assert machine.cores.leased == 3


def test_nothing_is_sent_ahead_by_a_gateway_that_has_more_cores_than_it_is_granted():
    machine = Machine(2)
    first, _ = machine.add(), machine.add()
    machine.queue(first)
    num_ahead = first.num_ahead
    assert num_ahead == 1
    machine.cores.granted = 1
    machine.dispatch()
    assert first.num_ahead == num_ahead


@given(st.integers(1, 20), st.integers(1, 8))
def test_gateways_with_equal_parts_of_the_cores_send_to_different_workers(num_workers, num_gateways):
    orders = [worker_order(num_workers, gateway, num_gateways) for gateway in range(num_gateways)]
    assert all(sorted(order) == list(range(num_workers)) for order in orders)
    taken = [place for order in orders for place in order[: num_workers // num_gateways]]
    assert len(set(taken)) == len(taken)


@given(st.integers(1, 20), st.integers(0, 20))
def test_two_gateways_never_meet_whatever_their_parts(num_workers, part):
    first, other = (worker_order(num_workers, gateway, 2) for gateway in (0, 1))
    part = min(part, num_workers)
    assert not set(first[:part]) & set(other[: num_workers - part])
