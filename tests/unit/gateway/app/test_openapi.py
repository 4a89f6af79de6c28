"""/openapi.json says all that is served, and nothing else; so does the page at `/` of errors."""

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import jsonschema_rs
import pytest

from tests.support.asking import PLAIN, changed
from vecd.gateway.app.openapi import describe_api
from vecd.gateway.app.routes import served
from vecd.gateway.app.table import DIALECTS, ROUTES
from vecd.gateway.errors import ApiError
from vecd.gateway.telemetry.measures import GONE

SERVED = changed(
    PLAIN, model="m", dim=8, hidden_size=8, max_tokens=16, max_inputs=7, max_request_tokens=1000, max_body_bytes=12345
)
PUBLIC = served(ROUTES, has_admin_listener=False, has_keys=True)
ADMIN = served(ROUTES, is_admin=True, has_admin_listener=True, has_keys=True)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return describe_api(PUBLIC, [SERVED], has_keys=True)


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): about
        for path, item in document["paths"].items()
        for method, about in item.items()
        if method != "parameters"
    }


@pytest.mark.parametrize("table", [PUBLIC, ADMIN], ids=["public", "admin"])
def test_every_route_of_a_listener_is_in_it_and_no_other(table):
    routes = {(method, path.replace("/*", "/{name}")) for path, methods in table.items() for method in methods}
    assert set(operations(describe_api(table, [SERVED], has_keys=True))) == routes


def test_every_field_that_is_parsed_is_in_it(document):
    for path, methods in PUBLIC.items():
        for method, route in methods.items():
            if not route.claims:
                continue
            text = json.dumps(document["paths"][path.replace("/*", "/{name}")][method.lower()])
            for claim in route.claims:
                for field in claim.operation.fields:
                    assert f'"{field.name}": ' in text, (path, field.name)
                    assert field.description


def references(value: Any) -> list[str]:
    found = [value["$ref"]] if isinstance(value, dict) and "$ref" in value else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return found + [reference for item in items for reference in references(item)]


@pytest.mark.parametrize("name", ["document", "several"])
def test_every_schema_is_one_and_every_reference_leads_somewhere(request, name):
    document = request.getfixturevalue(name)
    names = [about["operationId"] for about in operations(document).values()]
    assert len(names) == len(set(names))
    for (method, path), about in operations(document).items():
        assert {"200", "202"} & about["responses"].keys(), "every operation can succeed"
        for part in (about.get("requestBody", {}), *about["responses"].values()):
            for media in part.get("content", {}).values():
                schema = media.get("schema", {})
                jsonschema_rs.meta.validate({**schema, "components": document["components"]})
                assert schema or method == "POST", path
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]


def test_errors_are_said_with_their_shape(document):
    about = document["paths"]["/v1/embeddings"]["post"]
    assert {"400", "401", "403", "404", "408", "413", "415", "429", "431", "500", "503"} <= set(about["responses"])
    for status in ("429", "503"):
        assert "retry-after" in about["responses"][status]["headers"]
    assert "retry-after-ms" in about["responses"]["429"]["headers"]
    for dialect in DIALECTS:
        assert dialect.error.get("required"), dialect.name


def test_limits_are_those_of_the_server(document):
    description = document["info"]["description"]
    for limit in ("`m`", " 8 dimensions", " 16 tokens", " 7 inputs", " 1000 tokens", " 12345 bytes"):
        assert limit in description
    schema = json.dumps(document["paths"]["/v1/embeddings"]["post"]["requestBody"])
    assert '"maxItems": 7' in schema
    without_limit = describe_api(PUBLIC, [changed(SERVED, max_request_tokens=None)], has_keys=False)
    assert "any number of tokens" in without_limit["info"]["description"]


def body_fields(document: dict[str, Any], path: str) -> dict[str, Any]:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields: dict[str, Any] = schema["properties"]
    return fields


def test_vectors_of_tokens_have_a_length_of_their_own():
    """Which some models' vectors have not."""
    described = describe_api(PUBLIC, [changed(SERVED, hidden_size=12)], has_keys=False)
    assert body_fields(described, "/pooling")["dimensions"]["enum"] == [0, 8, 12, None]
    assert body_fields(described, "/v1/embeddings")["dimensions"]["enum"] == [0, 8, None]
    for path in ("/v1/embeddings", "/pooling"):
        assert body_fields(described, path)["truncate_prompt_tokens"]["maximum"] == 16
    matryoshka = describe_api(PUBLIC, [changed(SERVED, hidden_size=12, is_matryoshka=True)], has_keys=False)
    assert body_fields(matryoshka, "/pooling")["dimensions"]["maximum"] == 12
    assert body_fields(matryoshka, "/v1/embeddings")["dimensions"]["maximum"] == 8


def test_keys_are_asked_for_only_where_there_are_some(document):
    assert document["paths"]["/v1/embeddings"]["post"]["security"]
    assert "security" not in document["paths"]["/health"]["get"]
    open_to_all = describe_api(PUBLIC, [SERVED], has_keys=False)
    assert "security" not in open_to_all["paths"]["/v1/embeddings"]["post"]
    assert not open_to_all["components"]["securitySchemes"]


# --- several models -------------------------------------------------------------------------------------------------

OTHER = changed(SERVED, model="org/other", aliases=("o",), dim=5, hidden_size=5, max_tokens=32, max_inputs=9)
RANKER = changed(SERVED, model="r", capabilities=("rerank",), dim=1, max_inputs=99)


@pytest.fixture(scope="module")
def several() -> dict[str, Any]:
    return describe_api(PUBLIC, [SERVED, OTHER], has_keys=True, are_several=True)


def test_all_models_are_in_the_document_of_several(several):
    description = several["info"]["description"]
    for part in ("`m`", "`org/other`", " 8 dimensions", " 5 dimensions", " 16 tokens", " 32 tokens", "/m/NAME/"):
        assert part in description
    names = ["m", "org/other", "o"]
    assert [server["url"] for server in several["servers"]] == ["/", "/m/{model}"]
    assert several["servers"][1]["variables"]["model"] == {"enum": names, "default": "m"}
    for (_, path), about in operations(several).items():
        headers = {each["name"]: each["schema"] for each in about.get("parameters", []) if each["in"] == "header"}
        is_for_model = about["tags"] != ["server"] and "{name}" not in path
        assert headers.get("x-vecd-model") == ({"enum": names} if is_for_model else None), path


def test_what_one_of_several_allows_is_allowed(several):
    fields = body_fields(several, "/v1/embeddings")
    assert fields["dimensions"]["enum"] == [0, 5, 8, None]
    assert fields["truncate_prompt_tokens"]["maximum"] == 32
    assert '"maxItems": 9' in json.dumps(fields)
    with_ranker = describe_api(PUBLIC, [SERVED, RANKER], has_keys=True, are_several=True)
    assert body_fields(with_ranker, "/v1/embeddings")["dimensions"]["enum"] == [0, 8, None]
    assert '"maxItems": 7' in json.dumps(body_fields(with_ranker, "/v1/embeddings"))


def test_what_none_of_several_can_answer_is_left_out(several, document):
    with_ranker = operations(describe_api(PUBLIC, [SERVED, RANKER], has_keys=True, are_several=True))
    assert ("POST", "/rerank") not in operations(several)
    assert ("POST", "/rerank") in with_ranker
    assert ("POST", "/embed_sparse") not in with_ranker
    assert with_ranker.keys() < operations(document).keys()
    assert ("GET", "/v1/models") in with_ranker


# --- the page at / ----------------------------------------------------------------------------------------------


def errors(base: type[ApiError] = ApiError) -> Iterator[type[ApiError]]:
    for error in base.__subclasses__():
        yield error
        yield from errors(error)


def test_the_page_names_every_status_of_an_error():
    page = files("vecd.gateway.app").joinpath("data", "page.html").read_text()
    [table] = re.findall(r"const STATUSES = \{(.*?)\};", page, re.DOTALL)
    named = {int(status) for status in re.findall(r'(\d+): "', table)}
    of_dialects = {status for dialect in DIALECTS for status in dialect.statuses}
    assert {error.status for error in errors()} | of_dialects | {GONE} <= named
