import pytest

from launch.failure import StartFailure
from supervisor import Restarts


def test_the_first_restart_is_at_once_and_the_next_wait_longer():
    restarts = Restarts("worker 0")
    assert [restarts.delay_after("died", 0.1) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, 4.0]


def test_a_crash_loop_ends_with_the_last_reason():
    restarts = Restarts("worker 0")
    for _ in range(5):
        restarts.delay_after("died", 0.1)
    with pytest.raises(StartFailure, match=r"worker 0 keeps dying \(6 times\): at last it was killed by SIGILL"):
        restarts.delay_after("was killed by SIGILL", 0.1)


def test_a_child_that_has_served_for_a_while_starts_afresh():
    restarts = Restarts("worker 0")
    for _ in range(100):
        assert restarts.delay_after("was killed by SIGKILL", 5.0) == 0.0


def test_a_child_that_never_was_ready_is_given_up_sooner():
    restarts = Restarts("worker 0")
    restarts.delay_after("died", None)
    restarts.delay_after("died", None)
    with pytest.raises(StartFailure, match="3 times"):
        restarts.delay_after("died", None)
