"""Traffic whose every answer is checked: its status, whose it is, and each vector against the reference.

Owns the clients, and when they ask. A request has an id of its own, which its answer must carry; a connection has one
request at a time, so that a byte too many is an answer too many. Knows no server's processes: what happens to them
meanwhile is a trial's.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import httptools

from tests.support.soak.connection import ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S, Answer, Closed, Connection, connect
from tests.support.soak.questions import Question, Tenant, judge
from tests.support.soak.tally import Tally

_RECONNECT_PAUSE_S = 0.02
_REFUSED_PAUSE_S = 0.1
"""Of a closed loop. Less than a server asks for, so that it is put to the test, too."""
_request_numbers = itertools.count()


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
            is_refused = await self.ask(connection, self.question(tenant))
            if self._pause_s or is_refused:
                await asyncio.sleep(self._random.uniform(0, 2 * max(self._pause_s, is_refused * _REFUSED_PAUSE_S)))
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
        """One request, and its entry in the tally; says whether it was refused. `since`: when it arrived, if it is sent
        later than that."""
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
            return answer.status in (429, 503)
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
