import pytest

from gateway.app import ROUTES, create_embeddings, list_models, retrieve_model
from gateway.config import SCOPES
from gateway.errors import MethodNotAllowed, NotFound
from gateway.routes import admin_table, find_route, public_table


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/v1/embeddings/", "//v1//embeddings", "/embeddings", "//embeddings", "/v1/v1/embeddings"],
)
def test_the_ways_people_write_it(path):
    assert find_route(ROUTES, "POST", path).handler is create_embeddings


@pytest.mark.parametrize(
    ("path", "handler"),
    [("/v1/models", list_models), ("/v1/models/", list_models), ("/v1/models/a/b", retrieve_model)],
)
def test_models(path, handler):
    assert find_route(ROUTES, "GET", path).handler is handler
    assert find_route(ROUTES, "HEAD", path).handler is handler


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/embeddings", "/v1/embeddings/x", "/v1/modelsx", ""])
def test_unknown_paths_name_the_right_one(path):
    with pytest.raises(NotFound, match="/v1/embeddings"):
        find_route(ROUTES, "POST", path)


def test_another_method_is_told_which_are_allowed():
    with pytest.raises(MethodNotAllowed, match="only POST") as caught:
        find_route(ROUTES, "GET", "/v1/embeddings")
    assert caught.value.headers() == {"allow": "POST"}


def scopes(table) -> dict[str, set[str | None]]:
    return {path: {route.scope for route in methods.values()} for path, methods in table.items()}


def test_only_the_probes_need_no_key():
    assert {path for path, found in scopes(ROUTES).items() if None in found} == {"/health", "/live"}


def test_every_scope_is_asked_for_somewhere_and_no_other_one():
    assert set.union(*scopes(ROUTES).values()) == {None, *SCOPES}


EMBEDDINGS = {
    "/v1/embeddings", "/embeddings", "/v1/models", "/models", "/v1/models/*", "/models/*",
}  # fmt: skip
PROBES, OPERATOR, ADMIN = {"/health", "/live"}, {"/info", "/metrics"}, {"/admin/reload", "/admin/keys"}


@pytest.mark.parametrize(
    ("has_admin_listener", "has_keys", "paths"),
    [
        (False, False, EMBEDDINGS | PROBES | OPERATOR),
        (False, True, EMBEDDINGS | PROBES | OPERATOR | ADMIN),
        (True, False, EMBEDDINGS | PROBES),
        (True, True, EMBEDDINGS | PROBES),
    ],
)
def test_what_is_served_to_the_public(has_admin_listener, has_keys, paths):
    assert set(public_table(ROUTES, has_admin_listener=has_admin_listener, has_keys=has_keys)) == paths


def test_what_is_served_on_the_admin_listener():
    assert set(admin_table(ROUTES)) == PROBES | OPERATOR | ADMIN


def test_what_is_not_served_here_does_not_exist():
    table = public_table(ROUTES, has_admin_listener=True, has_keys=True)
    for path in OPERATOR | ADMIN:
        with pytest.raises(NotFound):
            find_route(table, "GET", path)
