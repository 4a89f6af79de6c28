"""A collector of OpenTelemetry spans, as far as a test needs one: takes OTLP over HTTP and keeps what it is sent."""

from collections.abc import Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.support.http_stub import Answer, StubServer


class Span:
    def __init__(self, span: trace_pb2.Span, resource: dict[str, Any]) -> None:
        self.name, self.kind, self.state, self.status = span.name, span.kind, span.trace_state, span.status.code
        self.trace_id, self.span_id = span.trace_id.hex(), span.span_id.hex()
        self.parent_id = span.parent_span_id.hex()
        self.start_ns, self.end_ns = span.start_time_unix_nano, span.end_time_unix_nano
        self.attributes, self.resource = _values(span.attributes), resource

    def encloses(self, other: "Span") -> bool:
        return self.start_ns <= other.start_ns <= other.end_ns <= self.end_ns


class Collector(StubServer):
    def __init__(self) -> None:
        super().__init__()
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        """That it answers with."""

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if path != "/v1/traces":
            return 404, b"", {}
        if self.status == 200:
            self.take(body, {name.lower(): value for name, value in headers.items()})
        return self.status, b"", {}

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        found = [
            Span(span, _values(of_resource.resource.attributes))
            for of_resource in message.resource_spans
            for scope in of_resource.scope_spans
            for span in scope.spans
        ]
        self.bodies.append(body)
        self.headers.append(headers)
        self.spans += found


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: AnyValue) -> Any:
    which = value.WhichOneof("value")
    assert which is not None
    return getattr(value, which)
