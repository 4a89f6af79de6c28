"""When clients that were refused are told to come back: `vecd.gateway.types.errors`."""

import math
from collections import Counter

import pytest

from vecd.gateway.types.errors import RateLimited, TooManyRequests, Unavailable


@pytest.mark.parametrize("kind", [TooManyRequests, RateLimited])
@pytest.mark.parametrize("estimate_s", [0.01, 1, 1.2, 5.1, 29.5, 58])
def test_no_client_is_told_less_than_the_estimate_and_both_headers_say_the_same(kind, estimate_s):
    for _ in range(100):
        headers = kind("m", retry_after_s=estimate_s).headers
        seconds, milliseconds = int(headers["retry-after"]), int(headers["retry-after-ms"])
        assert estimate_s * 1000 <= milliseconds <= 60_000
        assert estimate_s <= seconds <= 60
        assert seconds == max(1, math.ceil(milliseconds / 1000))


@pytest.mark.parametrize("estimate_s", [0.3, 1, 5.1, 20, 50, 58, 59.9, 1000])
def test_clients_that_were_refused_together_do_not_come_back_together(estimate_s):
    headers = [TooManyRequests("m", retry_after_s=estimate_s).headers for _ in range(300)]
    in_seconds = Counter(header["retry-after"] for header in headers)
    assert len(in_seconds) >= 2
    assert max(in_seconds.values()) < 250
    assert max(Counter(header["retry-after-ms"] for header in headers).values()) < 10


def test_clients_that_wait_long_come_back_over_half_of_that_time(monkeypatch):
    monkeypatch.setattr("vecd.gateway.types.errors.random.uniform", lambda least, most: most)
    assert TooManyRequests("m", retry_after_s=20).headers["retry-after"] == "30"


def test_a_part_of_a_millisecond_is_rounded_up(monkeypatch):
    monkeypatch.setattr("vecd.gateway.types.errors.random.uniform", lambda least, most: least)
    assert TooManyRequests("m", retry_after_s=1.0001).headers == {"retry-after": "2", "retry-after-ms": "1001"}


@pytest.mark.parametrize("estimate_s", [58.1, 60, 1000])
def test_no_client_is_told_more_than_a_minute_and_none_much_less_where_the_estimate_is_more(estimate_s):
    headers = [TooManyRequests("m", retry_after_s=estimate_s).headers for _ in range(100)]
    assert all(58_000 <= int(header["retry-after-ms"]) <= 60_000 for header in headers)


@pytest.mark.parametrize(("seconds", "header"), [(0, "1"), (1, "1"), (1.2, "2"), (5, "5"), (100, "60")])
def test_a_server_that_is_unavailable_says_whole_seconds_rounded_up(seconds, header):
    assert Unavailable("m", retry_after_s=seconds).headers == {"retry-after": header}
