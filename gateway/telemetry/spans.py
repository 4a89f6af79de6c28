"""What the spans of a finished request are called, and what they say.

Pure: knows neither OpenTelemetry nor a collector. No text, token id, vector or key is in a span, nor the path as the
client wrote it. `vecd.gateway.telemetry.span_sender` sends them.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from vecd.gateway.telemetry.shared_metrics import GONE
from vecd.gateway.types.endpoints import NO_ROUTE, Endpoint
from vecd.gateway.types.timeline import RequestTimeline, Trace

_ADMISSION_S = 0.001
"""A request that waited so long for its admission has a span for it."""


class Facts(NamedTuple):
    """What all spans of a gateway have in common."""

    version: str
    model: str
    gateway: int
    scheme: str
    address: str
    port: int | None


class Finished(NamedTuple):
    """A finished request, without its headers and body."""

    status: int
    method: str
    request_id: str
    is_admin: bool
    http_minor: int
    timeline: RequestTimeline
    trace: Trace
    finished_at: float
    """By `time.monotonic`."""
    context: object
    """For OpenTelemetry's queue alone: the same for all, and sampled."""


class Span(NamedTuple):
    name: str
    began_at: float
    """By `time.monotonic`, as the next."""
    ended_at: float
    attributes: Mapping[str, Any] = MappingProxyType({})
    spans: Sequence["Span"] = ()
    """Those within it."""


def describe(request: Finished, endpoint: Endpoint, facts: Facts) -> dict[str, Any]:
    """The attributes of a request's span, by OpenTelemetry's conventions for HTTP servers and generative AI, and ours.
    None of them is what a client sent, but for the request's id."""
    timeline = request.timeline
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


def span_of(request: Finished, endpoint: Endpoint, facts: Facts) -> Span:
    """The span of a request; below it those of the stages that it came through, and of their batches."""
    timeline, finished_at = request.timeline, request.finished_at
    name = request.method if endpoint is NO_ROUTE else f"{request.method} {endpoint.route}"
    spans = []
    if timeline.parsed_at:
        spans.append(Span("parse", timeline.arrived_at, timeline.parsed_at))
    if timeline.entered_at - timeline.parsed_at >= _ADMISSION_S:
        spans.append(Span("admission", timeline.parsed_at, timeline.entered_at))
    if timeline.tokenized_at:
        spans.append(Span("tokenize", timeline.entered_at, timeline.tokenized_at))
    if timeline.is_embedded:
        # The first batches of a large request are computed while its rest is tokenized: then nothing was queued.
        spans.append(Span("queue", min(timeline.tokenized_at, timeline.sent_at), timeline.sent_at))
        spans.append(Span("compute", timeline.sent_at, timeline.done_at, spans=_batches(timeline)))
        spans.append(Span("encode", timeline.done_at, finished_at))
    attributes = describe(request, endpoint, facts)
    return Span(name, timeline.started_at or finished_at, finished_at, attributes, spans)


def _batches(timeline: RequestTimeline) -> list[Span]:
    return [
        Span(
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
