"""Traffic whose every answer is checked: its status, whose it is, and each vector against the reference.

Owns the clients, their connections, when they ask, and the counts of what came of it. A request has an id of its own,
which its answer must carry, and is never sent twice; a connection has one request at a time, so that a byte too many is
an answer too many. Knows no server's processes: what happens to them meanwhile is a trial's.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import httptools
import numpy as np

from tests.support.soak.questions import Answer, Question, Tenant, judge

ANSWER_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 30.0
_RECONNECT_PAUSE_S = 0.02
FAILED_PAUSE_S = 0.1
"""Of a closed loop. Less than a server asks for that refuses, so that it is put to the test, too."""
_MAX_DETAILS = 20
_request_numbers = itertools.count()
_T = TypeVar("_T")


class Closed(Exception):
    """Raised when the server closes a connection before the whole answer has come."""


class Connection(asyncio.Protocol):
    """One request at a time; counts answers that were not asked for."""

    def __init__(self) -> None:
        self.is_open = False
        self.num_unasked = 0
        self._waiting: asyncio.Future[Answer] | None = None
        self._start_answer()

    def _start_answer(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._is_complete = self._keeps_alive = False

    async def exchange(self, request: bytes) -> Answer:
        """Raises Closed, TimeoutError."""
        if not self.is_open:
            raise Closed
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await self._waiting
        finally:
            self._waiting = None

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Closed())

    def data_received(self, data: bytes) -> None:
        if self._waiting is None or self._waiting.done():
            self.num_unasked += 1
            return
        self._parser.feed_data(data)
        if self._is_complete:
            answer = Answer(self._parser.get_status_code(), self._headers, b"".join(self._body))
            self.is_open = self._keeps_alive
            self._waiting.set_result(answer)
            self._start_answer()

    # --- called by the parser ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True


async def connect(url: str) -> Connection:
    """Raises OSError, TimeoutError."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        _, connection = await asyncio.get_running_loop().create_connection(Connection, host, int(port))
    return connection


@dataclass(slots=True)
class Tally:
    """What came of the requests: each is counted once, under one heading."""

    num_right: int = 0
    num_texts: int = 0
    """Of those answered right."""
    refused: Counter[int] = field(default_factory=Counter)
    """By status: 429 and 503, with Retry-After."""
    num_broken: int = 0
    """Whose connection was closed or reset before the answer."""
    num_unconnected: int = 0
    """That found nobody who listens."""
    failures: list[str] = field(default_factory=list)
    """Whatever must never be: another status, a wrong vector, another's answer, none in time, a refusal without
    Retry-After."""
    num_duplicates: int = 0
    """Answers that nobody had asked for."""
    models: list[tuple[float, float, int]] = field(default_factory=list)
    """Of those answered right: when they were sent and answered, by `time.monotonic`, and whose vectors they have."""
    latencies_s: list[float] = field(default_factory=list)
    """Of those answered right."""

    @property
    def num_requests(self) -> int:
        refused = sum(self.refused.values())
        return self.num_right + refused + self.num_broken + self.num_unconnected + len(self.failures)

    def percentile_ms(self, percent: float) -> float:
        return round(float(np.percentile(self.latencies_s, percent)) * 1000, 1) if self.latencies_s else float("nan")

    def figures(self) -> dict[str, Any]:
        """For `form.record`."""
        return {
            "requests": self.num_requests,
            "right": self.num_right,
            "failed_or_wrong": len(self.failures),
            "duplicated": self.num_duplicates,
            "refused": sum(self.refused.values()),
            "broken_connections": self.num_broken,
            "p50_ms": self.percentile_ms(50),
            "p99_ms": self.percentile_ms(99),
            "max_ms": self.percentile_ms(100),
            **({"first_failures": self.failures[:3]} if self.failures else {}),
        }

    def assert_all_right(self) -> None:
        """Every request was answered, once, with its own vectors."""
        others = self.refused, self.num_broken, self.num_unconnected, self.num_duplicates
        assert (self.failures[:_MAX_DETAILS], *others) == ([], Counter(), 0, 0, 0)
        assert self.num_right > 0

    def assert_none_wrong(self) -> None:
        """Whoever was answered was answered right."""
        assert (self.failures[:_MAX_DETAILS], self.num_duplicates) == ([], 0)
        assert self.num_right > 0


class Traffic:
    """Clients of several tenants, each asking again when it is answered, from `async with` on until its end."""

    def __init__(
        self,
        url: str,
        tenants: Sequence[Tenant],
        num_clients: int,
        *,
        max_texts: int = 3,
        headers: dict[str, str] | None = None,
        pause_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`max_texts` in one request; `pause_s` between a client's requests, on average."""
        self.tally = Tally()
        self._url, self._tenants, self._num_clients = url, tenants, num_clients
        self._max_texts, self._headers, self._pause_s = max_texts, headers or {}, pause_s
        self._random = random.Random(seed)
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._started_at = time.monotonic()
        self._clients = [asyncio.create_task(self._client(n)) for n in range(self._num_clients)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop.set()
        async with asyncio.timeout(ANSWER_TIMEOUT_S + CONNECT_TIMEOUT_S):
            await asyncio.gather(*self._clients)
        self.elapsed_s = time.monotonic() - self._started_at

    async def answers(self, num: int) -> None:
        """Wait until so many more requests have been answered right. Raises TimeoutError when none is for a minute."""
        for target in range(self.tally.num_right + 1, self.tally.num_right + num + 1):
            if self.tally.num_right < target:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    while self.tally.num_right < target:
                        await asyncio.sleep(0.01)

    async def _client(self, n: int) -> None:
        tenant = self._tenants[n % len(self._tenants)]
        connection: Connection | None = None
        while not self._stop.is_set():
            if connection is None or not connection.is_open:
                connection = await self._reconnect(connection)
                if connection is None:
                    continue
            has_failed = await self.ask(connection, self.question(tenant))
            if self._pause_s or has_failed:
                await asyncio.sleep(self._random.uniform(0, 2 * max(self._pause_s, has_failed * FAILED_PAUSE_S)))
        if connection is not None:
            self.leave(connection)

    def leave(self, connection: Connection) -> None:
        self.tally.num_duplicates += connection.num_unasked
        connection.close()

    async def _reconnect(self, connection: Connection | None) -> Connection | None:
        if connection is not None:
            self.leave(connection)
        try:
            return await connect(self._url)
        except (OSError, TimeoutError):
            self.tally.num_unconnected += 1
            await asyncio.sleep(_RECONNECT_PAUSE_S)
            return None

    def question(self, tenant: Tenant) -> Question:
        num_texts = self._random.randint(1, self._max_texts)
        indices = tuple(self._random.randrange(len(tenant.texts)) for _ in range(num_texts))
        encoding = self._random.choice(("base64", "base64", "float", "bytes"))
        return Question(tenant, indices, encoding, f"trial-{next(_request_numbers)}")

    async def ask(self, connection: Connection, question: Question, since: float | None = None) -> bool:
        """One request, and its entry in the tally; says whether it was answered with an error. `since`: when it
        arrived, if it is sent later than that."""
        sent_at = time.monotonic()
        try:
            answer = await connection.exchange(question.render(self._headers))
        except Closed:
            self.tally.num_broken += 1
        except TimeoutError:
            connection.close()
            self.tally.failures.append(f"{question.request_id}: no answer in {ANSWER_TIMEOUT_S:g} s")
        except httptools.HttpParserError as error:
            connection.close()
            self.tally.failures.append(f"{question.request_id}: not HTTP: {error}")
        else:
            latency_s = time.monotonic() - (sent_at if since is None else since)
            self._check(question, answer, sent_at, latency_s)
            return answer.status != 200
        return False

    def _check(self, question: Question, answer: Answer, sent_at: float, latency_s: float) -> None:
        tally = self.tally
        if answer.status in (429, 503) and answer.headers.get("retry-after", "").isdigit():
            tally.refused[answer.status] += 1  # perhaps unread, as where there are too many connections
        elif answer.headers.get("x-request-id") != question.request_id:
            tally.failures.append(f"{question.request_id}: the answer to another request")
        elif answer.status != 200:
            tally.failures.append(f"{question.request_id}: {answer.status} {answer.body[:300]!r}")
        else:
            model, problem = judge(question, answer, self._tenants)
            if problem:
                tally.failures.append(f"{question.request_id}: {problem}")
                return
            tally.num_right += 1
            tally.num_texts += len(question.indices)
            tally.models.append((sent_at, time.monotonic(), model))
            tally.latencies_s.append(latency_s)


class Arrivals(Traffic):
    """An open loop: requests arrive at random moments, so many a second, whatever the server does."""

    def __init__(self, *arguments: Any, rate_per_s: float, good_s: float, **settings: Any) -> None:
        """An answer within `good_s` of its arrival is a good one."""
        super().__init__(*arguments, **settings)
        self._rate_per_s, self._good_s = rate_per_s, good_s
        self._idle: list[Connection] = []
        self._asked: set[asyncio.Task[None]] = set()

    @property
    def num_good(self) -> int:
        return sum(latency_s <= self._good_s for latency_s in self.tally.latencies_s)

    async def _client(self, n: int) -> None:
        """One of them makes the arrivals; the others are the connections that are open at first."""
        if n:
            with suppress(OSError):
                self._idle.append(await connect(self._url))
            return
        arrives_at = time.monotonic()
        while not self._stop.is_set():
            arrives_at += self._random.expovariate(self._rate_per_s)
            await asyncio.sleep(max(0.0, arrives_at - time.monotonic()))
            tenant = self._tenants[self._random.randrange(len(self._tenants))]
            task = asyncio.create_task(self._arrive(self.question(tenant), arrives_at))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
        await asyncio.gather(*self._asked)
        for connection in self._idle:
            self.leave(connection)

    async def _arrive(self, question: Question, arrived_at: float) -> None:
        connection = self._idle.pop() if self._idle else None
        if connection is None or not connection.is_open:
            connection = await self._reconnect(connection)
        if connection is not None:
            await self.ask(connection, question, arrived_at)
            self._idle.append(connection)


def under_traffic(
    url: str,
    tenants: Sequence[Tenant],
    num_clients: int,
    do: Callable[[Traffic], Awaitable[_T]],
    *,
    before: int = 5,
    after: int = 20,
    kind: type[Traffic] = Traffic,
    **settings: Any,
) -> tuple[Traffic, _T]:
    """What `do` returns while clients ask. They get so many right answers `before` it, and `after` it."""

    async def trial() -> tuple[Traffic, _T]:
        async with kind(url, tenants, num_clients, **settings) as traffic:
            await traffic.answers(before)
            result = await do(traffic)
            await traffic.answers(after)
        return traffic, result

    return asyncio.run(trial())
