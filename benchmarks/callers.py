"""Clients of one model, each of which asks again once it has its response, which is checked.

Owns the connections and what came of each request. Called by `benchmarks.models` and `benchmarks.trials`.

They are threads of this process: a request costs the client a fraction of a millisecond, which is little beside what
the server computes for it.
"""

import itertools
import math
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

from benchmarks.alone import percentile
from benchmarks.requests import SUCCESS, Exchange
from benchmarks.servers import Server, ServerFailure
from benchmarks.several import Question
from vecd.base.target import parse_target

_REFUSED = (b"HTTP/1.1 429", b"HTTP/1.1 503")
_PAUSE_AFTER_FAILURE_S = 0.1


@dataclass(frozen=True, slots=True)
class Called:
    """What came of one request."""

    ended_at_s: float
    """By `time.perf_counter`."""
    latency_s: float
    problem: str = ""
    """"" for the right response, "refused: …" for 429 and 503."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Of the requests that have ended within a span of time."""

    num_right: int
    num_refused: int
    failures: Sequence[str]
    per_s: float
    """Right responses."""
    p50_ms: float
    p99_ms: float
    max_ms: float


class Callers:
    """Usable as a context manager: from its beginning until its end `num_clients` send `questions`, in turn. At the end
    each waits for its last response."""

    def __init__(
        self, server: Server, questions: Sequence[Question], num_clients: int, pause_s: float = 0.0, seed: int = 0
    ) -> None:
        """`pause_s`: between a client's requests, on average."""
        self.calls: list[Called] = []
        self._target, self._num_clients, self._pause_s = parse_target(server.url), num_clients, pause_s
        self._questions = itertools.cycle(questions)
        self._random = random.Random(seed)
        self._has_ended = threading.Event()
        self._threads = ThreadPoolExecutor(num_clients)

    def __enter__(self) -> "Callers":
        self._sending = [self._threads.submit(self._send) for _ in range(self._num_clients)]
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._threads.shutdown()
        for each in self._sending:
            each.result()

    def _send(self) -> None:
        exchange: Exchange | None = None
        while not self._has_ended.is_set():
            question, began_at_s = next(self._questions), time.perf_counter()
            try:
                exchange = exchange or Exchange(self._target)
                problem = _judge(question, exchange.response(question.request))
            except (ServerFailure, OSError) as error:
                problem = f"no response: {error}"
                if exchange is not None:
                    exchange.close()
                    exchange = None
            ended_at_s = time.perf_counter()
            self.calls.append(Called(ended_at_s, ended_at_s - began_at_s, problem))
            pause_s = self._pause_s or bool(problem) * _PAUSE_AFTER_FAILURE_S
            if pause_s:
                self._has_ended.wait(self._random.uniform(0, 2 * pause_s))
        if exchange is not None:
            exchange.close()

    def between(self, began_at_s: float, ended_at_s: float) -> Summary:
        """Latencies are infinite when nothing has been answered right in that span."""
        calls = [call for call in self.calls if began_at_s <= call.ended_at_s < ended_at_s]
        milliseconds = [1000 * call.latency_s for call in calls if not call.problem]
        problems = [call.problem for call in calls if call.problem]
        failures = [problem for problem in problems if not problem.startswith("refused")]
        return Summary(
            num_right=len(milliseconds),
            num_refused=len(problems) - len(failures),
            failures=failures,
            per_s=len(milliseconds) / (ended_at_s - began_at_s),
            p50_ms=median(milliseconds or [math.inf]),
            p99_ms=percentile(milliseconds or [math.inf], 99),
            max_ms=max(milliseconds, default=math.inf),
        )


def _judge(question: Question, response: bytes) -> str:
    if response.startswith(_REFUSED):
        return f"refused: {response[:300]!r}"
    return question.problem(response) if response.startswith(SUCCESS) else f"{response[:300]!r}"
