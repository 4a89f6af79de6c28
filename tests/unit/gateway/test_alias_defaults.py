"""The request defaults of aliases: a request by such a name is that which says the same in its own fields, in every
dialect, and what it says itself goes before."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.asking import PLAIN, ask, body_of, changed
from tests.support.cards import DENSE
from tests.unit.gateway.test_several_models import ALIAS_DEFAULTS, ALIASES, CARDS, Bench, json_of, serving
from vecd.base.files import dump, load
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.config import AliasDefaults, GatewayConfig
from vecd.gateway.dialects import rerank
from vecd.gateway.request import EmbedRequest, Role
from vecd.model.steps import Step

CARD = replace(
    DENSE, folder="/models/MiniLM-dense", dim=16, steps=(Step("normalize"),), is_matryoshka=True,
    prompt="own: ", prompts=(("query", "query: "), ("document", "passage: "), ("own", "own: ")),
)  # fmt: skip
OF_ALIASES = (
    AliasDefaults("asked", prompt_name="query", dimensions=8),
    AliasDefaults("bare", prompt=""),
    AliasDefaults("small", dtype="int8", overflow="truncate_left"),
    AliasDefaults("role", role="query"),
)
TEXT = "a text"
RERANK = rerank.DIALECT.operations["POST /v1/rerank"]


@pytest.fixture(autouse=True)
def _aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CARDS, "dense", CARD)
    monkeypatch.setitem(ALIASES, "dense", ("plain", *(defaults.alias for defaults in OF_ALIASES)))
    monkeypatch.setitem(ALIAS_DEFAULTS, "dense", OF_ALIASES)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with serving("dense", num_models=1, matryoshka=True) as bench:
        yield bench


async def requested(bench: Bench, path: str, body: Any, headers: Any = None) -> EmbedRequest:
    """The request that the model gets, with the prompt as text."""
    response = await bench.post(path, body, headers)
    assert response.status == 200 or b"recorded by dense" in body_of(response), body_of(response)
    assert response.headers["x-vecd-model"] == "dense"
    request = bench.recorder("dense").requests[-1]
    how = request.tokenizing
    return request._replace(tokenizing=how._replace(prompt=CARD.prompt if how.prompt is None else how.prompt))


IN_OPENAI_S, IN_TEI_S = {"prompt_name": "query", "dimensions": 8}, {"inputs": TEXT}
COMPARED = {"source_sentence": "a", "sentences": ["b"]}
IN_EACH_DIALECT = [
    *((path, {"input": TEXT, "model": "asked"}, IN_OPENAI_S) for path in ("/v1/embeddings", "/pooling")),
    ("/m/asked/v1/embeddings", {"input": TEXT, "model": "dense"}, IN_OPENAI_S),
    ("/openai/deployments/asked/embeddings", {"input": TEXT}, IN_OPENAI_S),
    *(
        (path, {"texts": [TEXT], "model": "asked"}, {"input_type": "search_query", "output_dimension": 8})
        for path in ("/v1/embed", "/v2/embed")
    ),
    ("/api/embed", {"input": TEXT, "model": "asked:latest"}, {"model": "dense:query", "dimensions": 8}),
    ("/m/asked/embed", IN_TEI_S, IN_OPENAI_S),
    ("/m/asked/similarity", {"inputs": COMPARED}, IN_OPENAI_S),
    ("/m/asked", IN_TEI_S, IN_OPENAI_S),
    ("/models/asked", IN_TEI_S, IN_OPENAI_S),
    ("/pipeline/feature-extraction/ASKED", IN_TEI_S, IN_OPENAI_S),
    ("/m/asked/embed_all", IN_TEI_S, {"prompt_name": "query"}),
    ("/m/small/v2/embed", {"texts": [TEXT]}, {"embedding_types": ["int8"], "truncate": "START"}),
    ("/m/small/v1/embeddings", {"input": TEXT}, {"output_dtype": "int8", "overflow": "truncate_left"}),
    ("/m/small/embed", IN_TEI_S, {"truncate": True, "truncation_direction": "left"}),
    ("/m/bare/v1/embeddings", {"input": TEXT}, {"prompt": ""}),
]


@pytest.mark.parametrize(("path", "body", "fields"), IN_EACH_DIALECT, ids=[path for path, *_ in IN_EACH_DIALECT])
@pytest.mark.parametrize("names", [("dense",), ("ranker", "dense")], ids=["alone", "beside another"])
async def test_a_request_by_an_alias_is_that_with_the_fields(names, path, body, fields):
    async with serving(*names, num_models=len(names), matryoshka=True) as bench:
        by_alias = await requested(bench, path, body)
        plain = path
        for defaults in OF_ALIASES:
            plain = plain.replace(f"/m/{defaults.alias}", "/m/dense").replace(f"/{defaults.alias}", "/dense")
        plain = plain.replace("ASKED", "dense")
        assert by_alias == await requested(bench, plain, {**body, "model": "dense", **fields})
        assert by_alias != await requested(bench, plain, {**body, "model": "plain"})


async def test_the_header_names_an_alias_and_letters_of_case_do_not_count(bench: Bench):
    expected = await requested(bench, "/embed", {**IN_TEI_S, **IN_OPENAI_S})
    for name in ("asked", "Asked", "asked:latest"):
        assert await requested(bench, "/embed", IN_TEI_S, {"x-vecd-model": name}) == expected


async def test_a_request_that_says_how_long_the_model_stays_has_them_too():
    async with serving("dense", num_models=1, matryoshka=True, client_keep_alive=True) as bench:
        body = {"input": TEXT, "model": "asked"}
        expected = await requested(bench, "/api/embed", body)
        assert await requested(bench, "/api/embed", {**body, "keep_alive": "5m"}) == expected
        assert bench.recorder("dense").kept_s == 300.0


@pytest.mark.parametrize(
    ("path", "body", "dimensions", "role"),
    [
        # Ollama's older operation has no fields for them.
        ("/api/embeddings", {"prompt": TEXT, "model": "asked"}, 8, None),
        ("/api/embeddings", {"prompt": TEXT, "model": "asked", "dimensions": 16, "prompt_name": "document"}, 8, None),
        ("/api/embed", {"input": TEXT, "model": "role"}, None, Role.QUERY),
        # Null leaves them, and so does a kind of input that is no purpose.
        ("/v1/embeddings", {"input": TEXT, "model": "asked", "prompt": None, "dimensions": None}, 8, None),
        ("/v1/embeddings", {"input": TEXT, "model": "asked", "input_type": None, "overflow": None}, 8, None),
        ("/v1/embeddings", {"input": TEXT, "model": "asked", "input_type": "text"}, 8, None),
    ],
)
async def test_what_says_nothing_leaves_the_defaults(bench: Bench, path, body, dimensions, role):
    request = await requested(bench, path, body)
    assert (request.tokenizing.prompt, request.dimensions) == ("query: ", dimensions)
    assert role is None or request.tokenizing.role is role


async def test_a_form_that_does_not_go_with_the_default_dimensions_is_refused(monkeypatch):
    monkeypatch.setitem(ALIAS_DEFAULTS, "dense", (AliasDefaults("asked", dimensions=7),))
    async with serving("dense", num_models=1, matryoshka=True) as bench:
        body = {"input": TEXT, "model": "asked", "output_dtype": "binary"}
        response = await bench.post("/v1/embeddings", body)
        assert (response.status, json_of(response)["error"]["param"]) == (400, "dimensions")


def info_of(defaults: AliasDefaults, **changes: Any) -> ModelInfo:
    return changed(PLAIN, prompts=dict(CARD.prompts), **changes).by_alias(defaults)


def test_rankings_have_neither_the_prompt_nor_the_dimensions():
    info = info_of(AliasDefaults("a", prompt="p: ", dimensions=8, role="query"), capabilities=("dense", "multi-vector"))
    request = ask(RERANK, {"query": "q", "documents": ["d"]}, model_info=info).request
    assert (request.tokenizing.prompt, request.tokenizing.role, request.dimensions) == (None, Role.DOCUMENT, None)


async def test_an_alias_is_listed_with_its_defaults(bench: Bench):
    listed = {each["id"]: each for each in json_of(await bench.get("/v1/models"))["data"]}
    expected = {"prompt_name": "query", "dimensions": 8}
    assert (listed["asked"]["defaults"], listed["asked"]["dimensions"]) == (expected, 8)
    assert (listed["small"]["dimensions"], listed["asked"]["root"]) == (16, "dense")
    for name in ("dense", "plain", "dense:query"):
        assert not {"defaults", "dimensions"} & listed[name].keys()
    for name in ("asked", "Asked"):
        assert json_of(await bench.get(f"/v1/models/{name}"))["defaults"] == expected
    shown = json_of(await bench.post("/api/show", {"model": "asked"}))
    assert shown["model_info"]["bert.embedding_length"] == 8
    told = json_of(await bench.get("/info"))["model"]
    assert told["alias_defaults"]["bare"] == {"prompt": ""}


async def test_the_configuration_travels_as_json(bench: Bench):
    config = bench.app.active.config
    assert config.alias_defaults == OF_ALIASES
    assert load(GatewayConfig, dump(config)) == config
