"""What text-embeddings-inference would have counted: by hand, on a board that two gateways share."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vecd.gateway.api.registry import ENDPOINTS
from vecd.gateway.telemetry.metrics import render_metrics
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.telemetry.tei_metrics import TeiCounts, render_tei_metrics
from vecd.gateway.types.errors import (
    ApiError,
    BadRequest,
    DeadlinePassed,
    EngineFailed,
    InputTooLong,
    PoisonInput,
    RateLimited,
    ServerError,
    TooManyInputs,
    TooManyRequests,
    TooManyTokens,
    Unavailable,
    WrongModel,
)
from vecd.gateway.types.request import Embedded, Stages, TokenizedInput
from vecd.shm.shared_metrics import Gauge

STAGES = Stages(total_s=0.5, tokenize_s=0.001, queue_s=0.002, compute_s=0.4)


def embedded() -> Embedded:
    return Embedded((), 0, 0, 0, frozenset(), (), 0, STAGES)


async def answer() -> Embedded:
    return embedded()


async def fail(error: BaseException) -> Embedded:
    raise error


def metrics_of(shared_metrics: SharedMetrics, max_tokens: int = 256) -> dict[str, float]:
    """By name and labels, as they are written."""
    lines = render_tei_metrics(shared_metrics, max_tokens=max_tokens).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def nonzero(shared_metrics: SharedMetrics, prefix: str) -> dict[str, float]:
    return {name: value for name, value in metrics_of(shared_metrics).items() if value and name.startswith(prefix)}


def test_requests_are_counted_by_all_gateways(shared_metrics_of_all):
    first, second = map(TeiCounts, shared_metrics_of_all)
    asyncio.run(first.watch(1, answer()))
    asyncio.run(second.watch(1, answer()))
    asyncio.run(second.watch(30, answer()))
    for shared_metrics in shared_metrics_of_all:
        metrics = metrics_of(shared_metrics)
        assert metrics['te_request_count{method="single"}'] == metrics['te_request_success{method="single"}'] == 2
        assert metrics['te_request_count{method="batch"}'] == metrics['te_request_success{method="batch"}'] == 1
        assert metrics["te_embed_success"] == 32
        assert metrics["te_request_duration_count"] == 3
        assert metrics["te_request_duration_sum"] == pytest.approx(1.5)
        assert metrics["te_embed_duration_count"] == 32
        assert metrics["te_embed_duration_sum"] == pytest.approx(16)
        assert metrics["te_request_tokenization_duration_sum"] == pytest.approx(0.003)
        assert metrics["te_request_queue_duration_sum"] == pytest.approx(0.006)
        assert metrics["te_request_inference_duration_sum"] == pytest.approx(1.2)
        assert not nonzero(shared_metrics, "te_request_failure")


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (TooManyRequests("m", retry_after_s=1), "overloaded"),
        (RateLimited("m", retry_after_s=1), "overloaded"),
        (DeadlinePassed(None), "overloaded"),
        (InputTooLong(8, 9), "tokenization"),
        (BadRequest("an id outside the vocabulary"), "tokenization"),
        (TooManyTokens("m"), "validation"),
        (EngineFailed("m"), "inference"),
        (PoisonInput("m"), "inference"),
        (ServerError("m"), "inference"),
        (Unavailable("m", retry_after_s=1), "inference"),
        (KeyError("a bug"), "inference"),
        (asyncio.CancelledError(), "dropped"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_a_failure_is_counted_once_and_raised(shared_metrics_of_all, error, label):
    counts = TeiCounts(shared_metrics_of_all[0])
    with pytest.raises(type(error)):
        asyncio.run(counts.watch(3, fail(error)))
    assert nonzero(shared_metrics_of_all[1], "te_request_failure") == {f'te_request_failure{{err="{label}"}}': 1}
    assert nonzero(shared_metrics_of_all[1], "te_request_count") == {'te_request_count{method="batch"}': 1}
    assert not nonzero(shared_metrics_of_all[1], "te_request_success")
    assert not nonzero(shared_metrics_of_all[1], "te_embed_success")


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (BadRequest("not JSON"), "validation"),
        (TooManyInputs("m"), "batch_size"),
        (WrongModel("m"), "model_type"),
        (RateLimited("m", retry_after_s=1), "overloaded"),
        (TooManyRequests("m", retry_after_s=1), "overloaded"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ApiError) else str(value),
)
def test_what_cannot_be_read_is_a_failure_alone(shared_metrics_of_all, error, label):
    TeiCounts(shared_metrics_of_all[0]).count_unread(error)
    assert nonzero(shared_metrics_of_all[0], "te_") == {f'te_request_failure{{err="{label}"}}': 1}


@pytest.mark.parametrize("lengths", [[3], [3, 200, 3, 256, 4]])
def test_inputs_are_counted_by_their_length(shared_metrics_of_all, lengths):
    TeiCounts(shared_metrics_of_all[0]).count_tokenized([TokenizedInput(b"", length, False) for length in lengths])
    metrics = metrics_of(shared_metrics_of_all[1], max_tokens=256)
    assert metrics["te_embed_count"] == metrics["te_request_input_length_count"] == len(lengths)
    assert metrics["te_request_input_length_sum"] == sum(lengths)
    for bound in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        below = sum(length <= bound for length in lengths)
        assert metrics[f'te_request_input_length_bucket{{le="{bound}"}}'] == below
    assert metrics['te_request_input_length_bucket{le="+Inf"}'] == len(lengths)
    assert 'te_request_input_length_bucket{le="512"}' not in metrics, "no sequence is so long"


def test_batches_are_counted_by_sequences_and_tokens(shared_metrics_of_all):
    TeiCounts(shared_metrics_of_all[0]).count_batch(5, 600)
    TeiCounts(shared_metrics_of_all[1]).count_batch(1, 3)
    metrics = metrics_of(shared_metrics_of_all[0])
    assert (metrics["te_batch_next_size_count"], metrics["te_batch_next_size_sum"]) == (2, 6)
    assert (metrics["te_batch_next_tokens_count"], metrics["te_batch_next_tokens_sum"]) == (2, 603)
    assert [metrics[f'te_batch_next_size_bucket{{le="{bound}"}}'] for bound in (1, 4, 8, 4096)] == [1, 1, 2, 2]
    assert [metrics[f'te_batch_next_tokens_bucket{{le="{bound}"}}'] for bound in (2, 4, 512, 1024)] == [0, 1, 1, 2]


def test_the_queue_is_all_gateways(shared_metrics_of_all):
    shared_metrics_of_all[0].set(Gauge.QUEUED_SEQUENCES, 5)
    shared_metrics_of_all[1].set(Gauge.QUEUED_SEQUENCES, 6)
    assert metrics_of(shared_metrics_of_all[0])["te_queue_size"] == 11


def test_names_and_numbers_are_written_as_their_dashboards_expect(shared_metrics_of_all):
    """No `_total`, no exponent, whole numbers without a fraction."""
    text = render_tei_metrics(shared_metrics_of_all[0], max_tokens=256)
    assert "_total" not in text
    assert 'te_request_duration_bucket{le="0.000015' in text
    assert "e-" not in text.replace("te-", "")
    assert 'te_batch_next_size_bucket{le="1"} 0\n' in text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["te_queue_size"].type == "gauge"
    assert families["te_embed_count"].type == families["te_request_failure"].type == "counter"
    for name in ("te_request_duration", "te_embed_queue_duration", "te_request_input_length", "te_batch_next_tokens"):
        assert families[name].type == "histogram"


def test_they_are_beside_ours_only_where_they_are_asked_for(shared_metrics_of_all):
    ours = render_metrics(shared_metrics_of_all[0], version="1", model="m", endpoints=ENDPOINTS).decode()
    both = render_metrics(
        shared_metrics_of_all[0], version="1", model="m", endpoints=ENDPOINTS, tei_max_tokens=256
    ).decode()
    assert "te_queue_size" not in ours
    assert both.startswith(ours)
    assert both.removeprefix(ours) == render_tei_metrics(shared_metrics_of_all[0], max_tokens=256)
    assert list(text_string_to_metric_families(both))
