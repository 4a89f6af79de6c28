"""Decides when only a restart of the whole server helps: systemd's watchdog is then no longer notified.

Owns that rule, without a clock, and the times that it depends on. `vecd.supervisor` asks before each notification; a
supervisor that hangs sends none, and is restarted for that.

A restart costs every connection and every running request, and for seconds not even `/health` responds. So it is the
last resort for what the supervisor cannot repair. It restarts workers and gateways that die or hang by itself, in
seconds. A restart does not repair a model whose files are broken: it would only take the responses of `/health` away.
"""

from dataclasses import dataclass

MAX_WITHOUT_GATEWAY_S = 180.0
"""A gateway that hangs is killed after 10 s; its restart waits at most 30 s and has 60 s to start: two tries."""
_MARGIN_S = 60.0


@dataclass(frozen=True, slots=True)
class HealthSignals:
    """The state of the server, as the supervisor knows it."""

    has_gateway: bool
    """At least one gateway is ready and has sent a heartbeat lately."""
    can_serve: bool
    """Such a gateway is connected to a worker that is not stuck."""
    is_broken: bool
    """The reason why there is no worker is known and reported by `/health`, and a start is tried again regularly."""


HEALTHY = HealthSignals(has_gateway=True, can_serve=True, is_broken=False)


class WatchdogState:
    """For how long the health signals have been bad."""

    def __init__(self, now: float, interval_s: float) -> None:
        """`now` in seconds; `interval_s`: the time between two calls of `why_restart`."""
        self._called_at = self._gateway_at = self._served_at = now
        self._interval_s = interval_s

    def why_restart(self, health_signals: HealthSignals, now: float, start_timeout_s: float) -> str:
        """Why the server must be restarted; "" while it need not be. `start_timeout_s`: the time that a worker may take
        to start, and before it the fork server."""
        away_s = now - self._called_at - 2 * self._interval_s
        self._called_at = now
        if away_s > 0:  # this process was stopped, or the machine: it could receive no heartbeat
            self._gateway_at += away_s
            self._served_at += away_s
        if health_signals.has_gateway:
            self._gateway_at = now
        # Without a gateway no worker can serve: that time counts for the gateways, not for the workers.
        if health_signals.can_serve or health_signals.is_broken or not health_signals.has_gateway:
            self._served_at = now
        without_gateway_s, without_worker_s = now - self._gateway_at, now - self._served_at
        if without_gateway_s > MAX_WITHOUT_GATEWAY_S:
            return f"no gateway has sent a heartbeat for {without_gateway_s:.0f} s"
        if without_worker_s > 2 * start_timeout_s + _MARGIN_S:
            return f"no worker has been able to serve for {without_worker_s:.0f} s, for an unknown reason"
        return ""
