"""What a client sends along, and what it is pickled as."""

import pickle
from typing import Any

import pytest

import vecd


def request_of(client: vecd.Client, path: str = "/x") -> str:
    return client.render(path, b"{}", None, None).decode()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VECD_URL", "VECD_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "path", "host"),
    [
        ("http://h:1", "/x", "h:1"),
        ("http://h:1/v1/", "/x", "h:1"),
        ("http://h:1/m/name", "/m/name/x", "h:1"),
        ("http://[::1]:9/", "/x", "[::1]:9"),
        ("https://h", "/x", "h:443"),
        ("unix:/run/sock", "/x", "localhost"),
    ],
)
def test_an_address_may_have_a_path(url: str, path: str, host: str) -> None:
    lines = request_of(vecd.Client(url)).split("\r\n")
    assert (lines[0], lines[1]) == (f"POST {path} HTTP/1.1", f"Host: {host}")


def test_the_environment_has_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vecd.Client().url == "http://127.0.0.1:8000"
    assert "Authorization" not in request_of(vecd.Client())
    monkeypatch.setenv("VECD_URL", "unix:/run/sock")
    monkeypatch.setenv("VECD_API_KEY", "k1")
    assert vecd.Client().url == "unix:/run/sock"
    assert "Authorization: Bearer k1\r\n" in request_of(vecd.Client())
    assert "Authorization: Bearer k2\r\n" in request_of(vecd.Client("http://h:1", api_key="k2"))


def test_the_model_goes_along() -> None:
    assert "x-vecd-model: m\r\n" in request_of(vecd.Client(model="m"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"url": "ftp://h"}, "ftp://h"),
        ({"url": "unix:"}, "names no socket"),
        ({"timeout": 0}, "timeout: must be above 0"),
        ({"retry_for": -1}, "retry_for"),
        ({"connections": 0}, "connections"),
        ({"api_key": "a\nb"}, "API key"),
        ({"model": "a\r\nb"}, "x-vecd-model"),
        ({"ca": "/nothing.pem", "url": "https://h"}, "nothing.pem"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        vecd.Client(**arguments)


@pytest.mark.parametrize("kind", [vecd.Client, vecd.AsyncClient])
@pytest.mark.parametrize("url", ["http://user:secret@h", "https://secret@h/v1", "http://user:secret@h\u2100"])
def test_an_address_with_a_password_is_refused_and_not_quoted(kind: Any, url: str) -> None:
    with pytest.raises(ValueError, match="api_key=") as raised:
        kind(url)
    assert "secret" not in str(raised.value)
    assert kind("http://h:1/m/a@b").url == "http://h:1/m/a@b"  # no user


@pytest.mark.parametrize("kind", [vecd.Client, vecd.AsyncClient])
def test_a_client_is_pickled_as_its_arguments(kind: Any) -> None:
    client = kind("http://h:1/m/x", api_key="k", model="m", identity="first", timeout=3, retry_for=4, connections=5)
    copy = pickle.loads(pickle.dumps(client))
    assert type(copy) is kind
    assert copy.render("/x", b"", None, None) == client.render("/x", b"", None, None)
    assert (copy.timeout, copy.retry_for, copy.connections) == (3, 4, 5)
    assert pickle.loads(pickle.dumps(copy)).url == client.url


def test_an_error_is_pickled_whole() -> None:
    error = vecd.BadRequest("m", status=400, code="c", param="p", request_id="r")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (vecd.BadRequest, "m", vars(error))
