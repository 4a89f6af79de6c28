from hashlib import sha256

import pytest

from vecd.gateway.config import SCOPES, ApiKey
from vecd.gateway.errors import InvalidApiKey, PermissionDenied, RateLimited
from vecd.gateway.request import Priority
from vecd.gateway.scheduling.keys import ANY_SCOPE, BURST_S, Principals


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def key(name: str, secret: str = "", **fields) -> ApiKey:
    return ApiKey(name, sha256((secret or f"secret of {name}").encode()).hexdigest(), **fields)


def principals_of(*keys: ApiKey, num_gateways: int = 1) -> tuple[Principals, Clock]:
    clock = Clock()
    return Principals(keys, num_gateways, clock), clock


def identify(principals: Principals, name: str, scope="embed", **where):
    return principals.identify({"api-key": f"secret of {name}"}, "192.0.2.1", scope, **where)


def rejection(principal, num_tokens=1) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        principal.reserve(num_tokens)
    error = caught.value
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    return error


def test_the_tenant_is_the_keys_name_or_else_the_address():
    principals, _ = principals_of(key("a"), key("b"))
    assert identify(principals, "a").tenant == "a"
    assert identify(principals, "b").tenant == "b"
    open_to_all, _ = principals_of()
    assert open_to_all.identify({}, "192.0.2.1", "embed").tenant == "192.0.2.1"


def test_the_admin_listener_is_open_until_a_key_has_the_scope():
    principals, _ = principals_of(key("a", scopes=("embed", "metrics")))
    assert principals.identify({}, "", "admin", is_admin=True).tenant == ""
    principals.set_keys([key("a", scopes=("embed", "metrics")), key("root", scopes=("admin",))])
    with pytest.raises(InvalidApiKey):
        principals.identify({}, "", "admin", is_admin=True)
    with pytest.raises(PermissionDenied):
        identify(principals, "a", "admin", is_admin=True)
    assert identify(principals, "root", "admin", is_admin=True).is_admin
    assert identify(principals, "a", "metrics", is_admin=True).tenant == "a"


def test_tokens_per_second_allow_a_burst_and_then_what_they_say():
    principals, clock = principals_of(key("a", tokens_per_s=100))
    principal = identify(principals, "a")
    for _ in range(int(BURST_S)):
        with principal.reserve(100):
            pass
    assert "100 tokens a second" in rejection(principal).message
    served = 0
    for _ in range(1000):
        clock.now += 0.01
        try:
            with principal.reserve(20):
                served += 20
        except RateLimited:
            pass
    assert abs(served - 1000) <= 20


def test_the_next_request_pays_for_what_this_one_turned_out_to_have():
    principals, clock = principals_of(key("a", tokens_per_s=100))
    principal = identify(principals, "a")
    with principal.reserve(10) as reservation:
        reservation.settle(1500)
    error = rejection(principal)
    assert "for the next 10 s" in error.message
    assert 10 <= int(error.headers["retry-after"]) <= 15
    clock.now += 9.9
    rejection(principal)
    clock.now += 0.2
    with principal.reserve(10):
        pass


def test_requests_at_a_time():
    principals, _ = principals_of(key("a", max_requests=2), key("b", max_requests=1))
    only = identify(principals, "b")
    with only.reserve(1):
        message = "Too many requests: this key already has 1 request in progress; its limit is 1"
        assert rejection(only).message == message
    principal = identify(principals, "a")
    first, second = principal.reserve(1), principal.reserve(1)
    message = "Too many requests: this key already has 2 requests in progress; its limit is 2"
    assert rejection(principal).message == message
    with pytest.raises(RuntimeError), first:
        raise RuntimeError
    with second, principal.reserve(1):
        assert principal.describe()["use"]["running"] == 2
    assert principal.describe()["use"]["running"] == 0
    assert principal.describe()["use"]["refused"] == 1


def test_each_gateway_has_its_part():
    principals, _ = principals_of(key("a", tokens_per_s=3, max_requests=3), num_gateways=2)
    principal = identify(principals, "a")
    running = [principal.reserve(0) for _ in range(2)]
    assert "its limit is 2" in rejection(principal).message
    for reservation in running:
        with reservation:
            pass
    with principal.reserve(9):
        pass
    assert "for the next 1 s" in rejection(principal).message, "1.5 tokens a second, of which 7.5 were there"


def test_without_limits_nothing_is_refused():
    principals, _ = principals_of(key("a"))
    for _ in range(10_000):
        identify(principals, "a").reserve(10**9)
    open_to_all, _ = principals_of()
    for _ in range(10_000):
        open_to_all.identify({}, "", "embed").reserve(10**9)


def test_a_key_that_is_gone_fails_and_one_that_stays_keeps_what_it_has_used():
    principals, clock = principals_of(key("a", tokens_per_s=100), key("b"))
    with identify(principals, "a").reserve(600), identify(principals, "b").reserve(1):
        principals.set_keys([key("a", tokens_per_s=10, max_priority="bulk")])
        with pytest.raises(InvalidApiKey):
            identify(principals, "b")
        assert "10 tokens a second" in rejection(identify(principals, "a")).message
    assert identify(principals, "a").max_priority is Priority.BULK
    assert principals.with_keys[0].num_running == 0
    clock.now += 10.1
    with identify(principals, "a").reserve(1):
        pass


def test_a_limit_that_is_new_does_not_count_what_was_sent_before_it():
    principals, _ = principals_of(key("a"))
    with identify(principals, "a").reserve(10**9):
        pass
    principals.set_keys([key("a", tokens_per_s=100)])
    with identify(principals, "a").reserve(1):
        pass


def test_all_keys_may_be_taken_away():
    principals, _ = principals_of(key("a"))
    principals.set_keys([])
    assert identify(principals, "a").tenant == "192.0.2.1"
    assert not principals.have_keys


def test_a_request_that_fails_costs_what_workers_had_of_it():
    principals, _ = principals_of(key("a", tokens_per_s=100))
    principal = identify(principals, "a")
    for num_sent in (None, 0, 40):
        with pytest.raises(RuntimeError), principal.reserve(600_000) as reservation:  # noqa: PT012
            if num_sent is not None:
                reservation.settle(500_000)
                reservation.note_sent(num_sent)
            raise RuntimeError
    assert principal.describe()["use"] == {"requests": 3, "running": 0, "tokens": 40, "refused": 0}
    with principal.reserve(10) as reservation:
        reservation.note_sent(0)
    assert principal.describe()["use"]["tokens"] == 50, "an answered one costs what it has"


# --- which key it is, and what it opens --------------------------------------------------------------------------


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
    assert Principals([key("name", "k")]).identify(headers, "", "embed").tenant == "name"


def test_a_key_with_letters_beyond_ascii_is_taken_as_utf_8():
    for secret in ("schlüssel", "voilà", "à la clé"):
        principals = Principals([key("name", secret)])
        sent = secret.encode().decode("latin-1")
        for headers in ({"api-key": sent}, {"authorization": f"Bearer {sent}"}):
            assert principals.identify(headers, "", "embed").tenant == "name"


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, "didn't provide"),
        ({"authorization": ""}, "didn't provide"),
        ({"authorization": "Basic k"}, "didn't provide"),
        ({"authorization": "Bearer"}, "didn't provide"),
        ({"authorization": "Bearer kk"}, "Incorrect API key"),
        ({"authorization": "Bearer undefined"}, "Incorrect API key provided"),
        ({"authorization": "", "api-key": ""}, "Incorrect API key provided"),
        ({}, "Incorrect API key provided"),
        ({"authorization": "Bearer \xe9"}, "Incorrect API key"),
        ({"x-api-key": "K"}, "Incorrect API key"),
        ({"x-api-key": sha256(b"k").hexdigest()}, "Incorrect API key"),
    ],
)
def test_others_are_refused(headers, says):
    with pytest.raises(InvalidApiKey, match=says) as caught:
        Principals([key("name", "k")]).identify(headers, "", "embed")
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer undefined", "Bearer null", "Bearer None", "Basic x", "\xe9"])
@pytest.mark.parametrize("name", ["authorization", "api-key", "x-api-key"])
def test_without_a_key_any_authorization_is_ignored(name, value):
    assert Principals([]).identify({name: value}, "192.0.2.1", "embed").tenant == "192.0.2.1"


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_that_a_key_has_not_is_named(scope):
    others = tuple(other for other in SCOPES if other != scope)
    principals = Principals([key("a", scopes=(scope,)), key("b", scopes=others)])
    assert identify(principals, "a", scope).tenant == "a"
    assert identify(principals, "b", ANY_SCOPE).tenant == "b"
    with pytest.raises(PermissionDenied, match=f"'{scope}'") as caught:
        identify(principals, "b", scope)
    error = caught.value
    assert (error.status, error.type, error.code) == (403, "invalid_request_error", "insufficient_scope")
