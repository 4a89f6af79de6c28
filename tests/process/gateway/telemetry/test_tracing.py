"""Which requests are traced, and the spans that a collector gets of them."""

import logging
import socket
import sys
import threading
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.collector import Collector, Span
from tests.support.dispatching import finished_requests, private_metrics
from tests.support.serving import eventually
from vecd.gateway.app.table import ENDPOINTS
from vecd.gateway.config import GatewayConfig
from vecd.gateway.request import BatchShare, Endpoint, HttpRequest, Trace
from vecd.gateway.telemetry.finished import make_sender, parse_traceparent, trace_of
from vecd.gateway.telemetry.measures import GONE
from vecd.gateway.telemetry.spans import MAX_WAITING, SpanSender, traces_url

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"
SERVER, ERROR = 2, 2
"""Source: opentelemetry/proto/trace/v1/trace.proto, SPAN_KIND_SERVER and STATUS_CODE_ERROR."""


def sender_to(url: str) -> SpanSender:
    return SpanSender(config(url), 0, ("127.0.0.1", 8000), ENDPOINTS)


def config(url: str | None) -> GatewayConfig:
    fields = {"version": "1.2.3", "model": "a-model", "tls_cert": None, "otlp_endpoint": url, "trace_ratio": 1}
    return cast(GatewayConfig, SimpleNamespace(**fields))


def endpoint(route: str, dialect: str = "vecd") -> int:
    return ENDPOINTS.index(Endpoint(route, dialect))


def embedded(**headers: str) -> HttpRequest:
    """An embedding request as it is before it is handled; `finish` tells its record how it went."""
    return HttpRequest(
        method="POST", path="/secret-path", query=b"secret-query", headers={"host": "secret-host", **headers},
        http_minor=1, keep_alive=True, request_id="req_1", body=b"secret text",
    )  # fmt: skip


def finish(request: HttpRequest, now: float) -> None:
    record = request.timeline
    record.endpoint = endpoint("/v1/embeddings", "openai")
    record.started_at, record.arrived_at, record.parsed_at = now - 0.012, now - 0.011, now - 0.010
    record.entered_at, record.tokenized_at = now - 0.0095, now - 0.009
    record.sent_at, record.done_at = now - 0.008, now - 0.001
    record.num_inputs, record.num_tokens, record.principal = 3, 41, "acme"
    if record.batches is not None:
        record.batches += [
            BatchShare(0, 7, now - 0.008, now - 0.003, 4500, 16, 300),
            BatchShare(1, 8, now - 0.007, now - 0.001, 5500, 8, 200),
        ]


# --- the header -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        (SAMPLED, 1),
        (UNSAMPLED, 0),
        (f"00-{TRACE_ID}-{PARENT_ID}-ff", 3),
        (f"cc-{TRACE_ID}-{PARENT_ID}-01-what-comes-later", 1),
    ],
)
def test_a_trace_is_understood(header, flags):
    assert parse_traceparent(header) == Trace(TRACE_ID, PARENT_ID, flags)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
        f"00-{TRACE_ID[:-1]}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{PARENT_ID}-0x",
        f"00-{TRACE_ID}-{PARENT_ID}-01-more",
        f"01-{TRACE_ID}-{PARENT_ID}-01more",
        f"00-{TRACE_ID}-{PARENT_ID}-01\n",
        f" {SAMPLED}",
        f"{SAMPLED}, {SAMPLED}",  # sent twice
        f"00-{TRACE_ID[:-1]}٣-{PARENT_ID}-01",
    ],
)
def test_what_is_no_trace_is_ignored(header):
    assert parse_traceparent(header) is None


@given(st.one_of(st.text(), st.text("0123456789abcdef-", max_size=60)), st.text())
def test_no_header_is_an_error(header, state):
    trace = parse_traceparent(header, state)
    assert trace is None or (len(trace.trace_id) == 32 and len(trace.parent_id) == 16)


def test_a_state_is_passed_on_unless_it_is_too_long():
    assert parse_traceparent(SAMPLED, "a=1") == Trace(TRACE_ID, PARENT_ID, 1, "a=1")
    assert parse_traceparent(SAMPLED, "a=" + "1" * 511) == Trace(TRACE_ID, PARENT_ID, 1, "")


# --- the decision ---------------------------------------------------------------------------------------------------


class Queue(SpanSender):
    """Sends nothing."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []

    def add(self, status: int, request: HttpRequest, trace: Trace, now: float) -> None:
        self.traces.append(trace)

    def close(self, timeout_s: float) -> None:
        pass


def traced(ratio: float, request: HttpRequest, route: int | None = None) -> list[Trace]:
    """What becomes of a request that is handled."""
    queue = Queue()
    tracing = finished_requests(private_metrics(), ratio, queue)
    request.timeline.started_at = 1.0
    tracing.begin_trace(request)
    record = request.timeline
    assert (record.batches is not None) == (record.trace is not None and record.trace.is_sampled)
    request.timeline.endpoint = endpoint("/v1/embeddings", "openai") if route is None else route
    tracing.on_finished(200, request)
    return queue.traces


def test_the_caller_s_flag_decides():
    assert traced(0, embedded(traceparent=SAMPLED)) == [Trace(TRACE_ID, PARENT_ID, 1)]
    assert traced(1, embedded(traceparent=UNSAMPLED)) == []


def test_without_a_trace_the_ratio_decides():
    assert traced(0, embedded()) == []
    [trace] = traced(1, embedded())
    assert (len(trace.trace_id), trace.parent_id, trace.is_sampled) == (32, "", True)
    [other] = traced(1, embedded(traceparent="00-nonsense"))
    assert other.trace_id != trace.trace_id
    num_traced = sum(bool(traced(0.5, embedded())) for _ in range(400))
    assert 100 < num_traced < 300


def test_a_trace_that_begins_here_is_in_the_log():
    request = embedded()
    [trace] = traced(1, request)
    assert trace_of(request) == trace


def test_probes_have_a_trace_only_if_they_come_with_one():
    health = endpoint("/health")
    assert traced(1, embedded(), health) == []
    assert len(traced(0, embedded(traceparent=SAMPLED), health)) == 1


def test_a_request_that_is_refused_by_its_head_is_traced_too():
    queue = Queue()
    tracing = finished_requests(private_metrics(), 1, queue)
    for header in (SAMPLED, UNSAMPLED, "nonsense"):
        tracing.on_finished(413, embedded(traceparent=header))
    tracing.on_finished(413, embedded())
    assert [trace.parent_id for trace in queue.traces] == [PARENT_ID, ""]


# --- what a collector gets ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def collector():
    with Collector() as made:
        yield made


@pytest.fixture
def sender(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.version=9")
    made = sender_to(collector.url)
    yield made
    made.close(10)


def sent(sender: SpanSender, collector: Collector, *requests: tuple[int, HttpRequest]) -> list[Span]:
    """The spans of finished requests."""
    num_before = len(collector.spans)
    for status, request in requests:
        trace = trace_of(request)
        assert trace is not None
        sender.add(status, request, trace, time.monotonic())
    sender.close(20)
    return collector.spans[num_before:]


def traced_request(state: str = "", **headers: str) -> HttpRequest:
    request = embedded(traceparent=SAMPLED, tracestate=state, **headers)
    request.timeline.trace = trace_of(request)
    request.timeline.batches = []
    finish(request, time.monotonic())
    return request


def test_the_spans_of_a_request(sender, collector):
    before = time.time_ns()
    found = sent(sender, collector, (200, traced_request("vendor=1")))
    whole, *_ = [span for span in found if span.kind == SERVER]
    by_name = {span.name: span for span in found}
    assert list(by_name) == [
        "parse", "tokenize", "queue", "worker 0 batch", "worker 1 batch", "compute", "encode", "POST /v1/embeddings",
    ]  # fmt: skip
    assert {span.trace_id for span in found} == {TRACE_ID}
    assert (whole.parent_id, whole.state, whole.status) == (PARENT_ID, "vendor=1", 0)
    stages = [by_name[name] for name in ("parse", "tokenize", "queue", "compute", "encode")]
    assert {span.parent_id for span in stages} == {whole.span_id}
    assert all(whole.encloses(span) for span in stages)
    assert [span.start_ns for span in stages] == sorted(span.start_ns for span in stages)
    assert all(one.end_ns <= next_one.start_ns for one, next_one in pairwise(stages))
    assert before - 10**9 < whole.start_ns < whole.end_ns <= time.time_ns()
    assert round((by_name["compute"].end_ns - by_name["compute"].start_ns) / 1e6, 2) == 7.0
    for worker in range(2):
        batch = by_name[f"worker {worker} batch"]
        assert batch.parent_id == by_name["compute"].span_id
        assert by_name["compute"].encloses(batch)
    assert by_name["worker 1 batch"].attributes == {
        "vecd.worker": 1, "vecd.batch": 8, "vecd.batch.sequences": 8, "vecd.batch.tokens": 200,
        "vecd.batch.compute_ms": 5.5,
    }  # fmt: skip
    assert whole.attributes == {
        "http.request.method": "POST", "http.route": "/v1/embeddings", "url.path": "/v1/embeddings",
        "url.scheme": "http", "network.protocol.version": "1.1", "server.address": "127.0.0.1", "server.port": 8000,
        "http.response.status_code": 200, "vecd.request_id": "req_1", "vecd.dialect": "openai", "vecd.caller": "acme",
        "gen_ai.operation.name": "embeddings", "gen_ai.request.model": "a-model", "gen_ai.usage.input_tokens": 41,
        "vecd.inputs": 3,
    }  # fmt: skip


def test_the_model_that_answered_a_trace_that_begins_here_and_a_state_that_is_not_well_formed(sender, collector):
    requests = of_another, begun_here, _ = traced_request(), traced_request(), traced_request("=,;what a mess=")
    of_another.timeline.model = "another"
    begun_here.timeline.trace = Trace("1" * 32, "", 1)
    found = sent(sender, collector, *((200, request) for request in requests))
    first, second, third = (span for span in found if span.kind == SERVER)
    assert first.attributes["gen_ai.request.model"] == "another"
    assert (second.trace_id, second.parent_id) == ("1" * 32, "")
    assert third.state == ""


def test_who_sends_them_is_said_by_the_server_and_before_that_by_the_environment(sender, collector, monkeypatch):
    [*_, span] = sent(sender, collector, (200, traced_request()))
    said = span.resource
    assert (said["service.name"], said["service.version"], said["vecd.gateway"]) == ("vecd", "9", 0)
    assert said["deployment.environment"] == "test"
    assert said["service.instance.id"]
    assert collector.headers[-1]["x-token"] == "abc"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "search")
    [*_, span] = sent(sender_to(collector.url), collector, (200, traced_request()))
    assert span.resource["service.name"] == "search"


def test_failures(sender, collector):
    refused, failed, gone, lost = (embedded(traceparent=SAMPLED) for _ in range(4))
    now = time.monotonic()
    for request, error in ((refused, "invalid_request_error"), (failed, "internal_error"), (gone, ""), (lost, "x")):
        finish(request, now)
        record = request.timeline
        record.done_at = record.sent_at = record.tokenized_at = record.entered_at = 0.0
        record.error = error
    lost.timeline.endpoint = lost.timeline.parsed_at = lost.timeline.started_at = 0
    statuses = ((400, refused), (500, failed), (GONE, gone), (404, lost))
    spans = [span for span in sent(sender, collector, *statuses) if span.kind == SERVER]
    assert [(span.attributes.get("error.type"), span.status) for span in spans] == [
        ("invalid_request_error", 0), ("internal_error", ERROR), ("client_gone", ERROR), ("x", 0),
    ]  # fmt: skip
    assert "http.response.status_code" not in spans[2].attributes
    assert spans[3].name == "POST"
    assert "http.route" not in spans[3].attributes


def test_a_large_request_is_computed_while_it_is_tokenized(sender, collector):
    request = traced_request()
    record = request.timeline
    record.tokenized_at = record.sent_at + 0.004
    by_name = {span.name: span for span in sent(sender, collector, (200, request))}
    assert by_name["queue"].start_ns == by_name["queue"].end_ns == by_name["compute"].start_ns
    assert by_name["tokenize"].end_ns > by_name["compute"].start_ns


def test_a_request_that_waits_for_its_admission_has_a_span_for_it(sender, collector):
    request = traced_request()
    request.timeline.parsed_at -= 0.5
    request.timeline.arrived_at -= 0.5
    request.timeline.started_at -= 0.5
    spans = sent(sender, collector, (200, request))
    admission = next(span for span in spans if span.name == "admission")
    assert admission.end_ns - admission.start_ns > 4e8


def test_no_span_has_what_a_caller_wrote(sender, collector):
    sent(sender, collector, (200, traced_request(authorization="secret-key")), (404, traced_request()))
    assert collector.bodies
    assert not [body for body in collector.bodies if b"secret" in body]


# --- a collector that is not well -----------------------------------------------------------------------------------


def sending() -> list[threading.Thread]:
    """The threads that send spans."""
    return [thread for thread in threading.enumerate() if "BatchSpan" in thread.name]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    eventually(lambda: not sending())


def test_a_collector_that_is_not_there_costs_spans_and_one_line(caplog):
    with Collector() as gone:
        url = gone.url
    sender = sender_to(url)
    for _ in range(MAX_WAITING + 500):
        sender.add(200, embedded(), Trace(TRACE_ID, PARENT_ID, 1), 1.0)
    assert sender.num_waiting <= MAX_WAITING
    assert sending()
    sender.close(0.2)  # while it still tries
    eventually(lambda: not sending())
    eventually(lambda: bool(caplog.records))
    [record] = caplog.records
    assert (record.name, record.levelno) == ("vecd.spans", logging.WARNING)
    assert f"did not get to {url}/v1/traces: " in record.getMessage()


def test_a_collector_that_refuses_is_told_of_once_a_minute(caplog):
    with Collector() as refusing:
        refusing.status = 400
        sender = sender_to(refusing.url)
        sender.add(200, traced_request(), Trace(TRACE_ID, PARENT_ID, 1), 1.0)
        eventually(lambda: bool(caplog.records))
        sender.add(200, traced_request(), Trace(TRACE_ID, PARENT_ID, 1), 1.0)
        sender.close(10)
    [record] = caplog.records
    assert "spans of 1 requests did not get to" in record.getMessage()
    assert "400" in record.getMessage()


def test_a_collector_that_never_answers_holds_nobody_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = sender_to(f"http://127.0.0.1:{silent.getsockname()[1]}")
        sender.add(200, traced_request(), Trace(TRACE_ID, PARENT_ID, 1), 1.0)
        connection, _ = silent.accept()
        with connection:
            began_at = time.monotonic()
            sender.close(0.1)
            assert time.monotonic() - began_at < 5
            assert sending()
    eventually(lambda: not sending())


def test_without_the_packages_nothing_is_kept(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "vecd.gateway.telemetry.spans")
    assert make_sender(config("http://127.0.0.1:9"), 0, ("127.0.0.1", 8000), ENDPOINTS) is None
    assert "OpenTelemetry cannot be used: ModuleNotFoundError" in caplog.text


@pytest.mark.parametrize("url", ["http://x/otlp", "http://x/otlp/", "http://x/otlp/v1/traces"])
def test_where_spans_go(url):
    assert traces_url(url) == "http://x/otlp/v1/traces"
