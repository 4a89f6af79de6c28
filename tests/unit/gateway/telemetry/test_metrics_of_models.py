"""What is counted for each of several models, over reloads and gateways' lives, and how `/metrics` tells it."""

import gc
import re

import pytest

from vecd.gateway.api.registry import ENDPOINTS
from vecd.gateway.telemetry.metrics import WORKER_STATES, ServedModel, render_metrics
from vecd.gateway.telemetry.on_finished import FinishedRequests
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.types.messages import HttpRequest
from vecd.shm.control import ModelIs
from vecd.shm.shared_metrics import (
    NUM_KINDS,
    SERVICES_PER_MODEL,
    Counter,
    Gauge,
    Histogram,
    ServiceKey,
    SharedMetricsSpec,
    WorkerKey,
    clear_gauges,
)
from vecd.shm.wire import Incarnation

SPEC = SharedMetricsSpec(num_gateways=2, num_workers=3, num_models=2)
READY = ModelIs(1, "ready")
A, B = ServedModel("a", READY, {0: "ready"}), ServedModel("org/b", READY, {1: "ready", 2: "down"})


@pytest.fixture
def board_spec() -> SharedMetricsSpec:
    return SPEC


@pytest.fixture
def gateway(shared_metrics_of_all: list[SharedMetrics]) -> SharedMetrics:
    return shared_metrics_of_all[0]


def samples(shared_metrics: SharedMetrics, *models: ServedModel, **options: object) -> dict[str, float]:
    text = render_metrics(
        shared_metrics, version="1", model="a", endpoints=ENDPOINTS, models=models, **options  # type: ignore[arg-type]
    ).decode()  # fmt: skip
    lines = [line.rpartition(" ") for line in text.splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in lines}


def of(found: dict[str, float], name: str) -> dict[str, float]:
    return {key.removeprefix(name): value for key, value in found.items() if key.partition("{")[0] == name}


def between(found: re.Match[str]) -> str:
    return "," if all(found.groups()) else ""


def total_of(name: str, found: dict[str, float]) -> float:
    return sum(of(found, name).values())


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


def test_one_model_has_the_metrics_that_there_were_before_there_were_several(
    shared_metrics_of_all: list[SharedMetrics],
) -> None:
    first, other = shared_metrics_of_all
    counting = first.of_model("a")
    for each in (counting, other):
        each.add(Counter.TOKENS, 5)
        each.add_answer(3, 200)
    found = samples(first, worker_states={0: "ready"})
    assert not [name for name in found if "model" in name and not name.startswith("vecd_info")]
    assert found["vecd_tokens_total"] == 10
    assert total_of("vecd_requests_total", found) == 2
    # A name, a label and its values for each sample: none is missing, and none is new, beside a server of two models.
    several = samples(first, A, B, worker_states={0: "ready"})
    unlabelled = {re.sub(r'(,?)model="[^"]*"(,?)', between, name).replace("{}", "") for name in several}
    assert {name for name in unlabelled if not name.startswith("vecd_model_")} == {
        re.sub(r'(,?)model="[^"]*"(,?)', between, name) for name in found
    } | {f'vecd_worker_state{{state="{state}",worker="{worker}"}}' for state in WORKER_STATES for worker in (1, 2)}


def test_answers_are_counted_for_the_model_that_is_known(gateway: SharedMetrics) -> None:
    kept = gateway.of_model("a")
    finished = FinishedRequests(gateway)
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
    gateway: SharedMetrics, board_fd: int, board_spec: SharedMetricsSpec
) -> None:
    kept = gateway.of_model("org/b")
    kept.add(Counter.TOKENS, 5)
    gateway.poll_models(lambda: {"org/b": {Gauge.QUEUED_TOKENS: 9}})
    gateway.publish()
    assert gateway.total(Gauge.QUEUED_TOKENS, "org/b") == 9
    clear_gauges(board_fd, board_spec, 0)
    assert gateway.total(Gauge.QUEUED_TOKENS, "org/b") == 0
    successor = SharedMetrics.mapped(board_fd, board_spec, 0)
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
    for number in range(3 * SPEC.num_services):
        made = gateway.of_model(f"model {number}")
        assert gateway.total(Counter.TOKENS, f"model {number}") == 0
        made.add(Counter.TOKENS, 10)
        made.add_answer(1, 200)
        made.observe(Histogram.TOTAL, 0.5)
        kept.add(Counter.TOKENS, 1)
        total += 11
        del made
        gc.collect()
        assert gateway.total(Counter.TOKENS) == total
        assert gateway.total(Counter.TOKENS, "stays") == number + 1
        assert sum(gateway.histogram(Histogram.TOTAL)[0]) == gateway.answers()[1, 200] == number + 1
        assert gateway.total(Counter.TOKENS, "") == 0, "a removed model's are in the total alone"
    last = f"model {3 * SPEC.num_services - 1}"
    gateway.of_model(last).add(Counter.TOKENS)
    assert gateway.total(Counter.TOKENS, last) == 11


def test_a_model_too_many_is_counted_with_what_belongs_to_none(gateway: SharedMetrics) -> None:
    kept = [gateway.of_model(str(number)) for number in range(SPEC.num_services)]
    assert gateway.of_model("one more") is gateway
    assert len({id(each) for each in kept}) == SPEC.num_services


def test_batches_have_numbers_of_their_own_over_all_models(gateway: SharedMetrics) -> None:
    kept = [gateway, gateway.of_model("a"), gateway.of_model("org/b")]
    numbers = [each.next_batch_number() for each in kept * 2]
    assert numbers == [1, 2, 3, 4, 5, 6]


def test_levels_and_workers_are_told_apart(shared_metrics_of_all: list[SharedMetrics]) -> None:
    first, other = shared_metrics_of_all
    kept = [each.of_model(name) for each in shared_metrics_of_all for name in ("a", "org/b")]
    first.poll_models(lambda: {"a": {Gauge.QUEUED_TOKENS: 3, Gauge.QUEUE_AGE_US: 2_000_000, Gauge.WORKERS: 1}})
    other.poll_models(lambda: {"org/b": {Gauge.QUEUED_TOKENS: 4, Gauge.WORKERS: 2}, "a": {Gauge.QUEUED_TOKENS: 5}})
    first.poll({Gauge.CONNECTIONS: lambda: 8})
    for each in shared_metrics_of_all:
        each.publish()
    first.worker_up(WorkerKey(ServiceKey(1), Incarnation(1, 2)))
    kept[1].batch_done(1, 1, 2, 30, 500_000, 0)
    states = {0: "ready", 1: "ready", 2: "down"}
    found = samples(first, A, B, worker_states=states)
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
    gateway.poll_models(lambda: {"org/b": {Gauge.REQUESTS: 4, Gauge.WORKERS: 0}})
    gateway.publish()
    status = ModelIs(
        2, "loading", nbytes=5000, num_loads=3, num_failed_loads=1, load_s=2.5, num_unloads={"idle": 2, "memory": 1}
    )
    loading = ServedModel("org/b", status, {1: "down", 2: "down"})
    found = samples(gateway, A, loading, worker_states={0: "ready", 1: "down", 2: "down"})
    assert {name for name, value in of(found, "vecd_model_state").items() if value} == {
        '{model="a",state="ready"}', '{model="org/b",state="loading"}'
    }  # fmt: skip
    assert len(of(found, "vecd_model_state")) == 2 * 6
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
    parked = ServedModel("a", ModelIs(1, "parked", num_loads=1), {0: "down"})
    found = samples(gateway, parked, worker_states={0: "down"})
    assert found['vecd_model_state{model="a",state="parked"}'] == 1
    assert found['vecd_model_waiting_requests{model="a"}'] == found["vecd_requests_in_flight"] == 6
    assert of(found, "vecd_workers_ready") == of(found, "vecd_worker_state") == {}
    assert "vecd_tokens_total" in found


def test_kinds_of_answers_that_have_no_cell_count_for_no_model(gateway: SharedMetrics) -> None:
    kept = gateway.of_model("a")
    for status in (200, 429):
        for endpoint in range(NUM_KINDS):
            kept.add_answer(endpoint, status)
    assert kept.answers("a") == {(endpoint, 200): 1 for endpoint in range(NUM_KINDS)}
    assert kept.answers("") == {(endpoint, 429): 1 for endpoint in range(NUM_KINDS)}
    assert len(kept.answers()) == 2 * NUM_KINDS


def test_a_model_takes_few_kib() -> None:
    sizes = [SharedMetricsSpec(num_gateways=1, num_workers=2, num_models=num).nbytes for num in (1, 17)]
    assert sizes[1] - sizes[0] <= 16 * SERVICES_PER_MODEL * 3 * 1024
