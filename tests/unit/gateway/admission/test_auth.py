from hashlib import sha256

import pytest

from vecd.gateway.admission.auth import Auth, check_scope
from vecd.gateway.types.config import SCOPES, ApiKey
from vecd.gateway.types.errors import InvalidApiKey, PermissionDenied


def key(name: str, secret: str, **fields) -> ApiKey:
    return ApiKey(name, sha256(secret.encode()).hexdigest(), **fields)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer k"},
        {"authorization": "bearer  k "},
        {"authorization": "BEARER\tk"},
        {"api-key": "k"},
        {"x-api-key": "k"},
        {"authorization": "", "api-key": "k"},
        {"authorization": "Basic dXNlcjpr", "x-api-key": "k"},
    ],
)
def test_the_key_is_accepted(headers):
    known = key("name", "k")
    assert Auth([known]).check(headers) is known


def test_each_of_many_keys_is_told_from_the_others():
    keys = [key(f"name-{n}", f"secret-{n}") for n in range(100)]
    auth = Auth(keys)
    assert [auth.check({"api-key": f"secret-{n}"}) for n in range(100)] == keys
    with pytest.raises(InvalidApiKey):
        auth.check({"api-key": "secret-100"})


def test_a_key_with_letters_beyond_ascii_is_taken_as_utf_8():
    for secret in ("schlüssel", "voilà", "à la clé"):
        known = key("name", secret)
        sent = secret.encode().decode("latin-1")
        for headers in ({"api-key": sent}, {"authorization": f"Bearer {sent}"}):
            assert Auth([known]).check(headers) is known


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, "didn't provide"),
        ({"authorization": ""}, "didn't provide"),
        ({"authorization": "Basic k"}, "didn't provide"),
        ({"authorization": "Bearer"}, "didn't provide"),
        ({"authorization": "Bearer kk"}, "Incorrect API key"),
        ({"authorization": "Bearer undefined"}, "Incorrect API key provided"),
        ({"authorization": "Bearer null"}, "Incorrect API key provided"),
        ({"authorization": "Bearer None"}, "Incorrect API key provided"),
        ({"authorization": "", "api-key": ""}, "Incorrect API key provided"),
        ({}, "Incorrect API key provided"),
        ({"authorization": "Bearer \xe9"}, "Incorrect API key"),
        ({"x-api-key": "K"}, "Incorrect API key"),
        ({"x-api-key": sha256(b"k").hexdigest()}, "Incorrect API key"),
    ],
)
def test_others_are_refused(headers, says):
    with pytest.raises(InvalidApiKey, match=says) as caught:
        Auth([key("name", "k")]).check(headers)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer undefined", "Bearer null", "Bearer None", "Basic x", "\xe9"])
@pytest.mark.parametrize("name", ["authorization", "api-key", "x-api-key"])
def test_without_a_key_any_authorization_is_ignored(name, value):
    assert Auth([]).check({name: value}) is None


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_that_a_key_has_not_is_named(scope):
    others = tuple(other for other in SCOPES if other != scope)
    check_scope(key("name", "k", scopes=(scope,)), scope)
    with pytest.raises(PermissionDenied, match=f"'{scope}'") as caught:
        check_scope(key("name", "k", scopes=others), scope)
    assert (caught.value.status, caught.value.type, caught.value.code) == (
        403,
        "invalid_request_error",
        "insufficient_scope",
    )


def test_which_scopes_some_key_has():
    auth = Auth([key("a", "a", scopes=("embed",)), key("b", "b", scopes=("metrics",))])
    assert [auth.has_scope(scope) for scope in SCOPES] == [True, True, False]
