"""What counts as proof against an input."""

from vecd.gateway.dispatch.crash_attribution import MAX_REMEMBERED, REMEMBERED_S, CrashAttribution
from vecd.gateway.types.deaths import Deaths


def deaths_until_guilty(*, has_crashed: bool, others_go_on: bool, in_company: int = 2) -> int:
    deaths, num_done = Deaths(), 0
    for number in range(1, 100):
        num_done += others_go_on
        is_alone = number > in_company
        assert deaths.must_run_alone == (number > 2)
        if deaths.count(is_alone=is_alone, has_crashed=has_crashed, num_done=num_done):
            return number
    raise AssertionError("never")


def test_a_crash_alone_is_proof_at_the_third_death():
    assert deaths_until_guilty(has_crashed=True, others_go_on=True) == 3
    assert deaths_until_guilty(has_crashed=True, others_go_on=False) == 3
    assert deaths_until_guilty(has_crashed=True, others_go_on=False, in_company=0) == 3


def test_a_kill_may_come_from_outside_and_proves_less():
    assert deaths_until_guilty(has_crashed=False, others_go_on=True) == 5
    assert deaths_until_guilty(has_crashed=False, others_go_on=True, in_company=0) == 3


def test_where_nobody_gets_on_it_is_not_the_input_for_long():
    assert deaths_until_guilty(has_crashed=False, others_go_on=False) == 7
    assert deaths_until_guilty(has_crashed=False, others_go_on=False, in_company=0) == 5


def test_deaths_in_company_never_condemn():
    deaths = Deaths()
    for num_done in range(100):
        assert not deaths.count(is_alone=False, has_crashed=True, num_done=num_done)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_deaths_are_remembered_for_a_while_after_the_last():
    clock = Clock()
    suspects = CrashAttribution(clock)
    deaths = suspects.record("a", None)
    clock.now = 0.5 * REMEMBERED_S
    assert suspects.record("a", None) is deaths
    suspects.record("b", None)
    clock.now = 1.4 * REMEMBERED_S
    assert suspects.find("a") is deaths
    clock.now = 1.5 * REMEMBERED_S
    assert suspects.find("a") is None
    assert len(suspects) == 0


def test_what_is_forgotten_begins_anew_but_a_request_remembers_its_own_deaths():
    suspects = CrashAttribution()
    deaths = suspects.record("a", None)
    suspects.forget("a")
    suspects.forget("never seen")
    assert suspects.find("a") is None
    assert suspects.record("a", deaths) is deaths
    assert suspects.find("a") is deaths


def test_of_too_many_suspects_the_one_with_the_oldest_death_is_forgotten():
    suspects = CrashAttribution()
    for number in range(MAX_REMEMBERED):
        suspects.record(str(number), None)
    suspects.record("0", None)
    suspects.record("one more", None)
    assert len(suspects) == MAX_REMEMBERED
    assert suspects.find("0") is not None
    assert suspects.find("1") is None
