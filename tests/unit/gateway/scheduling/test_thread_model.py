import random
from collections import Counter

import pytest

from vecd.gateway.scheduling.thread_model import ThreadModel

CHOICES = (1, 2, 4, 8)


def serve(model, time_of, num_batches, *, choices=CHOICES, num_tokens=64, noise=0.05, seed=0):
    """Let the model choose for so many batches, which take `time_of(threads)`; how often each number was chosen."""
    rng = random.Random(seed)
    chosen: Counter[int] = Counter()
    for _ in range(num_batches):
        num_threads = model.choose(num_tokens, choices)
        chosen[num_threads] += 1
        model.observe(num_tokens, num_threads, num_threads, time_of(num_threads) * rng.uniform(1, 1 + noise))
    return chosen


def test_one_thread_is_measured_first():
    assert ThreadModel().choose(64, CHOICES) == 1


@pytest.mark.parametrize("best", CHOICES)
def test_as_many_threads_are_used_as_pay(best):
    def time_of(threads):
        return 1 / threads if threads <= best else 1 / best * 1.1

    model = ThreadModel()
    serve(model, time_of, 40)
    chosen = serve(model, time_of, 1000)
    assert chosen[best] >= 970
    assert model.best(64, CHOICES) == best


def test_what_pays_little_is_not_used():
    model = ThreadModel()
    serve(model, {1: 1.0, 2: 0.96, 4: 1.0, 8: 1.1}.__getitem__, 200)
    assert model.best(64, CHOICES) == 1


def test_tries_of_what_does_not_pay_become_rare():
    model = ThreadModel()
    chosen = serve(model, {1: 1.0, 2: 3.0}.__getitem__, 5000, choices=(1, 2))
    assert chosen[2] <= 15


def test_threads_that_are_slower_once_are_given_up_at_once():
    model = ThreadModel()
    serve(model, lambda threads: 1 / threads, 50, choices=(1, 2))
    assert model.choose(64, (1, 2)) == 2
    model.observe(64, 2, 2, 3.0)
    assert model.choose(64, (1, 2)) == 1


def test_a_slow_batch_of_a_new_size_is_not_believed_but_three_in_a_row_are():
    model = ThreadModel()
    serve(model, lambda threads: 1 / threads, 50, choices=(1, 2))
    for num_tokens in (65, 66):
        model.observe(num_tokens, 2, 2, 3.0)
        assert model.best(64, (1, 2)) == 2
    model.observe(67, 2, 2, 3.0)
    assert model.best(64, (1, 2)) == 1


@pytest.mark.parametrize("gain", [0.5, 0.75, 0.85])
def test_one_good_try_brings_them_back(gain):
    model = ThreadModel()
    time_of = {1: 1.0, 2: gain}.__getitem__
    serve(model, time_of, 50, choices=(1, 2), noise=0.01)
    model.observe(64, 2, 2, 30.0)
    chosen = serve(model, time_of, 100, choices=(1, 2), noise=0.01)
    assert chosen[2] >= 80


def test_fewer_threads_are_compared_now_and_then_although_more_pay():
    model = ThreadModel()
    serve(model, lambda threads: 1 / threads, 50, choices=(1, 2))
    assert 5 <= serve(model, lambda threads: 1 / threads, 1000, choices=(1, 2))[1] <= 12
    serve(model, lambda threads: 1.0, 600, choices=(1, 2))  # the machine has changed
    assert model.best(64, (1, 2)) == 1


def test_a_worker_that_has_no_more_threads_is_asked_seldom():
    model, asked = ThreadModel(), 0
    for _ in range(1000):
        num_threads = model.choose(64, (1, 16))
        asked += num_threads == 16
        model.observe(64, num_threads, 1, 1.0)
    assert 3 <= asked <= 8


def test_size_classes_learn_apart():
    model = ThreadModel()
    serve(model, {1: 1.0, 2: 2.0}.__getitem__, 50, choices=(1, 2), num_tokens=12)
    serve(model, {1: 1.0, 2: 0.5}.__getitem__, 50, choices=(1, 2), num_tokens=200)
    assert (model.best(12, (1, 2)), model.best(200, (1, 2))) == (1, 2)
    assert [row["from_tokens"] for row in model.describe()] == [8, 8, 128, 128]


def test_only_choices_that_there_are_now_are_chosen():
    model = ThreadModel()
    serve(model, lambda threads: 1 / threads, 60)
    assert model.best(64, CHOICES) == 8
    assert model.choose(64, (1, 2)) == 2
    assert model.choose(64, (1,)) == 1
