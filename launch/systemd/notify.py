"""Notifies systemd that the server is ready, reloads, stops or is alive, and sends the line of `systemctl status`.

Owns the protocol of sd_notify(3). Sends nothing where the environment names no socket, and never raises. Removes the
variables, so that no child notifies in the service's place. `vecd.supervisor` decides when to send what.
"""

import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vecd.base.tasks import naming_limit

EXTEND_EVERY_S = 5.0
_EXTEND_BY_S = 30.0
_MAX_EXTENDED_S = 3600.0
"""The longest time to find the model, which may have to be fetched from the hub first."""
_MIN_INTERVAL_S = 0.05
_MAX_STATUS_CHARACTERS = 400
_MAX_UNSENT = 4


class Notifier:
    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        """`address`: a path, or a name after an @; empty: there is no listener. `watchdog_s`: the watchdog expects a
        notification at least this often; None: there is no watchdog."""
        self.watchdog_s = watchdog_s
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._status = ""
        self._unsent: deque[bytes] = deque(maxlen=_MAX_UNSENT)

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> "Notifier":
        """Side effect: removes the variables."""
        address = environ.pop("NOTIFY_SOCKET", "")
        watchdog_us, watchdog_pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        is_for_us = watchdog_pid in ("", str(os.getpid()))
        is_number = re.fullmatch("[0-9]{1,20}", watchdog_us) is not None
        watchdog_s = int(watchdog_us) / 1e6 if address and is_for_us and is_number else 0
        return cls(address, watchdog_s or None)

    @property
    def has_listener(self) -> bool:
        return bool(self._address)

    @property
    def interval_s(self) -> float:
        wanted_s = EXTEND_EVERY_S if self.watchdog_s is None else self.watchdog_s / 4
        return max(_MIN_INTERVAL_S, min(EXTEND_EVERY_S, wanted_s))

    def ready(self, status: str) -> None:
        """To be called after each reload, too, whatever its result."""
        self._send_surely(status, "READY=1")

    def status(self, status: str) -> None:
        """Send the line that `systemctl status` shows, unless it shows this one already."""
        if status != self._status and self.send(_status_line(status)):
            self._status = status

    def reloading(self, status: str) -> None:
        # systemd 253 and newer wants the time, by the clock of `clock_gettime(CLOCK_MONOTONIC)`.
        self._send_surely(status, "RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str, within_s: float) -> None:
        self._send_surely(status, "STOPPING=1", _extend(within_s))

    def alive(self) -> None:
        self.send("WATCHDOG=1")

    def extend(self) -> None:
        """To be called every EXTEND_EVERY_S while a start or a reload goes on: TimeoutStartSec= ends one that is
        silent."""
        self.send(_extend(_EXTEND_BY_S))

    @contextmanager
    def extending(self) -> Iterator[None]:
        """Call `extend` from a thread, while the block occupies this one; for an hour at most."""
        if not self.has_listener:
            yield
            return
        is_over = threading.Event()

        def extend() -> None:
            for _ in range(int(_MAX_EXTENDED_S / EXTEND_EVERY_S)):
                self.extend()
                if is_over.wait(EXTEND_EVERY_S):
                    return

        thread = threading.Thread(target=extend, name="extending", daemon=True)
        with naming_limit():
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _send_surely(self, status: str, *lines: str) -> None:
        """Send what must arrive: without it the service would stay starting or reloading. If systemd is too busy to
        take it, it is sent before the next message."""
        self._status = status
        self._unsent.append(_encoded(*lines, _status_line(status)))
        self.send()

    def send(self, *lines: str) -> bool:
        """Returns whether it was taken. Never waits: it runs in the supervisor's loop."""
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.connect(self._address)
                while self._unsent:
                    sock.send(self._unsent[0])
                    self._unsent.popleft()
                if lines:
                    sock.send(_encoded(*lines))
        except (OSError, ValueError):  # there is no listener, it is too busy, or the address is invalid
            return False
        return True


def _encoded(*lines: str) -> bytes:
    return "\n".join(lines).encode(errors="replace")


def _status_line(status: str) -> str:
    return "STATUS=" + " ".join(status.split())[:_MAX_STATUS_CHARACTERS]


def _extend(by_s: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(by_s * 1e6)}"


def serving(
    models: Sequence[tuple[str, int, int, str | None]],
    url: str,
    refused: str,
    others: Sequence[tuple[str, str]] = (),
) -> str:
    """The status line of a server that has been ready. `models`: for each that is loaded its name, how many of its
    workers are ready, of how many, and why there is no use in waiting for one, or None. `refused`: why the last reload
    was refused. `others`: name and state of each that is not loaded."""
    broken = [(name, why) for name, num_ready, _, why in models if why is not None and not num_ready]
    served = [model for model in models if (model[0], model[3]) not in broken]
    num_ready, num_workers = sum(model[1] for model in served), sum(model[2] for model in served)
    workers = f"{num_workers}" if num_ready == num_workers else f"{num_ready} of {num_workers}"
    plural = "" if workers == "1" else "s"
    parts = [f"Cannot serve {name}: {why}" for name, why in broken]
    if served:
        late = ", the others are being started" if num_ready < num_workers else ""
        names = ", ".join(model[0] for model in served)
        parts.insert(0, f"Serving {names} at {url}, {workers} worker{plural}{late}")
    if not models:
        parts = [f"Serving at {url}"]
    parts += [f"{name} is {state}" for name, state in others]
    return "; ".join([*parts, *([f"not reloaded: {refused}"] if refused else [])])


# Decides when only a restart of the whole server helps: systemd's watchdog is then no longer notified.
#
# `vecd.supervisor` asks before each notification; a supervisor that hangs sends none, and is restarted for that.
#
# A restart costs every connection and every running request, and for seconds not even `/health` responds. So it is the
# last resort for what the supervisor cannot repair. It restarts workers and gateways that die or hang by itself, in
# seconds. A restart does not repair a model whose files are broken: it would only take the responses of `/health` away.

MAX_WITHOUT_GATEWAY_S = 180.0
"""A gateway that hangs is killed after 10 s; its restart waits at most 30 s and has 60 s to start: two tries."""
_MARGIN_S = 60.0


@dataclass(frozen=True, slots=True)
class HealthSignals:
    has_gateway: bool
    can_serve: bool
    is_broken: bool
    """`/health` reports why there is no worker, and a start is tried again regularly."""


HEALTHY = HealthSignals(has_gateway=True, can_serve=True, is_broken=False)


class WatchdogState:
    def __init__(self, now: float, interval_s: float) -> None:
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
