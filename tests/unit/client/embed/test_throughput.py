"""The work under way is about a second of the server's, whatever its speed and the length of the texts."""

from collections import deque

import pytest

from vecd.client.embed.rows import MAX_REQUESTS, WORK_S, ThroughputEstimate

_DELAY_S = 0.003


class FifoServer:
    """Serves one request after the other, `chars_per_s` of them, and a client that keeps to an estimate."""

    def __init__(self, chars_per_s: float, text_chars: int, max_texts: int = 256) -> None:
        self.estimate = ThroughputEstimate(None)
        self.chars_per_s = chars_per_s
        self.text_chars = text_chars
        self.now_s = self.idle_s = 0.0
        self._max_texts = max_texts
        self._requests: deque[tuple[float, float, float, float]] = deque()
        """Work at its beginning, cost, when it was sent, when it is served."""

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def under_way_s(self) -> float:
        """What a kill would lose."""
        return max((request[3] for request in self._requests), default=self.now_s) - self.now_s

    def step(self) -> None:
        """Send while there is room, then serve one request."""
        while self.estimate.has_room(len(self._requests), [cost for _, cost, _, _ in self._requests]):
            text_cost = self.estimate.cost("x" * self.text_chars)
            num_texts = min(max(1, -(-self.estimate.max_request_cost // text_cost)), self._max_texts)
            free_at = max((request[3] for request in self._requests), default=self.now_s)
            if free_at <= self.now_s:
                self.idle_s += _DELAY_S
            served_at = max(free_at, self.now_s + _DELAY_S) + num_texts * self.text_chars / self.chars_per_s
            cost = num_texts * text_cost
            self._requests.append((self.estimate.begin(cost), cost, self.now_s, served_at))
        work, cost, sent_at, self.now_s = self._requests.popleft()
        self.estimate.end(cost, work, self.now_s - sent_at)


@pytest.mark.parametrize("chars_per_s", [2_000, 50_000, 1_000_000])
@pytest.mark.parametrize("text_chars", [30, 505])
def test_a_second_of_work_is_under_way(chars_per_s: float, text_chars: int) -> None:
    server = FifoServer(chars_per_s, text_chars)
    for _ in range(100):
        server.step()
    began_at, server.idle_s, most_s = server.now_s, 0.0, 0.0
    for _ in range(200):
        server.step()
        most_s = max(most_s, server.under_way_s)
    assert most_s < 1.3 * WORK_S
    assert server.idle_s < 0.02 * (server.now_s - began_at)


def test_a_server_that_gets_slower_soon_has_less() -> None:
    server = FifoServer(200_000, 505)
    for _ in range(100):
        server.step()
    server.chars_per_s = 20_000
    for _ in range(20):
        server.step()
    assert server.under_way_s < 1.5 * WORK_S


def test_a_fast_server_gets_many_requests_but_not_any_number() -> None:
    server = FifoServer(1e9, 30)
    for _ in range(200):
        server.step()
    assert server.num_requests + 1 == MAX_REQUESTS


def test_characters_that_the_server_cuts_off_cost_nothing() -> None:
    estimate = ThroughputEstimate(None)
    assert estimate.cost("x" * 100_000) > 100_000
    estimate.set_max_tokens(256)
    assert estimate.cost("x" * 100_000) == estimate.cost("x" * 2_000) < 2_000


def test_a_given_number_of_requests_is_kept() -> None:
    estimate = ThroughputEstimate(3)
    assert estimate.has_room(2, [1e9, 1e9])
    assert not estimate.has_room(3, [1.0, 1.0, 1.0])
    assert not estimate.has_room(0, [1.0] * 5), "all wait for an earlier one"
