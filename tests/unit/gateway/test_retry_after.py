"""When clients that were refused are told to come back: `vecd.gateway.errors`."""

import math
from collections import Counter

import pytest

from vecd.gateway.errors import RateLimited, TooManyRequests, Unavailable


@pytest.mark.parametrize("kind", [TooManyRequests, RateLimited])
@pytest.mark.parametrize("estimate_s", [0.01, 1.2, 29.5, 60, 1000])
def test_no_client_is_told_less_than_the_estimate_or_more_than_a_minute_and_both_headers_say_the_same(kind, estimate_s):
    for _ in range(100):
        headers = kind("m", retry_after_s=estimate_s).headers
        seconds, milliseconds = int(headers["retry-after"]), int(headers["retry-after-ms"])
        assert min(58_000, estimate_s * 1000) <= milliseconds <= 60_000
        assert min(58, estimate_s) <= seconds <= 60
        assert seconds == max(1, math.ceil(milliseconds / 1000))


@pytest.mark.parametrize("estimate_s", [0.3, 5.1, 58, 1000])
def test_clients_that_were_refused_together_do_not_come_back_together(estimate_s):
    headers = [TooManyRequests("m", retry_after_s=estimate_s).headers for _ in range(300)]
    in_seconds = Counter(header["retry-after"] for header in headers)
    assert len(in_seconds) >= 2
    assert max(in_seconds.values()) < 250
    assert max(Counter(header["retry-after-ms"] for header in headers).values()) < 10


def test_clients_that_wait_long_come_back_over_half_of_that_time(monkeypatch):
    monkeypatch.setattr("vecd.gateway.errors.random.uniform", lambda least, most: most)
    assert TooManyRequests("m", retry_after_s=20).headers["retry-after"] == "30"


def test_a_part_of_a_millisecond_is_rounded_up(monkeypatch):
    monkeypatch.setattr("vecd.gateway.errors.random.uniform", lambda least, most: least)
    assert TooManyRequests("m", retry_after_s=1.0001).headers == {"retry-after": "2", "retry-after-ms": "1001"}


@pytest.mark.parametrize(("seconds", "header"), [(0, "1"), (1, "1"), (1.2, "2"), (5, "5"), (100, "60")])
def test_a_server_that_is_unavailable_says_whole_seconds_rounded_up(seconds, header):
    assert Unavailable("m", retry_after_s=seconds).headers == {"retry-after": header}
