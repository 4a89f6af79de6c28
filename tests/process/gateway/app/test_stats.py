"""`/stats` has the shape that the page reads, counts what was done, and quotes nothing."""

from typing import Any

import httpx

from tests.support.serving import eventually, running_server
from tests.support.shared_servers import DUMMY

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
    "model": {"id": str, "identity": str, "architecture": str, "capabilities": [str], "dimensions": int,
              "max_tokens": int, "pooling": str, "normalized": bool, "prompt": str, "prompts": [str],
              "matryoshka": bool, "matryoshka_dimensions": [int]},
    "server": {"version": str, "num_gateways": int, "gateway": int},
    "processes": {
        process: {"pid": int, "cpu_s": float, "resident_bytes": int, "proportional_bytes": int}
        for process in ("supervisor", "forkserver", "gateway-0", "gateway-1", "worker-0")
    },
}  # fmt: skip


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


def test_what_is_said_and_that_it_is_counted_and_nothing_that_was_sent():
    with running_server(*DUMMY, "--gateways", "2") as server:

        def stats() -> Any:
            answer = httpx.get(f"{server.url}/stats")
            assert answer.headers["cache-control"] == "no-store"
            return answer.raise_for_status().json()

        eventually(lambda: all(gateway["pid"] for gateway in server.info()["gateways"]))
        before = stats()
        server.embed(["a secret text", "another one"])
        server.embed("a third")
        # A gateway counts a request behind its response, which may be later than another gateway's answer.
        eventually(lambda: sum(stats()["stages"]["total"]["counts"]) >= 2)
        after = stats()
    assert_has_shape(after, SHAPE)
    assert "secret" not in str(after)
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
