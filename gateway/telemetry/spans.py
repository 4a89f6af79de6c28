"""Make the spans of finished requests, and send them to a collector, in the thread of OpenTelemetry's
BatchSpanProcessor.

No text, token id, vector or key is in a span, nor the path as the client wrote it. Nothing waits in the event loop: a
request is put on a bounded queue, and what it has too many of is dropped and counted. A collector that is slow or
missing costs spans, and one line of the log a minute. Imported only with `--otlp-endpoint`: OpenTelemetry takes 0.2 s
to import, and is installed by `vecd[otel]` only.
"""

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, cast
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from vecd.base.files import JsonMapping, JsonObject
from vecd.gateway.config import GatewayConfig
from vecd.gateway.request import NO_ROUTE, Endpoint, HttpRequest, RequestTimeline, Trace
from vecd.gateway.telemetry.measures import GONE

log = logging.getLogger("vecd.spans")

MAX_WAITING = 4096
"""Requests on the queue. Each is a few hundred bytes."""
_BATCH = 128
"""Requests sent at a time: a thousand spans, half a megabyte."""
_SEND_EVERY_MS = 1000.0
_MAX_SHARE = 0.2
"""Of a core, for making and encoding spans: clients decide how much is traced, and the event loop needs the core."""
_COMPLAIN_EVERY_S = 60.0
_ADMISSION_S = 0.001
"""A request that waited so long for its admission has a span for it."""
_NS = 1_000_000_000
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def traces_url(url: str) -> str:
    """Where a collector takes traces; `url` as OTEL_EXPORTER_OTLP_ENDPOINT has it, with or without /v1/traces."""
    return url.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"


class _Finished(NamedTuple):
    """A finished request, without its headers and body."""

    status: int
    request: HttpRequest
    trace: Trace
    at: float
    """By `time.monotonic`."""
    context: SpanContext = SpanContext(1, 1, False, _SAMPLED)
    """For OpenTelemetry's queue alone: the same for all, and sampled."""


class SpanSender(SpanExporter):
    """The queue of finished requests, and the exporter that OpenTelemetry's processor passes them to in its thread."""

    def __init__(
        self, config: GatewayConfig, gateway: int, address: tuple[str, int | None], endpoints: Sequence[Endpoint]
    ) -> None:
        """`config` has the URL of a collector. `gateway`: this one's index. `address`: host and port of the public
        listener, or its path and None. `endpoints`: by the index that timelines have.

        Raises RuntimeError where no more threads can be started. Side effect: a thread is started.
        """
        url = traces_url(config.otlp_endpoint)
        self._config, self._address, self._endpoints = config, address, endpoints
        self._num_added = self._num_taken = self._num_dropped = 0
        """Requests, put on the queue, taken from it, and dropped before it. Each has one writer, and only grows."""
        self._num_dropped_before = 0
        self._closing = threading.Event()
        self._is_shut_down = False
        self._losses = _Losses(url)
        # What the exporter and the libraries below it would log of each failure is told with the losses, once a minute.
        noisy = logging.getLogger("opentelemetry")
        noisy.propagate = False
        noisy.handlers = [self._losses]
        logging.getLogger("urllib3").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._scope = InstrumentationScope("vecd", config.version)
        # The environment (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) has precedence.
        of_server: JsonObject = {
            "service.name": "vecd",
            "service.version": config.version,
            "service.instance.id": str(uuid4()),
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
            "vecd.gateway": gateway,
        }
        self._resource = Resource.create(of_server).merge(OTELResourceDetector().detect())
        self._processor = BatchSpanProcessor(
            self, MAX_WAITING, schedule_delay_millis=_SEND_EVERY_MS, max_export_batch_size=_BATCH
        )

    @property
    def num_waiting(self) -> int:
        return self._num_added - self._num_taken

    # --- called on the event loop ---------------------------------------------------------------------------

    def add(self, status: int, request: HttpRequest, trace: Trace, now: float) -> None:
        """Queue a request that finished at `now`, by `time.monotonic`. Never waits."""
        if self.num_waiting >= MAX_WAITING:
            self._num_dropped += 1
            return
        self._num_added += 1
        finished = _Finished(status, replace(request, headers={}, body=b"", choice=None), trace, now)
        # The queue is of whole requests: to make their spans here would take the event loop 50 µs for each request.
        self._processor.on_end(cast(ReadableSpan, finished))

    def close(self, timeout_s: float) -> None:
        """Send what is queued, for at most `timeout_s`; the rest is lost."""
        self._closing.set()
        # In a thread, because it waits for up to 30 s, and takes no other limit.
        thread = threading.Thread(target=self._processor.shutdown, name="spans-shutdown", daemon=True)
        with suppress(RuntimeError):  # no more threads: what is queued is lost
            thread.start()
            thread.join(timeout_s)
        self.shutdown()

    # --- called in the processor's thread -------------------------------------------------------------------

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        requests = cast(Sequence[_Finished], spans)
        began_at, result = time.thread_time(), SpanExportResult.FAILURE
        self._num_taken += len(requests)
        if not self._is_shut_down:
            try:
                result = self._exporter.export([span for request in requests for span in self._spans(request)])
            except Exception as error:  # a bug of the exporter must not be logged with the spans it was given
                self._losses.reason = f"unexpected {type(error).__name__}"
        num_dropped = self._num_dropped
        num_lost = num_dropped - self._num_dropped_before
        self._num_dropped_before = num_dropped
        self._losses.add(num_lost + (0 if result is SpanExportResult.SUCCESS else len(requests)))
        self._closing.wait((time.thread_time() - began_at) * (1 / _MAX_SHARE - 1))
        return result

    def shutdown(self) -> None:
        """Give up what is being sent. May be called again."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _spans(self, finished: _Finished) -> list[ReadableSpan]:
        """The span of a request, and before it those of the stages that it came through, and of their batches."""
        request, trace, finished_at = finished.request, finished.trace, finished.at
        timeline = request.timeline
        trace_id = int(trace.trace_id, 16)
        state = TraceState.from_header([trace.state]) if trace.state else None
        # From one clock to the other, once for all spans of a request: so they fit into one another.
        offset_ns = time.time_ns() - time.monotonic_ns()
        spans: list[ReadableSpan] = []

        def context() -> SpanContext:
            return SpanContext(trace_id, random.getrandbits(64) or 1, False, _SAMPLED, state)

        def add(
            own: SpanContext, parent: SpanContext | None, name: str, began_at: float, ended_at: float,
            attributes: JsonMapping | None = None, **more: Any,
        ) -> None:  # fmt: skip
            start_time, end_time = int(began_at * _NS) + offset_ns, int(ended_at * _NS) + offset_ns
            spans.append(
                ReadableSpan(
                    name, own, parent, self._resource, attributes, instrumentation_scope=self._scope,
                    start_time=start_time, end_time=end_time, **more,
                )
            )  # fmt: skip

        whole = context()
        for name, began_at, ended_at in _stages(timeline, finished_at):
            stage = context()
            if name == "compute":
                for batch in timeline.batches or ():
                    of_batch = {
                        "vecd.worker": batch.worker,
                        "vecd.batch": batch.number,
                        "vecd.batch.sequences": batch.num_sequences,
                        "vecd.batch.tokens": batch.num_tokens,
                        "vecd.batch.compute_ms": batch.compute_us / 1e3,
                    }
                    add(context(), stage, f"worker {batch.worker} batch", batch.sent_at, batch.done_at, of_batch)
            add(stage, whole, name, began_at, ended_at)
        parent = None
        if trace.parent_id:
            parent = SpanContext(trace_id, int(trace.parent_id, 16), True, TraceFlags(trace.flags), state)
        endpoint = self._endpoints[timeline.endpoint]
        name = request.method if endpoint is NO_ROUTE else f"{request.method} {endpoint.route}"
        attributes = self._of_request(finished.status, request, endpoint)
        is_error = finished.status >= 500 or finished.status == GONE
        status = Status(StatusCode.ERROR if is_error else StatusCode.UNSET)
        began_at = timeline.started_at or finished_at
        add(whole, parent, name, began_at, finished_at, attributes, kind=SpanKind.SERVER, status=status)
        return spans

    def _of_request(self, status: int, request: HttpRequest, endpoint: Endpoint) -> JsonObject:
        """The attributes of a request's span, by OpenTelemetry's conventions for HTTP servers and generative AI, and
        ours. None of them is what a client sent, but for the request's id."""
        timeline, (host, port) = request.timeline, self._address
        has_tls = self._config.tls_cert is not None and not request.is_admin
        attributes: JsonObject = {
            "http.request.method": request.method,
            "url.scheme": request.scheme or ("https" if has_tls else "http"),
            "network.protocol.version": f"1.{request.http_minor}",
            "server.address": host,
            "vecd.request_id": request.request_id,
            "vecd.dialect": endpoint.dialect,
        }
        if endpoint is not NO_ROUTE:
            attributes["http.route"] = attributes["url.path"] = endpoint.route
        if status != GONE:
            attributes["http.response.status_code"] = status
        if port is not None and not request.is_admin:
            attributes["server.port"] = port
        if status == GONE:
            attributes["error.type"] = "client_gone"
        elif status >= 400:
            attributes["error.type"] = timeline.error or str(status)
        if timeline.principal:
            attributes["vecd.caller"] = timeline.principal
        if timeline.num_inputs:
            attributes |= {
                "gen_ai.operation.name": "embeddings",
                "gen_ai.request.model": timeline.model or self._config.model,
                "gen_ai.usage.input_tokens": timeline.num_tokens,
                "vecd.inputs": timeline.num_inputs,
            }
        return attributes


def _stages(timeline: RequestTimeline, finished_at: float) -> Iterator[tuple[str, float, float]]:
    """The stages that a request came through: the name of each, its beginning and end, by `time.monotonic`."""
    if timeline.parsed_at:
        yield "parse", timeline.arrived_at, timeline.parsed_at
    if timeline.entered_at - timeline.parsed_at >= _ADMISSION_S:
        yield "admission", timeline.parsed_at, timeline.entered_at
    if timeline.tokenized_at:
        yield "tokenize", timeline.entered_at, timeline.tokenized_at
    if timeline.is_embedded:
        # The first batches of a large request are computed while its rest is tokenized: then nothing was queued.
        yield "queue", min(timeline.tokenized_at, timeline.sent_at), timeline.sent_at
        yield "compute", timeline.sent_at, timeline.done_at
        yield "encode", timeline.done_at, finished_at


class _Losses(logging.Handler):
    """How many requests have lost their spans, and why: a line at most once a minute."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
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
            self._num_lost, self._url, self.reason or "more than can be sent",
        )  # fmt: skip
        self._logged_at, self._num_lost, self.reason = now, 0, ""
