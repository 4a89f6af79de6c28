"""What becomes of finished requests: their counts, which are logged and traced, and what is said of them. No line has a
text, a token id, a vector or a key."""

import asyncio
import logging
import random
import re
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vecd.base.logs import ACCESS, JSON
from vecd.gateway.config import GatewayConfig
from vecd.gateway.errors import HttpVersionNotSupported, NotImplementedByServer
from vecd.gateway.request import IS_SAMPLED, Durations, Endpoint, HttpRequest, Trace
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.shm.shared_metrics import Counter

if TYPE_CHECKING:
    from vecd.gateway.telemetry.spans import SpanSender

# W3C's Trace Context. Source: https://www.w3.org/TR/trace-context/.

tracing_log = logging.getLogger("vecd.spans")

_HEADER = "traceparent"
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII | re.DOTALL)
_IS_RANDOM = 0x02
_MAX_STATE_CHARACTERS = 512


def parse_traceparent(header: str, state: str = "") -> Trace | None:
    """The client's trace; None where the header is not well-formed. Of a later version, the fields of this one."""
    match = _TRACEPARENT.fullmatch(header)
    if match is None:
        return None
    version, trace_id, parent_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if not trace_id.strip("0") or not parent_id.strip("0"):
        return None
    # Only these two flags are defined.
    known_flags = int(flags, 16) & (IS_SAMPLED | _IS_RANDOM)
    return Trace(trace_id, parent_id, known_flags, state if len(state) <= _MAX_STATE_CHARACTERS else "")


def trace_of(request: HttpRequest) -> Trace | None:
    """The one that the request came with, or that began with it."""
    trace: Trace | None = request.timeline.trace
    if trace is None and (header := request.headers.get(_HEADER)) is not None:
        trace = parse_traceparent(header, request.headers.get("tracestate", ""))
    return trace


def make_sender(
    config: GatewayConfig, gateway: int, address: tuple[str, int | None], endpoints: Sequence[Endpoint]
) -> "SpanSender | None":
    """What sends spans to the collector that `config` names, if it does. The arguments are those of `SpanSender`.
    Returns None, and logs an error, where OpenTelemetry cannot be used. Where the event loop runs, have a thread import
    `vecd.gateway.telemetry.spans` before: it takes 0.2 s."""
    if not config.otlp_endpoint:
        return None
    try:
        from vecd.gateway.telemetry.spans import SpanSender

        return SpanSender(config, gateway, address, endpoints)
    except Exception as error:
        tracing_log.error("no spans are sent: OpenTelemetry cannot be used: %s", type(error).__name__, exc_info=True)
        return None


access_log = logging.getLogger(ACCESS)
gateway_log = logging.getLogger("vecd.gateway")

MAX_FAILURES_PER_S = 50.0
"""Lines of requests that the server failed."""
MAX_SLOW_PER_S = 10.0
SLOW_S = 5.0
"""A request that takes so long has a budget of its own."""
REPORT_EVERY_S = 10.0

_UNSUPPORTED = {NotImplementedByServer.status, HttpVersionNotSupported.status}
"""Statuses above 500 that say that the client's request is not one for this server, and nothing of its health."""

_LINES_DROPPED = Counter.LINES_DROPPED  # Python 3.11 takes 0.2 µs to find a member of an enumeration
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
    """A token bucket: `rate` tokens a second, and those of one second at once."""

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


class FinishedRequests:
    """Counts the requests of one gateway once they are over, logs them and traces them. Measured, on a busy machine:
    5 µs for an embedding request that is counted, 50 µs more for one that is logged, 2.6 µs for one that is traced."""

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
        self._shared_metrics, self._counters = shared_metrics, shared_metrics.ours.own.counters
        self.sender: SpanSender | None = None
        """None: no request is traced."""
        self._call_later = call_later
        self._num_dropped = 0
        """Since the last report."""
        self._failures, self._slow = Bucket(MAX_FAILURES_PER_S), Bucket(MAX_SLOW_PER_S)
        self.change(config)

    def change(self, config: GatewayConfig) -> None:
        """Use another configuration. Call it once the root logger has its level."""
        self._trace_ratio = config.trace_ratio
        self._rate = config.log_requests
        self._others = Bucket(self._rate)
        self._is_json = config.log_format == JSON
        self._shows_clients = bool(config.trusted_proxies)
        self._is_on = self._rate > 0 and access_log.isEnabledFor(logging.INFO)

    def on_finished(self, status: int, request: HttpRequest | None) -> None:
        """A request has its response, or will have none (`vecd.gateway.telemetry.measures.GONE`). `request`: None where
        not even its head could be parsed; it is counted alone."""
        shared_metrics = self._shared_metrics
        if request is None:
            shared_metrics.add_answer(0, status)
            return
        timeline, now = request.timeline, time.monotonic()
        if timeline.model:
            shared_metrics = shared_metrics.counting(timeline.model)
        shared_metrics.add_answer(timeline.endpoint, status)
        if timeline.is_embedded and status < 300:
            shared_metrics.add_embedded(timeline.num_inputs, timeline.num_tokens, timeline.durations(now))
        try:
            self.log(status, request, now)
            if self.sender is not None:
                self._trace(self.sender, status, request, now)
        except Exception as error:  # raised from here, it would make the connection write a second response
            where = "".join(traceback.format_tb(error.__traceback__))
            gateway_log.error("an answered request cannot be logged or traced: %s\n%s", type(error).__name__, where)

    # --- traces ---------------------------------------------------------------------------------------------

    def begin_trace(self, request: HttpRequest) -> None:
        """Decide whether it is traced. From now on, the batches of one that is are noted on its timeline."""
        trace = trace_of(request) if _HEADER in request.headers else None
        if trace is None:
            if random.random() >= self._trace_ratio:
                return
            trace = Trace(f"{random.getrandbits(128) or 1:032x}", "", IS_SAMPLED | _IS_RANDOM)
        request.timeline.trace = trace
        if trace.is_sampled:
            request.timeline.batches = []

    def _trace(self, sender: "SpanSender", status: int, request: HttpRequest, now: float) -> None:
        timeline = request.timeline
        if timeline.batches is None:
            if timeline.started_at or _HEADER not in request.headers:
                return
            # Refused by its head alone, before `begin_trace`.
            self.begin_trace(request)
            if timeline.batches is None:
                return
        if timeline.trace is not None and (timeline.trace.parent_id or timeline.endpoint not in self._probes):
            sender.add(status, request, timeline.trace, now)

    # --- the access log -------------------------------------------------------------------------------------

    def log(self, status: int, request: HttpRequest, now: float) -> None:
        """Log a request that finished at `now`, if it is one of those that are logged."""
        timeline = request.timeline
        level = logging.INFO
        if status >= 500 and status not in _UNSUPPORTED:
            bucket = self._failures
            if timeline.endpoint not in self._probes:
                level = logging.WARNING
            elif status == 503 and not self._shared_metrics.was_ready:
                return  # the model is being loaded, and a probe is to find that out
        elif status < 400 and timeline.endpoint in self._probes:
            if access_log.isEnabledFor(logging.DEBUG):
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
        access_log.log(
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
        access_log.log(level, "%s", line, extra={"fields": fields})


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
    """Of a request that did not get its rows, of the stages that it came through."""
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
