"""The access log: one line for each finished request, at a bounded rate.

Owns the fields of such a line, and how many lines are written: requests that the server failed, slow requests and all
others have a budget each. What is left out is counted, and the number is logged every ten seconds. Nothing that a
client sent is logged, but for ids of a checked form: the route is a pattern of the table of routes, because a client
that confuses path and body puts a text into the path. `vecd.gateway.telemetry.on_finished` calls `on_finished` for
each request. docs/logs.md describes the fields.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.telemetry.tracing import trace_of
from vecd.gateway.types.config import GatewayConfig
from vecd.gateway.types.endpoints import Endpoint
from vecd.gateway.types.errors import HttpVersionNotSupported, NotImplementedByServer
from vecd.gateway.types.messages import HttpRequest
from vecd.gateway.types.timeline import Durations
from vecd.shm.logs import ACCESS, JSON
from vecd.shm.shared_metrics import Counter

log = logging.getLogger(ACCESS)

MAX_FAILURES_PER_S = 50.0
"""Lines of requests that the server failed."""
MAX_SLOW_PER_S = 10.0
SLOW_S = 5.0
"""A request that takes so long has a budget of its own."""
REPORT_EVERY_S = 10.0

_UNSUPPORTED = {NotImplementedByServer.status, HttpVersionNotSupported.status}
"""Statuses above 500 that say that the client's request is not one for this server, and nothing of its health."""

_LINES_DROPPED = Counter.LINES_DROPPED
_STAGES = tuple(field.removesuffix("_s") for field in Durations._fields if field != "total_s")
_STAGE_KEYS = tuple(f"{name}_ms" for name in _STAGES)
_NO_STAGES: dict[str, float | None] = dict.fromkeys(_STAGE_KEYS)
_SHORT = {
    "error": "error",
    "model": "model",
    "dialect": "api",
    "caller": "caller",
    "client": "client",
    "request_id": "id",
    "trace_id": "trace",
}
_HEAD_WIDTH = 40


class Bucket:
    """A token bucket: `rate` tokens a second, and as many as a second's at once."""

    __slots__ = ("_at", "_level", "_most", "_rate")

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._level = self._most = max(1.0, rate)
        self._at = 0.0

    def take(self, now: float) -> bool:
        level = self._level + (now - self._at) * self._rate
        if level > self._most:  # 0.1 µs faster than `min`
            level = self._most
        self._at = now
        has_token = level >= 1.0
        self._level = level - 1.0 if has_token else level
        return has_token


def _later(seconds: float, callback: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(seconds, callback)


class AccessLog:
    """Measured, on a busy machine: 0.4 µs for a request that is not logged, 50 µs for one that is."""

    def __init__(
        self,
        config: GatewayConfig,
        shared_metrics: SharedMetrics,
        endpoints: Sequence[Endpoint],
        call_later: Callable[[float, Callable[[], None]], object] = _later,
    ) -> None:
        """`endpoints`: by the index that timelines have."""
        self._endpoints = endpoints
        self._probes = frozenset(index for index, endpoint in enumerate(endpoints) if endpoint.is_probe)
        self._shared_metrics, self._counters = shared_metrics, shared_metrics.ours.counters
        self._call_later = call_later
        self._num_dropped = 0
        """Since the last report."""
        self._failures, self._slow = Bucket(MAX_FAILURES_PER_S), Bucket(MAX_SLOW_PER_S)
        self.change(config)

    def change(self, config: GatewayConfig) -> None:
        """Use another configuration. Call it once the root logger has its level."""
        self._rate = config.max_logged_requests_per_s
        self._others = Bucket(self._rate)
        self._is_json = config.log_format == JSON
        self._shows_clients = bool(config.trusted_proxies)
        self._is_on = self._rate > 0 and log.isEnabledFor(logging.INFO)

    def on_finished(self, status: int, request: HttpRequest, now: float) -> None:
        """A `vecd.gateway.telemetry.on_finished.Listener`."""
        timeline = request.timeline
        level = logging.INFO
        if status >= 500 and status not in _UNSUPPORTED:
            bucket = self._failures
            if timeline.endpoint not in self._probes:
                level = logging.WARNING
            elif status == 503 and not self._shared_metrics.was_ready:
                return  # the model is being loaded, and a probe is to find that out
        elif status < 400 and timeline.endpoint in self._probes:
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
            self._call_later(REPORT_EVERY_S, self.report_dropped)

    def report_dropped(self) -> None:
        """Log how many requests were not logged, if any."""
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
        fields = describe(status, request, self._endpoints[request.timeline.endpoint], now)
        if self._shows_clients:
            fields["client"] = request.client or None
        line = f"{request.method} {fields['route']} {status}" if self._is_json else render(fields)
        log.log(level, "%s", line, extra={"fields": fields})


def describe(status: int, request: HttpRequest, endpoint: Endpoint, now: float) -> dict[str, Any]:
    """The fields of a request that finished at `now`, by `time.monotonic`: always the same keys, None for what is not
    known or does not apply; and "model" where several are served and it is known."""
    timeline = request.timeline
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
        **({"model": timeline.model} if timeline.model else {}),
        "items": timeline.num_inputs if is_embedding else None,
        "tokens": timeline.num_tokens if is_embedding else None,
        "total_ms": _ms(now - began_at),
        **_stages_ms(request, now),
        "caller": timeline.principal or None,
        "request_id": request.request_id,
        "trace_id": trace.trace_id if trace is not None else None,
    }


def _stages_ms(request: HttpRequest, now: float) -> dict[str, float | None]:
    """The time of each stage; of a request that did not get its rows, of the stages that it came through."""
    timeline = request.timeline
    if timeline.is_embedded:
        return dict(zip(_STAGE_KEYS, map(_ms, timeline.durations(now)), strict=False))
    stages = _NO_STAGES.copy()
    if timeline.parsed_at:
        stages["parse_ms"] = _ms(timeline.parsed_at - timeline.arrived_at)
    if timeline.tokenized_at:
        stages["tokenize_ms"] = _ms(timeline.tokenized_at - timeline.entered_at)
    return stages


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def render(fields: dict[str, Any]) -> str:
    """The line as text: status, time and route in columns, then what is known, by name."""
    head = f"{fields['status']} {fields['total_ms']:9.1f} ms {fields['method']} {fields['route']}"
    parts = [head.ljust(_HEAD_WIDTH)]
    if fields["items"] is not None:
        parts.append(f"items={fields['items']} tokens={fields['tokens']}")
    parts += [f"{name}={ms:.1f}" for name in _STAGES if (ms := fields[f"{name}_ms"]) is not None]
    parts += [f"{name}={value}" for key, name in _SHORT.items() if (value := fields.get(key)) is not None]
    return " ".join(parts)
