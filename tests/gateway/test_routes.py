import pytest

from gateway.app import ROUTES, create_embeddings, list_models, retrieve_model
from gateway.errors import MethodNotAllowed, NotFound
from gateway.routes import find_route


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


def test_only_the_probes_need_no_key():
    assert {path for path, methods in ROUTES.items() for r in methods.values() if not r.needs_key} == {
        "/health",
        "/live",
    }
