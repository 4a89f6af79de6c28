"""Ollama's dialect: names, digests and the shape of errors. `test_attributes` has its words."""

import re
from typing import Any

import orjson
import pytest

from tests.support.asking import PLAIN, ask, body_of, changed
from tests.unit.gateway.test_service import http_request
from vecd.gateway.api.operation import Call
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.app.routes import dialects_of, render_error
from vecd.gateway.app.table import ROUTES
from vecd.gateway.dialects.ollama import DIALECT
from vecd.gateway.errors import ApiError, InvalidApiKey, ModelNotFound, NotFound
from vecd.gateway.request import EmbedRequest, Response

NAMED = changed(PLAIN, aliases=("all-minilm", "all-minilm:33m"), prompts={"query": "query: "}, is_matryoshka=True)
STRICT = changed(NAMED, unknown_model="refuse")
PATHS = ("embed", "embeddings")


def requested(body: dict[str, Any], path: str = "embed", headers: dict[str, str] | None = None) -> EmbedRequest:
    operation = DIALECT.operations[f"POST /api/{path}"]
    return ask(operation, {"input": "a", "prompt": "a", **body}, headers, NAMED).request


def reply(path: str, body: dict[str, Any], model_info: ModelInfo = NAMED) -> Response:
    operation = DIALECT.operations[f"POST /api/{path}"]
    assert operation.parse is not None
    response = operation.parse(Call(operation.fields.read(body), {}, model_info))
    assert isinstance(response, Response)
    return response


def listed(model_info: ModelInfo, path: str = "tags") -> list[dict[str, Any]]:
    describe = DIALECT.operations[f"GET /api/{path}"].describe
    assert describe is not None
    models: list[dict[str, Any]] = orjson.loads(body_of(describe([model_info], path)))["models"]
    return models


# --- embed ------------------------------------------------------------------------------------------------------


def test_vectors_have_length_1_but_those_of_the_older_operation():
    assert [requested({}, path).normalize for path in PATHS] == [True, False]


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_another_model_is_refused_where_names_matter_even_with_nothing_to_embed(path):
    operation = DIALECT.operations[f"POST /api/{path}"]
    for body in ({"input": "a", "prompt": "a"}, {"input": [], "prompt": ""}):
        with pytest.raises(ModelNotFound) as caught:
            ask(operation, {"model": "nomic-embed-text", **body}, model_info=STRICT)
    assert orjson.loads(body_of(DIALECT.render_error(caught.value))) == {
        "error": "model \"nomic-embed-text\" not found, try pulling it first; this server has 'minilm', 'all-minilm', "
        "'all-minilm:33m'"
    }


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        ("all-minilm:latest", True),
        ("all-minilm:33m", True),
        ("nomic-embed-text", False),
        ("library/minilm", False),
    ],
)
def test_what_can_be_embedded_with_can_be_asked_about_and_pulled(name, is_own):
    """mem0 pulls the model that it is about to use, and gives up if it cannot."""
    for model_info in (NAMED, STRICT) if is_own else (NAMED,):
        shown = orjson.loads(body_of(reply("show", {"model": name}, model_info)))
        assert shown["model_info"]["general.basename"] == "minilm"
        assert reply("pull", {"model": name, "stream": False}, model_info).body == b'{"status":"success"}'
    if not is_own:
        with pytest.raises(ModelNotFound):
            reply("show", {"model": name}, STRICT)
        with pytest.raises(NotFound, match="pull model manifest: file does not exist"):
            reply("pull", {"model": name}, STRICT)


def test_a_model_is_listed_by_all_its_names():
    assert [model["name"] for model in listed(NAMED)] == ["minilm:latest", "all-minilm:latest", "all-minilm:33m"]


@pytest.mark.parametrize("path", ["tags", "ps"])
def test_a_digest_is_of_the_model_that_is_served(path):
    """Ollama's command shows twelve characters of it, and has no model without."""
    [model] = listed(PLAIN, path)
    assert re.fullmatch("[0-9a-f]{64}", model["digest"])
    same = changed(PLAIN, aliases=("alias",), created_at=5, max_inputs=1, unknown_model="refuse")
    assert {other["digest"] for other in listed(same, path)} == {model["digest"]}
    for change in (
        {"model": "m"}, {"version": "2"}, {"dim": 8}, {"max_tokens": 8}, {"pooling": ("cls",)}, {"prompt": "p"},
        {"prompts": {"query": "q"}}, {"weights_bytes": 7},
    ):  # fmt: skip
        assert listed(changed(PLAIN, **change), path)[0]["digest"] != model["digest"]
    assert listed(changed(PLAIN, weights_bytes=7), path)[0]["size"] == 7


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "path", "body"),
    [
        (NotFound("no"), "/api/generate", {"error": "no"}),
        (NotFound("no"), "/v2/chat", {"message": "no"}),
        (NotFound("no"), "/v2/rerank", {"message": "no", "detail": "no", "error": "no"}),
        (
            NotFound("no"),
            "/apiary",
            {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}, "detail": "no"},
        ),
        # Of a 401 Ollama's Go client prints `status`, and nothing of `error`.
        (InvalidApiKey("no"), "/api/embed", {"error": "no", "status": "no"}),
    ],
)
def test_errors_have_the_shape_of_the_path(error: ApiError, path: str, body: dict[str, Any]):
    """Even where there is nothing: clients of one API read no other's errors."""
    assert orjson.loads(body_of(render_error(error, http_request(path), ROUTES, dialects_of(ROUTES)))) == body
