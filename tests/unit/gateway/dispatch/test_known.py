"""What is remembered of inputs: which are kept for a while, which are poisonous, and what may be computed again."""

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from vecd.gateway.dispatch.known import KEPT_S, MAX_INPUTS, KnownInputs, RetryBudget, count_death, poisonous
from vecd.gateway.scheduling.queue import Deaths
from vecd.shm.control import InputDeaths, InputsCleared, Message, Quarantined

POISON, OTHER = b"\x0d\0\0\0", b"\x0e\0\0\0"
MAX_BATCH_TOKENS = 100


class Case:
    """What is known, on a clock of its own."""

    def __init__(self, key: bytes = b"key") -> None:
        self.now = 0.0
        self.reported: list[Message] = []
        self.known = KnownInputs(key, "m", self.reported.append, lambda: self.now)

    def reject(self, *inputs: bytes) -> None:
        for token_ids in inputs:
            self.known.note(Quarantined("m", self.known.digest(token_ids)))

    def die(self, *inputs: bytes) -> None:
        digests = [self.known.digest(token_ids) for token_ids in inputs]
        self.known.note(InputDeaths("m", digests, is_isolated=False, has_crashed=False))

    def clear(self, *inputs: bytes) -> None:
        self.known.note(InputsCleared("m", [self.known.digest(token_ids) for token_ids in inputs]))

    def num_deaths(self, token_ids: bytes) -> int | None:
        """None where the input is rejected."""
        [sequence] = queued = sequences(token_ids)
        return None if self.known.rejected(queued) else sequence.deaths.num if sequence.deaths else 0


def sequences(*inputs: bytes) -> list[Any]:
    return [SimpleNamespace(token_ids=ids, index=index, deaths=None, num_tokens=1) for index, ids in enumerate(inputs)]


def numbered(number: int) -> bytes:
    return number.to_bytes(4, "little")


@pytest.fixture
def case() -> Case:
    return Case()


def test_an_input_is_known_for_a_while_after_its_last_death(case):
    case.die(POISON)
    case.now = 0.5 * KEPT_S
    case.die(POISON, OTHER)
    case.now = 1.4 * KEPT_S
    assert (case.num_deaths(POISON), case.num_deaths(OTHER)) == (2, 1)
    case.now = 1.5 * KEPT_S
    assert (case.num_deaths(POISON), len(case.known)) == (0, 0)


def test_of_too_many_inputs_the_oldest_is_forgotten_that_is_not_rejected(case):
    case.reject(numbered(0))
    case.die(*map(numbered, range(1, MAX_INPUTS)))
    case.die(numbered(1), b"one more")
    assert len(case.known) == MAX_INPUTS
    assert [case.num_deaths(ids) for ids in (numbered(0), numbered(1), numbered(2), b"one more")] == [None, 2, 0, 1]
    case.reject(*map(numbered, range(1, MAX_INPUTS + 1)))
    assert len(case.known) == MAX_INPUTS
    assert [case.num_deaths(numbered(number)) for number in (0, 1, MAX_INPUTS)] == [0, None, None]


def test_what_is_rejected_is_refused_by_name_and_nothing_else(case):
    case.reject(POISON)
    asked = sequences(OTHER, POISON + OTHER, POISON, POISON)
    assert case.known.rejected(asked) == asked[2:]
    error = poisonous(8)
    assert str(error) == "'input[8]' ended its worker each time it ran"
    assert (error.status, error.code, dict(error.headers)) == (500, "poison_input", {"x-should-retry": "false"})


def test_what_is_rejected_stays_so_for_its_time_whatever_is_heard_of_it(case):
    case.reject(POISON)
    case.now = 0.5 * KEPT_S
    case.die(POISON)
    case.clear(POISON)
    assert case.num_deaths(POISON) is None
    case.now = KEPT_S
    assert case.num_deaths(POISON) == 0


def test_a_sequence_that_waits_keeps_deaths_that_were_cleared_until_its_input_is_rejected(case):
    case.die(POISON)
    case.die(POISON)
    waiting = sequences(POISON)
    assert case.known.rejected(waiting) == []
    case.clear(POISON)
    case.die(POISON)
    assert (case.known.rejected(waiting), waiting[0].deaths.num) == ([], 2)
    case.reject(POISON)
    assert case.known.rejected(waiting) == waiting


def test_a_death_of_a_sequence_that_remembers_others_ends_no_rejection(case):
    case.die(POISON)
    computing = sequences(POISON)
    case.known.rejected(computing)
    case.clear(POISON)
    case.reject(POISON)
    assert case.known.count_deaths(computing, has_crashed=False) == []
    assert case.num_deaths(POISON) is None
    assert case.known.rejected(computing) == computing


def test_a_digest_is_understood_by_whoever_has_the_key_and_says_nothing_to_others(case):
    theirs, stranger = Case(), Case(b"another")
    for each in (theirs, stranger):
        each.known.note(Quarantined("m", case.known.digest(POISON)))
    assert (theirs.num_deaths(POISON), stranger.num_deaths(POISON)) == (None, 0)


def test_nothing_is_hashed_while_nothing_is_known(case):
    untouchable: list[Any] = [object()]  # has no token ids to hash
    assert case.known.rejected(untouchable) == []
    case.known.clear(untouchable)
    case.die(POISON)
    with pytest.raises(AttributeError):
        case.known.rejected(untouchable)


# --- when deaths of workers lead to the rejection of an input -------------------------------------------------------


def deaths_until_rejected(*, has_crashed: bool, others_die: bool = False, in_company: int = 2) -> int:
    deaths, num_worker_deaths = Deaths(), 50
    for number in range(1, 100):
        num_worker_deaths += 2 if others_die else 1
        is_isolated = number > in_company
        assert deaths.must_run_alone == (number > 2)
        if count_death(deaths, is_isolated=is_isolated, has_crashed=has_crashed, num_worker_deaths=num_worker_deaths):
            return number
    raise AssertionError("never")


@pytest.mark.parametrize(
    ("has_crashed", "others_die", "in_company", "num_deaths"),
    [
        *((True, others_die, in_company, 3) for others_die in (False, True) for in_company in (0, 1, 2)),
        *((False, False, in_company, 5) for in_company in (0, 1, 2)),  # a kill may come from outside
        (False, True, 2, 10),  # where other workers die as well it is not the input for long
        (False, True, 0, 8),
    ],
)
def test_an_isolated_crash_is_enough_at_the_third_death_and_other_deaths_are_not(
    has_crashed, others_die, in_company, num_deaths
):
    until = deaths_until_rejected(has_crashed=has_crashed, others_die=others_die, in_company=in_company)
    assert until == num_deaths


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


@pytest.mark.parametrize("seed", range(10))
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


@pytest.mark.parametrize("seed", range(20))
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


# --- what lost work may be computed again ---------------------------------------------------------------------------


def test_it_starts_full_and_pays_no_more_than_it_has():
    budget = RetryBudget(MAX_BATCH_TOKENS)
    assert not budget.pay(1601), "which costs nothing"
    assert all(budget.pay(100) for _ in range(16))
    assert not budget.pay(1)


def test_two_tokens_done_pay_for_one_up_to_what_it_holds():
    budget = RetryBudget(MAX_BATCH_TOKENS)
    assert budget.pay(1600)
    budget.earn(100)
    assert budget.pay(50)
    assert not budget.pay(1)
    budget.earn(1_000_000)
    assert budget.num_tokens == 1600


def test_it_holds_as_much_for_each_worker_and_keeps_it_when_they_die():
    budget = RetryBudget(MAX_BATCH_TOKENS)
    assert budget.pay(600)
    budget.make_room_for(3)
    assert budget.num_tokens == 1000 + 2 * 1600
    budget.make_room_for(0)
    assert budget.num_tokens == 1000 + 2 * 1600
    budget.earn(1_000_000)
    assert budget.num_tokens == 3 * 1600
