"""Where `vecd top` has its figures from: one server's `/stats`, asked again and again on one connection.

Owns the connection, the deadline of an answer, and what is said when none comes. Decides neither when to ask nor what
to show. Called by `vecd.client.top.command`.
"""

from vecd.client.bench.connection import Answer, BadAnswer, Connection, Target, connect, name_failure, render_get
from vecd.client.top.stats import NotStats, Stats, read_stats

_TIMEOUT_S = 5.0
"""For a connection, and for an answer: a server whose gateway hangs this long has it killed by its supervisor."""
_PATH = "/stats"


class Refused(Exception):
    """Raised when asking again would bring the same answer: the message says what is missing."""


class Away(Exception):
    """Raised when there is no answer now; the message says why, in a word or two."""


class Source:
    """`ask`, again after Away; one at a time."""

    def __init__(self, target: Target, api_key: str | None) -> None:
        """Raises ValueError when the key cannot be sent."""
        self._target = target
        self._has_key = api_key is not None
        self._request = render_get(target, _PATH, api_key=api_key, user_agent="vecd-top")
        self._connection: Connection | None = None

    async def ask(self) -> Stats:
        """Raises Away or Refused."""
        try:
            answer = await self._exchange()
        except (OSError, BadAnswer) as error:
            raise Away(name_failure(error)) from error
        if answer.status != 200:
            self._refuse(answer.status)
        try:
            return read_stats(answer.body)
        except NotStats as error:
            raise Refused(f"{self._target}{_PATH} is not the figures of a vecd: {error}") from error

    async def _exchange(self) -> Answer:
        """Servers close what has been idle, and a gateway may have died: then it is asked again, once, on another
        connection. Raises OSError and BadAnswer."""
        if self._connection is not None and self._connection.is_open:
            try:
                return await self._connection.exchange(self._request, _TIMEOUT_S)
            except ConnectionError:
                pass
        self._connection = await connect(self._target, _TIMEOUT_S)
        return await self._connection.exchange(self._request, _TIMEOUT_S)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _refuse(self, status: int) -> None:
        match status:
            case 401 if self._has_key:
                raise Refused(f"{self._target} does not know the key of --api-key")
            case 401:
                raise Refused(f"{self._target} wants a key with the scope metrics: --api-key, or VECD_API_KEY")
            case 403:
                raise Refused(f"{self._target} has not given this key the scope metrics, which its figures need")
            case 404:
                raise Refused(
                    f"{self._target} has no {_PATH}: where --admin-port or --admin-uds are set, the figures are there; "
                    "and servers older than this one have none"
                )
            case _:
                raise Away(f"status {status}")
