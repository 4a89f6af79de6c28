"""What stands in the line of a request, and which requests have one."""

import json
import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.dispatching import private_metrics
from vecd.base.logs import ACCESS, JsonFormatter, TextFormatter
from vecd.gateway.app.table import ENDPOINTS
from vecd.gateway.config import GatewayConfig
from vecd.gateway.http.reader import RequestReader
from vecd.gateway.request import Endpoint, HttpRequest
from vecd.gateway.request import Limits as HttpLimits
from vecd.gateway.telemetry.finished import (
    MAX_FAILURES_PER_S,
    MAX_SLOW_PER_S,
    SLOW_S,
    Bucket,
    FinishedRequests,
    describe,
    render,
)
from vecd.gateway.telemetry.measures import GONE, SharedMetrics
from vecd.shm.shared_metrics import Counter, Gauge

EMBEDDINGS = ENDPOINTS.index(Endpoint("/v1/embeddings", "openai"))
HEALTH = ENDPOINTS.index(Endpoint("/health", "vecd"))
EMBEDDING = ENDPOINTS[EMBEDDINGS]
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
NOW = 1000.0


def settings(rate: float = 100.0, log_format: str = "text", trusted_proxies: str = "") -> GatewayConfig:
    fields = {"log_requests": rate, "log_format": log_format, "trusted_proxies": trusted_proxies, "trace_ratio": 0}
    return cast(GatewayConfig, SimpleNamespace(**fields))


def request(endpoint: int = EMBEDDINGS, *, took_s: float = 0.01, traceparent: str = "") -> HttpRequest:
    """An embedding request that was over at NOW, and had its rows."""
    made = HttpRequest(
        method="POST",
        path="/v1/embeddings",
        query=b"",
        headers={"traceparent": traceparent} if traceparent else {},
        http_minor=1,
        keep_alive=True,
        request_id="req_1",
    )
    record = made.timeline
    record.endpoint = endpoint
    record.started_at = record.arrived_at = NOW - took_s
    return made


def embedded(traceparent: str = "") -> HttpRequest:
    made = request(took_s=0.010, traceparent=traceparent)
    record = made.timeline
    record.num_inputs, record.num_tokens, record.principal = 3, 41, "acme"
    record.parsed_at, record.entered_at = NOW - 0.0095, NOW - 0.0093
    record.tokenized_at, record.sent_at, record.done_at = NOW - 0.0085, NOW - 0.008, NOW - 0.001
    return made


@dataclass
class Log:
    """What is logged of finished requests, and its timers."""

    access: FinishedRequests
    shared_metrics: SharedMetrics
    records: list[logging.LogRecord]
    timers: list[tuple[float, Any]]

    @property
    def num_dropped(self) -> int:
        return self.shared_metrics.total(Counter.LINES_DROPPED)

    def fields(self) -> list[dict[str, Any]]:
        return [made.fields for made in self.records]  # type: ignore[attr-defined]


@pytest.fixture
def make(caplog: pytest.LogCaptureFixture):
    """Makes a `Log` of a rate and a format."""

    def made(rate: float = 100.0, log_format: str = "text", level: int = logging.INFO, num_workers: int = 1) -> Log:
        caplog.set_level(level, ACCESS)
        shared_metrics, timers = private_metrics(), list[tuple[float, Any]]()
        shared_metrics.read_gauges = lambda: {Gauge.WORKERS: num_workers}
        shared_metrics.publish()
        access = FinishedRequests(
            settings(rate, log_format), shared_metrics, ENDPOINTS, lambda seconds, call: timers.append((seconds, call))
        )
        return Log(access, shared_metrics, caplog.records, timers)

    return made


# --- what a line says -----------------------------------------------------------------------------------------------


def test_a_line_for_people():
    line = render(describe(200, embedded(traceparent=f"00-{TRACE_ID}-b7ad6b7169203331-00"), EMBEDDING, NOW))
    assert line == (
        "200      10.0 ms POST /v1/embeddings     items=3 tokens=41 parse=0.5 tokenize=0.8 queue=0.7 compute=7.0 "
        f"encode=1.0 api=openai caller=acme id=req_1 trace={TRACE_ID}"
    )


def test_a_line_for_programs(make):
    log = make(log_format="json")
    log.access.log(200, embedded(), NOW)
    said = json.loads(JsonFormatter("gateway").format(log.records[0]))
    assert (said.pop("message"), said.pop("level")) == ("POST /v1/embeddings 200", "info")
    assert {name: value for name, value in said.items() if name not in ("time", "process", "logger")} == {
        "event": "request", "method": "POST", "route": "/v1/embeddings", "dialect": "openai", "status": 200,
        "error": None, "items": 3, "tokens": 41, "total_ms": 10.0, "parse_ms": 0.5, "tokenize_ms": 0.8,
        "queue_ms": 0.7, "compute_ms": 7.0, "encode_ms": 1.0, "caller": "acme", "request_id": "req_1",
        "trace_id": None,
    }  # fmt: skip


def test_a_line_names_the_model_where_several_are_served():
    of_one = embedded()
    of_one.timeline.model = "org/model"
    said = describe(200, of_one, EMBEDDING, NOW)
    assert said["model"] == "org/model"
    assert " encode=1.0 model=org/model api=openai " in render(said)
    assert said.keys() - describe(200, embedded(), EMBEDDING, NOW).keys() == {"model"}


@pytest.mark.parametrize("client", ["203.0.113.9", ""])
def test_a_line_has_the_client_where_proxies_are_trusted(make, client):
    log = make()
    sent = embedded()
    sent.client = client
    log.access.log(200, sent, NOW)
    log.access.change(settings(trusted_proxies="10.0.0.1"))
    log.access.log(200, sent, NOW)
    before, after = log.fields()
    assert "client" not in before
    assert after == {**before, "client": client or None}
    assert (f" caller=acme client={client} id=" in render(after)) is bool(client)


def test_a_request_that_failed_says_how_far_it_came():
    failed = embedded()
    failed.timeline.done_at = failed.timeline.sent_at = 0.0
    failed.timeline.error = "service_unavailable"
    said = describe(503, failed, EMBEDDING, NOW)
    assert said.keys() == describe(200, embedded(), EMBEDDING, NOW).keys()
    assert (said["error"], said["parse_ms"], said["tokenize_ms"]) == ("service_unavailable", 0.5, 0.8)
    assert (said["queue_ms"], said["compute_ms"], said["encode_ms"]) == (None, None, None)
    assert "503      10.0 ms POST /v1/embeddings" in render(said)


def read(head: str) -> HttpRequest:
    reader = RequestReader(HttpLimits(max_body_bytes=1000))
    reader.feed(head.encode())
    request = reader.next_request()
    assert request is not None
    return request


@pytest.mark.parametrize("formatter", [TextFormatter("gateway"), JsonFormatter("gateway")])
def test_nothing_that_a_caller_writes_is_logged_or_makes_a_line(make, formatter):
    """Not the path, the query, any header, the body, nor a request id or a trace of another form."""
    secret = "secret%0aforged"
    hostile = read(
        f"POST /v1/{secret.replace('%0a', '')}?{secret} HTTP/1.1\r\nHost: {secret}\r\nX-Request-Id: {secret}\r\n"
        f"User-Agent: {secret}\r\nAuthorization: {secret}\r\nTraceparent: 00-{secret}-x-01\r\nTracestate: {secret}\r\n"
        f"Content-Length: 6\r\n\r\nsecret"
    )
    log = make()
    log.access.log(404, hostile, NOW)
    line = formatter.format(log.records[0])
    assert "secret" not in line
    assert len(line.splitlines()) == 1


# --- which requests have one ----------------------------------------------------------------------------------------


def test_what_was_left_out_is_told_of_every_ten_seconds(make):
    log = make(rate=10)
    for _ in range(25):
        log.access.log(200, request(), NOW)
    [(seconds, tell)] = log.timers
    assert seconds == 10
    tell()
    assert log.records[-1].getMessage().startswith("15 requests were not logged: at most 10 a second are")
    assert log.fields()[-1] == {"event": "requests_not_logged", "count": 15}
    tell()
    assert len(log.records) == 11
    for _ in range(11):
        log.access.log(200, request(), NOW + 20)
    assert len(log.timers) == 2


def test_failures_have_a_budget_of_their_own(make):
    log = make(rate=10)
    for _ in range(200):
        log.access.log(200, request(), NOW)
    for _ in range(200):
        log.access.log(503, request(), NOW)
    statuses = [said["status"] for said in log.fields()]
    assert statuses.count(503) == MAX_FAILURES_PER_S
    assert {made.levelno for made in log.records if "503" in made.getMessage()} == {logging.WARNING}
    for _ in range(20):
        log.access.log(200, request(), NOW + 1)
    assert [said["status"] for said in log.fields()].count(200) == 20


def test_slow_ones_have_one_too(make):
    log = make(rate=10)
    for _ in range(50):
        log.access.log(200, request(), NOW)
    for _ in range(50):
        log.access.log(200, request(took_s=SLOW_S + 1), NOW)
    assert [said["total_ms"] > 1000 * SLOW_S for said in log.fields()].count(True) == MAX_SLOW_PER_S


def test_none_means_none_but_what_the_server_failed(make):
    log = make(rate=0)
    for status in (200, 404, 429, GONE):
        log.access.log(status, request(took_s=SLOW_S + 1), NOW)
    assert (log.records, log.num_dropped, log.timers) == ([], 0, [])
    log.access.log(500, request(), NOW)
    assert [said["status"] for said in log.fields()] == [500]


def test_above_level_info_only_failures_have_one(make):
    log = make(level=logging.WARNING)
    log.access.log(200, request(), NOW)
    log.access.log(500, request(), NOW)
    assert [said["status"] for said in log.fields()] == [500]
    assert log.num_dropped == 0


def test_probes_are_logged_when_they_fail(make):
    log = make(rate=1)
    for _ in range(10):
        log.access.log(200, request(HEALTH), NOW)
    log.access.log(503, request(HEALTH), NOW)
    log.access.log(401, request(HEALTH), NOW)
    assert [(said["route"], said["status"]) for said in log.fields()] == [("/health", 503), ("/health", 401)]
    assert log.num_dropped == 0


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_a_probe_that_finds_no_worker_while_the_model_is_loaded_is_not_logged(make, level):
    log = make(level=level, num_workers=0)
    log.access.log(503, request(HEALTH), NOW)
    assert (log.records, log.num_dropped) == ([], 0)
    log.access.log(503, request(), NOW)
    assert [made.levelno for made in log.records] == [logging.WARNING], "another request is"
    log.access.log(200, request(HEALTH), NOW)
    assert [made.levelno for made in log.records[1:]] == [logging.DEBUG] * (level == logging.DEBUG)


@pytest.mark.parametrize("status", [501, 505])
def test_what_no_client_should_ask_for_is_no_failure_of_the_server(make, status):
    log = make(rate=10)
    for _ in range(20):
        log.access.log(status, request(), NOW)
    assert [made.levelno for made in log.records] == [logging.INFO] * 10, "within the budget of all others"


def test_a_probe_that_fails_is_never_a_warning(make):
    """Nor does a worker's death make it one: that has a line of its own."""
    log = make()
    log.shared_metrics.read_gauges = lambda: {Gauge.WORKERS: 0}
    log.shared_metrics.publish()
    for status in (401, 500, 503):
        log.access.log(status, request(HEALTH), NOW)
    assert [(made.levelno, made.fields["status"]) for made in log.records] == [
        (logging.INFO, status) for status in (401, 500, 503)
    ]


def test_what_counts_as_a_probe():
    assert sorted({endpoint.route for endpoint in ENDPOINTS if endpoint.is_probe}) == [
        "/", "/health", "/live", "/metrics", "/ping", "/stats", "/v2/health/live", "/v2/health/ready",
    ]  # fmt: skip
    assert Endpoint("/", "tei") in ENDPOINTS  # POST, which embeds
    assert not Endpoint("/", "tei").is_probe


def test_another_configuration(make):
    log = make(rate=0)
    log.access.log(200, request(), NOW)
    log.access.change(settings(5, "json"))
    log.access.log(200, request(), NOW)
    assert [made.getMessage() for made in log.records] == ["POST /v1/embeddings 200"]


@pytest.mark.parametrize(("rate", "seconds", "num"), [(10.0, 3, 40), (0.5, 10, 6), (1e6, 1, 100)])
def test_a_bucket(rate, seconds, num):
    """At once as many as a second's, and at least one; then at the rate."""
    bucket = Bucket(rate)
    taken = sum(bucket.take(NOW + second * 1.0) for second in range(seconds + 1) for _ in range(50))
    assert taken == num
