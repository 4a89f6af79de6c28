"""Whether the server of a run is still there.

Opens the connections, remembers when one failed and when an answer came, and decides when to give up. Called by
`vecd.client.bench.run`, the loops and `vecd.client.bench.stream`.
"""

import time

from vecd.client.connection import ClientConnection, Target, connect

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
