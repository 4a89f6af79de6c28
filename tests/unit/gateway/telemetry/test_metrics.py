"""`/metrics`: what two gateways have counted, as Prometheus reads it."""

import os
import re
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vecd.gateway.api.registry import ENDPOINTS
from vecd.gateway.telemetry.metrics import CONTENT_TYPE, WORKER_STATES, render_metrics
from vecd.gateway.telemetry.processes import Usage
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.shm.shared_metrics import STATUSES, Counter, Gauge, Histogram, ServiceKey, WorkerKey, clear_gauges
from vecd.shm.wire import Incarnation

EMBEDDINGS = ENDPOINTS.index(("/v1/embeddings", "openai"))
TEI = ENDPOINTS.index(("/embed", "tei"))


def text_of(shared_metrics: SharedMetrics, **told) -> str:
    return render_metrics(shared_metrics, **{"version": "1.2", "model": "m", "endpoints": ENDPOINTS, **told}).decode()


def metrics_of(shared_metrics: SharedMetrics, **told) -> dict[str, float]:
    """By name and labels, as they are written."""
    lines = text_of(shared_metrics, **told).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def of(metrics: dict[str, float], name: str) -> dict[str, float]:
    """By their labels."""
    return {key.removeprefix(name): value for key, value in metrics.items() if key.partition("{")[0] == name}


def test_they_are_the_same_from_any_gateway(shared_metrics_of_all):
    shared_metrics_of_all[1].add(Counter.COMPUTE_US, 1_500_000)
    shared_metrics_of_all[0].set(Gauge.CONNECTIONS, 3)
    shared_metrics_of_all[0].add_answer(TEI, 200)
    metrics = metrics_of(shared_metrics_of_all[0])
    there = metrics_of(shared_metrics_of_all[1])
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
    shared_metrics_of_all[0].add_answer(TEI, 418)
    shared_metrics_of_all[0].add_answer(TEI, 507)
    assert of(metrics_of(shared_metrics_of_all[0]), "vecd_requests_total") == {
        '{dialect="openai",route="/v1/embeddings",status="200"}': 2,
        '{dialect="tei",route="/embed",status="429"}': 1,
        '{dialect="none",route="other",status="404"}': 1,
        '{dialect="tei",route="/embed",status="400"}': 1,
        '{dialect="tei",route="/embed",status="500"}': 1,
    }


def test_stages_are_one_histogram_by_label(shared_metrics_of_all):
    shared_metrics_of_all[0].observe(Histogram.QUEUE, 0.003)
    shared_metrics_of_all[1].observe(Histogram.QUEUE, 1000.0)
    shared_metrics_of_all[1].observe(Histogram.TOTAL, 0.0001)
    metrics = metrics_of(shared_metrics_of_all[0])
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


def test_the_buckets_of_a_histogram_include_those_below(shared_metrics_of_all):
    for seconds in (0.0001, 0.003, 0.003, 5.0):
        shared_metrics_of_all[0].observe(Histogram.LOOP_LAG, seconds)
    metrics = metrics_of(shared_metrics_of_all[1])
    buckets = list(of(metrics, "vecd_loop_lag_seconds_bucket").values())
    assert all(lower <= upper for lower, upper in pairwise(buckets))
    assert metrics['vecd_loop_lag_seconds_bucket{le="0.0005"}'] == 1
    assert metrics['vecd_loop_lag_seconds_bucket{le="0.005"}'] == 3
    assert metrics['vecd_loop_lag_seconds_bucket{le="2.0"}'] == 3
    assert metrics['vecd_loop_lag_seconds_bucket{le="+Inf"}'] == metrics["vecd_loop_lag_seconds_count"] == 4
    assert metrics["vecd_loop_lag_seconds_sum"] == pytest.approx(5.0061)


def test_fill_is_of_the_room_that_a_batch_had(shared_metrics_of_all):
    shared_metrics_of_all[0].batch_sent(1, 0, 4, 600, 2400)
    shared_metrics_of_all[1].batch_sent(1, 1, 1, 2048, 2048)
    metrics = metrics_of(shared_metrics_of_all[0])
    assert metrics["vecd_batch_fill_ratio_count"] == 2
    assert metrics["vecd_batch_fill_ratio_sum"] == pytest.approx(1.25)
    assert metrics['vecd_batch_fill_ratio_bucket{le="0.2"}'] == 0
    assert metrics['vecd_batch_fill_ratio_bucket{le="0.3"}'] == 1
    assert metrics['vecd_batch_fill_ratio_bucket{le="1.0"}'] == 2
    assert (metrics["vecd_batch_tokens_sum"], metrics["vecd_batch_sequences_sum"]) == (2648, 5)


@pytest.mark.parametrize("num_tokens", [2049, 2100, 40_000])
def test_a_batch_of_more_tokens_than_its_budget_is_full_and_no_more(shared_metrics_of_all, num_tokens):
    shared_metrics_of_all[0].batch_sent(1, 0, 4, num_tokens, 2048)
    metrics = metrics_of(shared_metrics_of_all[0])
    assert (metrics["vecd_batch_fill_ratio_sum"], metrics["vecd_batch_fill_ratio_count"]) == (1, 1)
    assert metrics['vecd_batch_fill_ratio_bucket{le="0.9"}'] == 0
    assert metrics['vecd_batch_fill_ratio_bucket{le="1.0"}'] == 1


def test_workers_are_told_by_their_index_over_all_lives_and_gateways(shared_metrics_of_all):
    for shared_metrics in shared_metrics_of_all:
        shared_metrics.worker_up(WorkerKey(ServiceKey(1), Incarnation(0, 1)))
        shared_metrics.worker_up(WorkerKey(ServiceKey(1), Incarnation(2, 1)))
        shared_metrics.batch_sent(1, 2, 4, 600, 2400)
        shared_metrics.batch_done(1, 2, 4, 600, 250_000, 6)
        shared_metrics.worker_up(WorkerKey(ServiceKey(1), Incarnation(2, 3)))
    metrics = metrics_of(shared_metrics_of_all[0], worker_states={0: "ready", 1: "down", 2: "starting"})
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


def test_a_gateway_that_is_being_started_again_has_no_start_and_no_workers(shared_metrics_of_all, board_fd, board_spec):
    shared_metrics_of_all[1].set(Gauge.WORKERS, 2)
    clear_gauges(board_fd, board_spec, 1)
    metrics = metrics_of(shared_metrics_of_all[0])
    assert list(of(metrics, "vecd_gateway_start_time_seconds")) == ['{gateway="0"}']
    assert metrics['vecd_workers_ready{gateway="1"}'] == metrics['vecd_gateway_pid{gateway="1"}'] == 0


def test_levels_of_all_gateways_are_added_up_or_told_apart(shared_metrics_of_all):
    for shared_metrics, value in zip(shared_metrics_of_all, (3, 40), strict=True):
        shared_metrics.set(Gauge.QUEUED_TOKENS, value)
        shared_metrics.set(Gauge.QUEUE_AGE_US, value * 100_000)
    metrics = metrics_of(shared_metrics_of_all[1])
    assert metrics["vecd_queued_tokens"] == 43
    assert of(metrics, "vecd_queue_age_seconds") == {'{gateway="0"}': 0.3, '{gateway="1"}': 4.0}


def test_processes_are_told_by_name(shared_metrics_of_all):
    usages = {"supervisor": Usage(1, 0.5, 100, 60), "worker-0": Usage(2, 7.25, 300, 90)}
    metrics = metrics_of(shared_metrics_of_all[0], usages=usages)
    assert metrics['vecd_process_cpu_seconds_total{process="worker-0"}'] == 7.25
    assert metrics['vecd_process_resident_bytes{process="supervisor"}'] == 100
    assert of(metrics, "vecd_process_proportional_bytes") == {'{process="supervisor"}': 60, '{process="worker-0"}': 90}


def test_there_are_never_more_series_than_routes_statuses_workers_and_processes(shared_metrics_of_all):
    """Whatever is asked for, and by whom: a label's values are the server's own."""
    for endpoint in range(len(ENDPOINTS)):
        for status in (*STATUSES, *range(100, 600)):
            shared_metrics_of_all[0].add_answer(endpoint, status)
    metrics = metrics_of(shared_metrics_of_all[0])
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
    shared_metrics_of_all[0].poll({Gauge.QUEUED_SEQUENCES: lambda: 17})
    shared_metrics_of_all[0].publish()
    text = text_of(shared_metrics_of_all[0])
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation and family.type in {"counter", "gauge", "histogram"} for family in families)
    assert "vecd_queued_sequences 17.0\n" in text
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
