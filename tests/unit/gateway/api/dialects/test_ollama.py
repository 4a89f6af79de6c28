"""Ollama's dialect: every exchange to the byte, and what one server cannot show: prompts, strict names, aliases."""

import json
import re
from dataclasses import replace

import pytest

from vecd.gateway.api.dialects.ollama import DIALECT
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import Call, ParsedEmbed
from vecd.gateway.api.registry import ROUTES, render_error
from vecd.gateway.types.errors import BadRequest, InputTooLong, InvalidApiKey, ModelNotFound, NotFound
from vecd.gateway.types.messages import Response
from vecd.gateway.types.request import Overflow


def call(model_info: ModelInfo, path: str, body: dict, headers: dict[str, str] | None = None) -> ParsedEmbed | Response:
    operation = DIALECT.operations[f"POST {path}"]
    run = operation.embed or operation.reply
    assert run is not None
    asked = run(Call(operation.fields.read(body), headers or {}, model_info, "req_1"))
    assert isinstance(asked, ParsedEmbed | Response)
    return asked


def embed(model_info: ModelInfo, body: dict) -> ParsedEmbed:
    ask = call(model_info, "/api/embed", {"input": "a", **body})
    assert isinstance(ask, ParsedEmbed)
    return ask


def body_of(response: ParsedEmbed | Response) -> dict:
    assert isinstance(response, Response)
    body = response.body if isinstance(response.body, bytes) else b"".join(response.body)
    return json.loads(body)


# --- embed ------------------------------------------------------------------------------------------------------


def test_vectors_have_length_1(model_info):
    """Whatever the model's own have; those of the older operation are the model's own."""
    assert embed(model_info, {}).request.normalize
    ask = call(model_info, "/api/embeddings", {"prompt": "a"})
    assert isinstance(ask, ParsedEmbed)
    assert not ask.request.normalize


@pytest.mark.parametrize(("truncate", "overflow"), [(True, Overflow.TRUNCATE), (False, Overflow.ERROR), (None, None)])
def test_truncate(model_info, truncate, overflow):
    assert embed(model_info, {"truncate": truncate}).request.tokenizing.overflow is overflow


def test_num_ctx_bounds_a_text(model_info):
    assert embed(model_info, {"options": {"num_ctx": 16}}).request.tokenizing.max_tokens == 16
    for num_ctx in (None, model_info.max_tokens, 8192):
        assert embed(model_info, {"options": {"num_ctx": num_ctx}}).request.tokenizing.max_tokens is None
    ask = call(model_info, "/api/embeddings", {"prompt": "a", "options": {"num_ctx": 16}})
    assert isinstance(ask, ParsedEmbed)
    assert ask.request.tokenizing.max_tokens == 16


def test_dimensions(model_info):
    assert embed(replace(model_info, is_matryoshka=True), {"dimensions": 64}).request.dimensions == 64


def test_headers(model_info):
    ask = call(model_info, "/api/embed", {"input": "a"}, {"x-vecd-priority": "bulk", "x-vecd-timeout-ms": "1500"})
    assert isinstance(ask, ParsedEmbed)
    assert ask.request.priority is not None
    assert (ask.request.priority.name, ask.request.timeout_s) == ("BULK", 1.5)


def test_a_tag_may_name_a_prompt(model_info):
    model_info = replace(model_info, prompts={"query": "query: "})
    assert embed(model_info, {"model": f"{model_info.model}:query"}).request.tokenizing.prompt == "query: "
    assert embed(model_info, {"model": f"{model_info.model}:latest"}).request.tokenizing.prompt is None
    assert embed(model_info, {"model": model_info.model}).request.tokenizing.prompt is None
    ask = call(model_info, "/api/embeddings", {"model": f"{model_info.model}:query", "prompt": "a"})
    assert isinstance(ask, ParsedEmbed)
    assert ask.request.tokenizing.prompt == "query: "


def test_more_texts_than_the_server_takes_are_refused(model_info):
    with pytest.raises(BadRequest, match="4 inputs, at most 3"):
        embed(replace(model_info, max_inputs=3), {"input": ["a"] * 4})


def test_no_refusal_quotes_a_text(model_info):
    secret = "a text that nobody may see"
    for body in ({"input": {secret: secret}}, {"input": ["a", {"text": secret}]}, {"options": secret}):
        with pytest.raises(BadRequest) as caught:
            embed(model_info, body)
        assert secret not in caught.value.message


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings", "/api/show"])
def test_another_model_is_refused_where_names_matter(model_info, path):
    strict = replace(model_info, is_strict=True)
    for body in ({"input": "a", "prompt": "a"}, {"input": [], "prompt": ""}):
        with pytest.raises(ModelNotFound) as caught:
            call(strict, path, {"model": "nomic-embed-text", **body})
    response = DIALECT.render_error(caught.value)
    assert response.status == 404
    assert body_of(response) == {
        "error": "model \"nomic-embed-text\" not found, try pulling it first; this server has 'all-MiniLM-L6-v2'"
    }


def test_the_served_model_and_its_aliases_are_there(model_info):
    model_info = replace(model_info, aliases=("all-minilm", "all-minilm:33m"), prompts={"query": "query: "})
    for name in (model_info.model, "all-minilm", "all-minilm:latest", "all-minilm:33m", f"{model_info.model}:query"):
        assert body_of(call(model_info, "/api/show", {"model": name}))["capabilities"] == ["embedding"]
        assert body_of(call(model_info, "/api/pull", {"model": name, "stream": False})) == {"status": "success"}
    describe = DIALECT.operations["GET /api/tags"].describe
    assert describe is not None
    names = [model["name"] for model in body_of(describe(model_info, "/api/tags"))["models"]]
    assert names == [f"{model_info.model}:latest", "all-minilm:latest", "all-minilm:33m"]


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps"])
def test_a_digest_is_of_the_model_that_is_served(model_info, path):
    """Ollama's command shows twelve characters of it, and has no model without."""
    describe = DIALECT.operations[f"GET {path}"].describe
    assert describe is not None

    def described(of: ModelInfo) -> list[dict]:
        models: list[dict] = body_of(describe(of, path))["models"]
        return models

    [model] = described(model_info)
    assert re.fullmatch("[0-9a-f]{64}", model["digest"])
    same = replace(model_info, aliases=("alias",), created_at=5, max_inputs=1, is_strict=True)
    assert {other["digest"] for other in described(same)} == {model["digest"]}
    for change in (
        {"model": "m"}, {"version": "2"}, {"dim": 8}, {"max_tokens": 8}, {"pooling": ("cls",)}, {"default_prompt": "p"},
        {"prompts": {"query": "q"}}, {"weights_bytes": 7},
    ):  # fmt: skip
        assert described(replace(model_info, **change))[0]["digest"] != model["digest"]
    assert described(replace(model_info, weights_bytes=7))[0]["size"] == 7


def test_what_can_be_embedded_with_can_be_asked_about_and_pulled(model_info):
    """mem0 pulls the model that it is about to use, and gives up if it cannot."""
    strict = replace(model_info, is_strict=True)
    for name in ("nomic-embed-text", "nomic-embed-text:latest", "library/all-MiniLM-L6-v2"):
        assert (
            body_of(call(model_info, "/api/show", {"model": name}))["model_info"]["general.basename"]
            == model_info.model
        )
        assert body_of(call(model_info, "/api/pull", {"model": name, "stream": False})) == {"status": "success"}
        with pytest.raises(ModelNotFound):
            call(strict, "/api/show", {"model": name})
        with pytest.raises(NotFound, match="pull model manifest: file does not exist"):
            call(strict, "/api/pull", {"model": name})


def test_a_stream_is_one_line(model_info):
    """Unless the client wants no stream, as with Ollama."""
    for body in ({"model": model_info.model}, {"model": model_info.model, "stream": True}):
        response = call(model_info, "/api/pull", body)
        assert isinstance(response, Response)
        assert (response.body, response.content_type) == (b'{"status":"success"}\n', "application/x-ndjson")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/embed", {"error": "no"}),
        ("/api/tags", {"error": "no"}),
        ("/api/generate", {"error": "no"}),
        ("/v2/embed", {"message": "no"}),
        ("/v2/chat", {"message": "no"}),
        ("/v2/rerank", {"message": "no", "detail": "no", "error": "no"}),
        (
            "/apiary",
            {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}, "detail": "no"},
        ),
    ],
)
def test_errors_have_the_shape_of_the_path(path, body):
    """Even where there is nothing: clients of one API read no other's errors."""
    assert body_of(render_error(NotFound("no"), path, ROUTES)) == body


def test_a_wrong_key_is_told_where_ollama_s_go_client_looks():
    """Of a 401 it prints `status`, and nothing of `error`."""
    error = InvalidApiKey("Incorrect API key provided")
    assert body_of(DIALECT.render_error(error)) == {"error": error.message, "status": error.message}


def test_an_error_is_a_sentence():
    response = DIALECT.render_error(InputTooLong(256, 300, param="input"))
    assert response.status == 400
    [(key, sentence)] = body_of(response).items()
    assert key == "error"
    assert sentence.startswith("the input length exceeds the context length: ")
    assert "256 tokens" in sentence
