"""Send the spans of finished requests to a collector, in the thread of OpenTelemetry's BatchSpanProcessor.

Owns the queue of finished requests and the connection to the collector (OTLP over HTTP, by OpenTelemetry's exporter).
Nothing in it waits in the event loop: a request is put on a bounded queue, and what it has too many of is dropped and
counted. A collector that is slow or missing costs spans, and one line of the log a minute. Imported by
`vecd.gateway.telemetry.tracing` alone, and only with `--otlp-endpoint`: OpenTelemetry takes 0.2 s to import, and is
installed by `vecd[otel]` only.
"""

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from vecd.gateway.telemetry.shared_metrics import GONE
from vecd.gateway.telemetry.spans import Facts, Finished, Span, span_of
from vecd.gateway.types.endpoints import Endpoint
from vecd.gateway.types.messages import HttpRequest
from vecd.gateway.types.timeline import Trace

log = logging.getLogger("vecd.spans")

MAX_WAITING = 4096
"""Requests on the queue. Each is a few hundred bytes."""
_BATCH = 128
"""Requests sent at a time: a thousand spans, half a megabyte."""
_SEND_EVERY_MS = 1000.0
_MAX_SHARE = 0.2
"""Of a core, for making and encoding spans: clients decide how much is traced, and the event loop needs the core."""
_COMPLAIN_EVERY_S = 60.0
_TRACES_PATH = "/v1/traces"
_NS = 1_000_000_000
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def traces_url(url: str) -> str:
    """Where a collector takes traces; `url` as OTEL_EXPORTER_OTLP_ENDPOINT has it, with or without /v1/traces."""
    url = url.rstrip("/")
    return url if url.endswith(_TRACES_PATH) else url + _TRACES_PATH


class SpanSender:
    """The queue of finished requests."""

    def __init__(self, url: str, facts: Facts, endpoints: Sequence[Endpoint]) -> None:
        """`url`: of a collector. `endpoints`: by the index that timelines have.

        Raises RuntimeError where no more threads can be started. Side effect: a thread is started.
        """
        self._exporter = _RequestExporter(traces_url(url), facts, endpoints)
        self._processor = BatchSpanProcessor(
            self._exporter, MAX_WAITING, schedule_delay_millis=_SEND_EVERY_MS, max_export_batch_size=_BATCH
        )
        self._context = SpanContext(1, 1, False, _SAMPLED)
        self._num_added = 0

    @property
    def num_waiting(self) -> int:
        return self._num_added - self._exporter.num_taken

    def add(self, status: int, request: HttpRequest, trace: Trace, now: float) -> None:
        """Queue a request that finished at `now`, by `time.monotonic`. Never waits."""
        if self.num_waiting >= MAX_WAITING or self._exporter.is_shut_down:
            self._exporter.num_dropped += 1
            return
        self._num_added += 1
        finished = Finished(
            status, request.method, request.request_id, request.is_admin, request.http_minor, request.timeline, trace,
            now, self._context,
        )  # fmt: skip
        # The queue is of whole requests: to make their spans here would take the event loop 50 µs for each request.
        self._processor.on_end(cast(ReadableSpan, finished))

    def close(self, timeout_s: float) -> None:
        """Send what is queued, for at most `timeout_s`; the rest is lost."""
        self._exporter.closing.set()
        # In a thread, because it waits for up to 30 s, and takes no other limit.
        thread = threading.Thread(target=self._processor.shutdown, name="spans-shutdown", daemon=True)
        with suppress(RuntimeError):  # no more threads: what is queued is lost
            thread.start()
            thread.join(timeout_s)
        self._exporter.shutdown()


class _RequestExporter(SpanExporter):
    """Makes spans of finished requests and sends them. `export` runs in the processor's thread."""

    def __init__(self, endpoint: str, facts: Facts, endpoints: Sequence[Endpoint]) -> None:
        self._facts, self._endpoints = facts, endpoints
        self.num_taken = self.num_dropped = 0
        """Requests, taken from the queue, and dropped before it. Each has one writer, and only grows."""
        self._num_dropped_before = 0
        self.closing = threading.Event()
        self.is_shut_down = False
        self._losses = _Losses(endpoint)
        # What the exporter and the libraries below it would log of each failure is told with the losses, once a minute.
        noisy = logging.getLogger("opentelemetry")
        noisy.propagate = False
        noisy.handlers = [self._losses]
        logging.getLogger("urllib3").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._scope = InstrumentationScope("vecd", facts.version)
        # The environment (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) has precedence.
        self._resource = Resource.create(_resource(facts)).merge(OTELResourceDetector().detect())

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        requests = cast(Sequence[Finished], spans)
        began_at, result = time.thread_time(), SpanExportResult.FAILURE
        self.num_taken += len(requests)
        if not self.is_shut_down:
            try:
                result = self._exporter.export([span for request in requests for span in self._spans(request)])
            except Exception as error:  # a bug of the exporter must not be logged with the spans it was given
                self._losses.reason = f"unexpected {type(error).__name__}"
        num_dropped = self.num_dropped
        num_lost = num_dropped - self._num_dropped_before
        self._num_dropped_before = num_dropped
        self._losses.add(num_lost + (0 if result is SpanExportResult.SUCCESS else len(requests)))
        self.closing.wait((time.thread_time() - began_at) * (1 / _MAX_SHARE - 1))
        return result

    def shutdown(self) -> None:
        """Give up what is being sent. May be called again."""
        if not self.is_shut_down:
            self.is_shut_down = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _spans(self, request: Finished) -> list[ReadableSpan]:
        trace = request.trace
        trace_id = int(trace.trace_id, 16)
        state = TraceState.from_header([trace.state]) if trace.state else None
        # From one clock to the other, once for all spans of a request: so they fit into one another.
        offset_ns = time.time_ns() - time.monotonic_ns()
        made: list[ReadableSpan] = []

        def make(span: Span, parent: SpanContext | None, **attributes: Any) -> None:
            context = SpanContext(trace_id, random.getrandbits(64) or 1, False, _SAMPLED, state)
            for inner in span.spans:
                make(inner, context)
            made.append(
                ReadableSpan(
                    span.name, context, parent, self._resource, span.attributes, instrumentation_scope=self._scope,
                    start_time=int(span.began_at * _NS) + offset_ns, end_time=int(span.ended_at * _NS) + offset_ns,
                    **attributes,
                )
            )  # fmt: skip

        parent = None
        if trace.parent_id:
            parent = SpanContext(trace_id, int(trace.parent_id, 16), True, TraceFlags(trace.flags), state)
        is_error = request.status >= 500 or request.status == GONE
        status = Status(StatusCode.ERROR if is_error else StatusCode.UNSET)
        whole = span_of(request, self._endpoints[request.timeline.endpoint], self._facts)
        make(whole, parent, kind=SpanKind.SERVER, status=status)
        return made


class _Losses(logging.Handler):
    """How many requests have lost their spans, and why: a line at most once a minute."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._logged_at = float("-inf")
        self._num_lost = 0
        """Since the last line."""
        self.reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.reason = record.getMessage()[:300]

    def add(self, num_lost: int) -> None:
        self._num_lost += num_lost
        now = time.monotonic()
        if not self._num_lost or now - self._logged_at < _COMPLAIN_EVERY_S:
            return
        log.warning(
            "spans of %d requests did not get to %s: %s",
            self._num_lost, self._endpoint, self.reason or "more than can be sent",
        )  # fmt: skip
        self._logged_at, self._num_lost, self.reason = now, 0, ""


def _resource(facts: Facts) -> dict[str, Any]:
    return {
        "service.name": "vecd",
        "service.version": facts.version,
        "service.instance.id": str(uuid4()),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "vecd.gateway": facts.gateway,
    }
