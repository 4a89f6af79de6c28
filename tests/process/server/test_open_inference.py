"""What KServe sends: OpenAI's routes below /openai, the health and the metadata of the Open Inference Protocol."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.serving import Server, running_server

MODEL = "all-MiniLM-L6-v2"
METADATA = {
    "name": MODEL,
    "versions": [],
    "platform": "vecd",
    "inputs": [{"name": "input", "datatype": "BYTES", "shape": [-1]}],
    "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [-1, 384]}],
}
TWO_MODELS = """
[models.first]
aliases = ["one"]

[models."org/second"]
load = "demand"
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--engine", "dummy", "--workers", "1") as server:
        yield server


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("config") / "vecd.toml"
    file.write_text(TWO_MODELS)
    with running_server("--engine", "dummy", "--workers", "1", "--config", str(file)) as server:
        yield server


def get(server: Server, path: str) -> tuple[int, Any]:
    response = httpx.get(f"{server.url}{path}", timeout=30)
    return response.status_code, response.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": []}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/classify", {"input": ["a"], "labels": ["b", "c"]}),
        ("/v1/classify", {"input": ["a"]}),
        ("/v1/multi-vector", {"input": ["a"]}),
    ],
)
def test_below_openai_a_body_gets_what_it_gets_elsewhere(server: Server, path: str, body: dict[str, Any]) -> None:
    ours, theirs = (httpx.post(f"{server.url}{base}{path}", json=body, timeout=30) for base in ("/openai", ""))
    assert ours.status_code == theirs.status_code
    volatile = {"id": None, "created": None}
    assert ours.json() | volatile == theirs.json() | volatile


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/v1/models/"])
def test_below_openai_models_are_the_same(server: Server, path: str) -> None:
    assert get(server, f"/openai{path}") == get(server, path)
    assert get(server, path)[0] == 200


def test_health(server: Server) -> None:
    assert get(server, "/v2/health/live") == (200, {"live": True})
    assert get(server, "/v2/health/ready") == (200, {"ready": True})


def test_a_model_by_its_name_and_by_no_other(server: Server) -> None:
    assert get(server, f"/v2/models/{MODEL}") == (200, METADATA)
    assert get(server, f"/v2/models/{MODEL}/ready") == (200, {"name": MODEL, "ready": True})
    for path in ("/v2/models/some/other", "/v2/models/some/other/ready", "/v1/models/some/other"):
        assert get(server, path)[0] == 404


def test_tensors_are_not_served(server: Server) -> None:
    response = httpx.post(f"{server.url}/v2/models/{MODEL}/infer", json={"inputs": []})
    assert response.status_code == 405
    assert "POST /v1/embeddings" in response.json()["message"]


def test_each_of_two_models(two_models: Server) -> None:
    for name, own in (("first", "first"), ("one", "first"), ("org/second", "org/second")):
        assert get(two_models, f"/v2/models/{name}") == (200, METADATA | {"name": own})
        assert get(two_models, f"/v2/models/{name}/ready") == (200, {"name": own, "ready": True}), "it can be loaded"
        assert get(two_models, f"/m/{name}/v2/models/{name}/ready") == (200, {"name": own, "ready": True})
        assert get(two_models, f"/openai/v1/models/{name}") == get(two_models, f"/v1/models/{name}")
        vectors = httpx.post(f"{two_models.url}/m/{name}/openai/v1/embeddings", json={"input": "a"}, timeout=30)
        assert vectors.json()["model"] == own
    for path in ("/v2/models/other", "/v2/models/other/ready"):
        status, body = get(two_models, path)
        assert status == 404
        assert "`other`" in body["message"]
