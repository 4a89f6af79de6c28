"""A search for small bodies that multiply: of every route that reads a body, valid ones are changed field by field so
that they repeat, nest or refer to names, up to 64 KB; until its request would be admitted, no such body takes more
memory than 64 times its length or 16 MB."""

import asyncio
import gzip
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, cast

import orjson
import pytest

from tests.support import cards
from tests.support.asking import PLAIN, changed
from tests.support.pipelines import app_of, planned_config
from tests.unit.gateway.test_service import NoTexts
from vecd.gateway.api.fields import Field, Fields
from vecd.gateway.api.operation import ParsedDecode, ParsedMessages, ParsedTokenize
from vecd.gateway.app.app import App
from vecd.gateway.app.routes import Route
from vecd.gateway.app.table import ROUTES
from vecd.gateway.config import ChatTemplateSpec
from vecd.gateway.errors import ApiError
from vecd.gateway.request import Coding, EmbedRequest, HttpRequest, Pair
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.model.steps import PairTemplate
from vecd.shm.shared_metrics import SharedMetricsSpec

MOST = 64 * 1024
"""Bytes of a body."""
ROOM = 2048
"""Of these, for what is not repeated."""
MAX_INPUTS = 2048

LLM = replace(
    cards.RERANKER, score=replace(cast(Any, cards.RERANKER.score), pair_template=PairTemplate("{instruction}", "", ""))
)
CARDS = {
    "dense": replace(cards.DENSE, prompts=(("query", "query: "), ("document", "document: ")), is_matryoshka=True),
    "ranker": LLM,
    "classifier": cards.CLASSIFIER,
    "tokens": cards.TOKEN_CLASSIFIER,
    "sparse": cards.SPARSE,
    "multi": cards.MULTI_VECTOR,
    "hybrid": cards.HYBRID,
}
"""By kind of model."""

Bases: TypeAlias = list[tuple[str, dict[str, Any]]]
T = "a text, or else a name"
MESSAGES = [{"role": "user", "content": T}]
INPUT: Bases = [
    ("dense", {"input": [T]}),
    ("dense", {"messages": [MESSAGES]}),
    ("hybrid", {"input": [T], "output": ["dense"]}),
]
CLASSIFIED: Bases = [
    ("classifier", {"input": [T]}), ("tokens", {"input": [T], "ignore_labels": ["O"]}),
    ("dense", {"input": [T], "labels": [T]}),
]  # fmt: skip
MULTI: Bases = [("multi", {"input": [T]})]
RERANKED: Bases = [
    ("ranker", {"query": T, "documents": [{"text": "", T: T}]}),
    ("multi", {"query": T, "documents": [T]}),
]
SCORED: Bases = [("ranker", {"queries": T, "documents": [T]}), ("ranker", {"text_1": [T], "text_2": [T]})]
HUB: Bases = [
    ("dense", {"inputs": [T]}),
    ("classifier", {"inputs": [[T, T]]}),
    ("tokens", {"inputs": [T]}),
    ("sparse", {"inputs": [T]}),
]
ANY: Bases = [*HUB, ("ranker", {"query": T, "texts": [T]}), ("ranker", {"inputs": [[T, T]]})]
COHERE: Bases = [
    ("dense", {"texts": [T], "input_type": "search_query"}),
    ("dense", {"inputs": [{"content": [{"type": "text", "text": T}]}]}),
]
DETOKENIZED: Bases = [("dense", {"tokens": [5]})]
NAME: Bases = [("dense", {"model": "m"})]
BASES: dict[str, Bases] = {
    "/v1/embeddings": [*INPUT, ("dense", {"input": [T], "late_chunking": {"ranges": [[[0, 1]]]}})],
    "/v1/classify": CLASSIFIED,
    "/v1/multi-vector": MULTI,
    "/pooling": [("dense", {"input": [T]}), *MULTI],
    "/v1/score": SCORED,
    "/tokenize": [("dense", {"prompt": T}), ("dense", {"inputs": [T]}), ("dense", {"messages": MESSAGES})],
    "/detokenize": DETOKENIZED,
    "/v1/detokenize": DETOKENIZED,
    "/v1/tokenize": [("dense", {"text": T})],
    "/decode": [("dense", {"ids": [[5]]})],
    "/api/embed": [("dense", {"input": [T], "options": {"num_ctx": 8}})],
    "/api/embeddings": [("dense", {"prompt": T})],
    "/api/show": NAME,
    "/api/pull": NAME,
    "/embed": [("dense", {"inputs": [T]}), COHERE[0]],
    "/embed_all": [("dense", {"inputs": [T]})],
    "/models/*": HUB,
    "/": [*ANY, ("dense", {"inputs": {"source_sentence": T, "sentences": [T]}})],
    "/invocations": [
        HUB[0], ANY[4], INPUT[0], *CLASSIFIED[:2], RERANKED[0], *SCORED, ("ranker", {"text_pairs": [[T, T]]}),
    ],
    "/similarity": [("dense", {"inputs": {"source_sentence": T, "sentences": [T]}})],
    "/predict": [("classifier", {"inputs": [[T, T]]}), ("tokens", {"inputs": [T]})],
    "/embed_sparse": [("sparse", {"inputs": [T]})],
    "/v1/embed": COHERE,
    "/v2/embed": COHERE,
    "/rerank": [*RERANKED, ("ranker", {"query": T, "texts": [T]})],
    "/v1/rerank": RERANKED,
    "/voyage/v1/rerank": RERANKED,
    "/v1/ranking": [("ranker", {"query": T, "passages": [{"text": T}]})],
}  # fmt: skip
"""Valid bodies, with the kind of model that takes them, of one of the paths that have the same operations."""


def reading_routes() -> dict[str, Route]:
    routes = {path: methods["POST"] for path, methods in ROUTES.items() if "POST" in methods}
    return {
        path: route for path, route in routes.items() if route.claims and route.claims[0].operation.describe is None
    }


def operations_at(path: str) -> tuple[int, ...]:
    return tuple(id(claim.operation) for claim in reading_routes()[path].claims)


# --- bodies -----------------------------------------------------------------------------------------------------


def filled(item: Any, num_bytes: int = MOST - ROOM) -> list[Any]:
    """A list of the same item, of so many bytes as JSON."""
    return [item] * (num_bytes // (len(orjson.dumps(item)) + 1))


def nested(num: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = T
    for _ in range(num):
        value = wrap(value)
    return value


LONG = "x" * (MOST - ROOM)
HALF = "x" * (MOST // 2 - ROOM)
ITEMS: list[Any] = [5, [], [[T, T]], {"content": [{"type": "text", "text": T}]}, [[0, 9**9]], {T: T}]
VALUES: list[Any] = [
    *map(filled, ITEMS),
    nested(250, lambda inner: [inner]),
    nested(250, lambda inner: {T: inner}),
    {f"k{index}": 1 for index in range(5000)},
    filled(T),
    LONG,
]
"""What any field may have, whether it can or not."""
BOMB = gzip.compress(b" " * (60 << 20))


def grown(value: Any) -> Iterator[Any]:
    """The value with each list in it filled with what it has, and each text long."""
    if isinstance(value, str):
        yield LONG
    elif isinstance(value, list):
        yield filled(value[0])
        for inner in grown(value[0]):
            yield [inner]
            yield [*filled(value[0], 1000), inner]
    elif isinstance(value, dict):
        for name in value:
            for inner in grown(value[name]):
                yield {**value, name: inner}


def halved(value: Any) -> Any:
    """The value with its last text long."""
    if isinstance(value, dict):
        *others, last = value.items()
        return {**dict(others), last[0]: halved(last[1])}
    return [halved(value[-1])] if isinstance(value, list) else HALF if isinstance(value, str) else value


def variants(base: dict[str, Any], fields: Iterable[Field[Any]], unread: set[str]) -> Iterator[dict[str, Any]]:
    """`fields`: those that the body may have. `unread`: the names of those that may have any value here, because this
    body has them, or no other tries their readers."""
    yield from grown(base)
    yield {**base, **{f"k{index}": 1 for index in range(5000)}}
    names = [name for name, value in base.items() if isinstance(value, list)]
    lists = {name: filled(base[name][0], 30_000 // len(names)) for name in names}
    for field in fields:
        name, schema = field.name, orjson.dumps(field.schema)
        holds_many = not field.schema or b'"array"' in schema or b'"object"' in schema
        if name in unread:
            for value in VALUES if name in base else VALUES[-5:] if holds_many else VALUES[-2:]:
                yield {**base, name: value}
            for inner in field.schema.get("properties", ()):
                for value in VALUES[-2:]:
                    yield {**base, name: {inner: value}}
        if holds_many:
            yield {**halved(base), name: filled(T, MOST // 2 - ROOM)}  # repeats the name of a long text
        if b'"string"' in schema:
            yield {**base, name: HALF, **lists}


def inflated(base: dict[str, Any], names: set[str]) -> Iterator[bytes]:
    """As `grown`, of as many bytes as a small body may become."""
    most = 4_000_000
    for name in sorted(names):
        value = base[name]
        yield orjson.dumps({**base, name: filled(value[0], most) if isinstance(value, list) else "x" * most})


# --- up to admission --------------------------------------------------------------------------------------------


class Admitted(ApiError):
    """In place of a result."""


class Gate:
    """Counts what a request would be admitted with."""

    num_inputs = num_chars = 0

    @property
    def inspection(self) -> "Gate":
        return self

    async def run(self, request: EmbedRequest, *_: object) -> None:
        inputs = request.inputs
        texts = [text for each in inputs for text in (each if isinstance(each, Pair) else (each,))]
        self.count(texts, len(inputs))

    async def describe(self, parsed: ParsedTokenize, *_: object) -> None:
        self.count(parsed.texts, len(parsed.texts))

    async def decode(self, parsed: ParsedDecode, *_: object) -> None:
        self.count(parsed.lists, len(parsed.lists))

    async def render(self, parsed: ParsedMessages, *_: object) -> None:
        self.count([parsed.payload], 1)

    async def load(self, *_: object) -> None:
        self.count([], 0)

    def count(self, texts: Any, num: int) -> None:
        self.num_inputs, self.num_chars = num, sum(map(len, {id(text): text for text in texts}.values()))
        raise Admitted("admitted")


@pytest.fixture(scope="module")
def apps() -> Iterator[dict[str, App]]:
    spec = SharedMetricsSpec(num_gateways=1, num_workers=1, num_models=1)
    shared_metrics = SharedMetrics(memoryview(bytearray(spec.nbytes)).cast("q"), spec, 0)
    template, tokenizer = ChatTemplateSpec("", {}), NoTexts(MOST)
    config = replace(planned_config(), model="m", num_workers=1, chat_template=template, max_inputs=MAX_INPUTS)

    async def make() -> dict[str, App]:
        return {
            kind: app_of(replace(config, card=card), tokenizer, shared_metrics=shared_metrics)
            for kind, card in CARDS.items()
        }

    yield asyncio.run(make())
    tokenizer.threads.close()


async def ask(
    app: App, path: str, body: bytes, coding: Coding | None = None, gate: Gate | None = None
) -> tuple[Exception | None, Gate]:
    gate = gate or Gate()
    app.active.pipeline = cast(Any, gate)
    http = HttpRequest(
        "POST", path.replace("*", "m"), b"", {}, 1, keep_alive=True, request_id="id", body=body, coding=coding
    )
    try:
        await app.handle(http)
    except ApiError as error:
        return error, gate
    return None, gate


async def test_nothing_keeps_the_inputs_of_an_admitted_request(apps):
    class Removed(Gate):
        async def run(self, request: EmbedRequest, *_: object) -> None:
            ids = request.inputs.pop()
            assert sys.getrefcount(ids) == 2, "the call and `ids`"
            await super().run(request)

    error, _ = await ask(apps["dense"], "/v1/embeddings", b'{"input":[[1,2]]}', gate=Removed())
    assert isinstance(error, Admitted)


def test_every_route_that_reads_a_body_has_a_base():
    assert set(map(operations_at, BASES)) == set(map(operations_at, reading_routes()))


@pytest.mark.parametrize("path", BASES)
async def test_every_base_is_admitted(apps, path):
    for kind, base in BASES[path]:
        error, _ = await ask(apps[kind], path, orjson.dumps(base))
        assert isinstance(error, Admitted | None), f"{base}: {error}"


class Case(NamedTuple):
    path: str
    kind: str
    base: dict[str, Any]
    fields: Fields
    unread: set[str]
    """As in `variants`."""
    unlike: set[str]
    """Those of its names whose fields no case before it has."""


def cases() -> Iterator[Case]:
    read: set[int] = set()
    for path in BASES:
        for kind, base in BASES[path]:
            model = changed(PLAIN, capabilities=CARDS[kind].capabilities)
            fields = reading_routes()[path].claim_of(base, model).operation.fields
            unread = {field.name for field in fields if field.name in base or id(field) not in read}
            unlike = {field.name for field in fields if field.name in base and id(field) not in read}
            yield Case(path, kind, base, fields, unread, unlike)
            read.update(map(id, fields))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.path}-{case.kind}-{[*case.base][-1]}",
            marks=() if case.unlike else pytest.mark.full,  # another path of fields that a case before it has
        )
        for case in cases()
    ],
)
async def test_no_small_body_grows_before_admission(apps, case):
    bodies = [orjson.dumps(body) for body in variants(case.base, case.fields, case.unread)]
    sent: list[tuple[bytes, int, Coding | None]] = [(body, len(body), None) for body in bodies if len(body) <= MOST]
    assert len(sent) > 0.8 * len(bodies)
    sent += [(gzip.compress(body, 1), len(body), Coding.GZIP) for body in inflated(case.base, case.unlike)]
    sent.append((BOMB + gzip.compress(bodies[0]), 0, Coding.GZIP))
    tracemalloc.start()
    try:
        for body, length, coding in sent:
            assert len(body) <= MOST
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            _, gate = await ask(apps[case.kind], case.path, body, coding)
            growth = tracemalloc.get_traced_memory()[1] - before
            assert growth <= max(64 * len(body), 16 << 20), f"{growth} bytes for {body[:200]!r}"
            assert gate.num_inputs <= MAX_INPUTS, body[:200]
            assert gate.num_chars <= 2 * length, body[:200]
    finally:
        tracemalloc.stop()
