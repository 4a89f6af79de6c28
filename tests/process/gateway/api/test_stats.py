"""`/stats` has the shape that its module says and counts what was done; the page's headers, and a server without it."""

from typing import Any

import httpx
import pytest

from tests.support.serving import eventually, running_server

WEIGHTLESS = ("--engine", "weightless", "--workers", "1")
HTML = {"accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
SHAPE: dict[str, Any] = {
    "now_s": float,
    "requests": [{"route": str, "dialect": str, "status": int, "count": int}],
    "totals": dict.fromkeys(
        ("inputs", "input_tokens", "sequences", "tokens", "padding_tokens", "batches", "batches_leased", "compute_s",
         "refused", "expired", "retried", "coalesced", "stuck", "poisoned"),
        float,
    ),
    "stage_bounds_s": [float],
    "stages": {
        stage: {"counts": [int], "sum_s": float}
        for stage in ("parse", "tokenize", "queue", "compute", "encode", "total")
    },
    "batch_tokens": {"bounds": [float], "counts": [int], "sum": float},
    "batch_fill": {"bounds": [float], "counts": [int], "sum": float},
    "queue": {"requests": int, "sequences": int, "tokens": int, "age_s": float},
    "arena": {"rows": int, "rows_in_use": int},
    "vector_cache": {"max_bytes": int, "bytes": int, "hits": int, "misses": int},
    "workers": [
        {"worker": int, "life": int, "state": str, "batches": int, "sequences": int, "tokens": int, "busy_s": float,
         "tokens_per_s": int, "pid": int, "dtype": str, "path": str}
    ],
    "gateways": [{"gateway": int, "pid": int, "connections": int, "requests": int, "answered": int, "uptime_s": float}],
    "batches": [
        {"gateway": int, "number": int, "worker": int, "sequences": int, "tokens": int,
         "sent_s": float, "done_s": float, "compute_s": float}
    ],
    "model": {"id": str, "architecture": str, "capabilities": [str], "dimensions": int, "max_tokens": int,
              "pooling": str, "normalized": bool, "prompt": str, "prompts": [str], "matryoshka": bool,
              "matryoshka_dimensions": [int]},
    "server": {"version": str, "num_gateways": int, "gateway": int},
    "processes": {
        process: {"pid": int, "cpu_s": float, "resident_bytes": int, "proportional_bytes": int}
        for process in ("supervisor", "forkserver", "gateway-0", "gateway-1", "worker-0")
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with running_server(*WEIGHTLESS, "--gateways", "2") as running:
        yield running


def assert_has_shape(found: Any, shape: Any, where: str = "") -> None:
    if isinstance(shape, dict):
        assert isinstance(found, dict), where
        assert found.keys() == shape.keys(), where
        for name, part in shape.items():
            assert_has_shape(found[name], part, f"{where}.{name}")
    elif isinstance(shape, list):
        assert isinstance(found, list), where
        for n, part in enumerate(found):
            assert_has_shape(part, shape[0], f"{where}[{n}]")
    else:
        assert type(found) is shape, where


def stats_of(server) -> dict:
    answer = httpx.get(f"{server.url}/stats")
    assert answer.headers["cache-control"] == "no-store"
    return answer.raise_for_status().json()


def test_what_is_said_and_that_it_is_counted(server):
    eventually(lambda: all(gateway["pid"] for gateway in server.info()["gateways"]))
    before = stats_of(server)
    server.embed(["a text", "another one"])
    server.embed("a third")
    after = stats_of(server)
    assert_has_shape(after, SHAPE)
    assert after["now_s"] > before["now_s"]
    grown = {name: after["totals"][name] - before["totals"][name] for name in after["totals"]}
    assert (grown["inputs"], grown["sequences"]) == (3, 3)
    assert grown["tokens"] == grown["input_tokens"] == sum(batch["tokens"] for batch in after["batches"])
    for stage in after["stages"].values():
        assert len(stage["counts"]) == len(after["stage_bounds_s"]) + 1
        assert sum(stage["counts"]) == 2
    assert len(after["batch_tokens"]["counts"]) == len(after["batch_tokens"]["bounds"]) + 1
    assert sum(after["batch_tokens"]["counts"]) == grown["batches"] == len(after["batches"])
    assert all(batch["sent_s"] < batch["done_s"] < after["now_s"] for batch in after["batches"])
    [embeddings] = [entry for entry in after["requests"] if entry["dialect"] == "openai"]
    assert embeddings == {"route": "/v1/embeddings", "dialect": "openai", "status": 200, "count": 2}
    assert after["queue"] == {"requests": 0, "sequences": 0, "tokens": 0, "age_s": 0.0}


def test_nothing_that_was_sent_is_in_it(server):
    server.embed("a secret text")
    assert "secret" not in httpx.get(f"{server.url}/stats").text


def test_the_page_is_for_browsers_and_is_nobody_s_frame(server):
    page = httpx.get(server.url, headers=HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")
    for answer in (page, httpx.get(f"{server.url}/docs")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "http" not in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
    plain = httpx.get(server.url)
    assert (plain.text, plain.headers["content-type"]) == ("vecd is running", "text/plain; charset=utf-8")
    assert page.headers["vary"] == plain.headers["vary"] == "accept"


def test_without_the_page_the_root_is_as_it_was():
    with running_server(*WEIGHTLESS, "--no-ui") as server:
        answer = httpx.get(server.url, headers=HTML)
        assert (answer.text, answer.headers["content-type"]) == ("vecd is running", "text/plain; charset=utf-8")
        assert httpx.get(f"{server.url}/stats").status_code == 200
