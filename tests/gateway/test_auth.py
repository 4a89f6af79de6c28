import pytest

from gateway.auth import Auth
from gateway.errors import InvalidApiKey


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer k"}, {"authorization": "bearer  k "}, {"api-key": "k"}, {"x-api-key": "k"}],
)
def test_the_key_is_accepted(headers):
    Auth("k").check(headers)


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, "didn't provide"),
        ({"authorization": ""}, "didn't provide"),
        ({"authorization": "Basic k"}, "didn't provide"),
        ({"authorization": "Bearer"}, "didn't provide"),
        ({"authorization": "Bearer kk"}, "Incorrect API key"),
        ({"authorization": "Bearer \xe9"}, "Incorrect API key"),
        ({"x-api-key": "K"}, "Incorrect API key"),
    ],
)
def test_others_are_refused(headers, says):
    with pytest.raises(InvalidApiKey, match=says) as caught:
        Auth("k").check(headers)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_without_a_key_any_authorization_is_ignored():
    Auth(None).check({"authorization": "Bearer undefined"})
