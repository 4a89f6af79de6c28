import random
from collections import Counter

import pytest

from vecd.gateway.scheduling.cores import Cores
from vecd.gateway.scheduling.thread_model import ThreadModel

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
@pytest.mark.parametrize("seed", range(5))
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
