import pytest

from vecd.launch.base.exit_codes import StartFailure
from vecd.launch.processes.backoff import Backoff


def test_the_first_restart_is_at_once_and_the_next_wait_longer():
    backoff = Backoff("worker 0")
    assert [backoff.delay_after("died", 0.1) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, 4.0]


def test_a_child_that_was_ready_once_is_never_given_up():
    backoff = Backoff("worker 0")
    delays = [backoff.delay_after("died", 0.1), *(backoff.delay_after("died", None) for _ in range(2000))]
    assert delays[0] == 0.0
    assert delays[-1] == 30.0


def test_a_child_that_has_served_for_a_while_starts_afresh():
    backoff = Backoff("worker 0")
    for _ in range(100):
        assert backoff.delay_after("was killed by SIGKILL", 5.0) == 0.0


def test_a_child_that_never_was_ready_is_given_up_sooner():
    backoff = Backoff("worker 0")
    backoff.delay_after("died", None)
    backoff.delay_after("died", None)
    with pytest.raises(StartFailure, match=r"worker 0 keeps dying \(3 times\): at last it was killed by SIGILL"):
        backoff.delay_after("was killed by SIGILL", None)
