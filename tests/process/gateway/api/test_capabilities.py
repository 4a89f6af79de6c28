"""Models without dense vectors: what the gateway says of them, and to clients that take them for models of another
kind."""

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache
from typing import Any

import orjson
import pytest

from tests.support.asking import body_of
from tests.support.cards import CLASSIFIER, DENSE, HYBRID, MULTI_VECTOR, RERANKER, SPARSE, TOKEN_CLASSIFIER
from vecd.gateway.api.capabilities import check_model
from vecd.gateway.api.operations import Operation
from vecd.gateway.service import GatewayFacts, Service, read_tokenizer
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.types.errors import ApiError, WrongModel
from vecd.gateway.types.messages import HttpRequest
from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import load_settings
from vecd.launch.processes.sockets import make_zmq_endpoint
from vecd.launch.processes.summary import summary
from vecd.shm.card import ModelCard
from vecd.shm.heads import ScoreHead, Step, TokenHead

OTHERS = {
    "rerank": RERANKER,
    "classify": CLASSIFIER,
    "token-classify": TOKEN_CLASSIFIER,
    "sparse": SPARSE,
    "multi-vector": MULTI_VECTOR,
}
_HEADS = ("dim", "capabilities", "num_labels", "token_dim", "score", "sparse", "tokens")


@cache
def planned() -> Plan:
    return make_plan(load_settings(["--port", "0"]))


def with_heads_of(kind: ModelCard) -> ModelCard:
    """The bundled model's card with the heads of another."""
    return replace(planned().card, **{name: getattr(kind, name) for name in _HEADS})


class Gateway:
    """A gateway's routes and what is behind them, without a socket and without a worker."""

    def __init__(self, kind: ModelCard) -> None:
        config = replace(planned().gateway, card=with_heads_of(kind))
        facts = GatewayFacts(1, b"k" * 32, SharedMetrics.private(), lambda message: None)
        self._service = Service(config, 1, read_tokenizer(config), facts)
        listening, self._address_fd = make_zmq_endpoint()
        self._service.dispatcher.start(listening.detach())

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        request = HttpRequest(method, path, b"", {}, 1, True, "id", body=body)
        try:
            response = await self._service.api.handle(request)
        except ApiError as error:
            response = self._service.api.render_error(error, path)
        return response.status, orjson.loads(body_of(response))

    def stop(self) -> None:
        self._service.stop()
        os.close(self._address_fd)


@pytest.fixture(params=OTHERS)
async def other(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway of a model of each kind that has no dense vectors, and the kind."""
    gateway = Gateway(OTHERS[request.param])
    yield gateway, request.param
    gateway.stop()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", b"no JSON, which is not looked at"),
        ("/pooling", b'{"input": "a"}'),
        ("/api/embed", b'{"model": "m", "input": "a"}'),
        ("/api/embeddings", b'{"model": "m", "prompt": "a"}'),
        ("/v2/embed", b"{}"),
        ("/v1/embed", b"{}"),
        ("/embed", b'{"texts": ["a"]}'),
    ],
)
async def test_a_model_without_dense_vectors_is_not_embedded_with(other: tuple[Gateway, str], path: str, body: bytes):
    gateway, kind = other
    status, answer = await gateway.ask("POST", path, body)
    assert status == 400
    text = orjson.dumps(answer).decode()
    assert "This model can " in text
    assert f"({kind})" in text
    assert "it cannot make dense vectors" in text


@pytest.mark.parametrize("path", ["/embed", "/embed_all", "/similarity", "/vertex"])
async def test_text_embeddings_inference_has_a_status_of_its_own_for_it(other: tuple[Gateway, str], path: str):
    gateway, _ = other
    status, answer = await gateway.ask("POST", path, b'{"inputs": 1}')
    assert (status, answer["error_type"]) == (424, "Backend")
    assert "it cannot make dense vectors" in answer["error"]


async def test_what_describes_the_server_works_for_every_model(other: tuple[Gateway, str]):
    gateway, kind = other
    for path in ("/v1/models", "/openapi.json", "/api/tags", "/version", "/stats"):
        assert (await gateway.ask("GET", path))[0] == 200, path
    _, models = await gateway.ask("GET", "/v1/models")
    expected = [{"rerank": "rerank", "classify": "classify", "multi-vector": "rerank"}.get(kind)]
    expected = [endpoint for endpoint in expected if endpoint]
    assert models["models"][0]["endpoints"] == expected
    assert models["data"][0]["capabilities"] == [kind]
    _, shown = await gateway.ask("POST", "/api/show", b'{"model": "all-minilm"}')
    assert shown["capabilities"] == []
    _, document = await gateway.ask("GET", "/openapi.json")
    assert f": {kind}, texts of up to" in document["info"]["description"]


@pytest.mark.parametrize(
    ("card", "labels", "dimensions", "model_type"),
    [
        (DENSE, None, 6, {"embedding": {"pooling": "mean"}}),
        (HYBRID, None, 6, {"embedding": {"pooling": "mean"}}),
        (SPARSE, None, None, {"embedding": {"pooling": "splade"}}),
        (MULTI_VECTOR, None, 4, {"reranker": {"id2label": {}, "label2id": {}}}),
        (RERANKER, ["score"], None, {"reranker": {"id2label": {"0": "score"}, "label2id": {"score": 0}}}),
        (
            CLASSIFIER,
            ["a", "b", "c"],
            None,
            {"classifier": {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}},
        ),
    ],
)
async def test_info_says_what_the_model_can_do_and_tells_text_embeddings_inference_s_clients_which_route_it_has(
    card: ModelCard, labels: list[str] | None, dimensions: int | None, model_type: dict[str, Any]
):
    gateway = Gateway(card)
    try:
        status, info = await gateway.ask("GET", "/info")
    finally:
        gateway.stop()
    assert status == 200
    assert info["model_type"] == model_type
    assert info["model"]["capabilities"] == list(card.capabilities)
    assert info["model"].get("labels") == labels
    assert info["model"]["dimensions"] == dimensions


def test_the_message_names_some_of_the_routes_that_the_model_has():
    operation = Operation(summary="", response={}, needs=("sparse", "dense"))
    routes = {"rerank": ["/rerank", "/v1/rerank"], "classify": ["/rerank", *(f"/{n}" for n in range(9))]}
    with pytest.raises(WrongModel) as caught:
        check_model(operation, ("rerank", "classify"), routes)
    assert caught.value.message == (
        "This model can rerank texts and classify texts (rerank, classify); it cannot make sparse vectors or make "
        "dense vectors. It is served at /rerank, /v1/rerank, /0, /1, /2, /3, /4, /5 and 3 more"
    )
    check_model(operation, ("rerank", "dense"), routes)
    check_model(replace(operation, needs=()), ("rerank",), routes)


@pytest.mark.parametrize(
    ("card", "model_line", "kind_line", "path"),
    [
        (DENSE, ": 6 dimensions, at most 256 tokens, mean pooling, normalized", "dense", "/v1/embeddings"),
        (RERANKER, ": at most 256 tokens, cls pooling", "rerank (1 label)", "/rerank"),
        (CLASSIFIER, ": at most 256 tokens, cls pooling", "classify (3 labels: a, b, c)", "/predict"),
        (
            replace(CLASSIFIER, num_labels=7, score=ScoreHead(("a\x1b[2J", *"bcdefg"), "softmax", "mean")),
            ": at most 256 tokens, mean pooling",
            "classify (7 labels: 'a\\x1b[2J', b, c, d, e and 2 more)",
            "/predict",
        ),
        (TOKEN_CLASSIFIER, ": at most 256 tokens", "token-classify (3 labels: a, b, c)", "/predict"),
        (SPARSE, ": at most 256 tokens, max pooling", "sparse", "/embed_sparse"),
        (MULTI_VECTOR, ": at most 256 tokens", "multi-vector", "/rerank"),
        (HYBRID, ": 6 dimensions, at most 256 tokens, mean pooling, normalized", "dense, sparse, multi-vector", "/v1"),
    ],
)
def test_the_summary_of_the_start_names_the_kind(card: ModelCard, model_line: str, kind_line: str, path: str):
    lines, fields = summary(replace(planned(), card=with_heads_of(card)), "http://h:80", "", {}, 1, 1.0)
    assert lines[1].endswith(model_line)
    assert lines[2].split(maxsplit=1) == ["kind", kind_line]
    assert any(line.startswith("  try ") and f"http://h:80{path}" in line for line in lines)
    assert fields["capabilities"] == list(card.capabilities)
    assert fields["dimensions"] == (6 if "dense" in card.capabilities else None)
    assert fields["labels"] == (card.num_labels or None)
    about_tokens = [line.split(maxsplit=1)[1] for line in lines if line.startswith("  tokens ")]
    assert about_tokens == ([] if card.tokens is None else [f"{card.token_dim} dimensions each"])


def test_the_summary_says_how_long_queries_and_documents_of_a_multi_vector_model_are():
    tokens = TokenHead((), document_tokens=180, query_tokens=32)
    card = with_heads_of(replace(MULTI_VECTOR, tokens=tokens))
    lines, _ = summary(replace(planned(), card=card), "http://h:80", "", {}, 1, 1.0)
    assert "  tokens     4 dimensions each, with documents of 180 tokens and queries of 32 tokens at most" in lines


@pytest.mark.parametrize(
    ("card", "pooling", "is_normalized", "longest"),
    [
        (RERANKER, "cls", None, 256),
        (TOKEN_CLASSIFIER, None, None, 256),
        (SPARSE, "max", None, 256),
        (replace(MULTI_VECTOR, tokens=TokenHead((Step("normalize"),), document_tokens=180)), None, True, 180),
        (DENSE, "mean", True, 256),
    ],
)
async def test_info_says_how_tokens_are_pooled_only_where_they_are(
    card: ModelCard, pooling: str | None, is_normalized: bool | None, longest: int
):
    gateway = Gateway(card)
    try:
        _, info = await gateway.ask("GET", "/info")
    finally:
        gateway.stop()
    assert (info["model"]["pooling"], info["model"]["normalized"]) == (pooling, is_normalized)
    assert info["max_input_length"] == longest
