"""One test per attribute, for every dialect that has a word for it: bytes in, bytes out. `attributes` is the table.

A value has its effect, and no other; a wrong one is refused in the dialect's shape, by the client's own word; null is
absent; two words that disagree are refused, two that agree are accepted; an alias' default counts where the request
says nothing.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_rs import validator_for

from tests.unit.gateway.dialects.attributes import ABSENT, ATTRIBUTES, ROUTES, TABLE, UNSAID, Exchange, Route, Row
from tests.unit.gateway.dialects.played import Client
from vecd.gateway.config import ChatTemplateSpec
from vecd.gateway.request import Dtype, Encoding, Overflow, Priority, Role

TEMPLATE = ChatTemplateSpec("", {})
_STATUS = {"tei": 422}
"""Of a wrong field, by dialect; 400 in all others."""
_SHAPES = {
    "openai": {"error", "detail"}, "vllm": {"error"}, "ollama": {"error"}, "tei": {"error", "error_type"},
    "cohere": {"message"}, "rerank": {"message", "detail", "error"},
}  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    client = Client(chat_template=TEMPLATE)
    yield client
    client.close()


def body_of(route: Route, said: Mapping[str, Any]) -> dict[str, Any]:
    """`said`: values by word."""
    body = dict(route.body)
    for word, value in said.items():
        if "." in word:
            outer, inner = word.split(".")
            body[outer] = {**body.get(outer, {}), inner: value}
        elif not word.startswith("header "):
            body[word] = value
    return body


def ask(
    client: Client, route: Route, said: Mapping[str, Any] | None = None, path: str = "", **defaults: Any
) -> Exchange:
    prefix = "header "
    headers = {word.removeprefix(prefix): value for word, value in (said or {}).items() if word.startswith(prefix)}
    return client.exchange(route.model, path or route.path, body_of(route, said or {}), headers, **defaults)


def schemas_of(client: Client, model: str) -> dict[str, list[dict[str, Any]]]:
    """Of the bodies that each path takes, by the server's document."""
    found = {}
    for path, methods in client.document(model)["paths"].items():
        if "requestBody" in methods.get("post", {}):
            schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            found[path] = schema.get("anyOf", [schema])
    return found


ROWS_OF: dict[tuple[str, str], list[Row]] = defaultdict(list)
"""By route and attribute."""
for _row in TABLE:
    for _name in _row.routes:
        ROWS_OF[_name, _row.attribute].append(_row)


def each(has_case: Callable[[list[Row]], bool] = bool) -> pytest.MarkDecorator:
    """Every attribute on every route that has a word for it, and a case for the rule."""
    found = (key for key, rows in ROWS_OF.items() if has_case(rows))
    params = [pytest.param(name, attribute, id=f"{attribute}-{name}") for name, attribute in found]
    return pytest.mark.parametrize(("name", "attribute"), params)


def fields_in(rows: list[Row]) -> list[str]:
    """The words that are no headers."""
    return [word for row in rows for word in row.words if not word.startswith("header ")]


_SEVERAL = ("inputs", "output", "late chunks", "conversations", "documents", "query", "shape of rankings")
"""Attributes that others depend on."""


LARGE = 1 << 17
"""Bytes before a body that make it a large one."""


def as_lists(asked: Any) -> Any:
    """Of a large body token ids are arrays."""
    inputs = [list(each) if isinstance(each, array) else each for each in asked.inputs] if asked is not None else None
    return None if asked is None else asked._replace(inputs=inputs)


def has_both(rows: list[Row]) -> bool:
    """A header and a field; the header of the request's id has no row, because the reader of heads takes it."""
    num_fields = len(fields_in(rows))
    return num_fields > 0 and (num_fields < sum(len(row.words) for row in rows) or rows[0].attribute == "request id")


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
    assert "secret" not in message


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


@each()
def test_a_value_has_its_effect_and_no_other(client: Client, name: str, attribute: str):
    route, see = ROUTES[name], ATTRIBUTES[attribute].seen
    documented = [validator_for({**schema, "required": []}) for schema in schemas_of(client, route.model)[route.path]]
    others = {other: rows for (of, other), rows in ROWS_OF.items() if of == name and other != attribute}
    for row in ROWS_OF[name, attribute]:
        base = ask(client, route, row.beside)
        assert base.status == 200, base.body
        for word, (value, meaning) in product(row.words, row.values):
            exchange = ask(client, route, {**row.beside, word: value})
            assert exchange.status == 200, (word, value, exchange.body)
            [expected] = comes_to(attribute, see(base), meaning)
            assert any(each.is_valid(body_of(route, {**row.beside, word: value})) for each in documented), (
                word,
                value,
            )
            assert see(exchange) == expected, (word, value)
            for other, rows in others.items() if attribute not in _SEVERAL and not row.beside else ():
                if not any(word in each.words for each in rows):
                    assert ATTRIBUTES[other].seen(exchange) == ATTRIBUTES[other].seen(base), (word, value, other)
            for path in route.also if word != "model" and value == row.values[0][0] else ():
                assert see(ask(client, route, {**row.beside, word: value}, path)) == expected, (path, word, value)


@each(lambda rows: any(row.wrong for row in rows))
def test_a_wrong_value_is_refused_by_the_client_s_own_word(client: Client, name: str, attribute: str):
    for row in ROWS_OF[name, attribute]:
        for word, value in product(row.words, row.wrong):
            exchange = ask(client, ROUTES[name], {**row.beside, word: value})
            assert exchange.status >= 400, (word, value)
            check_refused(exchange, ROUTES[name], word)
            message = message_of(exchange)
            shows = type(value) is not int or row.is_alone or str(value) in message or "whole number" in message
            assert shows or attribute == "dimensions of tokens", message


@each(lambda rows: rows[0].attribute in ("inputs", "documents", "query"))
def test_a_large_body_is_read_as_a_small_one(client: Client, name: str, attribute: str):
    """It is parsed in a thread, and in pieces."""
    for row in ROWS_OF[name, attribute]:
        for word, value in product(row.words, (*(value for value, _ in row.values), *row.wrong)):
            body = body_of(ROUTES[name], {**row.beside, word: value})
            small = client.exchange(ROUTES[name].model, ROUTES[name].path, body, {})
            large = client.exchange(ROUTES[name].model, ROUTES[name].path, b" " * LARGE + orjson.dumps(body), {})
            assert (large.status, as_lists(large.asked)) == (small.status, as_lists(small.asked)), (word, value)
            if large.status >= 400:
                check_refused(large, ROUTES[name], word)


@each(lambda rows: bool(fields_in(rows)))
def test_null_is_absent(client: Client, name: str, attribute: str):
    for row in ROWS_OF[name, attribute]:
        base = ask(client, ROUTES[name], row.beside)
        for word in row.words:
            if word in fields_in([row]) and word not in ROUTES[name].body:
                exchange = ask(client, ROUTES[name], {**row.beside, word: None})
                assert (exchange.status, exchange.asked) == (200, base.asked), (word, exchange.body)
                assert ATTRIBUTES[attribute].seen(exchange) == ATTRIBUTES[attribute].seen(base)


@each(lambda rows: len(set(fields_in(rows))) > 1)
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
    base = ask(client, route)
    for (first, row, (value, meaning)), (second, other, (value_2, meaning_2)) in combinations(said, 2):
        if first == second or "header" in first + second:
            continue
        exchange = ask(client, route, {**row.beside, **other.beside, first: value, second: value_2})
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


# --- the defaults of the server, of headers and of aliases -------------------------------------------------------


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[Overflow, Client]]:
    clients = {overflow: Client(chat_template=TEMPLATE, overflow=overflow.value) for overflow in Overflow}
    yield clients
    for client in clients.values():
        client.close()


@pytest.mark.parametrize("default", Overflow)
def test_what_words_of_overflow_leave_open_is_the_server_s_to_say(servers: dict[Overflow, Client], default: Overflow):
    client = servers[default]

    def see(exchange: Exchange) -> Overflow:
        return default if exchange.asked is None else exchange.asked.tokenizing.overflow or default

    for (name, attribute), rows in ROWS_OF.items():
        for row in rows if attribute == "overflow" else ():
            unsaid = see(ask(client, ROUTES[name]))
            for word, (value, meaning) in product(row.words, row.values):
                exchange = ask(client, ROUTES[name], {word: value})
                if exchange.status == 200 or name not in ("pooling tokens", "pooling multi"):  # which refuse chunks
                    expected = comes_to("overflow", unsaid, meaning)
                    assert [see(exchange)] == expected, (name, word, value, exchange.body)


HEADERS = {
    "priority": ({"header x-vecd-priority": "bulk"}, Priority.BULK),
    "encoding": ({"header accept": "application/x-npy"}, (Encoding.NPY,)),
    "request id": ({"header x-request-id": "of-header"}, "of-header"),
}
"""By attribute, a header that says it, and what it means."""


@each(lambda rows: rows[0].attribute in HEADERS and has_both(rows))
def test_the_body_says_more_than_a_header(client: Client, name: str, attribute: str):
    """But of the request's id."""
    route, see, (header, of_header) = ROUTES[name], ATTRIBUTES[attribute].seen, HEADERS[attribute]
    for row in ROWS_OF[name, attribute]:
        for word, (value, meaning) in product(fields_in([row]), row.values):
            exchange = ask(client, route, {**header, word: value})
            is_said = meaning not in (UNSAID, ABSENT) and attribute != "request id"
            assert exchange.status == 200, exchange.body
            assert see(exchange) == (meaning if is_said else of_header), (word, value)


OF_ALIAS: dict[str, tuple[dict[str, Any], Any]] = {
    "dimensions": ({"dimensions": 4}, 4),
    "prompt": ({"prompt_name": "document"}, "passage: "),
    "overflow": ({"overflow": "truncate_left"}, Overflow.TRUNCATE_LEFT),
    "dtype": ({"dtype": "uint8"}, (Dtype.UINT8,)),
    "role": ({"role": "query"}, Role.QUERY),
    "scores": ({"raw_scores": True}, True),
    "prompt of tokens": ({"prompt_name": "document"}, "passage: "),
}
"""By attribute, what the configuration gives an alias, and what that means."""


@each(lambda rows: rows[0].attribute in OF_ALIAS)
def test_the_default_of_an_alias_counts_where_the_request_says_nothing(client: Client, name: str, attribute: str):
    route, see = ROUTES[name], ATTRIBUTES[attribute].seen
    defaults, expected = OF_ALIAS[attribute]
    alias = {"header x-vecd-model": "alias"}
    plain = ask(client, route)
    assert see(ask(client, route, alias, **defaults)) == expected
    assert see(ask(client, route, {"header x-vecd-model": "m"}, **defaults)) == see(plain) != expected
    for row in ROWS_OF[name, attribute]:
        for word, (value, meaning) in product(fields_in([row]), row.values):
            if word != "model" and meaning not in (UNSAID, ABSENT):
                exchange = ask(client, route, {**alias, **row.beside, word: value}, **defaults)
                assert [see(exchange)] == comes_to(attribute, expected, meaning), (word, value)


# --- the document -----------------------------------------------------------------------------------------------


def test_every_documented_field_is_in_the_table(client: Client):
    known = {word.partition(".")[0] for rows in ROWS_OF.values() for word in fields_in(rows)}
    known |= {field for route in ROUTES.values() for field in route.body}
    schemas = [schema for each in schemas_of(client, "dense").values() for schema in each]
    missing = {field for schema in schemas for field in schema["properties"]} - known - {"parameters", "options"}
    assert not missing


# --- whatever is sent -------------------------------------------------------------------------------------------

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["secret", "", "query", "text", "float", "base64", "left", "NONE", "m:query", "\U0001f600" * 40]),
)  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["text", "type", "content", "secret", "ranges"]), inner, max_size=3),
    ),
    max_leaves=8,
)


TEXTS = {word for row in TABLE if row.attribute in (*_SEVERAL, "texts", "ids") for word in row.words}
"""The words whose values no message may quote."""


@given(name=st.sampled_from(sorted(ROUTES)), data=st.data())
@settings(max_examples=settings().max_examples * 4)
def test_whatever_fields_hold_is_accepted_or_refused_in_shape(client: Client, name: str, data: st.DataObject):
    words = {word for (of, _), rows in ROWS_OF.items() if of == name for word in fields_in(rows)}
    fields = sorted({*words, *ROUTES[name].body} - {"parameters", "options"})
    said = data.draw(st.dictionaries(st.sampled_from(fields), anything, max_size=4))
    exchange = ask(client, ROUTES[name], said)
    if exchange.status != 200:
        assert exchange.status in (400, 422, 424), exchange
        assert set(exchange.json) in _SHAPES.values()
        of_options = [value for word, value in said.items() if word not in TEXTS]
        assert "secret" not in message_of(exchange) or "secret" in str(of_options), "a text is quoted"
