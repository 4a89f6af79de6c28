"""API keys that reach some of several models: for such a key the others are names that nothing has."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import orjson
import pytest

from tests.support.asking import body_of
from tests.unit.gateway.test_several_models import CARDS, DEFAULTS, NAMED, TEXT, Bench, json_of, serving
from vecd.gateway.app import table
from vecd.gateway.app.openapi import describe_api
from vecd.gateway.config import ApiKey
from vecd.gateway.request import Response
from vecd.shm.control import NewKeys

KEYS = {
    "all": None,
    "ranks": ("ranker",),
    "two": ("org/splade", "dense"),
    "gone": ("withdrawn",),
}
OTHERS = ("dense", "text-embedding-3-small", "MiniLM-dense", "DENSE:latest", "org/splade", "splade", "sparse")
"""Names of models that the key "ranks" does not reach."""


@asynccontextmanager
async def limited(*names: str, **options: Any) -> AsyncIterator[Bench]:
    keys = [ApiKey(name, sha256(name.encode()).hexdigest(), models=models) for name, models in KEYS.items()]
    async with serving(*names, **options) as bench:
        bench.app.on_message(NewKeys(orjson.loads(orjson.dumps([asdict(key) for key in keys]))), [])
        yield bench


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with limited() as bench:
        yield bench


async def ask(bench: Bench, key: str, path: str, body: Any = None, model: str = "", query: str = "") -> Response:
    headers = {**({"api-key": key} if key else {}), **({"x-vecd-model": model} if model else {})}
    if body is None:
        return await bench.ask("GET", path, headers=headers, query=query.encode())
    return await bench.ask("POST", path, headers=headers, body=orjson.dumps(body))


def as_seen(response: Response, name: str) -> tuple[Any, ...]:
    """All that a client sees of a response, without the name that it has sent."""
    headers = {each: value for each, value in response.headers.items() if each != "server-timing"}
    return response.status, headers, re.sub(rb"(?<=[`'\"])" + re.escape(name.encode()), b"NAME", body_of(response))


@pytest.mark.parametrize(("path", "body"), [*NAMED, *((path, body) for path, body, _ in DEFAULTS)])
@pytest.mark.parametrize("unknown_model", ["default", "refuse"])
async def test_another_s_model_is_as_unknown_as_a_name_that_nothing_has(path, body, unknown_model):
    async with limited(unknown_model=unknown_model) as bench:
        for name in OTHERS:
            seen = []
            for each in (name, "no" + name[2:]):
                answers = [
                    await ask(bench, "ranks", path, {**body, "model": each}),
                    await ask(bench, "ranks", path, body, model=each),
                    await ask(bench, "ranks", f"/m/{each}{path}", body),
                ]
                assert answers[2].status == 404
                seen.append([as_seen(answer, each) for answer in answers])
            assert seen[0] == seen[1]
            assert not bench.recorder("dense").requests
            assert not bench.recorder("org/splade").requests
            for other in ("text-embedding-3-small", "splade", "MiniLM"):
                assert other not in str(seen[0])


@pytest.mark.parametrize("unknown_model", ["default", "refuse"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/openai/deployments/{}/embeddings", {"input": TEXT}),
        ("/models/{}", {"inputs": TEXT}),
        ("/v1/models/{}", None),
        ("/v1/tokenize", {"model": "{}", "text": TEXT}),
        ("/api/show", {"model": "{}"}),
        ("/api/pull", {"name": "{}", "stream": False}),
    ],
)
async def test_so_it_is_in_the_paths_and_the_names_of_dialects(path, body, unknown_model):
    async with limited(unknown_model=unknown_model) as bench:
        seen = []
        for name in ("dense", "nonse"):
            named = {key: name if value == "{}" else value for key, value in body.items()} if body else None
            seen.append(as_seen(await ask(bench, "ranks", path.format(name), named), name))
        assert seen[0] == seen[1]
        assert not bench.recorder("dense").requests


@pytest.mark.parametrize(("path", "body", "model"), DEFAULTS)
async def test_the_default_is_the_first_of_its_own_that_can(path, body, model):
    async with limited("ranker", "org/splade", "dense") as bench:
        for key, own in KEYS.items():
            if own == ("withdrawn",):
                continue
            response = await ask(bench, key, path, body)
            expected = model if own is None or model in own else min(own, key=[*bench.counts()].index)
            assert response.headers["x-vecd-model"] == expected


async def test_its_own_models_are_reached_in_every_way(bench: Bench):
    body = {"input": TEXT}
    for name in ("dense", "text-embedding-3-small", "DENSE:latest"):
        for response in (
            await ask(bench, "two", "/v1/embeddings", {**body, "model": name}),
            await ask(bench, "two", "/v1/embeddings", body, model=name),
            await ask(bench, "two", f"/m/{name}/v1/embeddings", body),
        ):
            assert (response.status, response.headers["x-vecd-model"]) == (200, "dense")


async def test_lists_have_its_own_models_alone(bench: Bench):
    for key, own in KEYS.items():
        if own == ("withdrawn",):
            continue
        for path in ("/v1/models", "/api/tags", "/api/ps"):
            listed = json_of(await ask(bench, key, path))
            names = {each.get("id") or each["model"] for each in listed.get("data") or listed["models"]}
            assert {name for name in CARDS if names & {name, f"{name}:latest"}} == set(own or CARDS), path
        info = json_of(await ask(bench, key, "/info"))
        assert info["model_id"] in (own or CARDS)
        models = [model["id"] for model in info.get("models", [info["model"]])]
        assert set(models) == set(own or CARDS)


async def test_health_with_a_key_is_about_its_own_models(bench: Bench):
    reason = json_of(await ask(bench, "", "/health"))["reason"]
    assert all(name in reason for name in CARDS), "the probes of a load balancer have no key"
    assert "dense" not in json_of(await ask(bench, "ranks", "/health"))["reason"]
    for path, query in (("/health", "model=dense"), ("/m/dense/health", "")):
        assert (await ask(bench, "ranks", path, query=query)).status == 404
        assert (await ask(bench, "two", path, query=query)).status == 503
    assert (await ask(bench, "gone", "/live")).status == 200


async def test_a_wrong_kind_names_its_own_models_alone(bench: Bench):
    both = json_of(await ask(bench, "all", "/m/dense/rerank", {"query": "q", "texts": ["d"]}))
    assert "'ranker'" in both["error"]
    own = json_of(await ask(bench, "two", "/m/dense/rerank", {"query": "q", "texts": ["d"]}))
    assert "ranker" not in own["error"]


async def test_a_key_whose_models_are_not_served_reaches_nothing(bench: Bench):
    for path, body in (*NAMED, ("/v1/models", None), ("/api/tags", None), ("/info", None), ("/openapi.json", None)):
        response = await ask(bench, "gone", path, body)
        assert response.status == 404
        assert not any(name in body_of(response).decode() for name in CARDS)


async def test_with_one_model_left_a_key_for_another_reaches_nothing():
    async with limited("dense", num_models=1) as bench:
        assert (await ask(bench, "two", "/v1/embeddings", {"input": TEXT})).status == 200
        for path, body in (*NAMED, ("/v1/models", None), ("/info", None)):
            assert (await ask(bench, "ranks", path, body)).status == 404


async def test_without_a_right_key_no_name_is_told(bench: Bench):
    for key in ("", "wrong"):
        for name in ("dense", "text-embedding-3-small", "gpt-4"):
            for response in (
                await ask(bench, key, f"/m/{name}/v1/embeddings", {"input": TEXT}),
                await ask(bench, key, "/v1/embeddings", {"input": TEXT}, model=name),
            ):
                assert response.status == 401
                assert "x-vecd-model" not in response.headers


async def test_models_that_are_still_to_come_are_not_unknown():
    async with limited("dense", num_models=3) as bench:
        bench.app.active.dispatcher.start_stage = "loading"
        response = await ask(bench, "ranks", "/v1/embeddings", {"input": TEXT, "model": "ranker"})
        assert response.status == 503


async def test_the_documentation_is_of_its_own_models(bench: Bench):
    every = json_of(await ask(bench, "all", "/openapi.json"))
    assert all(f"`{name}`" in every["info"]["description"] for name in CARDS)
    own = body_of(await ask(bench, "ranks", "/openapi.json")).decode()
    assert "`ranker`" in own
    assert not any(name in own for name in ("`dense`", "org/splade", "text-embedding-3-small"))
    assert "/v1/embeddings" not in orjson.loads(own)["paths"]
    assert orjson.loads(own)["servers"][1]["variables"]["model"]["enum"] == ["ranker"]
    one = json_of(await ask(bench, "two", "/m/dense/openapi.json"))
    assert one["servers"] == [{"url": "/m/dense"}]
    assert "splade" not in str(one)


async def test_a_document_is_made_once_for_all_that_see_the_same(bench: Bench, monkeypatch):
    made: list[list[str]] = []

    def count(routes: Any, infos: Any, **options: Any) -> dict[str, Any]:
        made.append([info.model for info in infos])
        return describe_api(routes, infos, **options)

    monkeypatch.setattr(table, "describe_api", count)
    for _ in range(3):
        for key, path in (("all", "/openapi.json"), ("ranks", "/openapi.json"), ("all", "/m/dense/openapi.json")):
            assert json_of(await ask(bench, key, path))["paths"]
    assert [sorted(names) for names in made] == [["dense", "org/splade", "ranker"], ["ranker"], ["dense"]]
    bench.add("ranker", 7)
    assert json_of(await ask(bench, "all", "/openapi.json"))
    assert len(made) == 4, "a model has changed, and its name has not"
    num_made = len(made)
    bench.app.on_message(NewKeys([]), [])
    assert b'"bearer"' not in body_of(await ask(bench, "", "/openapi.json")), "keys have changed"
    assert len(made) == num_made + 1
