"""When deaths of workers lead to the rejection of an input."""

import random

import pytest

from vecd.gateway.dispatch.crash_attribution import MAX_REMEMBERED, REMEMBERED_S, CrashAttribution, count_death
from vecd.gateway.scheduling.deaths import Deaths


def deaths_until_rejected(*, has_crashed: bool, others_go_on: bool, in_company: int = 2) -> int:
    deaths, num_done = Deaths(), 0
    for number in range(1, 100):
        num_done += others_go_on
        is_isolated = number > in_company
        assert deaths.must_run_alone == (number > 2)
        if count_death(deaths, is_isolated=is_isolated, has_crashed=has_crashed, num_done=num_done):
            return number
    raise AssertionError("never")


def test_an_isolated_crash_is_enough_at_the_third_death():
    assert deaths_until_rejected(has_crashed=True, others_go_on=True) == 3
    assert deaths_until_rejected(has_crashed=True, others_go_on=False) == 3
    assert deaths_until_rejected(has_crashed=True, others_go_on=False, in_company=0) == 3


def test_a_kill_may_come_from_outside_and_proves_less():
    assert deaths_until_rejected(has_crashed=False, others_go_on=True) == 5
    assert deaths_until_rejected(has_crashed=False, others_go_on=True, in_company=0) == 3


def test_where_nobody_gets_on_it_is_not_the_input_for_long():
    assert deaths_until_rejected(has_crashed=False, others_go_on=False) == 5
    assert deaths_until_rejected(has_crashed=False, others_go_on=False, in_company=0) == 5


def test_deaths_in_company_alone_never_reject():
    deaths = Deaths()
    for num_done in range(100):
        assert not count_death(deaths, is_isolated=False, has_crashed=True, num_done=num_done)


def test_after_many_deaths_in_company_three_isolated_ones_are_still_needed():
    """As when many copies of a harmless input are being computed, and all workers are killed at once."""
    deaths = Deaths()
    for _ in range(8):
        assert not count_death(deaths, is_isolated=False, has_crashed=False, num_done=0)
    rejected = [count_death(deaths, is_isolated=True, has_crashed=False, num_done=0) for _ in range(3)]
    assert rejected == [False, False, True]


@pytest.mark.parametrize("seed", range(50))
def test_an_input_that_ends_every_worker_is_rejected_after_five_deaths_at_most(seed: int):
    """Whatever ends them, and whatever happens to others, while one copy of it is computed at a time. In its first
    two deaths it may have been isolated or not."""
    dice = random.Random(seed)
    for _ in range(200):
        deaths, num_done, num_deaths = Deaths(), 0, 0
        is_rejected = False
        while not is_rejected:
            num_deaths += 1
            num_done += dice.choice((0, 0, 1))
            is_isolated = deaths.must_run_alone or dice.random() < 0.5
            is_rejected = count_death(
                deaths, is_isolated=is_isolated, has_crashed=dice.random() < 0.3, num_done=num_done
            )
        assert 3 <= num_deaths <= 5


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_deaths_are_remembered_for_a_while_after_the_last():
    clock = Clock()
    attribution = CrashAttribution(clock)
    deaths = attribution.record("a", None)
    clock.now = 0.5 * REMEMBERED_S
    assert attribution.record("a", None) is deaths
    attribution.record("b", None)
    clock.now = 1.4 * REMEMBERED_S
    assert attribution.find("a") is deaths
    clock.now = 1.5 * REMEMBERED_S
    assert attribution.find("a") is None
    assert len(attribution) == 0


def test_what_is_forgotten_begins_anew_but_a_request_remembers_its_own_deaths():
    attribution = CrashAttribution()
    deaths = attribution.record("a", None)
    attribution.forget("a")
    attribution.forget("never seen")
    assert attribution.find("a") is None
    assert attribution.record("a", deaths) is deaths
    assert attribution.find("a") is deaths


def test_of_too_many_inputs_the_one_with_the_oldest_death_is_forgotten():
    attribution = CrashAttribution()
    for number in range(MAX_REMEMBERED):
        attribution.record(str(number), None)
    attribution.record("0", None)
    attribution.record("one more", None)
    assert len(attribution) == MAX_REMEMBERED
    assert attribution.find("0") is not None
    assert attribution.find("1") is None
