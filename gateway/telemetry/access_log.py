"""One line for each request, and not more of them than anybody reads.

Owns what stands in such a line, and how many are written: so many a second of those that were answered, so many of
those that took long, and so many of those that the server failed, each with a budget of its own. What is left out is
counted, and told of every ten seconds. Never logs what a caller has sent, but for ids of a checked form: the route is a
pattern of `vecd.gateway.api.registry.ENDPOINTS`, because who mistakes the path for the body puts a text there.
`vecd.gateway.telemetry.on_finished` calls `note_over` for each request that is over, `vecd.gateway.main` makes and
changes it. docs/logs.md describes the fields.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from vecd.gateway.api.registry import ENDPOINTS
from vecd.gateway.telemetry.probes import PROBES
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.telemetry.tracing import trace_of
from vecd.gateway.types.config import GatewayConfig
from vecd.gateway.types.messages import HttpRequest
from vecd.shm.logs import ACCESS, JSON
from vecd.shm.shared_metrics import Counter

log = logging.getLogger(ACCESS)

MAX_FAILURES_PER_S = 50.0
"""Lines of requests answered with a status of 500 or above."""
MAX_SLOW_PER_S = 10.0
SLOW_S = 5.0
"""A request that takes so long is logged though others of its second have used up the rest."""
TELL_EVERY_S = 10.0

_LINES_DROPPED = Counter.LINES_DROPPED
_STAGES = ("parse", "tokenize", "queue", "compute", "encode")
_SHORT = {"error": "error", "dialect": "api", "caller": "caller", "request_id": "id", "trace_id": "trace"}
_HEAD_WIDTH = 40


class Bucket:
    """So many a second, and at once as many as a second's."""

    __slots__ = ("_at", "_level", "_most", "_rate")

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._level = self._most = max(1.0, rate)
        self._at = 0.0

    def take(self, now: float) -> bool:
        level = self._level + (now - self._at) * self._rate
        if level > self._most:
            level = self._most
        self._at = now
        if level < 1.0:
            self._level = level
            return False
        self._level = level - 1.0
        return True


def _later(seconds: float, callback: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(seconds, callback)


class AccessLog:
    """Measured, on a busy machine: 0.4 µs for a request that is not logged, 50 µs for one that is."""

    def __init__(
        self,
        config: GatewayConfig,
        shared_metrics: SharedMetrics,
        call_later: Callable[[float, Callable[[], None]], object] = _later,
    ) -> None:
        self._counters = shared_metrics.ours.counters
        self._call_later = call_later
        self._num_dropped = 0
        """Since they were told of last."""
        self._failures, self._slow = Bucket(MAX_FAILURES_PER_S), Bucket(MAX_SLOW_PER_S)
        self.change(config)

    def change(self, config: GatewayConfig) -> None:
        """Go by another configuration. Call it once the root logger has its level."""
        self._rate = config.max_logged_requests_per_s
        self._others = Bucket(self._rate)
        self._is_json = config.log_format == JSON
        self._is_on = self._rate > 0 and log.isEnabledFor(logging.INFO)

    def note_over(self, status: int, request: HttpRequest, now: float) -> None:
        """A `vecd.gateway.telemetry.on_finished.Listener`."""
        timeline = request.timeline
        level = logging.INFO
        if status >= 500:
            bucket, level = self._failures, logging.WARNING
        elif status < 400 and timeline.endpoint in PROBES:
            if log.isEnabledFor(logging.DEBUG):
                self._write(logging.DEBUG, status, request, now)
            return
        elif not self._is_on:
            return
        elif 0.0 < timeline.started_at < now - SLOW_S:
            bucket = self._slow
        else:
            bucket = self._others
        if bucket.take(now):
            self._write(level, status, request, now)
            return
        self._counters[_LINES_DROPPED] += 1
        self._num_dropped += 1
        if self._num_dropped == 1:
            self._call_later(TELL_EVERY_S, self.tell_dropped)

    def tell_dropped(self) -> None:
        """Say how many were not logged, if any."""
        if not self._num_dropped:
            return
        num, self._num_dropped = self._num_dropped, 0
        log.log(
            logging.INFO if self._rate > 0 else logging.WARNING,
            "%d requests were not logged: at most %g a second are, and of those that failed %g (--log-requests)",
            num, self._rate, MAX_FAILURES_PER_S,
            extra={"fields": {"event": "requests_not_logged", "count": num}},
        )  # fmt: skip

    def _write(self, level: int, status: int, request: HttpRequest, now: float) -> None:
        fields = describe(status, request, now)
        line = f"{request.method} {fields['route']} {status}" if self._is_json else render(fields)
        log.log(level, "%s", line, extra={"fields": fields})


def describe(status: int, request: HttpRequest, now: float) -> dict[str, Any]:
    """What is logged of a request that was over at `now`, by `time.monotonic`: always the same keys, None for what is
    not known, or does not apply."""
    timeline = request.timeline
    endpoint = ENDPOINTS[timeline.endpoint]
    trace = trace_of(request)
    began_at = timeline.arrived_at or timeline.started_at or now
    is_embedding = timeline.num_inputs > 0
    return {
        "event": "request",
        "method": request.method,
        "route": endpoint.route,
        "dialect": endpoint.dialect,
        "status": status,
        "error": timeline.error or None,
        "items": timeline.num_inputs if is_embedding else None,
        "tokens": timeline.num_tokens if is_embedding else None,
        "total_ms": _ms(now - began_at),
        **_stages_ms(request, now),
        "caller": timeline.principal or None,
        "request_id": request.request_id,
        "trace_id": trace.trace_id if trace is not None else None,
    }


def _stages_ms(request: HttpRequest, now: float) -> dict[str, float | None]:
    """Of a request that did not get its rows, those that it has come through."""
    timeline = request.timeline
    if timeline.is_embedded:
        durations = timeline.durations(now)
        return {f"{name}_ms": _ms(seconds) for name, seconds in zip(_STAGES, durations, strict=False)}
    stages: dict[str, float | None] = dict.fromkeys(f"{name}_ms" for name in _STAGES)
    if timeline.parsed_at:
        stages["parse_ms"] = _ms(timeline.parsed_at - timeline.arrived_at)
    if timeline.tokenized_at:
        stages["tokenize_ms"] = _ms(timeline.tokenized_at - timeline.entered_at)
    return stages


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def render(fields: dict[str, Any]) -> str:
    """The line for people: status, time and route in columns, the rest by name where there is any."""
    head = f"{fields['status']} {fields['total_ms']:9.1f} ms {fields['method']} {fields['route']}"
    parts = [head.ljust(_HEAD_WIDTH)]
    if fields["items"] is not None:
        parts.append(f"items={fields['items']} tokens={fields['tokens']}")
    parts += [f"{name}={ms:.1f}" for name in _STAGES if (ms := fields[f"{name}_ms"]) is not None]
    parts += [f"{name}={value}" for key, name in _SHORT.items() if (value := fields[key]) is not None]
    return " ".join(parts)
