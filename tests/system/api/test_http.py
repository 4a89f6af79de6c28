"""What any HTTP client sees: routes, errors, headers."""

from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import httpx
import pytest

POST_EMBEDDINGS = {
    "bad json": b"{",
    "deep": b'{"input":' + b"[" * 100_000,
    "null item": b'{"input":["a",null]}',
    "ids of no vocabulary": b'{"input":[15339,999999]}',
    "too many": b'{"input":[' + b'"a",' * 2048 + b'"a"]}',
}
"""Others are in tests/unit/gateway/dialects."""


def assert_is_error(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert set(body) == {"error", "detail"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    return body["error"]


@pytest.mark.parametrize("body", POST_EMBEDDINGS.values(), ids=POST_EMBEDDINGS.keys())
def test_bad_requests(server, body):
    error = assert_is_error(httpx.post(f"{server.url}/v1/embeddings", content=body), 400)
    assert error["type"] == "invalid_request_error"
    assert len(server.embed("the server goes on")) == 1


def test_token_ids_of_openai_s_vocabulary_are_what_they_mean(server):
    """As LangChain sends them by default; [15339, 1917] is "hello world"."""
    by_ids = httpx.post(f"{server.url}/v1/embeddings", json={"input": [[15339, 1917]]})
    assert by_ids.headers["x-vecd-token-ids"] == "cl100k"
    by_text = httpx.post(f"{server.url}/v1/embeddings", json={"input": "hello world"})
    assert by_ids.json()["data"] == by_text.json()["data"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/embeddings", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/nothing", 404),
        ("POST", "/v1/models/other", 405),
        ("GET", "/%ff%fe", 400),
    ],
)
def test_every_error_has_the_shape(server, method, path, status):
    assert_is_error(httpx.request(method, server.url + path), status)


def test_health_live_models(server):
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/live").status_code == 200
    models = httpx.get(f"{server.url}/v1/models").json()
    [model] = models["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("all-MiniLM-L6-v2", "model", "vecd")
    assert httpx.get(f"{server.url}/v1/models/all-MiniLM-L6-v2").json() == model


def test_info_tells_the_model_and_the_workers(server):
    info = server.info()
    assert info["model"]["dimensions"] == 384
    assert info["model"]["max_tokens"] == 256
    assert info["model"]["pooling"] == "mean"
    assert info["workers"]
    for worker in info["workers"]:
        assert (worker["path"], worker["dtype"]) in (("lean", "float32"), ("fused", "bfloat16")), "by the processor"
        assert worker["dtype"] in ("bfloat16", "float32"), "by processor"
        assert worker["agreement"]["min_cosine"] > 0.998
        assert worker["agreement"]["longest_probe_tokens"] == 256


def test_answers_are_dated(server):
    for path in ("/live", "/nothing"):
        date = parsedate_to_datetime(httpx.get(server.url + path).headers["date"])
        assert abs(datetime.now(UTC) - date) < timedelta(seconds=5)


def test_who_asks_is_told_where_the_time_went(server):
    body = {"model": "m", "input": ["a", "b c"]}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, headers={"x-vecd-timing": "1"})
    timing = answer.headers["server-timing"]
    stages = {name: float(ms) for name, _, ms in (part.partition(";dur=") for part in timing.split(", "))}
    assert list(stages) == ["parse", "tokenize", "queue", "compute", "encode", "total"]
    assert stages["compute"] > 0
    assert sum(stages.values()) == pytest.approx(2 * stages["total"], abs=0.01)
    assert "server-timing" not in httpx.post(f"{server.url}/v1/embeddings", json=body).headers


def test_what_callers_send_is_no_label(server):
    """Whatever path, method or model they think of."""
    for path in ("/v1/a-model/embeddings", "/nowhere", "/v1//embeddings/", "/openai/deployments/mine/embeddings"):
        httpx.post(f"{server.url}{path}", json={"model": "of-my-own", "input": "a"})
    httpx.request("BREW", f"{server.url}/v1/embeddings")
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'vecd_requests_total{dialect="none",route="other",status="404"}' in metrics
    assert 'route="/openai/deployments/*/embeddings"' in metrics
    for invented in ("a-model", "nowhere", "of-my-own", "BREW", "mine"):
        assert invented not in metrics
