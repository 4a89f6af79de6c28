"""A gateway of several models: which of them a request goes to, in each dialect, and what is answered."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest

from tests.support.asking import body_of, embedded_of
from tests.support.cards import DENSE, RERANKER, SPARSE
from tests.support.pipelines import app_of, planned_config
from tests.unit.gateway.test_service import IN_VIRTUAL_TIME, NoTexts, http_request
from vecd.gateway.api.operation import ParsedDecode, ParsedMessages, ParsedTokenize
from vecd.gateway.config import AliasDefaults, ApiKey, GatewayConfig
from vecd.gateway.dispatch.workers import WorkerLink
from vecd.gateway.encoding.result import Encoder
from vecd.gateway.errors import INPUT, ApiError, BadRequest, Unavailable
from vecd.gateway.request import Embedded, EmbedRequest, Response
from vecd.gateway.scheduling.keys import Principal
from vecd.gateway.service import Service
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.gateway.tokenization.fair_pool import Threads
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import ModelCard
from vecd.shm.control import (
    Activate,
    InputDeaths,
    Message,
    ModelAsked,
    ModelFiles,
    ModelIs,
    NewKeys,
    Quarantined,
    Retired,
    Withdrawn,
)
from vecd.shm.shared_metrics import Counter, SharedMetricsSpec

PROMPTS = (("query", "query: "),)
CARDS = {
    "dense": replace(DENSE, folder="/models/MiniLM-dense", prompts=PROMPTS),
    "ranker": replace(RERANKER, folder="/models/ranker"),
    "org/splade": replace(SPARSE, folder="/models/splade"),
}
ALIASES = {"dense": ("text-embedding-3-small",), "org/splade": ("sparse",)}
ALIAS_DEFAULTS: dict[str, tuple[AliasDefaults, ...]] = {}
"""By model. Tests add what they are about."""


class Recorder:
    """Notes the requests of one model. Answers those for vectors, each of ones; fails for the others with a 503 that
    names the model."""

    def __init__(self, name: str, card: ModelCard) -> None:
        self._name = name
        self._encoder = Encoder(card)
        self._card = card
        self.requests: list[EmbedRequest] = []
        self.kept_s: float | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def run(self, request: EmbedRequest, num_estimated: int, timeline: object, principal: Principal) -> Embedded:
        self.requests.append(request)
        await self.may_answer.wait()
        if not request.output.is_plain:
            raise self._failure()
        [make] = self._encoder.makes(request, [])
        make.put(0, np.ones((len(request.inputs), self._card.dim), np.float32), 0)
        return embedded_of(make.made)

    def keep_alive(self, seconds: float | None) -> None:
        self.kept_s = seconds

    async def describe(self, parsed: ParsedTokenize, *_: object) -> None:
        raise self._failure()

    async def decode(self, parsed: ParsedDecode, *_: object) -> list[str]:
        raise self._failure()

    async def render(self, parsed: ParsedMessages, *_: object) -> list[str]:
        raise self._failure()

    def _failure(self) -> Unavailable:
        return Unavailable(f"recorded by {self._name}", retry_after_s=1)


class Bench:
    """An app with a generation for each of CARDS."""

    def __init__(self, names: tuple[str, ...] = tuple(CARDS), num_models: int = len(CARDS), **changes: Any) -> None:
        self._names = names
        self._changes = {"unknown_model": "default", **changes}
        self.sent: list[Message] = []
        spec = SharedMetricsSpec(num_gateways=1, num_workers=8, num_models=len(CARDS))
        shared_metrics = SharedMetrics(memoryview(bytearray(spec.nbytes)).cast("q"), spec, 0)
        self._threads: list[Threads] = []
        self.made: list[Service] = []
        self._recorders: dict[Service, Recorder] = {}
        self.activated: list[GatewayConfig] = []
        self.app = app_of(
            self._config(names[0]), sent=self.sent, shared_metrics=shared_metrics, num_models=num_models,
            read_tokenizer=self._read_tokenizer,
        )  # fmt: skip
        self._begin(self.app.active)
        self.app.on_activated = self.activated.append
        for generation, name in enumerate(names[1:], 2):
            self.add(name, generation)

    def _config(self, name: str) -> GatewayConfig:
        index = (*self._names, *CARDS).index(name)
        return replace(
            planned_config(), model=name, card=CARDS[name], aliases=ALIASES.get(name, ()), model_index=index,
            alias_defaults=ALIAS_DEFAULTS.get(name, ()), num_workers=1, first_worker=index, **self._changes,
        )  # fmt: skip

    def _read_tokenizer(self, config: GatewayConfig) -> Tokenizer:
        tokenizer = NoTexts(max_chars=16 * 10**config.model_index)
        self._threads.append(tokenizer.threads)
        return cast(Tokenizer, tokenizer)

    def _begin(self, made: Service) -> None:
        cast(Any, made.dispatcher).activate = lambda: None  # it has no socket
        recorder = self._recorders[made] = self.make_recorder(made.config)
        made.pipeline.run = recorder.run  # type: ignore[method-assign]
        for name in ("describe", "decode", "render"):
            setattr(made.pipeline.inspection, name, getattr(recorder, name))
        made.residence.keep_alive = recorder.keep_alive  # type: ignore[method-assign]
        self.made.append(made)

    def make_recorder(self, config: GatewayConfig) -> Recorder:
        return Recorder(config.model, config.card)

    def add(self, name: str, generation: int) -> Service:
        config = self._config(name)
        made = self.app.all[generation] = Service(config, generation, self._read_tokenizer(config), self.app.process)
        self._begin(made)
        self.app.on_message(Activate(generation), [])
        return made

    def close(self) -> None:
        for threads in self._threads:
            threads.close()

    def recorder(self, name: str) -> Recorder:
        [service] = [each for each in self.app.of_models if each.config.model == name]
        return self._recorders[service]

    def recorder_of(self, made: Service) -> Recorder:
        return self._recorders[made]

    def counts(self) -> dict[str, int]:
        return {service.config.model: service.num_handled for service in self.app.of_models}

    async def get(self, path: str, query: bytes = b"", **options: Any) -> Response:
        return await self.ask("GET", path, query=query, **options)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Response:
        encoded = body if isinstance(body, bytes) else orjson.dumps(body)
        return await self.ask("POST", path, body=encoded, headers=dict(headers or {}))

    async def ask(self, method: str, path: str, **options: Any) -> Response:
        """As a connection asks."""
        request = http_request(path, method=method, **options)
        try:
            if len(request.body) > 10_000:
                self.app.check_head(request)
            response = await self.app.handle(request)
        except ApiError as error:
            response = self.app.render_error(error, request)
        self.app.add_headers(response, request)
        assert set(self.counts().values()) <= {0}, "nothing is held for a request that is over"
        return response


@asynccontextmanager
async def serving(*names: str, **options: Any) -> AsyncIterator[Bench]:
    bench = Bench(names, **options) if names else Bench(**options)
    yield bench
    bench.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with serving() as bench:
        yield bench


def json_of(response: Response) -> Any:
    return orjson.loads(body_of(response))


# --- each dialect's way to name a model -----------------------------------------------------------------------------

TEXT = "a text"
RANKED = {"query": "q", "documents": ["d"]}
NAMED = [
    *((path, {"input": TEXT}) for path in ("/v1/embeddings", "/embeddings", "/pooling", "/api/embed")),
    ("/api/embeddings", {"prompt": TEXT}),
    *((path, {"texts": [TEXT], "input_type": "search_document"}) for path in ("/v1/embed", "/v2/embed", "/embed")),
    *((path, RANKED) for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/api/rerank", "/voyage/v1/rerank")),
    ("/v1/ranking", {"query": {"text": "q"}, "passages": [{"text": "d"}]}),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/tokenize", {"prompt": TEXT}),
    ("/detokenize", {"tokens": [1]}),
    ("/v1/tokenize", {"text": TEXT}),
    ("/v1/detokenize", {"tokens": [1]}),
    ("/invocations", {"input": TEXT}),
]


def recorded_by(response: Response) -> str:
    """The model that has answered a request, by its answer."""
    assert response.status in (200, 503, 400, 424), body_of(response)
    return response.headers["x-vecd-model"]


@pytest.mark.parametrize(("path", "body"), NAMED, ids=[path for path, _ in NAMED])
@pytest.mark.parametrize("model", CARDS)
async def test_the_model_that_the_body_names(bench: Bench, path, body, model):
    """Whether it can or not: a known name is never replaced."""
    for name in (model, model.upper(), f"{model}:latest"):
        response = await bench.post(path, {**body, "model": name})
        assert recorded_by(response) == model
        if response.status == 503:
            assert f"recorded by {model}" in body_of(response).decode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/openai/deployments/{}/embeddings", {"input": TEXT, "model": "ranker"}),
        ("/v1/engines/{}/embeddings", {"input": TEXT}),
        ("/models/{}", {"inputs": TEXT}),
        ("/models/{}/pipeline/feature-extraction", {"inputs": TEXT}),
        ("/pipeline/feature-extraction/{}", {"inputs": TEXT}),
        ("/hf-inference/models/{}/pipeline/feature-extraction", {"inputs": TEXT}),
    ],
)
@pytest.mark.parametrize("name", ["dense", "org/splade", "DENSE", "splade"])
async def test_the_model_that_a_path_of_a_dialect_names(bench: Bench, path, body, name):
    response = await bench.post(path.format(name), body)
    assert recorded_by(response) == ("dense" if "dense" in name.lower() else "org/splade")


DEFAULTS = [
    ("/embed", {"inputs": TEXT}, "dense"),
    ("/embed_all", {"inputs": TEXT}, "dense"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, "dense"),
    ("/embed_sparse", {"inputs": TEXT}, "org/splade"),
    ("/rerank", {"query": "q", "texts": ["d"]}, "ranker"),
    ("/tokenize", {"inputs": TEXT}, "ranker"),
    ("/v1/embeddings", {"input": TEXT}, "dense"),  # the first of the first kind
    ("/v1/embeddings", {"input": TEXT, "output": "sparse"}, "org/splade"),
    ("/v1/embeddings", {"input": TEXT, "output": ["sparse"]}, "org/splade"),
    ("/classify", {"input": TEXT, "labels": ["a", "b"]}, "dense"),
    ("/v2/rerank", RANKED, "ranker"),
    ("/score", {"text_1": "a", "text_2": "b"}, "ranker"),
]


@pytest.mark.parametrize(("path", "body", "model"), DEFAULTS)
async def test_the_default_of_a_kind(path, body, model):
    """With another model first, in the order of the configuration."""
    async with serving("ranker", "org/splade", "dense") as bench:
        for changes in ({}, {"model": "unknown"}, {"model": None}, {"model": ""}):
            response = await bench.post(path, {**body, **changes})
            assert (recorded_by(response), response.status in (200, 503)) == (model, True), body_of(response)


async def test_the_default_takes_the_request_of_an_unknown_name_and_says_its_own(bench: Bench):
    for path in ("/v1/embeddings", "/api/embed"):
        response = await bench.post(path, {"input": TEXT, "model": "gpt-4:query"})
        assert json_of(response)["model"] == response.headers["x-vecd-model"] == "dense"
    assert [request.tokenizing.prompt for request in bench.recorder("dense").requests] == ["query: ", "query: "]


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [("/v1/embeddings", TEXT, "input"), ("/v2/embed", [TEXT], "texts"), ("/api/embeddings", TEXT, "prompt")],
)
async def test_an_error_about_an_input_names_the_dialect_s_field(bench: Bench, monkeypatch, path, value, name):
    async def fail(*_: object) -> None:
        raise BadRequest(f"'{INPUT}[0]' is too long", param=INPUT)

    monkeypatch.setattr(bench.made[0].pipeline, "run", fail)
    response = await bench.post(path, {name: value})
    assert response.status >= 400
    assert f"'{name}[0]' is too long" in body_of(response).decode()


# --- path, header, body ---------------------------------------------------------------------------------------------


async def test_the_path_wins_over_the_header_and_the_header_over_the_body(bench: Bench):
    body, header = {"text_1": "a", "text_2": "b", "model": "org/splade"}, {"x-vecd-model": "ranker"}
    assert recorded_by(await bench.post("/m/dense/score", body, header)) == "dense"
    assert recorded_by(await bench.post("/score", body, header)) == "ranker"
    assert recorded_by(await bench.post("/score", body)) == "org/splade"
    assert recorded_by(await bench.post("/score", body, {"x-vecd-model": "gpt-4"})) == "ranker", "the default"


@pytest.mark.parametrize(
    ("path", "headers", "name", "prompt"),
    [
        ("", {}, "dense:query", "query: "),
        ("/m/dense", {}, "dense:query", "query: "),
        ("/m/dense", {}, "other:query", "query: "),
        ("/m/dense", {}, "ranker", None),
        ("/m/DENSE:query", {}, None, "query: "),
        ("", {"x-vecd-model": "dense:query"}, "ranker", "query: "),
        ("", {"x-vecd-model": "dense"}, "dense:query", "query: "),
    ],
)
@pytest.mark.parametrize("unknown_model", ["default", "refuse"])
async def test_the_prompt_that_a_name_chooses(path, headers, name, prompt, unknown_model):
    async with serving(unknown_model=unknown_model) as bench:
        response = await bench.post(f"{path}/v1/embeddings", {"input": TEXT, "model": name}, headers)
        assert response.status == 200
        [request] = bench.recorder("dense").requests
        assert request.tokenizing.prompt == prompt


@pytest.mark.parametrize("unknown_model", ["any", "default", "refuse"])
@pytest.mark.parametrize(
    ("path", "is_in_shape"),
    [
        ("/m/gpt-4/v1/embeddings", lambda body: body["error"]["code"] == "model_not_found"),
        ("/m/gpt-4/api/embed", lambda body: body["error"].startswith('model "gpt-4" not found, try pulling it')),
        ("/m/gpt-4/embed", lambda body: body["error_type"] == "Validation"),
        ("/m/" + "x" * 8000 + "/v1/embeddings", lambda body: len(body["error"]["message"]) < 200),
        ("/m/..%2f/embed", lambda body: True),
    ],
)
async def test_an_unknown_name_in_the_path_is_a_404_in_the_shape_of_the_rest(path, is_in_shape, unknown_model):
    async with serving(unknown_model=unknown_model) as bench:
        response = await bench.post(path, {"input": TEXT, "model": "dense"})
        assert response.status == 404
        body = json_of(response)
        assert is_in_shape(body), body
        assert "dense" not in str(body), "without a key, nobody learns the names"


@pytest.mark.parametrize("is_admin", [False, True])
async def test_behind_the_name_of_a_model_nothing_is_the_operator_s(bench: Bench, is_admin):
    for path in ("/metrics", "/stats", "/admin/models"):
        assert (await bench.get(path, is_admin=is_admin)).status in (200, 404), path
        for spelling in (f"/m/dense{path}", f"/m/dense/{path}/", f"/m/org/splade{path}"):
            assert (await bench.get(spelling, is_admin=is_admin)).status == 404, spelling
    assert (await bench.get("/metrics", is_admin=is_admin)).status == 200
    browser = {"accept": "text/html"}
    assert (await bench.get("/", headers=browser, is_admin=is_admin)).content_type.startswith("text/html")
    for path in ("/m/dense", "/m/dense/"):
        assert not (await bench.get(path, headers=browser, is_admin=is_admin)).content_type.startswith("text/html")


REFUSED = [*NAMED, ("/models/gpt-4", {"inputs": TEXT}), ("/openai/deployments/gpt-4/embeddings", {"input": TEXT})]


@pytest.mark.parametrize(("path", "body"), REFUSED, ids=[path for path, _ in REFUSED])
async def test_an_unknown_name_is_refused_if_that_is_configured(path, body):
    async with serving(unknown_model="refuse") as bench:
        response = await bench.post(path, {**body, "model": "gpt-4"})
        assert response.status == 404
        assert "x-vecd-model" not in response.headers
        assert b"gpt-4" in body_of(response)
        assert b"'ranker'" in body_of(response) or b"'dense'" in body_of(response)
        header = await bench.post(path.replace("gpt-4", "dense"), {**body, "model": "dense"}, {"x-vecd-model": "x"})
        assert header.status == 404


async def test_a_name_of_a_megabyte_in_the_body():
    async with serving(unknown_model="refuse") as bench:
        for num_chars, status in ((2**10, 404), (2**15, 404), (2**17, 404), (2**20, 400)):
            response = await bench.post("/v1/embeddings", {"input": TEXT, "model": "x" * num_chars})
            assert response.status == status
            assert len(body_of(response)) < 500


async def test_what_is_no_name_is_an_error_of_its_field(bench: Bench):
    response = await bench.post("/v1/embeddings", {"input": TEXT, "model": 5})
    assert (response.status, json_of(response)["error"]["param"]) == (400, "model")


# --- the wrong kind -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "others"),
    [
        ("/v1/embeddings", {"input": TEXT, "model": "ranker"}, 400, "'dense', 'org/splade'"),
        ("/v2/rerank", {**RANKED, "model": "dense"}, 400, "'ranker'"),
        ("/api/embed", {"input": TEXT, "model": "ranker"}, 400, "'dense'"),
        ("/m/dense/embed_sparse", {"inputs": TEXT}, 424, "'org/splade'"),
        ("/m/ranker/", {"inputs": TEXT}, 424, "'dense', 'org/splade'"),
        ("/m/dense/", {"query": "q", "texts": ["d"]}, 424, "'ranker'"),
        ("/m/org/splade/v1/embeddings", {"input": TEXT, "output": "dense"}, 400, "'dense'"),
        ("/m/dense/v1/embeddings", {"input": TEXT, "output": ["dense", "sparse"]}, 400, None),
        ("/m/dense/pooling", {"input": TEXT, "task": "classify"}, 400, None),
        ("/m/org/splade/pooling", {"input": TEXT}, 400, "'dense'"),
    ],
)
async def test_what_a_model_cannot_names_those_that_can(bench: Bench, path, body, status, others):
    response = await bench.post(path, body)
    text = body_of(response).decode()
    assert response.status == status, text
    _, *named = text.split("Models of this server that can: ")
    assert {each[: len(others or "")] for each in named} == {others} - {None}, text
    assert status != 424 or "It is served at /" in text


# --- large bodies ---------------------------------------------------------------------------------------------------


async def test_a_large_body_is_for_the_model_that_it_names_at_its_end(bench: Bench):
    """It is read as far as its model reads, which is farther than the first does."""
    long, ids = "x" * 100_000, [*range(50_000)]
    response = await bench.post("/v1/embeddings", {"input": [long], "output": "sparse", "model": "splade"})
    assert recorded_by(response) == "org/splade"
    response = await bench.post("/v1/embeddings", {"input": ids, "output": "sparse", "model": "splade"})
    texts, lists = (request.inputs for request in bench.recorder("org/splade").requests)
    assert len(texts[0]) > 1600
    assert len(cast(array, lists[0])) > 1600


# --- what is held ---------------------------------------------------------------------------------------------------


async def test_a_request_holds_the_model_that_it_is_for_and_no_other(bench: Bench):
    bench.recorder("dense").may_answer.clear()
    for path, body in (("/m/dense/v1/embeddings", {}), ("/v1/embeddings", {"model": "dense"})):
        asking = asyncio.ensure_future(bench.post(path, {"input": TEXT, **body}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.counts() == {"dense": 1, "ranker": 0, "org/splade": 0}
        bench.recorder("dense").may_answer.set()
        assert (await asking).status == 200
        bench.recorder("dense").may_answer.clear()


async def test_while_a_body_is_read_no_model_is_retired(bench: Bench):
    large = asyncio.ensure_future(bench.post("/v1/embeddings", {"input": "x" * 100_000, "model": "dense"}))
    await asyncio.sleep(0)
    assert bench.counts() == {"dense": 1, "ranker": 1, "org/splade": 1}
    bench.add("dense", 9)
    assert bench.sent == []
    old = bench.made[0]
    assert (await large).status == 200
    assert len(bench.recorder_of(old).requests) == 1, "it began with the generation before"
    while Retired(1) not in bench.sent:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("names", [("dense",), ("dense", "ranker")], ids=["alone", "beside another"])
async def test_a_request_that_is_cancelled_holds_nothing(names):
    async with serving(*names, num_models=len(names)) as bench:
        for size in (1, 100_000):
            bench.recorder("dense").may_answer.clear()
            asking = asyncio.ensure_future(bench.post("/v1/embeddings", {"input": "x" * size, "model": "dense"}))
            await asyncio.sleep(0)
            assert bench.counts()["dense"] == 1
            asking.cancel()
            await asyncio.wait([asking])
            assert set(bench.counts().values()) == {0}


async def test_a_request_stays_with_the_generation_that_it_began_with():
    async with serving("dense", num_models=1) as bench:
        first = bench.made[0]
        bench.recorder_of(first).may_answer.clear()
        old = asyncio.ensure_future(bench.post("/v1/embeddings", {"input": TEXT}))
        await asyncio.sleep(0)
        second = bench.add("dense", 2)
        assert (await bench.post("/v1/embeddings", {"input": TEXT})).status == 200
        assert len(bench.recorder_of(second).requests) == 1
        assert (first.num_handled, second.num_handled, bench.sent) == (1, 0, [])
        bench.recorder_of(first).may_answer.set()
        assert (await old).status == 200
        assert (first.num_handled, len(bench.recorder_of(first).requests)) == (0, 1)
        while Retired(1) not in bench.sent:
            await asyncio.sleep(0.01)


# --- generations ----------------------------------------------------------------------------------------------------


async def test_another_generation_of_a_model_replaces_that_one_alone(bench: Bench):
    assert [config.model for config in bench.activated] == []
    before = bench.made[1]
    bench.add("ranker", 7)
    assert bench.sent == [Retired(before.generation)]
    assert [service.generation for service in bench.app.of_models] == [1, 7, 3]
    assert bench.activated == [], "the server's settings are the first model's"
    bench.add("dense", 8)
    assert [service.generation for service in bench.app.of_models] == [8, 7, 3]
    assert [config.model for config in bench.activated] == ["dense"]
    assert recorded_by(await bench.post("/v2/rerank", RANKED)) == "ranker"
    assert len(bench.recorder_of(bench.made[3]).requests) == 1


async def test_a_withdrawn_model_is_unknown(bench: Bench):
    bench.app.on_message(Withdrawn(2), [])
    assert bench.sent == [Retired(2)]
    assert (await bench.post("/m/ranker/score", {"text_1": "a", "text_2": "b"})).status == 404
    response = await bench.post("/v2/rerank", {**RANKED, "model": "ranker"})
    assert (response.status, recorded_by(response)) == (400, "dense")
    bench.app.on_message(Withdrawn(1), [])
    assert [config.model for config in bench.activated] == ["org/splade"]
    assert bench.app.active.config.model == "org/splade"
    only = await bench.post("/v1/embeddings", {"input": TEXT, "model": "dense"})
    assert "x-vecd-model" not in only.headers, "it is the only one"
    assert not bench.app.models.are_several


@pytest.mark.parametrize("are_others", [True, False])
@pytest.mark.parametrize("path", ["/m/ranker/v1/embeddings", "/v1/embeddings"])
async def test_no_model_answers_for_one_that_is_withdrawn_while_a_body_arrives(bench: Bench, path, are_others):
    headers = {"content-length": "20"} | ({"x-vecd-model": "ranker"} if path.startswith("/v1") else {})
    request = http_request(path, headers=headers)
    bench.app.check_head(request)
    for generation in (2,) if are_others else (2, 3):
        bench.app.on_message(Withdrawn(generation), [])
    request.body = b'{"input": "a"}'
    with pytest.raises(ApiError) as raised:
        await bench.app.handle(request)
    assert raised.value.status == 404


async def test_the_last_model_answers_a_request_for_itself_that_began_when_there_were_others(bench: Bench):
    for generation in (2, 3):
        bench.app.on_message(Withdrawn(generation), [])
    request = http_request("/m/dense/v1/embeddings", body=b'{"input": "a"}')
    bench.add("ranker", 7)
    bench.app.check_head(request)
    bench.app.on_message(Withdrawn(7), [])
    assert (await bench.app.handle(request)).status == 200


async def test_an_input_that_ends_the_workers_of_one_model_is_no_other_s_fault(bench: Bench):
    """Models of one vocabulary get the same token ids for the same text."""
    dense, ranker, _ = (service.dispatcher.known for service in bench.made)
    digest = dense.digest(b"the same ids")
    bench.app.on_message(InputDeaths("dense", [digest], is_isolated=True, has_crashed=True), [])
    bench.app.on_message(Quarantined("dense", digest), [])
    assert [len(known) for known in (dense, ranker)] == [1, 0], "it has room for its own alone"
    again = bench.add("dense", 7).dispatcher.known
    assert again.digest(b"the same ids") == digest, "which other gateways tell all generations"


async def test_no_core_is_wanted_for_what_waits_without_a_worker(bench: Bench):
    dense, ranker, _ = bench.made
    for service, num in ((dense, 2), (ranker, 5)):
        service.policy.queued_sequences = num
    assert bench.app.num_waiting() == 0
    link = SimpleNamespace(is_usable=False)
    dense.dispatcher._links[b"0"] = cast(WorkerLink, link)
    assert bench.app.num_waiting() == 0
    link.is_usable = True
    assert bench.app.num_waiting() == 2


async def test_keys_and_their_use_are_the_server_s(bench: Bench):
    bench.app.on_message(NewKeys([asdict(ApiKey("a", "00"))]), [])
    bench.add("ranker", 7)
    assert bench.app.principals.have_keys


async def test_until_all_models_are_activated_none_answers_for_another():
    async with serving("dense", num_models=3) as bench:
        bench.app.active.dispatcher.start_stage = "loading weights"
        assert (await bench.post("/v1/embeddings", {"input": TEXT, "model": "dense"})).status == 200
        for body in ({"input": TEXT}, {"input": TEXT, "model": "org/splade"}):
            response = await bench.post("/v1/embeddings", body)
            assert (response.status, json_of(response)["error"]["code"]) == (503, "not_ready")
        for path, query in (
            ("/health", b""), ("/health", b"model=ranker"), ("/m/ranker/health", b""), ("/m/ranker/v1/models", b""),
        ):  # fmt: skip
            assert (await bench.get(path, query)).status == 503
        assert (await bench.get("/m/dense/v1/models")).status == 200
        bench.add("ranker", 2)
        assert (await bench.post("/v1/embeddings", {"input": TEXT})).status == 503
        bench.add("org/splade", 3)
        assert (await bench.post("/v1/embeddings", {"input": TEXT})).status == 200
        response = await bench.post("/v1/embeddings", {"input": TEXT, "model": "org/splade", "output": "sparse"})
        assert recorded_by(response) == "org/splade"


async def test_requests_wait_for_the_models_of_a_gateway_that_was_started_again():
    """Its server has been ready, and their clients know the models."""
    async with serving("dense", num_models=3) as bench:
        body = {"text_1": "a", "text_2": "b"}
        asking = [
            asyncio.ensure_future(bench.post(path, {**body, "model": model}))
            for path, model in (("/score", "ranker"), ("/m/ranker/score", "dense"), ("/score", None))
        ]
        assert (await bench.get("/health")).status == 503, "a probe does not wait"
        assert (await bench.get("/m/ranker/health")).status == 503
        bench.add("org/splade", 3)
        await asyncio.sleep(0)
        assert [body_of(each.result()) for each in asking if each.done()] == []
        bench.add("ranker", 2)
        for each in asking:
            assert recorded_by(await each) == "ranker"


async def test_a_body_that_is_still_arriving_waits_too():
    async with serving("dense", num_models=2) as bench:
        body = orjson.dumps({"text_1": "a" * 20_000, "text_2": "b"})
        asking = asyncio.ensure_future(bench.post("/m/ranker/score", body))
        await asyncio.sleep(0)
        bench.app.on_message(NewKeys([asdict(ApiKey("a", "00"))]), [])
        assert (await bench.post("/m/ranker/score", body)).status == 401
        bench.app.on_message(NewKeys([]), [])
        assert not asking.done()
        bench.add("ranker", 2)
        assert recorded_by(await asking) == "ranker"


@IN_VIRTUAL_TIME
async def test_requests_wait_for_models_only_for_a_while():
    async with serving("dense", num_models=2) as bench:
        began_at = asyncio.get_running_loop().time()
        response = await bench.post("/score", {"text_1": "a", "text_2": "b", "model": "ranker"})
        assert (response.status, asyncio.get_running_loop().time() - began_at) == (503, 10)


# --- lists ----------------------------------------------------------------------------------------------------------


async def test_all_models_are_listed_with_their_aliases_and_prompts(bench: Bench):
    for path in ("/v1/models", "/models"):
        body = json_of(await bench.get(path))
        listed = [(model["id"], model["root"], tuple(model["capabilities"])) for model in body["data"]]
        assert listed == [
            ("dense", "dense", ("dense",)),
            ("text-embedding-3-small", "dense", ("dense",)),
            ("dense:query", "dense", ("dense",)),
            ("ranker", "ranker", ("rerank",)),
            ("org/splade", "org/splade", ("sparse",)),
            ("sparse", "org/splade", ("sparse",)),
        ]
        assert [model["name"] for model in body["models"]] == [name for name, _, _ in listed]
    one = json_of(await bench.get("/m/ranker/v1/models"))
    assert [model["id"] for model in one["data"]] == ["ranker"]
    tags = [model["name"] for model in json_of(await bench.get("/api/tags"))["models"]]
    assert tags == [
        "dense:latest", "text-embedding-3-small:latest", "ranker:latest", "org/splade:latest", "sparse:latest",
    ]  # fmt: skip
    running = [model["name"] for model in json_of(await bench.get("/api/ps"))["models"]]
    assert running == ["dense:latest", "ranker:latest", "org/splade:latest"]


@pytest.mark.parametrize("unknown_model", ["default", "refuse"])
async def test_one_model_is_described_by_any_of_its_names(unknown_model):
    async with serving(unknown_model=unknown_model) as bench:
        for name, listed, root in [
            ("text-embedding-3-small", "text-embedding-3-small", "dense"),
            ("RANKER", "ranker", "ranker"),
            ("splade:latest", "org/splade:latest", "org/splade"),
        ]:
            body = json_of(await bench.get(f"/v1/models/{name}"))
            assert (body["id"], body["root"]) == (listed, root)
            for field in ("model", "name"):
                shown = json_of(await bench.post("/api/show", {field: name}))
                assert shown["model_info"]["general.basename"] == root
        for path in ("/v1/models/gpt-4", "/models/gpt-4:latest", "/m/dense/v1/models/ranker"):
            unknown = await bench.get(path)
            assert (unknown.status, json_of(unknown)["error"]["code"]) == (404, "model_not_found"), path


@pytest.mark.parametrize("is_strict", [False, True])
async def test_the_only_model_is_described_by_any_of_its_names_alone(is_strict):
    """Embeddings have it by any name, unless names are strict."""
    async with serving("dense", num_models=1, unknown_model="refuse" if is_strict else "any") as bench:
        names = {"dense": "dense", "text-embedding-3-small": "text-embedding-3-small", "dense:latest": "dense:latest"}
        found = {"DENSE": "dense", "org/dense": "dense", "minilm-dense:v2": "dense:v2", "dense:query": "dense:query"}
        for name, listed in (names if is_strict else {**names, **found}).items():
            for path in ("/v1/models", "/models", "/openai/v1/models"):
                assert json_of(await bench.get(f"{path}/{name}"))["id"] == listed
        for name in ("gpt-4", "gpt-4:latest", "dens", *(["DENSE", "org/dense"] if is_strict else [])):
            for path in ("/v1/models", "/models", "/openai/v1/models"):
                unknown = await bench.get(f"{path}/{name}")
                assert (unknown.status, json_of(unknown)["error"]["code"]) == (404, "model_not_found"), (path, name)
            response = await bench.post("/v1/embeddings", {"input": TEXT, "model": name})
            assert response.status == (404 if is_strict else 200)


# --- the server's own routes ----------------------------------------------------------------------------------------


async def test_health_is_that_of_all_models_or_of_the_named_one(bench: Bench):
    for service in bench.app.of_models:
        cast(Any, service).why_unavailable = lambda: None
    assert json_of(await bench.get("/health")) == {"status": "ok", "model_files": "as loaded"}
    cast(Any, bench.made[1]).why_unavailable = lambda: "no worker stays alive"
    response = await bench.get("/health")
    assert response.status == 503
    assert json_of(response)["reason"] == "ranker: no worker stays alive"
    assert (await bench.get("/")).status == 503
    for path, query, status in [
        ("/health", b"model=dense", 200),
        ("/health", b"model=RANKER", 503),
        ("/health", b"model=gpt-4", 404),
        ("/health", b"model=" + b"x" * 8000, 404),
        ("/health", b"model=%FF..%2F", 404),
        ("/health", b"model=", 503),
        ("/m/dense/health", b"", 200),
        ("/m/ranker/health", b"", 503),
        ("/m/gpt-4/health", b"", 404),
    ]:
        assert (await bench.get(path, query)).status == status, (path, query)
    unknown = json_of(await bench.get("/health", b"model=gpt-4"))
    assert "dense" not in str(unknown), "a probe needs no key"


async def test_info_is_the_first_model_s_with_a_list_of_all(bench: Bench):
    body = json_of(await bench.get("/info"))
    assert body["model_id"] == body["model"]["id"] == "dense"
    assert [(model["id"], model["capabilities"], model["aliases"]) for model in body["models"]] == [
        ("dense", ["dense"], ["text-embedding-3-small"]), ("ranker", ["rerank"], []),
        ("org/splade", ["sparse"], ["sparse"]),
    ]  # fmt: skip
    for path, query in (("/info", b"model=splade"), ("/m/splade/info", b"")):
        one = json_of(await bench.get(path, query))
        assert one["model_id"] == "org/splade"
        assert "models" not in one
    assert (await bench.get("/info", b"model=gpt-4")).status == 404
    stats = json_of(await bench.get("/stats"))
    assert [worker["worker"] for worker in stats["workers"]] == [0, 1, 2]
    assert [(model["model"], model["kind"], model["state"], model["workers"]) for model in stats["models"]] == [
        ("dense", "dense", "ready", 0), ("ranker", "rerank", "ready", 0), ("org/splade", "sparse", "ready", 0),
    ]  # fmt: skip


async def test_stats_tell_each_model_s_load_and_state_and_sum_up_all(bench: Bench):
    services = bench.made
    services[0].pipeline.shared_metrics.add(Counter.TOKENS, 5)
    services[1].pipeline.shared_metrics.add(Counter.TOKENS, 40)
    services[1].policy.queued_tokens = 7  # read by the gauge alone
    bench.app.process.shared_metrics.read_gauges_of_models = bench.app.gauges_of_models
    told = ModelIs(2, "loading", wait_s=3.0, nbytes=9000, num_loads=2, num_failed_loads=1, num_unloads={"idle": 1})
    bench.app.on_message(told, [])
    stats = json_of(await bench.get("/stats"))
    dense, ranker, _ = stats["models"]
    assert stats["totals"]["tokens"] == 45
    assert (dense["tokens"], dense["state"], dense["queued_tokens"]) == (5, "ready", 0)
    assert (ranker["tokens"], ranker["state"], ranker["queued_tokens"]) == (40, "loading", 7)
    assert (ranker["bytes"], ranker["wait_s"], ranker["loads"], ranker["failed_loads"]) == (9000, 3.0, 2, 1)
    assert ranker["unloads"] == {"idle": 1}
    assert [worker["state"] for worker in stats["workers"]] == ["down", "loading", "down"]
    metrics = body_of(await bench.get("/metrics")).decode()
    assert 'vecd_model_state{model="ranker",state="loading"} 1.0' in metrics
    bench.app.on_message(ModelIs(2, "ready"), [])
    assert json_of(await bench.get("/stats"))["models"][1]["state"] == "ready"


# --- one model ------------------------------------------------------------------------------------------------------


async def test_a_server_of_one_model_knows_no_prefix_and_no_header():
    async with serving("dense", num_models=1, unknown_model="any") as bench:
        response = await bench.post("/v1/embeddings", {"input": TEXT, "model": "any"}, {"x-vecd-model": "gpt-4"})
        assert response.status == 200
        assert "x-vecd-model" not in response.headers
        assert (await bench.post("/m/dense/v1/embeddings", {"input": TEXT})).status == 404
        assert "models" not in json_of(await bench.get("/info", b"model=gpt-4"))
        assert not bench.app.models.are_several
        assert "models" not in json_of(await bench.get("/stats"))
        assert 'model="' not in body_of(await bench.get("/metrics")).decode().replace(
            'vecd_info{model="dense"', ""
        ).replace('vecd_model_files_changed{model="dense"}', "")


# --- models that are not loaded -------------------------------------------------------------------------------------


def states_of(response: Response) -> dict[str, str]:
    return {model["id"]: model["state"] for model in json_of(response)["data"]}


async def test_the_lists_tell_the_states(bench: Bench):
    for generation in (1, 2):
        bench.made[generation - 1].dispatcher.start_stage = None
    bench.app.on_message(ModelIs(2, "draining", nbytes=7, num_loads=3, load_s=1.5), [])
    bench.app.on_message(ModelIs(3, "unloaded"), [])
    states = states_of(await bench.get("/v1/models"))
    assert (states["dense"], states["ranker"], states["org/splade"], states["sparse"]) == (
        "ready", "draining", "unloaded", "unloaded",
    )  # fmt: skip
    assert json_of(await bench.get("/v1/models/sparse"))["state"] == "unloaded"
    assert [each["name"] for each in json_of(await bench.get("/api/ps"))["models"]] == [
        "dense:latest", "ranker:latest",
    ]  # fmt: skip
    assert len(json_of(await bench.get("/api/tags"))["models"]) == 5
    listed = json_of(await bench.get("/info"))["models"]
    assert [each["state"] for each in listed] == ["ready", "draining", "unloaded"]
    assert (listed[1]["bytes"], listed[1]["loads"], listed[1]["load_s"]) == (7, 3, 1.5)


async def test_health_and_metrics_tell_whose_files_have_changed(bench: Bench):
    for service in bench.app.of_models:
        cast(Any, service).why_unavailable = lambda: None
    bench.app.on_message(ModelFiles(2, "tokenizer.json has changed"), [])
    told = "tokenizer.json has changed"
    response = await bench.get("/health")
    assert (response.status, json_of(response)["model_files"]) == (200, f"ranker: {told}")
    assert json_of(await bench.get("/health", b"model=ranker"))["model_files"] == told
    assert json_of(await bench.get("/health", b"model=dense"))["model_files"] == "as loaded"
    lines = body_of(await bench.get("/metrics")).decode()
    assert 'vecd_model_files_changed{model="ranker"} 1.0' in lines
    assert 'vecd_model_files_changed{model="dense"} 0.0' in lines


@pytest.mark.parametrize("loads_on_demand", [True, False])
async def test_a_model_that_has_failed_makes_the_server_unavailable_unless_it_is_loaded_on_demand(loads_on_demand):
    async with serving(load="demand" if loads_on_demand else "start") as bench:
        for generation in (1, 2):
            bench.app.on_message(ModelIs(generation, "unloaded"), [])
        bench.app.on_message(ModelIs(3, "failed", reason="no file", wait_s=9.0), [])
        assert (await bench.get("/health")).status == (200 if loads_on_demand else 503)
        response = await bench.get("/health", b"model=sparse")
        assert response.status == 503
        assert "no file" in json_of(response)["reason"]
        unloaded = {"status": "ok", "model_files": "as loaded", "state": "unloaded"}
        assert json_of(await bench.get("/health", b"model=ranker")) == unloaded


@pytest.mark.parametrize(("name", "generation"), [("dense", 1), ("sparse", 3), ("org/splade", 3)])
async def test_a_command_is_for_the_model_that_it_names(bench: Bench, name, generation):
    response = await bench.ask("POST", f"/admin/models/{name}/load", is_admin=True)
    assert response.status == 200
    assert bench.sent == [ModelAsked(generation, "load")]
    assert (await bench.ask("POST", f"/admin/models/{name}/load")).status == 404, "it is the operator's"


@pytest.mark.parametrize(
    "name", ["splade", "DENSE", "dense:latest", "unknown", "../dense", "http://a/dense", "x" * 5000, "dense/load"]
)
async def test_a_command_takes_no_other_spelling(bench: Bench, name):
    response = await bench.ask("POST", f"/admin/models/{name}/unload", is_admin=True)
    assert (response.status, bench.sent) == (404, [])
