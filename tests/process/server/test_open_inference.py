"""What KServe sends: OpenAI's routes below /openai, the health of the Open Inference Protocol."""

from typing import Any

import httpx
import pytest

from tests.support.serving import RunningServer, Server
from tests.support.shared_servers import DUMMY, shared_server

MODEL = "all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def server() -> RunningServer:
    return shared_server(*DUMMY)


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


def test_what_is_no_more_names_what_serves_instead(server: Server) -> None:
    for path in ("/v2/models/m", "/v2/models/org/m/ready", "/vertex"):
        response = httpx.get(f"{server.url}{path}")
        assert response.status_code == 404
        assert "There is nothing at this path; /" in response.text
