"""Fairness, priorities, deadlines and refusals of a real server with a real model."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.serving import eventually, running_server
from tests.support.soak.form import only_long

BULK = [f"text {n}: " + "many words that are asked for in one request of a great many texts " * 5 for n in range(400)]


@pytest.fixture(scope="module")
def server():
    with running_server("--workers", "1") as server:
        yield server


@pytest.fixture
def bulk(server):
    """A request that keeps the worker busy for seconds; its answer."""
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(post, server, BULK)
        eventually(lambda: server.info()["queue"]["sequences"] > 100)
        yield answer
        assert answer.result().status_code == 200
        assert len(answer.result().json()["data"]) == len(BULK)


def post(server, texts, **headers) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/embeddings",
        json={"input": texts, "encoding_format": "base64"},
        headers={name.replace("_", "-"): value for name, value in headers.items()},
        timeout=120,
    )


def test_a_short_request_is_answered_while_a_bulk_request_still_waits(server, bulk):
    assert post(server, "short").status_code == 200
    assert not bulk.done()


@only_long
def test_a_large_request_behind_another_is_refused_and_told_when_to_come_back():
    with running_server("--workers", "1", "--max-wait", "0.05") as server, ThreadPoolExecutor() as threads:
        first = threads.submit(post, server, BULK)
        eventually(lambda: server.info()["queue"]["sequences"] > 100)
        refused = post(server, BULK)
        assert not first.done()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "server_overloaded"
        assert "at most 0.05 s are allowed" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert first.result().status_code == 200


def test_a_request_is_given_up_at_its_own_deadline_and_nothing_of_it_is_left(server):
    late = post(server, BULK, x_vecd_timeout_ms="300")
    assert late.status_code == 503
    assert "No answer before the request's deadline" in late.json()["error"]["message"]
    assert server.info()["queue"] == {"requests": 0, "sequences": 0, "tokens": 0}
    assert post(server, "the next").status_code == 200


def test_bulk_priority_waits_for_normal(server):
    with ThreadPoolExecutor() as threads:
        low = threads.submit(post, server, BULK, x_vecd_priority="bulk")
        eventually(lambda: server.info()["queue"]["sequences"] > 100)
        high = post(server, [f"other {text}" for text in BULK[:60]])
        assert high.status_code == 200
        assert not low.done()
        assert low.result().status_code == 200


def test_a_request_larger_than_any_queue_is_served_in_pieces():
    with running_server("--engine", "weightless", "--max-inputs", "20000") as server:
        answer = post(server, [f"text {n}" for n in range(20_000)])
        assert answer.status_code == 200
        assert len(answer.json()["data"]) == 20_000
        assert post(server, ["text"] * 20_001).status_code == 400


def test_the_learned_speed_is_shown(server):
    post(server, BULK[:50])
    [worker] = server.info()["workers"]
    assert worker["tokens_per_s"] > 0
    assert 128 <= worker["short_batch_tokens"] <= worker["batch_tokens"] <= 2048
