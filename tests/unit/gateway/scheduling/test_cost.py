"""What is learned of workers: how long batches take, and how many threads pay."""

import random
from collections import Counter
from copy import copy

import pytest

from vecd.gateway.scheduling.cores import Cores
from vecd.gateway.scheduling.cost import CostModel, ThreadModel
from vecd.gateway.scheduling.policy import SHORT_BATCH_S
from vecd.shm.output import FULL_BATCH_S

MAX_TOKENS = 4096


def test_learns_overhead_and_speed_from_batches_of_several_sizes():
    cost_model = CostModel(MAX_TOKENS)
    rng = random.Random(1)
    for _ in range(200):
        tokens = rng.randint(10, 2000)
        cost_model.observe(tokens, 0.002 + tokens / 8000 * rng.uniform(0.95, 1.05))
    assert cost_model.batch_s(1000) == pytest.approx(0.127, rel=0.05)
    assert cost_model.tokens_per_s == pytest.approx(8000, rel=0.06)
    assert cost_model.budget_tokens(SHORT_BATCH_S) == pytest.approx(0.058 * 8000, rel=0.1)


def test_batches_of_one_size_say_only_how_long_these_take():
    cost_model = CostModel(MAX_TOKENS)
    for _ in range(50):
        cost_model.observe(12, 0.004)
    assert cost_model.batch_s(12) == pytest.approx(0.004)
    assert cost_model.tokens_per_s == pytest.approx(3000)


def test_forgets_how_fast_it_was():
    cost_model = CostModel(MAX_TOKENS)
    for tokens_per_s in (8000, 2000):
        for tokens in (100, 500, 900) * 40:
            cost_model.observe(tokens, tokens / tokens_per_s)
    assert cost_model.tokens_per_s == pytest.approx(2000, rel=0.01)


def test_one_batch_that_stood_still_does_not_make_a_worker_slow():
    """It was stopped, or the machine slept. Else no request with a deadline would be admitted for a long time."""
    cost_model = CostModel(MAX_TOKENS)
    for _ in range(100):
        cost_model.observe(12, 0.004)
    cost_model.observe(12, 60.0)
    assert cost_model.tokens_per_s > 3000 / 2


def test_a_worker_that_stays_slow_is_believed_soon():
    cost_model = CostModel(MAX_TOKENS)
    for _ in range(100):
        cost_model.observe(12, 0.004)
    for _ in range(200):
        cost_model.observe(12, 4.0)
    assert cost_model.tokens_per_s == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("seconds_per_token", [1e-9, 1e-7, 1e-3, 10.0])
def test_a_budget_stays_within_bounds(seconds_per_token):
    cost_model = CostModel(MAX_TOKENS)
    for tokens in (1, 10, 100):
        cost_model.observe(tokens, tokens * seconds_per_token)
    assert 128 <= cost_model.budget_tokens(FULL_BATCH_S) <= MAX_TOKENS
    assert CostModel(64).budget_tokens(FULL_BATCH_S) == 64


@pytest.mark.parametrize("times", [[(100, 0.0)], [(10, 1.0), (1000, 0.1)], [(1, 0.0), (2, 0.0)]])
def test_strange_times_make_no_strange_speed(times):
    cost_model = CostModel(MAX_TOKENS)
    for tokens, seconds in times * 20:
        cost_model.observe(tokens, seconds)
    assert cost_model.tokens_per_s > 0
    assert cost_model.batch_s(100) >= 0


# --- how long a batch may take ----------------------------------------------------------------------------------


def test_while_nothing_is_known_a_batch_may_take_as_long_as_any():
    assert CostModel(MAX_TOKENS).deadline_s(10, limit_s=60) == 60
    assert not CostModel(MAX_TOKENS).is_learned


def learned(tokens_per_s: float = 1000, overhead_s: float = 0.01) -> CostModel:
    cost_model = CostModel(MAX_TOKENS)
    for tokens in (50, 200, 400) * 20:
        cost_model.observe(tokens, overhead_s + tokens / tokens_per_s)
    return cost_model


@pytest.mark.parametrize(
    ("deadline_s", "options"),
    [
        (2 + 20 * 0.11, {}),
        (3, {"limit_s": 3}),
        # What a dead worker has taught is known of the next, but not of its first batch.
        (10 + 2 + 20 * 0.11, {"has_answered": False}),
        (5, {"has_answered": False, "limit_s": 5}),
        # A full batch of each other gateway may come first.
        ((2 + 20 * 0.11) + 2 * (2 + 20 * 0.25), {"num_gateways": 3}),
    ],
)
def test_a_batch_may_take_twenty_times_what_is_expected_and_two_seconds(deadline_s, options):
    assert copy(learned()).deadline_s(100, **{"limit_s": 60, **options}) == pytest.approx(deadline_s, rel=0.01)


def test_another_gateway_s_long_sequence_may_come_first():
    cost_model = learned()
    longer_s = cost_model.deadline_s(10, limit_s=1000, num_gateways=2, max_sequence_tokens=4000)
    assert longer_s > 2 + 20 * cost_model.batch_s(4000)


def test_small_batches_do_not_make_the_time_of_a_large_one_short():
    """Of batches of about a size, what one token more costs is noise: a large batch may take as long by the token."""
    cost_model = CostModel(MAX_TOKENS)
    for _ in range(50):
        cost_model.observe(10, 0.100)
        cost_model.observe(16, 0.101)  # truly 5 ms a token, the rest being noise
    assert cost_model.batch_s(4000) < 1
    assert cost_model.deadline_s(4000, limit_s=1000) > 20 * 0.005 * 4000


# --- how many threads pay -----------------------------------------------------------------------------------------

CHOICES = (1, 2, 4, 8)


def serve(model, time_of, num_batches, *, choices=CHOICES, num_tokens=64, noise=0.05, seed=0, is_quiet=True):
    """Let the model choose for so many batches, which take `time_of(threads)`; how often each number was chosen."""
    rng = random.Random(seed)
    chosen: Counter[int] = Counter()
    for _ in range(num_batches):
        num_threads = model.choose(num_tokens, choices, is_quiet=is_quiet)
        chosen[num_threads] += 1
        took_s = time_of(num_threads) * rng.uniform(1, 1 + noise)
        model.observe(num_tokens, num_threads, num_threads, took_s, is_quiet=is_quiet)
    return chosen


def test_one_thread_is_measured_first():
    assert ThreadModel().choose(64, CHOICES, is_quiet=True) == 1


@pytest.mark.parametrize("best", CHOICES)
def test_as_many_threads_are_used_as_pay(best):
    def time_of(threads):
        return 1 / threads if threads <= best else 1 / best * 1.1

    model = ThreadModel()
    serve(model, time_of, 40)
    chosen = serve(model, time_of, 1000)
    assert chosen[best] >= 970
    assert model.best(64, CHOICES, is_quiet=True) == best


def test_what_pays_little_is_not_used():
    model = ThreadModel()
    serve(model, {1: 1.0, 2: 0.96, 4: 1.0, 8: 1.1}.__getitem__, 200)
    assert model.best(64, CHOICES, is_quiet=True) == 1


def test_tries_of_what_does_not_pay_become_rare():
    model = ThreadModel()
    chosen = serve(model, {1: 1.0, 2: 3.0}.__getitem__, 5000, choices=(1, 2))
    assert chosen[2] <= 15


def test_threads_that_are_slower_once_are_given_up_at_once():
    model = ThreadModel()
    serve(model, lambda threads: 1 / threads, 50, choices=(1, 2))
    assert model.choose(64, (1, 2), is_quiet=True) == 2
    model.observe(64, 2, 2, 3.0, is_quiet=True)
    assert model.choose(64, (1, 2), is_quiet=True) == 1


def test_a_slow_batch_of_a_new_size_is_not_believed_but_three_in_a_row_are():
    model = ThreadModel()
    serve(model, lambda threads: 1 / threads, 50, choices=(1, 2))
    for num_tokens in (65, 66):
        model.observe(num_tokens, 2, 2, 3.0, is_quiet=True)
        assert model.best(64, (1, 2), is_quiet=True) == 2
    model.observe(67, 2, 2, 3.0, is_quiet=True)
    assert model.best(64, (1, 2), is_quiet=True) == 1


@pytest.mark.parametrize("gain", [0.5, 0.75, 0.85])
def test_one_good_try_brings_them_back(gain):
    model = ThreadModel()
    time_of = {1: 1.0, 2: gain}.__getitem__
    serve(model, time_of, 50, choices=(1, 2), noise=0.01)
    model.observe(64, 2, 2, 30.0, is_quiet=True)
    chosen = serve(model, time_of, 100, choices=(1, 2), noise=0.01)
    assert chosen[2] >= 80


def test_fewer_threads_are_compared_now_and_then_although_more_pay():
    model = ThreadModel()
    serve(model, lambda threads: 1 / threads, 50, choices=(1, 2))
    assert 5 <= serve(model, lambda threads: 1 / threads, 1000, choices=(1, 2))[1] <= 12
    serve(model, lambda threads: 1.0, 600, choices=(1, 2))  # the machine has changed
    assert model.best(64, (1, 2), is_quiet=True) == 1


def test_a_worker_that_has_no_more_threads_is_asked_seldom():
    model, asked = ThreadModel(), 0
    for _ in range(1000):
        num_threads = model.choose(64, (1, 16), is_quiet=True)
        asked += num_threads == 16
        model.observe(64, num_threads, 1, 1.0, is_quiet=True)
    assert 3 <= asked <= 8


def test_size_classes_learn_apart():
    model = ThreadModel()
    serve(model, {1: 1.0, 2: 2.0}.__getitem__, 50, choices=(1, 2), num_tokens=12)
    serve(model, {1: 1.0, 2: 0.5}.__getitem__, 50, choices=(1, 2), num_tokens=200)
    assert (model.best(12, (1, 2), is_quiet=True), model.best(200, (1, 2), is_quiet=True)) == (1, 2)
    assert [row["from_tokens"] for row in model.describe()] == [8, 8, 128, 128]


def test_only_choices_that_there_are_now_are_chosen():
    model = ThreadModel()
    serve(model, lambda threads: 1 / threads, 60)
    assert model.best(64, CHOICES, is_quiet=True) == 8
    assert model.choose(64, (1, 2), is_quiet=True) == 2
    assert model.choose(64, (1,), is_quiet=True) == 1


class LoneTexts:
    """Texts of 12 tokens on two cores, by a clock of their own, of which two threads take 0.6 of one's time. While
    others send batches as well, a second thread waits for a core: a batch takes up to four times as long with two."""

    def __init__(self, seed=0):
        self.model, self.cores, self.now = ThreadModel(), Cores(2), 0.0
        self._random = random.Random(seed)

    def serve(self, num_batches, *, among_others=False):
        """Every 5 ms one; with how many threads each is computed."""
        chosen = []
        for _ in range(num_batches):
            self.now += 0.005
            if among_others:
                self.cores.note_meeting(self.now)
            num_threads = self.model.choose(12, (1, 2), is_quiet=self.cores.is_quiet(self.now))
            took_s = {1: 0.0024, 2: 0.0015}[num_threads] * self._random.uniform(1, 1.05)
            if among_others:
                took_s *= self._random.uniform(1.5, 4) if num_threads == 2 else self._random.uniform(1, 1.3)
            self.cores.lease(num_threads)
            self.now += took_s
            self.cores.give_back(num_threads)
            self.model.observe(12, num_threads, num_threads, took_s, is_quiet=self.cores.is_quiet(self.now))
            chosen.append(num_threads)
        return chosen


@pytest.mark.parametrize("num_before", [0, 100])
@pytest.mark.parametrize("seed", range(2))
def test_what_threads_did_in_a_busy_minute_says_nothing_about_a_quiet_one(num_before, seed):
    texts = LoneTexts(seed)
    texts.serve(num_before)
    assert texts.serve(8000, among_others=True).count(2) < 400  # so two threads do not pay there
    texts.serve(150)  # the last busy second
    assert texts.serve(100).count(2) >= 90


def test_what_did_not_pay_in_quiet_is_tried_again_within_some_hundred_batches():
    model = ThreadModel()
    serve(model, {1: 1.0, 2: 3.0}.__getitem__, 20_000, choices=(1, 2))
    chosen = serve(model, {1: 1.0, 2: 0.6}.__getitem__, 1000, choices=(1, 2))
    assert chosen[2] >= 470


def test_busy_moments_begin_with_what_is_known_of_quiet_ones_and_are_learned_apart():
    model = ThreadModel()
    serve(model, {1: 1.0, 2: 0.6}.__getitem__, 50, choices=(1, 2))
    assert model.best(64, (1, 2), is_quiet=False) == 2
    serve(model, {1: 1.0, 2: 1.5}.__getitem__, 50, choices=(1, 2), is_quiet=False)
    assert (model.best(64, (1, 2), is_quiet=False), model.best(64, (1, 2), is_quiet=True)) == (1, 2)
    assert [(row["quiet"], row["threads"]) for row in model.describe()] == [
        (False, 1),
        (False, 2),
        (True, 1),
        (True, 2),
    ]
