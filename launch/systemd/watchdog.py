"""Whether the server is so far gone that only a new one helps: then systemd is not told any more that it is alive.

Owns that rule, as a pure function, and the time that it goes by. Asked by `supervisor` each time that it could say so;
one that does not come to ask hangs, and is restarted for that.

A restart costs every connection and every request under way, and for seconds there is nobody who could even say what is
wrong. So it is for what the supervisor cannot mend by itself. Workers and gateways that die or hang it does mend, in
seconds; and a model whose files are broken is broken in the next life, too, which would only take the answers
of `/health` away.
"""

from dataclasses import dataclass

MAX_WITHOUT_GATEWAY_S = 180.0
"""A gateway that hangs is killed after 10 s, the next life waits 30 s at most and has 60 s to start: two tries."""
_MARGIN_S = 60.0


@dataclass(frozen=True, slots=True)
class HealthSignals:
    """What the supervisor sees of its server at a moment."""

    hears_gateway: bool
    """One of them at least is ready, and has beaten lately."""
    can_serve: bool
    """A gateway that is heard has an answer from a worker that is not stuck."""
    is_broken: bool
    """It is known why there is no worker, `/health` says so, and it is tried again now and then."""


HEALTHY = HealthSignals(hears_gateway=True, can_serve=True, is_broken=False)


def why_restart(without_gateway_s: float, without_worker_s: float, *, is_broken: bool, start_timeout_s: float) -> str:
    """Why a new server is needed; "" while it is not.

    `without_gateway_s` is how long no gateway has been heard of, `without_worker_s` how long none of them could serve;
    `start_timeout_s` is how long a worker may take to start, and before it the fork server.
    """
    if without_gateway_s > MAX_WITHOUT_GATEWAY_S:
        return f"no gateway has been heard of for {without_gateway_s:.0f} s"
    max_without_worker_s = 2 * start_timeout_s + _MARGIN_S
    if without_worker_s > max_without_worker_s and not is_broken:
        return f"no worker can serve for {without_worker_s:.0f} s, and it is not known why"
    return ""


class WatchdogState:
    """How long the signs have been bad."""

    def __init__(self, now: float, interval_s: float) -> None:
        """`now` in seconds; `interval_s` is how often it will be asked."""
        self._asked_at = self._heard_at = self._served_at = now
        self._interval_s = interval_s

    def why_restart(self, health_signals: HealthSignals, now: float, start_timeout_s: float) -> str:
        away_s = now - self._asked_at - 2 * self._interval_s
        self._asked_at = now
        if away_s > 0:  # this process was stopped, or the machine: nobody could be heard meanwhile
            self._heard_at += away_s
            self._served_at += away_s
        if health_signals.hears_gateway:
            self._heard_at = now
        # Without a gateway nobody can say of a worker that it serves; that is the gateways' time, not theirs.
        if health_signals.can_serve or health_signals.is_broken or not health_signals.hears_gateway:
            self._served_at = now
        return why_restart(
            now - self._heard_at,
            now - self._served_at,
            is_broken=health_signals.is_broken,
            start_timeout_s=start_timeout_s,
        )
