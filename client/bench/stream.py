"""One stream of requests of a run, the counting of their results, and whether the server is still there.

Owns the requests' order, a tally, and the moments of the last response and of the first failed connection. Filled by
`vecd.client.bench.closed_loop` and `vecd.client.bench.open_loop`, read by `vecd.client.bench.run`.
"""

import itertools
import time
from collections.abc import Sequence

from vecd.client.bench.responses import READERS
from vecd.client.bench.tally import Tally
from vecd.client.bench.window import TimedWindow
from vecd.client.connection import BadResponse, ClientConnection, ExchangeResult, Target, connect, name_failure

_DETAIL_CHARS = 300
"""How much of the first error of a kind is kept."""
_CONNECT_TIMEOUT_S = 5.0
_GONE_AFTER_S = 3.0
"""Without a connection or an answer for this long, the server counts as gone."""


class Contact:
    """One server, as a run sees it. Moments are those of `time.perf_counter`."""

    def __init__(self, target: Target, timeout_s: float, quiet_s: float = 0.0) -> None:
        """`timeout_s` is that of a request; `quiet_s` is how long no request may be due."""
        self.answered_at = time.perf_counter()
        """When the last answer came, of any status. Set by `Stream`; at first the start of the run."""
        self._target = target
        self._timeout_s = timeout_s
        self._quiet_s = quiet_s
        self._unreachable_since: float | None = None

    async def connect(self) -> ClientConnection:
        """Raises OSError, of which TimeoutError is one, when no connection can be made."""
        try:
            connection = await connect(self._target, min(self._timeout_s, _CONNECT_TIMEOUT_S))
        except OSError:
            self._unreachable_since = self._unreachable_since or time.perf_counter()
            raise
        self._unreachable_since = None
        return connection

    def why_give_up(self, now: float) -> str | None:
        """Why the server counts as gone, or None."""
        since = self._unreachable_since
        if since is not None and now - max(since, self.answered_at) > _GONE_AFTER_S + self._quiet_s:
            return f"no connection to {self._target} for {_GONE_AFTER_S + self._quiet_s:g} s"
        patience_s = self._timeout_s + _GONE_AFTER_S + self._quiet_s
        if now - self.answered_at > patience_s:
            return f"{self._target} answered nothing for {patience_s:g} s"
        return None


class Stream:
    """Requests of one kind, in turn, and their tally. Moments are those of `time.perf_counter`."""

    def __init__(
        self,
        requests: Sequence[bytes],
        texts_per_request: int,
        window: TimedWindow,
        contact: Contact,
        *,
        encoding_format: str = "base64",
        goodput_ms: float | None = None,
    ) -> None:
        self.window = window
        self.contact = contact
        self.tally = Tally(goodput_ms=goodput_ms)
        self._requests = itertools.cycle(requests)
        self._texts_per_request = texts_per_request
        self._read = READERS[encoding_format]

    def next_request(self) -> bytes:
        return next(self._requests)

    def count(self, sent_at: float, result: ExchangeResult) -> bool:
        """Count the result of the request that should have been sent at `sent_at`. Returns whether it was a response.

        A response with an error status, or of the wrong shape, is one, too: the server is there.
        """
        now = time.perf_counter()
        if isinstance(result, Exception):
            self.count_error(sent_at, name_failure(result), str(result))
            return False
        self.contact.answered_at = now
        if result.status != 200:
            self.count_error(sent_at, f"HTTP {result.status}", result.body[:_DETAIL_CHARS].decode(errors="replace"))
            return True
        is_measured, is_counted = self.window.measures(sent_at, now), self.window.counts(sent_at, now)
        if is_measured or is_counted:
            try:
                receipt = self._read(result, self._texts_per_request)
            except BadResponse as error:
                self.count_error(sent_at, name_failure(error), str(error))
                return False
            if is_measured:
                self.tally.add_latency(now - sent_at)
            if is_counted:
                self.tally.add_success(receipt)
        return True

    def count_error(self, sent_at: float, kind: str, detail: str) -> None:
        if self.window.measures_failure(sent_at, time.perf_counter()):
            self.tally.add_errors(kind, detail)

    def count_late(self, arrived_at: float, late_s: float) -> None:
        """Count that this process itself sends a request `late_s` after its arrival."""
        if self.window.measures_failure(arrived_at, arrived_at):
            self.tally.add_late(late_s)
