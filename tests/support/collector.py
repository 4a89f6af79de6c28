"""A collector of OpenTelemetry spans, as far as a test needs one: takes OTLP over HTTP and keeps what it is sent."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    start_ns: int
    end_ns: int
    kind: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]

    def encloses(self, other: "Span") -> bool:
        return self.start_ns <= other.start_ns <= other.end_ns <= self.end_ns


@dataclass
class Collector:
    url: str
    spans: list[Span] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    """That it answers with."""

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        found = [
            _span(span, _values(of_resource.resource.attributes))
            for of_resource in message.resource_spans
            for scope in of_resource.scope_spans
            for span in scope.spans
        ]
        self.bodies.append(body)
        self.headers.append(headers)
        self.spans += found


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces" and collector.status == 200:
                collector.take(body, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(collector.status if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _span(span: trace_pb2.Span, resource: dict[str, Any]) -> Span:
    return Span(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        state=span.trace_state,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        kind=span.kind,
        status=span.status.code,
        attributes=_values(span.attributes),
        resource=resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: AnyValue) -> Any:
    which = value.WhichOneof("value")
    assert which is not None
    return getattr(value, which)
