from hashlib import sha256

import pytest

from vecd.gateway.admission.principals import BURST_S, Principals
from vecd.gateway.types.config import ApiKey
from vecd.gateway.types.errors import InvalidApiKey, PermissionDenied, RateLimited
from vecd.gateway.types.request import Priority


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def key(name: str, **fields) -> ApiKey:
    return ApiKey(name, sha256(f"secret of {name}".encode()).hexdigest(), **fields)


def callers_of(*keys: ApiKey, num_gateways: int = 1) -> tuple[Principals, Clock]:
    clock = Clock()
    return Principals(keys, num_gateways, clock), clock


def identify(callers: Principals, name: str, scope="embed", **where):
    return callers.identify({"api-key": f"secret of {name}"}, "192.0.2.1", scope, **where)


def refusal(principal, num_tokens=1) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        principal.spend(num_tokens)
    error = caught.value
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    return error


def test_the_tenant_is_the_keys_name_or_else_the_address():
    callers, _ = callers_of(key("a"), key("b"))
    assert identify(callers, "a").tenant == "a"
    assert identify(callers, "b").tenant == "b"
    open_to_all, _ = callers_of()
    assert open_to_all.identify({}, "192.0.2.1", "embed").tenant == "192.0.2.1"


def test_scopes_are_asked_for():
    callers, _ = callers_of(key("a", scopes=("embed",)))
    identify(callers, "a")
    with pytest.raises(PermissionDenied):
        identify(callers, "a", "metrics")
    with pytest.raises(InvalidApiKey):
        identify(callers, "nobody")
    assert callers.identify({}, "", None).tenant == ""


def test_the_admin_listener_is_open_until_a_key_has_the_scope():
    callers, _ = callers_of(key("a", scopes=("embed", "metrics")))
    assert callers.identify({}, "", "admin", is_admin=True).tenant == ""
    callers.set_keys([key("a", scopes=("embed", "metrics")), key("root", scopes=("admin",))])
    with pytest.raises(InvalidApiKey):
        callers.identify({}, "", "admin", is_admin=True)
    with pytest.raises(PermissionDenied):
        identify(callers, "a", "admin", is_admin=True)
    assert identify(callers, "root", "admin", is_admin=True).is_admin
    assert identify(callers, "a", "metrics", is_admin=True).tenant == "a"


def test_tokens_per_second_allow_a_burst_and_then_what_they_say():
    callers, clock = callers_of(key("a", tokens_per_s=100))
    principal = identify(callers, "a")
    for _ in range(int(BURST_S)):
        with principal.spend(100):
            pass
    assert "100 tokens a second" in refusal(principal).message
    model_info = 0
    for _ in range(1000):
        clock.now += 0.01
        try:
            with principal.spend(20):
                model_info += 20
        except RateLimited:
            pass
    assert abs(model_info - 1000) <= 20


def test_the_next_request_pays_for_what_this_one_turned_out_to_have():
    callers, clock = callers_of(key("a", tokens_per_s=100))
    principal = identify(callers, "a")
    with principal.spend(10) as spending:
        spending.settle(1500)
    error = refusal(principal)
    assert "for the next 10 s" in error.message
    assert error.headers() == {"retry-after": "10"}
    clock.now += 9.9
    refusal(principal)
    clock.now += 0.2
    with principal.spend(10):
        pass


def test_what_was_thought_too_much_is_given_back():
    callers, _ = callers_of(key("a", tokens_per_s=100))
    principal = identify(callers, "a")
    for _ in range(50):
        with principal.spend(10_000) as spending:
            spending.settle(1)
    assert identify(callers, "a").describe()["use"] == {"requests": 50, "running": 0, "tokens": 50, "refused": 0}


def test_requests_at_a_time():
    callers, _ = callers_of(key("a", max_requests=2))
    principal = identify(callers, "a")
    first, second = principal.spend(1), principal.spend(1)
    assert "2 requests with this API key are being served, at most 2" in refusal(principal).message
    with pytest.raises(RuntimeError), first:
        raise RuntimeError
    with second, principal.spend(1):
        assert principal.describe()["use"]["running"] == 2
    assert principal.describe()["use"]["running"] == 0
    assert principal.describe()["use"]["refused"] == 1


def test_each_gateway_has_its_part():
    callers, _ = callers_of(key("a", tokens_per_s=3, max_requests=3), num_gateways=2)
    principal = identify(callers, "a")
    running = [principal.spend(0) for _ in range(2)]
    assert "at most 2" in refusal(principal).message
    for spending in running:
        with spending:
            pass
    with principal.spend(9):
        pass
    assert "for the next 1 s" in refusal(principal).message, "1.5 tokens a second, of which 7.5 were there"


def test_without_limits_nothing_is_refused():
    callers, _ = callers_of(key("a"))
    for _ in range(10_000):
        identify(callers, "a").spend(10**9)
    open_to_all, _ = callers_of()
    for _ in range(10_000):
        open_to_all.identify({}, "", "embed").spend(10**9)


def test_a_key_that_is_gone_fails_and_one_that_stays_keeps_what_it_has_used():
    callers, clock = callers_of(key("a", tokens_per_s=100), key("b"))
    with identify(callers, "a").spend(600), identify(callers, "b").spend(1):
        callers.set_keys([key("a", tokens_per_s=10, max_priority="bulk")])
        with pytest.raises(InvalidApiKey):
            identify(callers, "b")
        assert "10 tokens a second" in refusal(identify(callers, "a")).message
    assert identify(callers, "a").max_priority is Priority.BULK
    assert callers.holders[0].num_running == 0
    clock.now += 10.1
    with identify(callers, "a").spend(1):
        pass


def test_a_limit_that_is_new_does_not_count_what_was_sent_before_it():
    callers, _ = callers_of(key("a"))
    with identify(callers, "a").spend(10**9):
        pass
    callers.set_keys([key("a", tokens_per_s=100)])
    with identify(callers, "a").spend(1):
        pass


def test_all_keys_may_be_taken_away():
    callers, _ = callers_of(key("a"))
    callers.set_keys([])
    assert identify(callers, "a").tenant == "192.0.2.1"
    assert not callers.are_known


def test_a_request_that_fails_costs_what_workers_had_of_it():
    callers, _ = callers_of(key("a", tokens_per_s=100))
    principal = identify(callers, "a")
    for num_sent in (None, 0, 40):
        with pytest.raises(RuntimeError), principal.spend(600_000) as spending:  # noqa: PT012
            if num_sent is not None:
                spending.settle(500_000)
                spending.note_sent(num_sent)
            raise RuntimeError
    assert principal.describe()["use"] == {"requests": 3, "running": 0, "tokens": 40, "refused": 0}
    with principal.spend(10) as spending:
        spending.note_sent(0)
    assert principal.describe()["use"]["tokens"] == 50, "an answered one costs what it has"
