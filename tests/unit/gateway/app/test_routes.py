import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.asking import PLAIN, changed
from vecd.gateway.app.routes import RETIRED, find_route, methods_at, name_in, normalize, served
from vecd.gateway.app.table import DIALECTS, ROUTES
from vecd.gateway.config import SCOPES
from vecd.gateway.errors import MethodNotAllowed, NotFound
from vecd.gateway.request import Response
from vecd.model.steps import CAPABILITIES

EXACT = sorted({path for path in ROUTES if "*" not in path and path != "/"})


def written(path: str) -> list[str]:
    """A path as people write it who have a base URL of their own idea."""
    last = path.rpartition("/")[2]
    return [path, f"{path}/", f"/{path}", path.replace("/", "//"), f"{path}///", f"{path}{path}", f"{path}/{last}"]


@pytest.mark.parametrize("path", EXACT)
def test_every_path_may_be_written_in_other_ways(path):
    for spelling in written(path):
        if f"{path}/*" in ROUTES and name_in(f"{path}/*", spelling):
            continue  # a model may have that name
        assert methods_at(ROUTES, spelling) is ROUTES[path], spelling


@pytest.mark.parametrize("path", [path for path in EXACT if path.startswith("/v1/")])
def test_v1_may_be_given_twice_or_thrice(path):
    for spelling in (f"/v1{path}", f"/v1/v1{path}", f"//v1/{path}/"):
        assert methods_at(ROUTES, spelling) is ROUTES[path], spelling


@pytest.mark.parametrize("pattern", RETIRED)
def test_a_path_that_was_a_route_says_what_serves_its_users(pattern):
    with pytest.raises(NotFound) as caught:
        find_route(ROUTES, "POST", pattern.replace("*", "a/b"))
    assert caught.value.message == f"There is nothing at this path; {RETIRED[pattern]}"


@pytest.mark.parametrize(
    ("path", "pattern", "name"),
    [
        ("/v1/models/a/a", "/v1/models/*", "a/a"),
        ("/v1/v1/models/a/a/", "/v1/models/*", "a/a"),
        ("/v1/engines/org/m/embeddings/", "/v1/engines/*/embeddings", "org/m"),
        ("/v1/engines/m/embeddings/embeddings", "/v1/engines/*/embeddings", "m"),
        ("//openai/deployments/m//embeddings", "/openai/deployments/*/embeddings", "m"),
        ("/models/org/m/pipeline/feature-extraction", "/models/*/pipeline/feature-extraction", "org/m"),
        ("/pipeline/feature-extraction/org/m/", "/pipeline/feature-extraction/*", "org/m"),
    ],
)
def test_a_name_in_a_path(path, pattern, name):
    assert methods_at(ROUTES, path) is ROUTES[pattern]
    assert name_in(pattern, path) == name


@pytest.mark.parametrize(
    ("path", "body", "capabilities", "dialect"),
    [
        ("/embed", {"texts": ["a"]}, CAPABILITIES, "cohere"),
        ("/embed", {"texts": ["a"], "inputs": "b"}, CAPABILITIES, "tei"),
        ("/embed", {"texts": None}, CAPABILITIES, "tei"),
        ("/rerank", {"query": "q", "texts": ["a"]}, CAPABILITIES, "tei"),
        ("/rerank", {"query": "q", "texts": ["a"], "documents": ["a"]}, CAPABILITIES, "rerank"),
        ("/", {"query": "q", "documents": ["a"]}, CAPABILITIES, "tei"),
        ("/invocations", {"query": "q", "documents": ["a"]}, CAPABILITIES, "rerank"),
        ("/invocations", {"query": "q", "texts": ["a"]}, CAPABILITIES, "tei"),
        ("/invocations", {"queries": "q", "items": ["a"]}, CAPABILITIES, "rerank"),
        ("/invocations", {"text_1": "q", "text_2": ["a"]}, CAPABILITIES, "rerank"),
        ("/invocations", {"text_pairs": [["a", "b"]]}, CAPABILITIES, "rerank"),
        ("/invocations", {"inputs": "a"}, CAPABILITIES, "tei"),
        ("/invocations", {"input": "a"}, CAPABILITIES, "vllm"),
        # A body without inputs belongs to what the model can do: its error is then about the body, not about the model.
        ("/classify", {"text": "a"}, ("classify",), "vllm"),
        ("/classify", {"text": "a"}, ("dense",), "openai"),
        ("/invocations", {"text": "a"}, ("rerank",), "tei"),
        ("/invocations", {"text": "a"}, ("dense",), "vllm"),
    ],
)
def test_a_body_belongs_to_the_dialect_whose_field_it_has(path, body, capabilities, dialect):
    assert ROUTES[path]["POST"].claim_of(body, changed(PLAIN, capabilities=tuple(capabilities))).dialect.name == dialect


@pytest.mark.parametrize(
    "path",
    ["/models/m/v1/embeddings", "/pipeline/feature-extraction/m/embed",
     "/v1", "/v1/v1", "/v2/embeddings", "/v1/embeddings/x", "/v1/modelsx", "*", "/engines/embeddings",
     "/engines//embeddings", "/openai/deployments/m", "/x/v1/embeddings", "/v1/embeddings" * 9, "/a" * 4000,
     "/V1/embeddings"],
)  # fmt: skip
def test_unknown_paths_name_the_right_one(path):
    with pytest.raises(NotFound, match="/v1/embeddings"):
        find_route(ROUTES, "POST", path)


RANKING = ("/v1/rerank", "/v2/rerank", "/api/rerank", "/v1/score")
OF_OTHER_SERVERS = (
    "chat/completions", "completions", "responses", "chat", "generate", "generate_stream", "messages", "score",
    "rerank", "classify", "predict", "v1/chat/completions", "v1/completions", "v2/rerank",
    "pipeline/sentence-similarity",
)  # fmt: skip


@pytest.mark.parametrize(
    "prefix",
    ["/v1", "/v1/v1", "/v2", "/api", "/openai/deployments/m", "/v1/engines/m", "/x", "/embed",
     *(pattern.replace("*", name) for pattern in ROUTES for name in ("m", "org/m") if "*" in pattern)],
)  # fmt: skip
def test_clients_of_another_kind_of_server_are_told_what_this_one_has(prefix):
    for operation in OF_OTHER_SERVERS:
        for path in (f"{prefix}/{operation}", f"/{prefix}/{operation}/"):
            if normalize(path) in ROUTES or methods_at(ROUTES, path) in [ROUTES[ranking] for ranking in RANKING]:
                continue
            with pytest.raises(NotFound, match=r"this server serves embeddings: POST /v1/embeddings \(OpenAI\)"):
                find_route(ROUTES, "POST", path)


def test_so_are_those_that_post_where_nothing_may_be_posted():
    with pytest.raises(MethodNotAllowed, match=r"only GET, HEAD; this server serves embeddings: POST /v1/embeddings"):
        find_route(ROUTES, "POST", "/v1/models/org/m")


def test_another_method_is_told_which_are_allowed():
    assert find_route(ROUTES, "HEAD", "/v1/models/") is ROUTES["/v1/models"]["GET"]
    with pytest.raises(MethodNotAllowed, match=r"only POST$") as caught:
        find_route(ROUTES, "GET", "/v1/embeddings")
    assert caught.value.headers == {"allow": "OPTIONS, POST"}


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        ("/v1/embeddings", "OPTIONS, POST"),
        ("/v1/models/a", "GET, HEAD, OPTIONS"),
        ("*", "GET, HEAD, OPTIONS, POST"),
    ],
)
def test_options_says_so_too_and_asks_for_no_key(path, allow):
    route = find_route(ROUTES, "OPTIONS", path)
    assert route.scope is None
    anything: Any = None

    async def handle() -> Response:
        assert route.handler is not None
        return await route.handler(anything, anything, anything, anything)

    answer = asyncio.run(handle())
    assert (answer.status, answer.headers) == (204, {"allow": allow})
    with pytest.raises(NotFound):
        find_route(ROUTES, "OPTIONS", "/nothing")


PARTS = st.sampled_from(
    ["v1", "v2", "embeddings", "embed", "api", "admin", "reload", "models", "engines", "m", "", "*"]
)


@given(st.lists(PARTS, max_size=20).map(lambda parts: "/" + "/".join(parts)))
def test_no_spelling_leads_elsewhere_than_its_first_part_says(path):
    """Who forbids /admin at a proxy has forbidden it."""
    methods = methods_at(ROUTES, path)
    if methods is not None:
        [pattern] = [pattern for pattern in ROUTES if ROUTES[pattern] is methods]
        assert pattern.split("/")[1] == normalize(path).split("/")[1]


NO_KEY = {"GET /", "GET /health", "GET /ping", "POST /ping", "GET /live", "GET /docs"}
NO_KEY |= {"GET /v2/health/live", "GET /v2/health/ready"}
ANY_KEY, OPERATOR = {"GET /info", "GET /openapi.json"}, {"GET /metrics", "GET /stats"}
ADMIN = {"POST /admin/reload", "GET /admin/keys", "GET /admin/models"}
ADMIN |= {f"POST /admin/models/*/{action}" for action in ("load", "unload")}
"""What is not for whoever may embed: everything else is."""
EMBEDDINGS = {at for dialect in DIALECTS for at in dialect.operations}


def places(table) -> set[str]:
    return {f"{method} {path}" for path, methods in table.items() for method in methods}


def of_scope(scope: str | None) -> set[str]:
    return {at for at in places(ROUTES) if find_route(ROUTES, *at.split(" ", 1)).scope == scope}


def test_which_key_is_asked_for():
    assert of_scope(None) == NO_KEY
    assert of_scope("any") == ANY_KEY
    assert of_scope("metrics") == OPERATOR
    assert of_scope("admin") == ADMIN
    assert of_scope("embed") == EMBEDDINGS
    assert {route.scope for methods in ROUTES.values() for route in methods.values()} == {None, "any", *SCOPES}


@pytest.mark.parametrize(
    ("has_admin_listener", "has_keys", "found"),
    [
        (False, False, EMBEDDINGS | NO_KEY | ANY_KEY | OPERATOR),
        (False, True, EMBEDDINGS | NO_KEY | ANY_KEY | OPERATOR | ADMIN),
        (True, False, EMBEDDINGS | NO_KEY | ANY_KEY),
        (True, True, EMBEDDINGS | NO_KEY | ANY_KEY),
    ],
)
def test_what_is_served_to_the_public(has_admin_listener, has_keys, found):
    assert places(served(ROUTES, has_admin_listener=has_admin_listener, has_keys=has_keys)) == found


def test_what_is_served_on_the_admin_listener():
    assert (
        places(served(ROUTES, is_admin=True, has_admin_listener=True, has_keys=True))
        == NO_KEY | ANY_KEY | OPERATOR | ADMIN
    )


def test_what_is_not_served_here_does_not_exist():
    table = served(ROUTES, has_admin_listener=True, has_keys=True)
    for path in ("/metrics", "/admin/reload", "/admin/keys", "/admin/admin/reload", "//metrics/", "/metrics/metrics"):
        for method in ("GET", "POST", "OPTIONS"):
            with pytest.raises(NotFound):
                find_route(table, method, path)
