"""One test per attribute, for every dialect that has a word for it: bytes in, bytes out. `attributes` is the table.

A value has its effect, and no other; a wrong one is refused in the dialect's shape, by the client's own word; null is
absent; two words that disagree are refused, two that agree are accepted; an alias' default counts where the request
says nothing.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any, cast
from unittest import mock

import numpy as np
import orjson
import pytest
from jsonschema_rs import validator_for

from tests.support.asking import body_of, embedded_of
from tests.support.cards import CLASSIFIER, DENSE, HYBRID, MULTI_VECTOR, RERANKER, SPARSE, TOKEN_CLASSIFIER
from tests.unit.gateway.dialects.attributes import ABSENT, ATTRIBUTES, ROUTES, TABLE, UNSAID, Exchange, Route, Row
from tests.unit.gateway.test_service import http_request
from tests.unit.gateway.test_several_models import ALIAS_DEFAULTS, ALIASES, CARDS, Bench, Recorder, json_of
from vecd.gateway.api.operation import ParsedMessages
from vecd.gateway.config import AliasDefaults, ChatTemplateSpec, GatewayConfig
from vecd.gateway.encoding.fragments import Encoder
from vecd.gateway.errors import ApiError
from vecd.gateway.request import Dtype, Embedded, EmbedRequest, InputReport, Overflow, Role, Source, Token
from vecd.gateway.tokenization.late_chunks import LateChunks
from vecd.model.steps import PairTemplate, ScoreHead, Step

_PROMPTS = (("query", "query: "), ("document", "passage: "), ("own", "own: "))
_TEXTS: dict[str, Any] = {"prompt": "own: ", "prompts": _PROMPTS}
_HAS_INSTRUCTION = PairTemplate("<{instruction}>", "|", "", "rank")
MODELS = {
    "dense": replace(DENSE, dim=16, hidden_size=16, steps=(Step("normalize"),), is_matryoshka=True, **_TEXTS),
    "hybrid": replace(
        HYBRID, dim=16, hidden_size=16, token_dim=16, steps=(Step("normalize"),), is_matryoshka=True, **_TEXTS
    ),
    "sparse": replace(SPARSE, **_TEXTS),
    "multi": replace(MULTI_VECTOR, **_TEXTS),
    "ranker": replace(RERANKER, score=ScoreHead(("score",), "sigmoid", "cls", pair_template=_HAS_INSTRUCTION)),
    "classifier": replace(CLASSIFIER, **_TEXTS),
    "tagger": replace(TOKEN_CLASSIFIER, **_TEXTS),
}  # fmt: skip
_STATUS = {"tei": 422}
"""Of a wrong field, by dialect; 400 in all others."""
_SHAPES = {
    "openai": {"error", "detail"}, "vllm": {"error"}, "ollama": {"error"}, "tei": {"error", "error_type"},
    "cohere": {"message"}, "rerank": {"message", "detail", "error"},
}  # fmt: skip


class Played(Recorder):
    """Answers all that is asked, with rows that tell forms and activations apart."""

    asked: Any = None
    rendered: Any = None

    async def embed(self, request: EmbedRequest, *rest: Any) -> Embedded:
        self.asked = request._replace(inputs=cast(Any, list(request.inputs)))
        return self._rows_of(request)

    def _rows_of(self, request: EmbedRequest) -> Embedded:
        num, width = len(request.inputs), request.output.width_of(self._card)
        rows = (np.arange(2 * num * width) % 5 - 1.5).astype(np.float32).reshape(2 * num, width)
        ids, offsets = np.array([1, 2], np.int32), np.array([[0, 1], [0, 1]], np.int32)
        spans = np.array([[0, 1]], np.int32), np.array([[0, 2]], np.int32), (0, 0), 2, np.array([False])
        collectors = Encoder(self._card).make_collectors(request, [ids] * num, [LateChunks(*spans)] * num)
        for collector in collectors:
            if request.output.is_per_token or request.late is not None:
                for index in range(num):
                    collector.put_tokens(index, rows[2 * index : 2 * index + 2], 0)
            else:
                collector.put(0, np.ascontiguousarray(rows[:num]))
        reports = (InputReport(3, False, 1, Source.TEXT),) * num if request.wants_report else ()
        return embedded_of(*collectors, reports=reports, token_ids=(ids,) * num, offsets=(offsets,) * num)

    async def describe(self, parsed: Any, *_: object) -> None:
        self.asked = {"texts": parsed.texts, "add_special_tokens": parsed.add_special_tokens, "prompt": parsed.prompt}
        parsed.collector.put(0, [Token(7, "t", False, 0, 1)])

    async def render(self, parsed: ParsedMessages, *_: object) -> list[str]:
        self.rendered = orjson.loads(parsed.payload)
        return ["a"] * len(self.rendered["conversations"])

    async def decode(self, parsed: Any, *_: object) -> list[str]:
        self.asked = {"lists": parsed.lists, "skip_special_tokens": parsed.skip_special_tokens}
        return ["a"] * len(parsed.lists)


class Gateway(Bench):
    """One model."""

    def make_recorder(self, config: GatewayConfig) -> Played:
        self.played = Played(config.model, MODELS[config.model])
        return self.played

    async def exchange(self, path: str, body: Any, headers: Mapping[str, str]) -> Exchange:
        played = self.played
        played.asked = played.rendered = played.kept_s = None
        request = http_request(path, body=orjson.dumps(body), headers=dict(headers))
        try:
            response = await self.app.handle(request)
        except ApiError as error:
            response = self.app.render_error(error, request.path)
        self.app.add_headers(response, request)
        came = played.asked, played.rendered, played.kept_s
        return Exchange(response.status, response.headers, body_of(response), request.request_id, *came)


class Client:
    """Asks the gateways of all models, each of which is made when it is asked first."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.gateway = cache(self._make)
        """By the model, and the defaults of its alias."""
        self.schemas = cache(self._schemas)

    def close(self) -> None:
        self._loop.close()

    def _make(self, model: str, **defaults: Any) -> Gateway:
        async def make() -> Gateway:
            options: dict[str, Any] = {
                "is_matryoshka": True,
                "allows_keep_alive": True,
                "max_inputs": 8,
                "chat_template": ChatTemplateSpec("", {}, ()),
            }
            aliases = {model: (AliasDefaults("alias", **defaults),)} if defaults else {}
            with (
                mock.patch.dict(CARDS, MODELS),
                mock.patch.dict(ALIASES, {model: ("alias",)}),
                mock.patch.dict(ALIAS_DEFAULTS, aliases),
            ):
                return Gateway((model,), 1, **options)

        return self._loop.run_until_complete(make())

    def ask(self, route: Route, said: Mapping[str, Any] | None = None, path: str = "", **defaults: Any) -> Exchange:
        """`said`: values by word. `defaults`: those of the alias."""
        body, prefix = self.body(route, said or {}), "header "
        headers = {word.removeprefix(prefix): value for word, value in (said or {}).items() if word.startswith(prefix)}
        gateway = self.gateway(route.model, **defaults)
        return self._loop.run_until_complete(gateway.exchange(path or route.path, body, headers))

    @staticmethod
    def body(route: Route, said: Mapping[str, Any]) -> dict[str, Any]:
        body = dict(route.body)
        for word, value in said.items():
            if "." in word:
                outer, inner = word.split(".")
                body[outer] = {**body.get(outer, {}), inner: value}
            elif not word.startswith("header "):
                body[word] = value
        return body

    def _schemas(self, model: str) -> dict[str, list[dict[str, Any]]]:
        """Of the bodies that each path takes, by the server's document."""
        document = json_of(self._loop.run_until_complete(self.gateway(model).get("/openapi.json")))
        found = {}
        for path, methods in document["paths"].items():
            if "requestBody" in methods.get("post", {}):
                schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
                found[path.replace("{name}", "m")] = schema.get("anyOf", [schema])
        return found


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


ROWS_OF: dict[tuple[str, str], list[Row]] = defaultdict(list)
"""By route and attribute."""
for _row in TABLE:
    for _name in _row.routes:
        ROWS_OF[_name, _row.attribute].append(_row)
KNOWN = {
    ("words", "prompt", "pooling"): "names 'input_type' where the client has 'embedding_mode'",
    ("words", "prompt", "pooling tokens"): "names 'input_type' where the client has 'embedding_mode'",
    ("words", "role", "pooling multi"): "names 'input_type' where the client has 'embedding_mode'",
    ("words", "role", "embed_sparse"): "'prompt_name' silently wins over 'input_type'",
    ("words", "role", "root sparse"): "'prompt_name' silently wins over 'input_type'",
    ("words", "most weights", "embed_sparse"): "leaves 'parameters.' out of the names",
    ("words", "most weights", "root sparse"): "leaves 'parameters.' out of the names",
    ("words", "documents in the response", "root rerank"): "either of both that is true wins silently",
    ("wrong", "nothing", "show by name"): "names 'model' where the client has 'name'",
    ("wrong", "nothing", "pull by name"): "names 'model' where the client has 'name'",
    ("alias", "prompt", "zero-shot"): "has the model's own prompt, not the alias'",
}
"""What is not yet as the rule has it, by rule, attribute and route."""


def each(rule: str, has_case: Callable[[list[Row]], bool] = bool) -> pytest.MarkDecorator:
    """Every attribute on every route that has a word for it, and a case for the rule."""
    params = []
    for name, attribute in (key for key, rows in ROWS_OF.items() if has_case(rows)):
        why = KNOWN.get((rule, attribute, name))
        marks = [] if why is None else [pytest.mark.xfail(reason=why, strict=False)]
        params.append(pytest.param(name, attribute, id=f"{attribute}-{name}", marks=marks))
    return pytest.mark.parametrize(("name", "attribute"), params)


def fields_in(rows: list[Row]) -> list[str]:
    """The words that are no headers."""
    return [word for row in rows for word in row.words if not word.startswith("header ")]


_SEVERAL = ("inputs", "output", "late chunks", "conversations", "documents", "query", "shape of rankings")
"""Attributes that others depend on."""


def message_of(exchange: Exchange) -> str:
    fault = exchange.json
    error = fault.get("error", fault.get("message"))
    return error["message"] if isinstance(error, dict) else error


def check_refused(exchange: Exchange, route: Route, *words: str) -> None:
    """In the dialect's shape, naming the client's own words."""
    assert exchange.status == _STATUS.get(route.dialect, 400) or "empty" in message_of(exchange), exchange
    assert exchange.asked is None
    fault, message = exchange.json, message_of(exchange)
    assert set(fault) == _SHAPES[route.dialect]
    for word in words:
        name = word.removeprefix("header ")
        assert f"'{name}" in message or f"$.{name}" in message or (name != word and name in message), message
    if isinstance(fault.get("error"), dict) and not words[-1].startswith("header "):
        assert fault["error"]["param"] in {word.partition(".")[0] for word in words}
    assert len(message) < 600


def comes_to(attribute: str, unsaid: Any, *meanings: Any) -> list[Any]:
    """What one meaning, or several together, come to; [] if they contradict each other."""
    said = [meaning for meaning in meanings if meaning not in (UNSAID, ABSENT)]
    if not said:
        return [unsaid]
    if isinstance(said[0], frozenset):
        left = frozenset.intersection(*said)
        return [next(each for each in (unsaid, *ATTRIBUTES[attribute].order) if each in left)] if left else []
    return said[:1] if all(each == said[0] for each in said) else []


def are_synonyms(row: Row, word: str, other: Row, other_word: str) -> bool:
    return row is other or row.of == other.of != "" or word.rpartition(".")[2] == other_word.rpartition(".")[2]


@each("effect")
def test_a_value_has_its_effect_and_no_other(client: Client, name: str, attribute: str):
    route, see = ROUTES[name], ATTRIBUTES[attribute].seen
    documented = [validator_for({**schema, "required": []}) for schema in client.schemas(route.model)[route.path]]
    others = {other: rows for (of, other), rows in ROWS_OF.items() if of == name and other != attribute}
    for row in ROWS_OF[name, attribute]:
        base = client.ask(route, row.beside)
        assert base.status == 200, base.body
        for word, (value, meaning) in product(row.words, row.values):
            exchange = client.ask(route, {**row.beside, word: value})
            assert exchange.status == 200, (word, value, exchange.body)
            [expected] = comes_to(attribute, see(base), meaning)
            assert any(each.is_valid(client.body(route, {**row.beside, word: value})) for each in documented), (
                word,
                value,
            )
            assert see(exchange) == expected, (word, value)
            for other, rows in others.items() if attribute not in _SEVERAL and not row.beside else ():
                if not any(word in each.words for each in rows):
                    assert ATTRIBUTES[other].seen(exchange) == ATTRIBUTES[other].seen(base), (word, value, other)
            for path in route.also if word != "model" and value == row.values[0][0] else ():
                assert see(client.ask(route, {**row.beside, word: value}, path)) == expected, (path, word, value)


@each("wrong", lambda rows: any(row.wrong for row in rows))
def test_a_wrong_value_is_refused_by_the_client_s_own_word(client: Client, name: str, attribute: str):
    for row in ROWS_OF[name, attribute]:
        for word, value in product(row.words, row.wrong):
            exchange = client.ask(ROUTES[name], {**row.beside, word: value})
            assert exchange.status >= 400, (word, value)
            check_refused(exchange, ROUTES[name], word)


@each("null", lambda rows: bool(fields_in(rows)))
def test_null_is_absent(client: Client, name: str, attribute: str):
    for row in ROWS_OF[name, attribute]:
        base = client.ask(ROUTES[name], row.beside)
        for word in row.words:
            if word in fields_in([row]) and word not in ROUTES[name].body:
                exchange = client.ask(ROUTES[name], {**row.beside, word: None})
                assert (exchange.status, exchange.asked) == (200, base.asked), (word, exchange.body)
                assert ATTRIBUTES[attribute].seen(exchange) == ATTRIBUTES[attribute].seen(base)


@each("words", lambda rows: len(set(fields_in(rows))) > 1)
def test_two_words_contradict_each_other_or_agree(client: Client, name: str, attribute: str):
    route, see, rows = ROUTES[name], ATTRIBUTES[attribute].seen, ROWS_OF[name, attribute]
    said = [
        (word, row, value)
        for row in rows
        if not row.is_alone
        for word, value in product(
            row.words, {str(meaning): (value, meaning) for value, meaning in row.values}.values()
        )
    ]
    base = client.ask(route)
    for (first, row, (value, meaning)), (second, other, (value_2, meaning_2)) in combinations(said, 2):
        if first == second or "header" in first + second:
            continue
        exchange = client.ask(route, {**row.beside, **other.beside, first: value, second: value_2})
        expected = comes_to(attribute, see(base), meaning, meaning_2)
        if are_synonyms(row, first, other, second) and meaning != meaning_2 and ABSENT not in (meaning, meaning_2):
            expected = []
        case = first, value, second, value_2
        if not expected:
            assert exchange.status >= 400, case
            check_refused(exchange, route, first, second)
        elif not (row.is_exclusive and other.is_exclusive and UNSAID not in (meaning, meaning_2)):
            assert exchange.status == 200, (case, exchange.body)
            assert see(exchange) == expected[0], case


# --- the defaults of aliases ------------------------------------------------------------------------------------

OF_ALIAS: dict[str, tuple[dict[str, Any], Any]] = {
    "dimensions": ({"dimensions": 4}, 4),
    "prompt": ({"prompt_name": "document"}, "passage: "),
    "overflow": ({"overflow": "truncate_left"}, Overflow.TRUNCATE_LEFT),
    "dtype": ({"dtype": "uint8"}, (Dtype.UINT8,)),
    "role": ({"role": "query"}, Role.QUERY),
    "scores": ({"raw_scores": True}, True),
}
"""By attribute, what the configuration gives an alias, and what that means."""


@each("alias", lambda rows: rows[0].attribute in OF_ALIAS)
def test_the_default_of_an_alias_counts_where_the_request_says_nothing(client: Client, name: str, attribute: str):
    route, see = ROUTES[name], ATTRIBUTES[attribute].seen
    defaults, expected = OF_ALIAS[attribute]
    alias = {"header x-vecd-model": "alias"}
    plain = client.ask(route)
    assert see(client.ask(route, alias, **defaults)) == expected
    assert see(client.ask(route, {"header x-vecd-model": "m"}, **defaults)) == see(plain) != expected
    for row in ROWS_OF[name, attribute]:
        for word, (value, meaning) in product(fields_in([row]), row.values):
            if word != "model" and meaning not in (UNSAID, ABSENT):
                exchange = client.ask(route, {**alias, **row.beside, word: value}, **defaults)
                assert [see(exchange)] == comes_to(attribute, expected, meaning), (word, value)


# --- the document -----------------------------------------------------------------------------------------------


def test_every_documented_field_is_in_the_table(client: Client):
    known = {word.partition(".")[0] for rows in ROWS_OF.values() for word in fields_in(rows)}
    known |= {field for route in ROUTES.values() for field in route.body}
    schemas = [schema for each in client.schemas("dense").values() for schema in each]
    missing = {field for schema in schemas for field in schema["properties"]} - known - {"parameters", "options"}
    assert not missing
