"""Spans of finished requests, made and sent to a collector by a thread of its own.

Owns what a span is called and says, the queue of what is to be made into spans, and the connection to the collector
(OTLP over HTTP, by OpenTelemetry's own exporter). Nothing of it waits in the event loop: a request is put on a bounded
queue and forgotten. A collector that is slow, or not there, costs spans, which are counted, and a line a minute. No
text, token id, vector or key is in a span, nor the path as the caller wrote it.

`vecd.gateway.telemetry.tracing` hands requests over, `vecd.gateway.main` starts and closes it. OpenTelemetry is
imported by the thread: it takes 0.2 s, and is not there without `vecd[otel]`, which `vecd.launch.config.plan` has
looked for.
"""

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from vecd.gateway.api.registry import ENDPOINTS
from vecd.gateway.telemetry.shared_metrics import GONE
from vecd.gateway.types.endpoints import NO_ROUTE
from vecd.gateway.types.messages import HttpRequest
from vecd.gateway.types.timeline import RequestTimeline, Trace

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger("vecd.spans")

MAX_WAITING = 4096
"""Requests. Each is a few hundred bytes."""
_BATCH = 128
"""Requests sent at a time: a thousand spans, half a megabyte."""
_SEND_EVERY_S = 1.0
_MAX_SHARE = 0.2
"""Of a core, for making spans: what is too much for that is dropped."""
_COMPLAIN_EVERY_S = 60.0
_TRACES_PATH = "/v1/traces"
_NS = 1_000_000_000
_DOOR_S = 0.001
"""A request that waited for so long to be let in has a span for it."""


class Facts(NamedTuple):
    """What all spans of a gateway have in common."""

    version: str
    model: str
    gateway: int
    scheme: str
    address: str
    port: int | None


class Finished(NamedTuple):
    """A request that is over, without its headers and body."""

    status: int
    method: str
    request_id: str
    is_admin: bool
    http_minor: int
    timeline: RequestTimeline
    trace: Trace
    finished_at: float
    """By `time.monotonic`."""


class Part(NamedTuple):
    """A span within a request, by `time.monotonic`."""

    name: str
    began_at: float
    ended_at: float
    attributes: dict[str, Any]
    parts: Sequence["Part"] = ()


class SpanSender:
    """The queue, and the thread that empties it."""

    def __init__(self, endpoint: str, facts: Facts) -> None:
        """`endpoint`: a collector's URL, as OTEL_EXPORTER_OTLP_ENDPOINT has it; /v1/traces is added where it is not
        there. Side effect: the thread is started."""
        self.endpoint = endpoint if endpoint.rstrip("/").endswith(_TRACES_PATH) else endpoint.rstrip("/") + _TRACES_PATH
        self._facts = facts
        self._waiting: deque[Finished] = deque()
        self._num_dropped = 0
        self._is_due = threading.Event()
        self._closing = threading.Event()
        self._has_given_up = False
        self._exporter: Any = None
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(self, status: int, request: HttpRequest, trace: Trace, now: float) -> None:
        """Never waits."""
        if len(self._waiting) >= MAX_WAITING or self._has_given_up:
            self._num_dropped += 1
            return
        finished = Finished(
            status,
            request.method,
            request.request_id,
            request.is_admin,
            request.http_minor,
            request.timeline,
            trace,
            now,
        )
        self._waiting.append(finished)
        if len(self._waiting) == _BATCH:
            self._is_due.set()

    def close(self, timeout_s: float) -> None:
        """Send what waits, for at most so long; the rest is lost."""
        self._closing.set()
        self._is_due.set()
        self._thread.join(timeout_s)
        self._has_given_up = True
        if self._exporter is not None:
            self._exporter.shutdown()

    # --- the thread ---

    def _run(self) -> None:
        complaints = _Complaints(self.endpoint)
        try:
            maker = _SpanMaker(self._facts)
            self._exporter = _make_exporter(self.endpoint, complaints)
        except Exception as error:
            log.error("no spans are sent: OpenTelemetry cannot be used: %s", type(error).__name__, exc_info=True)
            self._has_given_up = True
            self._waiting.clear()
            return
        while not self._has_given_up:
            is_last = self._closing.is_set()
            began_at = time.thread_time()
            self._send(maker, complaints)
            if is_last and not self._waiting:
                break
            self._pause(time.thread_time() - began_at)

    def _pause(self, worked_s: float) -> None:
        """Until there is something to do, and so long that the event loop, who shares a core with this thread, has the
        most of it: callers decide how much is traced."""
        rest_until = time.monotonic() + worked_s * (1 / _MAX_SHARE - 1)
        if len(self._waiting) < _BATCH and not self._closing.is_set():
            self._is_due.wait(_SEND_EVERY_S)
        self._is_due.clear()
        self._closing.wait(max(0.0, rest_until - time.monotonic()))

    def _send(self, maker: "_SpanMaker", complaints: "_Complaints") -> None:
        finished = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
        if finished:
            try:
                spans = maker.make(finished)
                is_sent = self._exporter.export(spans).name == "SUCCESS"
            except Exception as error:  # an exporter's bug must not end this thread
                is_sent, complaints.why = False, f"unexpected {type(error).__name__}"
            if not is_sent:
                complaints.num_lost += len(finished)
        complaints.num_lost += self._num_dropped
        self._num_dropped = 0
        complaints.tell()


class _Complaints(logging.Handler):
    """What is wrong with the collector, once a minute. Takes what the exporter would log of each failure."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._told_at = float("-inf")
        self.num_lost = 0
        """Requests, since it was told last."""
        self.why = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.why = record.getMessage()[:300]

    def tell(self) -> None:
        now = time.monotonic()
        if not self.num_lost or now - self._told_at < _COMPLAIN_EVERY_S:
            return
        log.warning(
            "spans of %d requests did not get to %s: %s",
            self.num_lost, self._endpoint, self.why or "more than can be sent",
        )  # fmt: skip
        self._told_at, self.num_lost, self.why = now, 0, ""


def _make_exporter(endpoint: str, complaints: _Complaints) -> Any:
    """Side effect: what the exporter and the libraries below it would log is heard by `complaints` alone."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    noisy = logging.getLogger("opentelemetry")
    noisy.propagate = False
    noisy.handlers = [complaints]
    logging.getLogger("urllib3").setLevel(logging.CRITICAL)
    return OTLPSpanExporter(endpoint=endpoint)


class _SpanMaker:
    """Finished requests → spans, by OpenTelemetry's SDK, whose clock and sampler are not used."""

    def __init__(self, facts: Facts) -> None:
        """Raises ImportError without the packages."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        made: list[ReadableSpan] = []

        class Collect(SpanProcessor):
            def on_end(self, span: "ReadableSpan") -> None:
                made.append(span)

        class Ids(RandomIdGenerator):
            """The trace that begins here has got its id already: it is in the log."""

            trace_id = 0

            def generate_trace_id(self) -> int:
                return self.trace_id

        self._facts = facts
        self._made = made
        self._ids = Ids()
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            # What the environment says (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) comes before what is said here.
            resource=Resource.create(_resource(facts)).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        provider.add_span_processor(Collect())
        self._tracer = provider.get_tracer("vecd", facts.version)

    def make(self, finished: Sequence[Finished]) -> "list[ReadableSpan]":
        self._made.clear()
        for request in finished:
            self._make(request)
        return list(self._made)

    def _make(self, request: Finished) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        # From the one clock to the other, once for all spans of a request: they fit into one another.
        offset_ns = time.time_ns() - time.monotonic_ns()
        endpoint = ENDPOINTS[request.timeline.endpoint]
        self._ids.trace_id = int(request.trace.trace_id, 16)
        whole = whole_of(request)
        span = self._tracer.start_span(
            request.method if endpoint is NO_ROUTE else f"{request.method} {endpoint.route}",
            _parent(request.trace),
            kind=SpanKind.SERVER,
            attributes=describe(request, self._facts),
            start_time=_epoch_ns(whole.began_at, offset_ns),
        )
        if request.status >= 500 or request.status == GONE:
            span.set_status(Status(StatusCode.ERROR))
        self._add_parts(whole.parts, set_span_in_context(span), offset_ns)
        span.end(_epoch_ns(whole.ended_at, offset_ns))

    def _add_parts(self, parts: Sequence[Part], context: "Context", offset_ns: int) -> None:
        from opentelemetry.trace import set_span_in_context

        for part in parts:
            span = self._tracer.start_span(
                part.name, context, attributes=part.attributes, start_time=_epoch_ns(part.began_at, offset_ns)
            )
            self._add_parts(part.parts, set_span_in_context(span), offset_ns)
            span.end(_epoch_ns(part.ended_at, offset_ns))


def _epoch_ns(at: float, offset_ns: int) -> int:
    return int(at * _NS) + offset_ns


def _parent(trace: Trace) -> "Context":
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    if not trace.parent_id:
        return Context()
    state = TraceState.from_header([trace.state]) if trace.state else None
    span_context = SpanContext(
        int(trace.trace_id, 16), int(trace.parent_id, 16), True, TraceFlags(trace.flags), state
    )  # fmt: skip
    return set_span_in_context(NonRecordingSpan(span_context), Context())


def _resource(facts: Facts) -> dict[str, Any]:
    return {
        "service.name": "vecd",
        "service.version": facts.version,
        "service.instance.id": str(uuid4()),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "vecd.gateway": facts.gateway,
    }


# --- what is said -------------------------------------------------------------------------------------------------


def describe(request: Finished, facts: Facts) -> dict[str, Any]:
    """The attributes of a request's span, by OpenTelemetry's conventions for HTTP servers and generative AI, and ours.
    None of them is what a caller wrote, but for the request's id."""
    timeline = request.timeline
    endpoint = ENDPOINTS[timeline.endpoint]
    attributes: dict[str, Any] = {
        "http.request.method": request.method,
        "url.scheme": "http" if request.is_admin else facts.scheme,
        "network.protocol.version": f"1.{request.http_minor}",
        "server.address": facts.address,
        "vecd.request_id": request.request_id,
        "vecd.dialect": endpoint.dialect,
    }
    if endpoint is not NO_ROUTE:
        attributes["http.route"] = attributes["url.path"] = endpoint.route
    if request.status != GONE:
        attributes["http.response.status_code"] = request.status
    if facts.port is not None and not request.is_admin:
        attributes["server.port"] = facts.port
    if request.status == GONE:
        attributes["error.type"] = "client_gone"
    elif request.status >= 400:
        attributes["error.type"] = timeline.error or str(request.status)
    if timeline.principal:
        attributes["vecd.caller"] = timeline.principal
    if timeline.num_inputs:
        attributes |= {
            "gen_ai.operation.name": "embeddings",
            "gen_ai.request.model": facts.model,
            "gen_ai.usage.input_tokens": timeline.num_tokens,
            "vecd.inputs": timeline.num_inputs,
        }
    return attributes


def whole_of(request: Finished) -> Part:
    """The request and the stages that it came through, each within the one that it is a part of."""
    timeline, finished_at = request.timeline, request.finished_at
    began_at = timeline.started_at or finished_at
    parts = []
    if timeline.parsed_at:
        parts.append(Part("parse", timeline.arrived_at, timeline.parsed_at, {}))
    if timeline.entered_at - timeline.parsed_at >= _DOOR_S:
        parts.append(Part("door", timeline.parsed_at, timeline.entered_at, {}))
    if timeline.tokenized_at:
        parts.append(Part("tokenize", timeline.entered_at, timeline.tokenized_at, {}))
    if timeline.is_embedded:
        # Of a large request, the first is computed while the last is tokenized: it has not waited then.
        parts.append(Part("queue", min(timeline.tokenized_at, timeline.sent_at), timeline.sent_at, {}))
        parts.append(Part("compute", timeline.sent_at, timeline.done_at, {}, _batches(timeline)))
        parts.append(Part("encode", timeline.done_at, finished_at, {}))
    return Part("", began_at, finished_at, {}, parts)


def _batches(timeline: RequestTimeline) -> list[Part]:
    return [
        Part(
            f"worker {batch.worker} batch",
            batch.sent_at,
            batch.done_at,
            {
                "vecd.worker": batch.worker,
                "vecd.batch": batch.number,
                "vecd.batch.sequences": batch.num_sequences,
                "vecd.batch.tokens": batch.num_tokens,
                "vecd.batch.compute_ms": batch.compute_us / 1e3,
            },
        )
        for batch in timeline.batches or ()
    ]
