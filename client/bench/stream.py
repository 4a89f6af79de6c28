"""One stream of requests of a run, the clients that send it, and whether the server is still there.

Owns the requests' order, the counting of their results, and the moments of the last response and of the first failed
connection. Decides neither when a request is sent nor when the run ends. Called by `vecd.client.bench.loops` and
`vecd.client.bench.run`. Moments are those of `time.perf_counter`.
"""

import itertools
import time
from collections.abc import Sequence

from vecd.client.bench.responses import READERS
from vecd.client.bench.result import RunResult
from vecd.client.bench.window import Window
from vecd.client.connection import BadResponse, ClientConnection, ExchangeResult, Target, connect, name_failure

_DETAIL_CHARS = 300
"""How much of the first error of a kind is kept."""
_CONNECT_TIMEOUT_S = 5.0
_GONE_AFTER_S = 3.0
"""Without a connection or an answer for this long, the server counts as gone."""


class Contact:
    """One server, as a run sees it."""

    def __init__(self, target: Target, timeout_s: float, quiet_s: float = 0.0) -> None:
        """`timeout_s` is that of a request; `quiet_s` is how long no request may be due."""
        self.answered_at = time.perf_counter()
        """When the last answer came, of any status. Set by `Stream`; at first the start of the run."""
        self.timeout_s = timeout_s
        self._target = target
        self._gone_after_s = _GONE_AFTER_S + quiet_s
        self._unreachable_since: float | None = None

    async def connect(self) -> ClientConnection:
        """Raises OSError, of which TimeoutError is one, when no connection can be made."""
        try:
            connection = await connect(self._target, min(self.timeout_s, _CONNECT_TIMEOUT_S))
        except OSError:
            self._unreachable_since = self._unreachable_since or time.perf_counter()
            raise
        self._unreachable_since = None
        return connection

    def why_give_up(self, now: float) -> str | None:
        """Why the server counts as gone, or None."""
        since = self._unreachable_since
        if since is not None and now - max(since, self.answered_at) > self._gone_after_s:
            return f"no connection to {self._target} for {self._gone_after_s:g} s"
        if now - self.answered_at > (silence_s := self.timeout_s + self._gone_after_s):
            return f"{self._target} answered nothing for {silence_s:g} s"
        return None


class Stream:
    """Requests of one kind, in turn, and their results."""

    def __init__(
        self,
        requests: Sequence[bytes],
        window: Window,
        contact: Contact,
        result: RunResult,
        encoding_format: str = "base64",
    ) -> None:
        self.requests = itertools.cycle(requests)
        self.window = window
        self.contact = contact
        self.result = result
        self.waiting: dict[object, float] = {}
        """When each request was sent that has no answer yet."""
        self._read = READERS[encoding_format]

    def count(self, sent_at: float, outcome: ExchangeResult) -> bool:
        """Count the outcome of the request that should have been sent at `sent_at`. Returns whether it was a response.

        A response with an error status is one, too: the server is there.
        """
        now = time.perf_counter()
        if isinstance(outcome, Exception):
            self.count_error(sent_at, name_failure(outcome), str(outcome))
            return False
        self.contact.answered_at = now
        if outcome.status != 200:
            self.count_error(sent_at, f"HTTP {outcome.status}", outcome.body[:_DETAIL_CHARS].decode(errors="replace"))
            return True
        is_measured, is_counted = self.window.measures(sent_at, now), self.window.counts(sent_at, now)
        if is_measured or is_counted:
            try:
                receipt = self._read(outcome, self.result.texts_per_request)
            except BadResponse as error:
                self.count_error(sent_at, name_failure(error), str(error))
                return False
            if is_measured:
                self.result.add_latency(now - sent_at)
            if is_counted:
                self.result.add_success(receipt)
        return True

    def count_error(self, sent_at: float, kind: str, detail: str) -> None:
        if self.window.measures_failure(sent_at, time.perf_counter()):
            self.result.add_errors(kind, detail)


class Client:
    """One client of a stream, with one connection at a time."""

    def __init__(self, stream: Stream, connection: ClientConnection | None = None) -> None:
        self._stream = stream
        self._connection = connection

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and self._connection.is_open

    async def request(self, sent_at: float) -> bool:
        """Send the stream's next request, which is due at `sent_at`, and count what becomes of it. Latency includes the
        connecting: a caller would wait for it, too. Returns whether there was a response."""
        stream = self._stream
        stream.waiting[self] = sent_at
        try:
            if self._connection is None or not self._connection.is_open:
                self._connection = await stream.contact.connect()
            outcome: ExchangeResult = await self._connection.exchange(next(stream.requests), stream.contact.timeout_s)
        except (OSError, BadResponse) as error:
            outcome = error
        del stream.waiting[self]
        return stream.count(sent_at, outcome)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
