"""What any HTTP client sees: routes, errors, headers."""

import socket
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import httpx
import pytest

from tests.support.serving import running_server

POST_EMBEDDINGS = {
    "bad json": b"{",
    "empty body": b"",
    "not an object": b"[1]",
    "invalid utf-8": b'{"input":"\xff"}',
    "lone surrogate": b'{"input":"\\ud83d"}',
    "deep": b'{"input":' + b"[" * 100_000,
    "no input": b"{}",
    "empty list": b'{"input":[]}',
    "null item": b'{"input":["a",null]}',
    "wrong type": b'{"input":5}',
    "id too large": b'{"input":[101,30522,102]}',
    "id negative": b'{"input":[101,-1,102]}',
    "id huge": b'{"input":[101,99999999999999999999,102]}',
    "ids of no vocabulary": b'{"input":[15339,999999]}',
    "too many": b'{"input":[' + b'"a",' * 2048 + b'"a"]}',
}


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


def test_method_not_allowed_says_which_is(server):
    assert httpx.get(f"{server.url}/v1/embeddings").headers["allow"] == "OPTIONS, POST"


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


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_any_content_type(server, content_type):
    headers = {"content-type": content_type} if content_type else {}
    answer = httpx.post(f"{server.url}/v1/embeddings", content=b'{"input":"a"}', headers=headers)
    assert answer.status_code == 200


def test_answers_are_dated(server):
    for path in ("/live", "/nothing"):
        date = parsedate_to_datetime(httpx.get(server.url + path).headers["date"])
        assert abs(datetime.now(UTC) - date) < timedelta(seconds=5)


def test_a_clients_request_id_comes_back(server):
    answer = httpx.get(f"{server.url}/live", headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"


def test_a_body_over_the_limit_is_refused_before_it_is_sent(server):
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {64 * 2**20 + 1}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(head.encode())
        answer = sock.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"67108864" in answer


@pytest.fixture(scope="module")
def guarded():
    """A server with a key and small limits, without a model."""
    flags = ["--engine", "weightless", "--workers", "1", "--max-inputs", "3", "--max-body-bytes", "2000"]
    with running_server(*flags, "--served-model-name", "org/name", env={"VECD_API_KEY": "k3y"}) as running:
        yield running


def test_a_key_is_asked_for(guarded):
    url = f"{guarded.url}/v1/embeddings"
    error = assert_is_error(httpx.post(url, json={"input": "a"}), 401)
    assert error["code"] == "invalid_api_key"
    assert_is_error(httpx.post(url, json={"input": "a"}, headers={"authorization": "Bearer no"}), 401)
    assert httpx.post(url, json={"input": "a"}, headers={"authorization": "Bearer k3y"}).status_code == 200
    assert_is_error(httpx.get(f"{guarded.url}/info"), 401)
    assert httpx.get(f"{guarded.url}/health").status_code == 200


def test_limits_are_the_configured_ones(guarded):
    headers = {"x-api-key": "k3y"}
    url = f"{guarded.url}/v1/embeddings"
    error = assert_is_error(httpx.post(url, json={"input": ["a"] * 4}, headers=headers), 400)
    assert "4 inputs, at most 3" in error["message"]
    error = assert_is_error(httpx.post(url, json={"input": "a" * 2000}, headers=headers), 413)
    assert "2000" in error["message"]


def test_a_name_with_a_slash(guarded):
    headers = {"x-api-key": "k3y"}
    assert httpx.get(f"{guarded.url}/v1/models/org/name", headers=headers).json()["id"] == "org/name"
    assert httpx.get(f"{guarded.url}/v1/models/org%2Fname", headers=headers).json()["id"] == "org/name"


def test_the_key_is_nowhere_to_be_seen(guarded):
    assert "k3y" not in guarded.stderr
    for process in guarded.processes():
        assert "k3y" not in " ".join(process.cmdline())


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
