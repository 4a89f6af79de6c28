"""When only a new server helps, and when it does not."""

from dataclasses import replace

import pytest

from vecd.launch.systemd.notify import HEALTHY, MAX_WITHOUT_GATEWAY_S, HealthSignals, WatchdogState

START_TIMEOUT_S = 100.0
NO_GATEWAY = HealthSignals(has_gateway=False, can_serve=False, is_broken=False)
NO_WORKER = HealthSignals(has_gateway=True, can_serve=False, is_broken=False)
BROKEN = HealthSignals(has_gateway=True, can_serve=False, is_broken=True)
INTERVAL_S = 5.0


@pytest.mark.parametrize(
    ("health_signals", "seconds", "reason"),
    [
        (HEALTHY, 0, ""),
        (NO_GATEWAY, MAX_WITHOUT_GATEWAY_S, ""),
        (NO_GATEWAY, MAX_WITHOUT_GATEWAY_S + 1, "no gateway has sent a heartbeat for 181 s"),
        (replace(NO_GATEWAY, is_broken=True), MAX_WITHOUT_GATEWAY_S + 1, "no gateway has sent a heartbeat for 181 s"),
        (NO_WORKER, 260, ""),
        (NO_WORKER, 261, "no worker has been able to serve for 261 s, for an unknown reason"),
        (BROKEN, 261, ""),
    ],
)
def test_the_rule(health_signals, seconds, reason):
    watchdog_state = WatchdogState(0, interval_s=seconds)  # the next call is in time
    assert watchdog_state.why_restart(health_signals, seconds, START_TIMEOUT_S) == reason


def restarted_after(*health_signals: tuple[HealthSignals, float]) -> float | None:
    """Seconds until a new server is asked for, with these signs for so many seconds each."""
    now, watchdog_state = 1000.0, WatchdogState(1000.0, INTERVAL_S)
    for sign, seconds in health_signals:
        end = now + seconds
        while now < end:
            now += INTERVAL_S
            if watchdog_state.why_restart(sign, now, START_TIMEOUT_S):
                return now - 1000.0
    return None


def test_gateways_and_workers_that_come_back_in_time_again_and_again():
    assert (
        restarted_after(*[(NO_GATEWAY, 170), (HEALTHY, INTERVAL_S), (NO_WORKER, 250), (HEALTHY, INTERVAL_S)] * 20)
        is None
    )


def test_what_comes_after_a_broken_model_has_its_time():
    assert restarted_after((BROKEN, 1000), (NO_WORKER, 255)) is None


def test_time_without_a_gateway_is_not_the_workers_fault():
    assert restarted_after((NO_WORKER, 200), (NO_GATEWAY, 100), (NO_WORKER, 200), (HEALTHY, 5)) is None


def test_while_the_supervisor_was_stopped_nobody_could_be_heard():
    watchdog_state = WatchdogState(0, INTERVAL_S)
    assert not watchdog_state.why_restart(NO_GATEWAY, 100, START_TIMEOUT_S)
    assert not watchdog_state.why_restart(NO_GATEWAY, 100_000, START_TIMEOUT_S)
    assert not watchdog_state.why_restart(NO_WORKER, 100_005, START_TIMEOUT_S)
