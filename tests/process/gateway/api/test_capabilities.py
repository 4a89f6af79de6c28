"""A gateway without workers: what it says of models of each kind, and to clients that take them for another; the pages
for browsers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import orjson
import pytest

from tests.support.asking import PLAIN, body_of, changed
from tests.support.cards import CLASSIFIER, DENSE, HYBRID, MULTI_VECTOR, RERANKER, SPARSE, TOKEN_CLASSIFIER
from tests.support.pipelines import app_of
from vecd.gateway.api.operation import Operation, wrong_model
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.app.app import App
from vecd.gateway.errors import ApiError
from vecd.gateway.request import HttpRequest, Response
from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import load_settings
from vecd.launch.sockets import make_zmq_endpoint
from vecd.launch.summary import summary
from vecd.model.card import ModelCard
from vecd.model.steps import ScoreHead, Step, TokenHead

OTHERS = {
    "rerank": RERANKER,
    "classify": CLASSIFIER,
    "token-classify": TOKEN_CLASSIFIER,
    "sparse": SPARSE,
    "multi-vector": MULTI_VECTOR,
}
"""By kind, models without dense vectors."""
_HEADS = ("dim", "capabilities", "num_labels", "token_dim", "score", "sparse", "tokens")


@cache
def planned() -> Plan:
    return make_plan(load_settings(["--port", "0"]))


def with_heads_of(kind: ModelCard) -> ModelCard:
    """The bundled model's card with the heads of another."""
    return replace(planned().card, **{name: getattr(kind, name) for name in _HEADS})


class Gateway:
    """A gateway's routes and what is behind them, without a socket and without a worker."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def respond(self, method: str, path: str, body: bytes = b"", **headers: str) -> Response:
        request = HttpRequest(method, path, b"", headers, 1, True, "id", body=body)
        try:
            return await self._app.handle(request)
        except ApiError as error:
            return self._app.render_error(error, request)

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        response = await self.respond(method, path, body)
        return response.status, orjson.loads(body_of(response))


@contextmanager
def gateway_of(kind: ModelCard, **changes: Any) -> Iterator[Gateway]:
    config = replace(planned().gateway, card=with_heads_of(kind), **changes)
    app = app_of(config)
    listening, address_fd = make_zmq_endpoint()
    app.active.dispatcher.start(listening.detach())
    try:
        yield Gateway(app)
    finally:
        app.stop()
        app.active.tokenizer.threads.close()
        os.close(address_fd)


_HAS_ANOTHER_OUTPUT = {
    "/v1/embeddings": ("sparse", "multi-vector"),
    "/pooling": ("classify", "token-classify", "multi-vector"),
}
"""By path, the kinds that answer there with something else than dense vectors."""


@pytest.mark.parametrize("kind", OTHERS)
async def test_a_model_without_dense_vectors_is_described_and_not_embedded_with(kind: str):
    with gateway_of(OTHERS[kind]) as gateway:
        for path, body in (
            ("/v1/embeddings", b"no JSON, which is not looked at"),
            ("/pooling", b'{"input": "a"}'),
            ("/api/embed", b'{"model": "m", "input": "a"}'),
            ("/api/embeddings", b'{"model": "m", "prompt": "a"}'),
            ("/v2/embed", b"{}"),
            ("/embed", b'{"texts": ["a"]}'),
        ):
            if kind not in _HAS_ANOTHER_OUTPUT.get(path, ()):
                status, answer = await gateway.ask("POST", path, body)
                text = orjson.dumps(answer).decode()
                said = ["This model can ", f"({kind})", "it cannot make dense vectors"]
                assert (status, [part for part in said if part in text]) == (400, said), path
        for path in ("/embed", "/embed_all", "/similarity"):  # text-embeddings-inference has a status of its own for it
            status, answer = await gateway.ask("POST", path, b'{"inputs": 1}')
            assert (status, answer["error_type"]) == (424, "Backend")
            assert "it cannot make dense vectors" in answer["error"]
        for path in ("/api/tags", "/version", "/stats"):
            assert (await gateway.ask("GET", path))[0] == 200, path
        _, models = await gateway.ask("GET", "/v1/models")
        endpoints = {"rerank": ["rerank"], "classify": ["classify"], "multi-vector": ["rerank"]}
        assert models["models"][0]["endpoints"] == endpoints.get(kind, [])
        assert models["data"][0]["capabilities"] == [kind]
        _, shown = await gateway.ask("POST", "/api/show", b'{"model": "all-minilm"}')
        assert shown["capabilities"] == []
        _, document = await gateway.ask("GET", "/openapi.json")
        assert f": {kind}, texts of up to" in document["info"]["description"]


_LONG_DOCUMENTS = replace(MULTI_VECTOR, tokens=TokenHead((Step("normalize"),), document_tokens=180))
_ID_TO_LABEL, _LABEL_TO_ID = {"0": "a", "1": "b", "2": "c"}, {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("card", "about", "model_type", "longest"),
    [
        (DENSE, (None, 6, "mean", True), {"embedding": {"pooling": "mean"}}, 256),
        (HYBRID, (None, 6, "mean", True), {"embedding": {"pooling": "mean"}}, 256),
        (SPARSE, (None, None, "max", None), {"embedding": {"pooling": "splade"}}, 256),
        (_LONG_DOCUMENTS, (None, 4, None, True), {"reranker": {"id2label": {}, "label2id": {}}}, 180),
        (
            RERANKER,
            (["score"], None, "cls", None),
            {"reranker": {"id2label": {"0": "score"}, "label2id": {"score": 0}}},
            256,
        ),
        (
            CLASSIFIER,
            (["a", "b", "c"], None, "cls", None),
            {"classifier": {"id2label": _ID_TO_LABEL, "label2id": _LABEL_TO_ID}},
            256,
        ),
    ],
)
async def test_info_says_what_the_model_can_do_and_tells_text_embeddings_inference_s_clients_which_route_it_has(
    card: ModelCard, about: tuple[Any, ...], model_type: dict[str, Any], longest: int
):
    with gateway_of(card) as gateway:
        status, info = await gateway.ask("GET", "/info")
    assert (status, info["model_type"], info["max_input_length"]) == (200, model_type, longest)
    model = info["model"]
    assert model["capabilities"] == list(card.capabilities)
    assert (model.get("labels"), model["dimensions"], model["pooling"], model["normalized"]) == about


def test_the_message_names_some_of_the_routes_that_the_model_has():
    def able_to(*capabilities: str) -> ModelInfo:
        return changed(PLAIN, capabilities=capabilities)

    operation = Operation(summary="", response={}, needs=("sparse", "dense"))
    routes = {"rerank": ["/rerank", "/v1/rerank"], "classify": ["/rerank", *(f"/{n}" for n in range(9))]}
    assert wrong_model(operation, able_to("rerank", "classify"), routes).message == (
        "This model can rerank texts and classify texts (rerank, classify); it cannot make sparse vectors or make "
        "dense vectors. It is served at /rerank, /v1/rerank, /0, /1, /2, /3, /4, /5 and 3 more"
    )
    assert not able_to("rerank", "classify").can(operation.needs)
    assert able_to("rerank", "dense").can(operation.needs)
    assert able_to("rerank").can(())


# --- the summary of the start -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "model_line", "kind_line", "path"),
    [
        (RERANKER, ": at most 256 tokens, cls pooling", "rerank (1 label)", "/rerank"),
        (
            replace(CLASSIFIER, num_labels=7, score=ScoreHead(("a\x1b[2J", *"bcdefg"), "softmax", "mean")),
            ": at most 256 tokens, mean pooling",
            "classify (7 labels: 'a\\x1b[2J', b, c, d, e and 2 more)",
            "/predict",
        ),
        (SPARSE, ": at most 256 tokens, max pooling", "sparse", "/embed_sparse"),
        (HYBRID, ": 6 dimensions, at most 256 tokens, mean pooling, normalized", "dense, sparse, multi-vector", "/v1"),
    ],
)
def test_it_names_the_kind(card: ModelCard, model_line: str, kind_line: str, path: str):
    lines, fields = summary(replace(planned(), card=with_heads_of(card)), "http://h:80", "", {}, 1, 1.0)
    assert lines[1].endswith(model_line)
    assert lines[2].split(maxsplit=1) == ["kind", kind_line]
    assert any(line.startswith("  try ") and f"http://h:80{path}" in line for line in lines)
    assert fields["capabilities"] == list(card.capabilities)
    assert fields["dimensions"] == (6 if "dense" in card.capabilities else None)
    assert fields["labels"] == (card.num_labels or None)


def test_it_says_how_long_queries_and_documents_of_a_multi_vector_model_are():
    card = with_heads_of(replace(MULTI_VECTOR, tokens=TokenHead((), document_tokens=180, query_tokens=32)))
    lines, _ = summary(replace(planned(), card=card), "http://h:80", "", {}, 1, 1.0)
    assert "  tokens     4 dimensions each, with documents of 180 tokens and queries of 32 tokens at most" in lines


# --- pages ------------------------------------------------------------------------------------------------------

HTML = "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"


async def test_the_page_is_for_browsers_and_is_nobody_s_frame():
    with gateway_of(DENSE) as gateway:
        page, plain, docs = [
            await gateway.respond("GET", "/", accept=HTML),
            await gateway.respond("GET", "/", accept="*/*"),
            await gateway.respond("GET", "/docs"),
        ]
    assert page.content_type == "text/html; charset=utf-8"
    assert body_of(page).startswith(b"<!doctype html>")
    for answer in (page, docs):
        policy = answer.headers["content-security-policy"]
        for rule in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"):
            assert rule in policy
        assert "http" not in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
    assert plain.content_type == "application/json", "the health check of other clients, and no worker is there"
    assert page.headers["vary"] == plain.headers["vary"] == "accept"


async def test_without_the_page_the_root_is_a_health_check_for_browsers_too():
    without = make_plan(load_settings(["--port", "0", "--no-ui"])).gateway
    with gateway_of(DENSE, ui=without.ui) as gateway:
        answer = await gateway.respond("GET", "/", accept=HTML)
        assert (answer.status, answer.content_type, "vary" in answer.headers) == (503, "application/json", False)
        assert (await gateway.ask("GET", "/stats"))[0] == 200
