import random
from copy import copy

import pytest

from vecd.gateway.scheduling.cost_model import CostModel
from vecd.gateway.scheduling.policy import SHORT_BATCH_S
from vecd.shm.batch_limits import FULL_BATCH_S

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


def test_a_copy_learns_for_itself():
    cost_model = CostModel(MAX_TOKENS)
    heir = copy(cost_model)
    heir.observe(100, 1.0)
    assert heir.tokens_per_s < cost_model.tokens_per_s


# --- how long a batch may take ----------------------------------------------------------------------------------


def test_while_nothing_is_known_a_batch_may_take_as_long_as_any():
    assert CostModel(MAX_TOKENS).deadline_s(10, limit_s=60) == 60
    assert not CostModel(MAX_TOKENS).is_learned


def learned(tokens_per_s: float = 1000, overhead_s: float = 0.01) -> CostModel:
    cost_model = CostModel(MAX_TOKENS)
    for tokens in (50, 200, 400) * 20:
        cost_model.observe(tokens, overhead_s + tokens / tokens_per_s)
    return cost_model


def test_a_batch_may_take_twenty_times_what_is_expected_and_two_seconds():
    cost_model = learned()
    assert cost_model.deadline_s(100, limit_s=60) == pytest.approx(2 + 20 * 0.11)
    assert cost_model.deadline_s(100, limit_s=3) == 3


def test_what_a_dead_worker_has_taught_is_known_of_the_next_but_not_of_its_first_batch():
    heir = copy(learned())
    assert heir.deadline_s(100, limit_s=60, has_answered=False) == pytest.approx(10 + 2 + 20 * 0.11)
    assert heir.deadline_s(100, limit_s=5, has_answered=False) == 5


def test_with_several_gateways_a_full_batch_of_each_other_may_come_first():
    cost_model = learned()
    full_s = cost_model.batch_s(cost_model.budget_tokens(FULL_BATCH_S))
    assert full_s == pytest.approx(0.25, rel=0.01)
    assert cost_model.deadline_s(100, limit_s=60, num_gateways=3) == pytest.approx(
        (2 + 20 * 0.11) + 2 * (2 + 20 * full_s), rel=0.01
    )


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


@pytest.mark.parametrize("times", [[(1, 0.0)], [(10, 1.0), (1000, 0.1)], [(4096, 4000.0)]])
def test_a_deadline_is_never_below_the_least_and_never_above_the_limit(times):
    cost_model = CostModel(MAX_TOKENS)
    for tokens, seconds in times * 20:
        cost_model.observe(tokens, seconds)
    for tokens in (1, 100, 100_000):
        assert 2 <= cost_model.deadline_s(tokens, limit_s=60) <= 60
