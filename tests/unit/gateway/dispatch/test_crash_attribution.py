"""When deaths of workers lead to the rejection of an input."""

import random
from collections import deque

import pytest

from vecd.gateway.dispatch.crash_attribution import count_death
from vecd.gateway.scheduling.queue import Deaths


def deaths_until_rejected(*, has_crashed: bool, others_die: bool = False, in_company: int = 2) -> int:
    deaths, num_worker_deaths = Deaths(), 50
    for number in range(1, 100):
        num_worker_deaths += 2 if others_die else 1
        is_isolated = number > in_company
        assert deaths.must_run_alone == (number > 2)
        if count_death(deaths, is_isolated=is_isolated, has_crashed=has_crashed, num_worker_deaths=num_worker_deaths):
            return number
    raise AssertionError("never")


@pytest.mark.parametrize("others_die", [False, True])
@pytest.mark.parametrize("in_company", [0, 1, 2])
def test_an_isolated_crash_is_enough_at_the_third_death(in_company: int, others_die: bool):
    assert deaths_until_rejected(has_crashed=True, others_die=others_die, in_company=in_company) == 3


@pytest.mark.parametrize("in_company", [0, 1, 2])
def test_a_kill_may_come_from_outside_and_five_are_needed(in_company: int):
    assert deaths_until_rejected(has_crashed=False, in_company=in_company) == 5


def test_where_other_workers_die_as_well_it_is_not_the_input_for_long():
    assert deaths_until_rejected(has_crashed=False, others_die=True) == 10
    assert deaths_until_rejected(has_crashed=False, others_die=True, in_company=0) == 8


def test_deaths_in_company_alone_never_reject():
    deaths = Deaths()
    for number in range(100):
        assert not count_death(deaths, is_isolated=False, has_crashed=True, num_worker_deaths=number)


def test_after_many_deaths_in_company_three_isolated_ones_are_still_needed():
    """As when many copies of a harmless input are being computed, and all workers are killed at once."""
    deaths = Deaths()
    rejected = [
        count_death(deaths, is_isolated=number > 8, has_crashed=False, num_worker_deaths=number)
        for number in range(1, 12)
    ]
    assert rejected == [False] * 10 + [True]


@pytest.mark.parametrize("seed", range(50))
def test_an_input_that_ends_every_worker_is_rejected_after_five_deaths_and_ten_while_others_die(seed: int):
    """Whatever ends them, while one copy of it is computed at a time. In its first two deaths it may have been
    isolated or not."""
    dice = random.Random(seed)
    for _ in range(100):
        others_die = dice.random() < 0.5
        deaths, num_worker_deaths, num_deaths = Deaths(), 0, 0
        is_rejected = False
        while not is_rejected:
            num_deaths += 1
            num_worker_deaths += 1 + (dice.choice((0, 1, 3)) if others_die else 0)
            is_rejected = count_death(
                deaths,
                is_isolated=deaths.must_run_alone or dice.random() < 0.5,
                has_crashed=dice.random() < 0.2,
                num_worker_deaths=num_worker_deaths,
            )
        assert 3 <= num_deaths <= (10 if others_die else 5)


@pytest.mark.parametrize("seed", range(100))
def test_an_input_of_which_two_gateways_have_a_copy_each_ends_ten_workers_at_most(seed: int):
    """In any order of what dies and of what is told."""
    chance = random.Random(seed)
    for _ in range(20):
        assert 5 <= deaths_by_two_gateways(chance) <= 10


def deaths_by_two_gateways(chance: random.Random) -> int:
    """Each gateway is told of deaths of workers by the supervisor, and of those of the input by the other gateway."""
    deaths, num_worker_deaths, has_rejected = (Deaths(), Deaths()), [0, 0], [False, False]
    told: tuple[deque[str], deque[str]] = (deque(), deque())
    copies = ["waits", "waits"]
    num_deaths = 0
    for _ in range(1000):
        steps = [("told", at) for at in (0, 1) if told[at]]
        steps += [("waits", at) for at in (0, 1) if copies[at] == "waits" and not has_rejected[at]]
        steps += [("computed", at) for at in (0, 1) if copies[at] == "computed"]
        if not steps:
            return num_deaths
        step, at = chance.choice(steps)
        other = 1 - at
        if step == "waits":
            copies[at] = "computed"
        elif step == "computed":
            copies[at] = "lost"
            num_deaths += 1
            told[at].append("my worker died")
            told[other].append("a worker died")
        else:
            message = told[at].popleft()
            if message == "rejected":
                has_rejected[at] = True
                continue
            num_worker_deaths[at] += message != "the other's input died"
            if message == "a worker died":
                continue
            is_enough = count_death(
                deaths[at], is_isolated=True, has_crashed=False, num_worker_deaths=num_worker_deaths[at]
            )
            if message == "my worker died":
                copies[at] = "waits"
                told[other].append("the other's input died")
                if is_enough:
                    has_rejected[at] = True
                    told[other].append("rejected")
    raise AssertionError("it is never rejected")
