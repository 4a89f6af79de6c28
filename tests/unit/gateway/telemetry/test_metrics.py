"""`/metrics`: what two gateways have counted, as Prometheus reads it."""

import os
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.dispatching import finished_requests
from vecd.gateway.app.table import ENDPOINTS
from vecd.gateway.request import Endpoint, HttpRequest
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.gateway.telemetry.prometheus import CONTENT_TYPE, WORKER_STATES, ServedModel, Usage, render_metrics
from vecd.shm.control import ModelIs, ModelState
from vecd.shm.shared_metrics import (
    STATUSES,
    Counter,
    Gauge,
    Histogram,
    SharedMetricsSpec,
    clear_gauges,
)
from vecd.shm.wire import Done, Incarnation

EMBEDDINGS = ENDPOINTS.index(Endpoint("/v1/embeddings", "openai"))
TEI = ENDPOINTS.index(Endpoint("/embed", "tei"))


SPEC = SharedMetricsSpec(num_gateways=2, num_workers=3, num_models=2)
READY = ModelIs(1, "ready")
A, B = ServedModel("a", READY, {0: "ready"}), ServedModel("org/b", READY, {1: "ready", 2: "down"})


@pytest.fixture
def metrics_spec() -> SharedMetricsSpec:
    return SPEC


@pytest.fixture
def gateway(shared_metrics_of_all: list[SharedMetrics]) -> SharedMetrics:
    return shared_metrics_of_all[0]


def text_of(shared_metrics: SharedMetrics, *models: ServedModel, model: str = "m", **told: Any) -> str:
    """Without `models`: of one that is loaded all the time, with workers in `worker_states`."""
    served = models or (ServedModel(model, READY, told.pop("worker_states", {})),)
    return render_metrics(
        shared_metrics, version="1.2", endpoints=ENDPOINTS, models=served, have_states=bool(models), **told
    ).decode()


def samples(shared_metrics: SharedMetrics, *models: ServedModel, **told: Any) -> dict[str, float]:
    """By name and labels, as they are written."""
    lines = text_of(shared_metrics, *models, **told).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def of(found: dict[str, float], name: str) -> dict[str, float]:
    """By their labels."""
    return {key.removeprefix(name): value for key, value in found.items() if key.partition("{")[0] == name}


def test_they_are_the_same_from_any_gateway(shared_metrics_of_all):
    shared_metrics_of_all[1].add(Counter.COMPUTE_US, 1_500_000)
    shared_metrics_of_all[0].set(Gauge.CONNECTIONS, 3)
    shared_metrics_of_all[0].add_answer(TEI, 200)
    metrics = samples(shared_metrics_of_all[0])
    there = samples(shared_metrics_of_all[1])
    for name in [name for name in metrics if "start_time" in name]:
        # Reckoned from two clocks, which are not read at the same moment.
        assert metrics.pop(name) == pytest.approx(there.pop(name), abs=1)
    assert metrics == there
    assert metrics['vecd_info{model="m",version="1.2"}'] == 1
    assert metrics["vecd_compute_seconds_total"] == 1.5
    assert metrics['vecd_connections{gateway="0"}'] == 3
    assert metrics['vecd_gateway_pid{gateway="1"}'] == os.getpid()
    assert not [name for name in metrics if not name.startswith("vecd_")]


def test_answers_are_told_by_route_dialect_and_status(shared_metrics_of_all):
    shared_metrics_of_all[0].add_answer(EMBEDDINGS, 200)
    shared_metrics_of_all[1].add_answer(EMBEDDINGS, 200)
    shared_metrics_of_all[1].add_answer(TEI, 429)
    shared_metrics_of_all[1].add_answer(0, 404)
    assert of(samples(shared_metrics_of_all[0]), "vecd_requests_total") == {
        '{dialect="openai",route="/v1/embeddings",status="200"}': 2,
        '{dialect="tei",route="/embed",status="429"}': 1,
        '{dialect="none",route="other",status="404"}': 1,
    }


def test_stages_are_one_histogram_by_label(shared_metrics_of_all):
    shared_metrics_of_all[0].observe(Histogram.QUEUE, 0.003)
    shared_metrics_of_all[1].observe(Histogram.QUEUE, 1000.0)
    shared_metrics_of_all[1].observe(Histogram.TOTAL, 0.0001)
    metrics = samples(shared_metrics_of_all[0])
    assert of(metrics, "vecd_request_stage_seconds_count") == {
        f'{{stage="{stage}"}}': {"queue": 2, "total": 1}.get(stage, 0)
        for stage in ("parse", "tokenize", "queue", "compute", "encode", "total")
    }
    assert metrics['vecd_request_stage_seconds_sum{stage="queue"}'] == pytest.approx(1000.003)
    assert metrics['vecd_request_stage_seconds_bucket{le="0.002",stage="queue"}'] == 0
    assert metrics['vecd_request_stage_seconds_bucket{le="0.005",stage="queue"}'] == 1
    assert metrics['vecd_request_stage_seconds_bucket{le="300.0",stage="queue"}'] == 1
    assert metrics['vecd_request_stage_seconds_bucket{le="+Inf",stage="queue"}'] == 2
    assert metrics['vecd_request_stage_seconds_bucket{le="0.0001",stage="total"}'] == 1


def test_fill_is_of_the_room_that_a_batch_had_and_never_more_than_all_of_it(shared_metrics_of_all):
    shared_metrics_of_all[0].batch_sent(1, 0, 4, 600, 2400)
    shared_metrics_of_all[1].batch_sent(1, 1, 1, 2048, 2048)
    shared_metrics_of_all[1].batch_sent(2, 1, 1, 2049, 2048)
    metrics = samples(shared_metrics_of_all[0])
    assert metrics["vecd_batch_fill_ratio_count"] == 3
    assert metrics["vecd_batch_fill_ratio_sum"] == pytest.approx(2.25)
    assert metrics['vecd_batch_fill_ratio_bucket{le="0.2"}'] == 0
    assert metrics['vecd_batch_fill_ratio_bucket{le="0.3"}'] == metrics['vecd_batch_fill_ratio_bucket{le="0.9"}'] == 1
    assert metrics['vecd_batch_fill_ratio_bucket{le="1.0"}'] == 3
    assert (metrics["vecd_batch_tokens_sum"], metrics["vecd_batch_sequences_sum"]) == (600 + 2048 + 2049, 6)


def test_workers_are_told_by_their_index_over_all_lives_and_gateways(shared_metrics_of_all):
    for shared_metrics in shared_metrics_of_all:
        shared_metrics.note_life(Incarnation(0, 1))
        shared_metrics.note_life(Incarnation(2, 1))
        shared_metrics.batch_sent(1, 2, 4, 600, 2400)
        shared_metrics.batch_done(2, 4, 600, Done(0, 1, 0, 4, 250_000, 6))
        shared_metrics.note_life(Incarnation(2, 3))
    metrics = samples(shared_metrics_of_all[0], worker_states={0: "ready", 1: "down", 2: "starting"})
    assert of(metrics, "vecd_worker_batches_total") == {'{worker="0"}': 0, '{worker="2"}': 2}
    assert metrics['vecd_worker_sequences_total{worker="2"}'] == 8
    assert metrics['vecd_worker_tokens_total{worker="2"}'] == 1200
    assert metrics['vecd_worker_busy_seconds_total{worker="2"}'] == 0.5
    assert of(metrics, "vecd_worker_restarts_total") == {'{worker="0"}': 0, '{worker="2"}': 2}
    assert metrics["vecd_padding_tokens_total"] == 12
    states = of(metrics, "vecd_worker_state")
    assert len(states) == 3 * len(WORKER_STATES)
    assert {labels for labels, value in states.items() if value} == {
        '{state="ready",worker="0"}', '{state="down",worker="1"}', '{state="starting",worker="2"}'
    }  # fmt: skip


def test_a_gateway_that_is_being_started_again_has_no_start_and_no_workers(
    shared_metrics_of_all, metrics_fd, metrics_spec
):
    shared_metrics_of_all[1].set(Gauge.WORKERS, 2)
    clear_gauges(metrics_fd, metrics_spec, 1)
    metrics = samples(shared_metrics_of_all[0])
    assert list(of(metrics, "vecd_gateway_start_time_seconds")) == ['{gateway="0"}']
    assert metrics['vecd_workers_ready{gateway="1"}'] == metrics['vecd_gateway_pid{gateway="1"}'] == 0


def test_levels_of_all_gateways_are_added_up_or_told_apart(shared_metrics_of_all):
    for shared_metrics, value in zip(shared_metrics_of_all, (3, 40), strict=True):
        shared_metrics.set(Gauge.QUEUED_TOKENS, value)
        shared_metrics.set(Gauge.QUEUE_AGE_US, value * 100_000)
    metrics = samples(shared_metrics_of_all[1])
    assert metrics["vecd_queued_tokens"] == 43
    assert of(metrics, "vecd_queue_age_seconds") == {'{gateway="0"}': 0.3, '{gateway="1"}': 4.0}


def test_processes_are_told_by_name(shared_metrics_of_all):
    usages = {"supervisor": Usage(1, 0.5, 100, 60), "worker-0": Usage(2, 7.25, 300, 90)}
    metrics = samples(shared_metrics_of_all[0], usages=usages)
    assert metrics['vecd_process_cpu_seconds_total{process="worker-0"}'] == 7.25
    assert metrics['vecd_process_resident_bytes{process="supervisor"}'] == 100
    assert of(metrics, "vecd_process_proportional_bytes") == {'{process="supervisor"}': 60, '{process="worker-0"}': 90}


def test_there_are_never_more_series_than_routes_statuses_workers_and_processes(shared_metrics_of_all):
    """Whatever is asked for, and by whom: a label's values are the server's own."""
    for endpoint in range(len(ENDPOINTS)):
        for status in (*STATUSES, *range(100, 600)):
            shared_metrics_of_all[0].add_answer(endpoint, status)
    metrics = samples(shared_metrics_of_all[0])
    requests = of(metrics, "vecd_requests_total")
    assert len(requests) == len(ENDPOINTS) * len(STATUSES)
    labels = [dict(re.findall(r'(\w+)="([^"]*)"', series)) for series in requests]
    assert {(each["route"], each["dialect"]) for each in labels} == set(ENDPOINTS)
    assert {each["status"] for each in labels} == set(map(str, STATUSES))
    assert {name for each in labels for name in each} == {"route", "dialect", "status"}


def test_a_model_s_name_cannot_break_out_of_its_label(shared_metrics_of_all):
    text = text_of(shared_metrics_of_all[0], model='a"\\\n} 1\nvecd_tokens_total 5')
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["vecd_info"].samples[0].labels["model"] == 'a"\\\n} 1\nvecd_tokens_total 5'
    assert [sample.value for sample in families["vecd_tokens"].samples] == [0]


def test_every_metric_has_words_and_a_type_and_what_is_published_is_in_it(shared_metrics_of_all):
    shared_metrics_of_all[0].read_gauges = lambda: {Gauge.QUEUED_SEQUENCES: 17}
    shared_metrics_of_all[0].publish()
    text = text_of(shared_metrics_of_all[0])
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation and family.type in {"counter", "gauge", "histogram"} for family in families)
    assert "vecd_queued_sequences 17.0\n" in text
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


# --- several models, over reloads and gateways' lives ------------------------------------------------------------


def test_each_model_has_its_own_counts_and_the_total_is_of_all(shared_metrics_of_all: list[SharedMetrics]) -> None:
    first, other = shared_metrics_of_all
    kept = [first.of_model("a"), first.of_model("org/b"), other.of_model("a")]
    kept[0].add(Counter.TOKENS, 1)
    kept[1].add(Counter.TOKENS, 20)
    kept[2].add(Counter.TOKENS, 300)
    kept[0].observe(Histogram.TOTAL, 1.5)
    first.add(Counter.LINES_DROPPED, 7)
    for each in (*shared_metrics_of_all, *kept):
        assert (each.total(Counter.TOKENS, "a"), each.total(Counter.TOKENS, "org/b")) == (301, 20)
        assert (each.total(Counter.TOKENS), each.total(Counter.TOKENS, "")) == (321, 0)
        assert sum(each.histogram(Histogram.TOTAL, "a")[0]) == sum(each.histogram(Histogram.TOTAL)[0]) == 1
        assert not any(each.histogram(Histogram.TOTAL, "org/b")[0])
    found = samples(other, A, B)
    assert of(found, "vecd_tokens_total") == {'{model="a"}': 301, '{model="org/b"}': 20}
    assert found["vecd_log_lines_dropped_total"] == 7
    assert found['vecd_request_stage_seconds_count{model="a",stage="total"}'] == 1
    assert samples(other)["vecd_tokens_total"] == 321


def test_answers_are_counted_for_the_model_that_is_known(gateway: SharedMetrics) -> None:
    kept = gateway.of_model("a")
    finished = finished_requests(gateway)
    for model in ("a", "a", "", "a client's word"):
        request = HttpRequest("POST", "/v1/embeddings", b"", {}, 1, True, "id")
        request.timeline.model, request.timeline.endpoint = model, 3
        finished.on_finished(200, request)
    assert (kept.answers("a"), gateway.answers(""), gateway.answers()) == ({(3, 200): 2}, {(3, 200): 2}, {(3, 200): 4})
    route, dialect = ENDPOINTS[3]
    assert of(samples(gateway, A, B), "vecd_requests_total") == {
        f'{{dialect="{dialect}",model="{model}",route="{route}",status="200"}}': 2 for model in ("", "a")
    }
    assert gateway.num_answered_by(gateway.sections[0]) == 4


def test_a_gateway_that_is_started_again_counts_on(
    gateway: SharedMetrics, metrics_fd: int, metrics_spec: SharedMetricsSpec
) -> None:
    kept = gateway.of_model("org/b")
    kept.add(Counter.TOKENS, 5)
    gateway.read_gauges_of_models = lambda: {"org/b": {Gauge.QUEUED_TOKENS: 9}}
    gateway.publish()
    assert gateway.total(Gauge.QUEUED_TOKENS, "org/b") == 9
    clear_gauges(metrics_fd, metrics_spec, 0)
    assert gateway.total(Gauge.QUEUED_TOKENS, "org/b") == 0
    successor = SharedMetrics.mapped(metrics_fd, metrics_spec, 0)
    again = [successor.of_model(name) for name in ("a", "org/b")]  # in another order
    again[1].add(Counter.TOKENS)
    assert successor.total(Counter.TOKENS, "org/b") == 6
    assert successor.total(Counter.TOKENS, "a") == 0


def test_both_generations_of_a_model_count_in_the_same_place(gateway: SharedMetrics) -> None:
    before, after = gateway.of_model("a"), gateway.of_model("a")
    before.add(Counter.TOKENS, 5)
    after.add(Counter.TOKENS, 5)
    assert gateway.total(Counter.TOKENS, "a") == 10


def test_a_model_that_comes_back_counts_on_and_no_model_has_another_one_s_counts(gateway: SharedMetrics) -> None:
    """What a reload does: places are fewer than names, but a total never decreases."""
    total = 0
    kept = gateway.of_model("stays")
    for number in range(3 * (SPEC.num_places - 1)):
        made = gateway.of_model(f"model {number}")
        assert gateway.total(Counter.TOKENS, f"model {number}") == 0
        made.add(Counter.TOKENS, 10)
        made.add_answer(1, 200)
        made.observe(Histogram.TOTAL, 0.5)
        kept.add(Counter.TOKENS, 1)
        total += 11
        del made
        assert gateway.total(Counter.TOKENS) == total
        assert gateway.total(Counter.TOKENS, "stays") == number + 1
        assert sum(gateway.histogram(Histogram.TOTAL)[0]) == gateway.answers()[1, 200] == number + 1
        assert gateway.total(Counter.TOKENS, "") == 0, "a removed model's are in the total alone"
    last = f"model {3 * (SPEC.num_places - 1) - 1}"
    gateway.of_model(last).add(Counter.TOKENS)
    assert gateway.total(Counter.TOKENS, last) == 11


def test_a_model_too_many_is_counted_with_what_belongs_to_none(gateway: SharedMetrics) -> None:
    kept = [gateway.of_model(str(number)) for number in range(1, SPEC.num_places)]
    assert gateway.of_model("one more") is gateway
    assert len({id(each) for each in kept}) == SPEC.num_places - 1


def test_batches_have_numbers_of_their_own_over_all_models(gateway: SharedMetrics) -> None:
    kept = [gateway, gateway.of_model("a"), gateway.of_model("org/b")]
    numbers = [each.next_batch_number() for each in kept * 2]
    assert numbers == [1, 2, 3, 4, 5, 6]


def test_levels_and_workers_are_told_apart(shared_metrics_of_all: list[SharedMetrics]) -> None:
    first, other = shared_metrics_of_all
    kept = [each.of_model(name) for each in shared_metrics_of_all for name in ("a", "org/b")]
    first.read_gauges_of_models = lambda: {
        "a": {Gauge.QUEUED_TOKENS: 3, Gauge.QUEUE_AGE_US: 2_000_000, Gauge.WORKERS: 1}
    }
    other.read_gauges_of_models = lambda: {
        "org/b": {Gauge.QUEUED_TOKENS: 4, Gauge.WORKERS: 2},
        "a": {Gauge.QUEUED_TOKENS: 5},
    }
    first.read_gauges = lambda: {Gauge.CONNECTIONS: 8}
    for each in shared_metrics_of_all:
        each.publish()
    first.note_life(Incarnation(1, 2))
    kept[1].batch_done(1, 2, 30, Done(0, 1, 0, 2, 500_000))
    found = samples(first, A, B)
    assert of(found, "vecd_queued_tokens") == {'{model="a"}': 8, '{model="org/b"}': 4}
    assert found['vecd_queue_age_seconds{gateway="0",model="a"}'] == 2
    assert found['vecd_workers_ready{gateway="1",model="org/b"}'] == 2
    assert found['vecd_connections{gateway="0"}'] == 8
    assert found['vecd_worker_tokens_total{model="org/b",worker="1"}'] == 30
    assert found['vecd_tokens_total{model="org/b"}'] == 30
    assert found['vecd_worker_restarts_total{model="org/b",worker="1"}'] == 1
    assert found['vecd_worker_state{model="org/b",state="down",worker="2"}'] == 1


def test_the_state_of_each_model_and_what_it_took(gateway: SharedMetrics) -> None:
    kept = gateway.of_model("org/b")
    gateway.read_gauges_of_models = lambda: {"org/b": {Gauge.REQUESTS: 4, Gauge.WORKERS: 0}}
    gateway.publish()
    status = ModelIs(
        2, "loading", nbytes=5000, num_loads=3, num_failed_loads=1, load_s=2.5, num_unloads={"idle": 2, "memory": 1}
    )
    loading = ServedModel("org/b", status, {1: "down", 2: "down"})
    found = samples(gateway, A, loading)
    assert {name for name, value in of(found, "vecd_model_state").items() if value} == {
        '{model="a",state="ready"}', '{model="org/b",state="loading"}'
    }  # fmt: skip
    assert len(of(found, "vecd_model_state")) == 2 * len(ModelState)
    assert found['vecd_model_loads_total{model="org/b"}'] == 3
    assert found['vecd_model_failed_loads_total{model="org/b"}'] == 1
    assert found['vecd_model_load_seconds{model="org/b"}'] == 2.5
    assert found['vecd_model_memory_bytes{model="org/b"}'] == 5000
    unloads = {reason: found[f'vecd_model_unloads_total{{model="org/b",reason="{reason}"}}'] for reason in ("idle",
               "memory", "operator", "client")}  # fmt: skip
    assert unloads == {"idle": 2, "memory": 1, "operator": 0, "client": 0}
    assert of(found, "vecd_model_waiting_requests") == {'{model="a"}': 0, '{model="org/b"}': 4}
    # Nothing is wrong with a model without workers while it is not loaded, so no alert on workers may find one.
    assert list(of(found, "vecd_workers_ready")) == ['{gateway="0",model="a"}', '{gateway="1",model="a"}']
    assert [name for name in of(found, "vecd_worker_state") if 'worker="0"' not in name] == []
    del kept


def test_the_only_model_has_no_label_but_a_state_if_it_is_not_loaded_all_the_time(gateway: SharedMetrics) -> None:
    gateway.set(Gauge.REQUESTS, 6)
    unloaded = ServedModel("a", ModelIs(1, "unloaded", num_loads=1), {0: "down"})
    found = samples(gateway, unloaded)
    assert found['vecd_model_state{model="a",state="unloaded"}'] == 1
    assert found['vecd_model_waiting_requests{model="a"}'] == found["vecd_requests_in_flight"] == 6
    assert of(found, "vecd_workers_ready") == of(found, "vecd_worker_state") == {}
    assert "vecd_tokens_total" in found
