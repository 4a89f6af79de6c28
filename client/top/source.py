"""The `/stats` of one server, requested again and again on one connection.

Owns the connection, the deadline of a response, and the words for why there is none. Called by
`vecd.client.top.command`.
"""

from vecd.client.connection import (
    BadResponse,
    ClientConnection,
    ServerResponse,
    Target,
    TlsMismatch,
    check_not_tls,
    connect,
    name_failure,
    render_request,
)
from vecd.client.top.figures import NotStats, Stats, read_stats

_TIMEOUT_S = 5.0
"""Time for a connection, and for a response. A supervisor replaces a gateway that hangs this long."""
_PATH = "/stats"
_REFUSALS = {
    401: "wants a key with the scope metrics: --api-key, or VECD_API_KEY",
    403: "has not given this key the scope metrics, which its figures need",
    404: f"has no {_PATH}: where --admin-port or --admin-uds are set, the figures are there; and servers older than "
    "this one have none",
}


class StatsRefused(Exception):
    """Raised when another request would bring the same response. The message says what is missing."""


class StatsUnavailable(Exception):
    """Raised when there is no response now. The message says why, in a word or two."""


class StatsSource:
    """`read` one response at a time. May be called again after StatsUnavailable."""

    def __init__(self, target: Target, api_key: str | None) -> None:
        """Raises ValueError when the key cannot be sent."""
        self._target = target
        self._has_key = api_key is not None
        self._request = render_request(target, _PATH, api_key=api_key, user_agent="vecd-top")
        self._connection: ClientConnection | None = None
        self._has_read = False

    async def read(self) -> Stats:
        """Raises StatsUnavailable or StatsRefused."""
        try:
            response = await self._exchange()
        except TlsMismatch as error:
            raise StatsRefused(f"{self._target}: {error}") from error
        except (OSError, BadResponse) as error:
            raise StatsUnavailable(name_failure(error)) from error
        if response.status == 401 and self._has_key:
            raise StatsRefused(f"{self._target} does not know the key of --api-key")
        if response.status in _REFUSALS:
            raise StatsRefused(f"{self._target} {_REFUSALS[response.status]}")
        if response.status != 200:
            raise StatsUnavailable(f"status {response.status}")
        try:
            return read_stats(response.body)
        except NotStats as error:
            raise StatsRefused(f"{self._target}{_PATH} has not the figures of a vecd server: {error}") from error

    async def _exchange(self) -> ServerResponse:
        """Send the request, and once more on a new connection if the old one is broken: servers close idle connections,
        and a gateway may have been replaced. Raises OSError and BadResponse."""
        if self._connection is not None and self._connection.is_open:
            try:
                return await self._connection.exchange(self._request, _TIMEOUT_S)
            except ConnectionError:
                pass
        self._connection = await connect(self._target, _TIMEOUT_S)
        try:
            response = await self._connection.exchange(self._request, _TIMEOUT_S)
        except (OSError, BadResponse):
            await self._check_first()
            raise
        if response.status == 400:
            await self._check_first()
        self._has_read = True
        return response

    async def _check_first(self) -> None:
        """The first request has failed: raises TlsMismatch if the server speaks TLS and the target does not."""
        if not self._has_read:
            await check_not_tls(self._target)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
