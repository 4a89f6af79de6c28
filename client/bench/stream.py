"""One stream of requests of a run, the clients that send it, and whether the server is still there.

Owns the requests' order, the counting of their results, and the moments of the last response and of the first failed
connection. Decides neither when a request is sent nor when the run ends. Called by `vecd.client.bench.loops` and
`vecd.client.bench.run`. Moments are those of `time.perf_counter`.
"""

import itertools
import time

from vecd.client.bench.load import Load
from vecd.client.bench.responses import READERS
from vecd.client.bench.result import RunResult
from vecd.client.bench.window import Window
from vecd.client.connection import BadResponse, ClientConnection, ServerResponse, connect, name_failure

_DETAIL_CHARS = 300
"""How much of the first error of a kind is kept."""
_CONNECT_TIMEOUT_S = 5.0
_GONE_AFTER_S = 3.0
"""Without a connection or an answer for this long, the server counts as gone."""
_QUIET_ARRIVALS = 20
"""Without a server's fault, no arrival for as long as 20 take on average has a chance of e⁻²⁰."""


class Contact:
    """The server of a load, as its run sees it."""

    def __init__(self, load: Load) -> None:
        self.answered_at = time.perf_counter()
        """When the last answer came, of any status. Set by `Stream`; at first the start of the run."""
        self.has_cut_off = False
        """Whether an exchange failed by something else than its deadline. Set by `Client`."""
        self._load = load
        self._gone_after_s = _GONE_AFTER_S + (_QUIET_ARRIVALS / load.rate_per_s if load.rate_per_s else 0.0)
        self._unreachable_since: float | None = None

    async def connect(self) -> ClientConnection:
        """Raises OSError, of which TimeoutError is one, when no connection can be made."""
        try:
            connection = await connect(self._load.target, min(self._load.timeout_s, _CONNECT_TIMEOUT_S))
        except OSError:
            self._unreachable_since = self._unreachable_since or time.perf_counter()
            raise
        self._unreachable_since = None
        return connection

    def why_give_up(self, now: float) -> str | None:
        """Why the server counts as gone, or None."""
        since = self._unreachable_since
        if since is not None and now - max(since, self.answered_at) > self._gone_after_s:
            return f"no connection to {self._load.target} for {self._gone_after_s:g} s"
        if now - self.answered_at > (silence_s := self._load.timeout_s + self._gone_after_s):
            return f"{self._load.target} answered nothing for {silence_s:g} s"
        return None


class Stream:
    """The requests of a load, in turn, and their results."""

    def __init__(self, load: Load, contact: Contact, started_at: float) -> None:
        self.load = load
        self.contact = contact
        self.requests = itertools.cycle(load.requests)
        self.window = Window(
            started_at,
            load.warmup_s,
            load.duration_s,
            num_requests=load.num_requests,
            is_by_arrival=load.rate_per_s is not None,
        )
        self.result = RunResult(load=load)
        self.waiting: dict[object, float] = {}
        """When each request was sent that has no answer yet."""
        self._read = READERS[load.shape.encoding_format]

    def count(self, sent_at: float, response: ServerResponse) -> None:
        """Count the response to the request that should have been sent at `sent_at`. Raises BadResponse when it is
        measured, and does not fit the request."""
        now = self.contact.answered_at = time.perf_counter()
        if response.status != 200:
            detail = response.body[:_DETAIL_CHARS].decode(errors="replace")
            self.count_error(sent_at, f"HTTP {response.status}", detail)
            return
        is_measured, is_counted = self.window.measures(sent_at, now), self.window.counts(sent_at, now)
        if is_measured or is_counted:
            receipt = self._read(response, self.load.shape.texts_per_request)
            if is_measured:
                self.result.add_latency(now - sent_at)
            if is_counted:
                self.result.add_success(receipt)

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
        connecting: a caller would wait for it, too. Returns whether there was a response: one with an error status is
        one, too, as the server is there."""
        stream = self._stream
        stream.waiting[self] = sent_at
        try:
            if self._connection is None or not self._connection.is_open:
                self._connection = await stream.contact.connect()
            stream.count(sent_at, await self._connection.exchange(next(stream.requests), stream.load.timeout_s))
        except (OSError, BadResponse) as error:
            stream.contact.has_cut_off |= not isinstance(error, TimeoutError)
            stream.count_error(sent_at, name_failure(error), str(error))
            return False
        finally:
            del stream.waiting[self]
        return True

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
