import random

import pytest

from gateway.pace import FULL_BATCH_S, SHORT_BATCH_S, Pace

MAX_TOKENS = 4096


def test_learns_overhead_and_speed_from_batches_of_several_sizes():
    pace = Pace(MAX_TOKENS)
    rng = random.Random(1)
    for _ in range(200):
        tokens = rng.randint(10, 2000)
        pace.observe(tokens, 0.002 + tokens / 8000 * rng.uniform(0.95, 1.05))
    assert pace.batch_s(1000) == pytest.approx(0.127, rel=0.05)
    assert pace.tokens_per_s == pytest.approx(8000, rel=0.06)
    assert pace.budget_tokens(SHORT_BATCH_S) == pytest.approx(0.058 * 8000, rel=0.1)


def test_batches_of_one_size_say_only_how_long_these_take():
    pace = Pace(MAX_TOKENS)
    for _ in range(50):
        pace.observe(12, 0.004)
    assert pace.batch_s(12) == pytest.approx(0.004)
    assert pace.tokens_per_s == pytest.approx(3000)


def test_forgets_how_fast_it_was():
    pace = Pace(MAX_TOKENS)
    for tokens_per_s in (8000, 2000):
        for tokens in (100, 500, 900) * 40:
            pace.observe(tokens, tokens / tokens_per_s)
    assert pace.tokens_per_s == pytest.approx(2000, rel=0.01)


def test_one_batch_that_stood_still_does_not_make_a_worker_slow():
    """It was stopped, or the machine slept. Else nobody with a deadline would be let in for a long time."""
    pace = Pace(MAX_TOKENS)
    for _ in range(100):
        pace.observe(12, 0.004)
    pace.observe(12, 60.0)
    assert pace.tokens_per_s > 3000 / 2


def test_a_worker_that_stays_slow_is_believed_soon():
    pace = Pace(MAX_TOKENS)
    for _ in range(100):
        pace.observe(12, 0.004)
    for _ in range(200):
        pace.observe(12, 4.0)
    assert pace.tokens_per_s == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("seconds_per_token", [1e-9, 1e-7, 1e-3, 10.0])
def test_a_budget_stays_within_bounds(seconds_per_token):
    pace = Pace(MAX_TOKENS)
    for tokens in (1, 10, 100):
        pace.observe(tokens, tokens * seconds_per_token)
    assert 128 <= pace.budget_tokens(FULL_BATCH_S) <= MAX_TOKENS
    assert Pace(64).budget_tokens(FULL_BATCH_S) == 64


@pytest.mark.parametrize("times", [[(100, 0.0)], [(10, 1.0), (1000, 0.1)], [(1, 0.0), (2, 0.0)]])
def test_strange_times_make_no_strange_speed(times):
    pace = Pace(MAX_TOKENS)
    for tokens, seconds in times * 20:
        pace.observe(tokens, seconds)
    assert pace.tokens_per_s > 0
    assert pace.batch_s(100) >= 0


def test_a_copy_learns_for_itself():
    pace = Pace(MAX_TOKENS)
    copy = pace.copy()
    copy.observe(100, 1.0)
    assert copy.tokens_per_s < pace.tokens_per_s
