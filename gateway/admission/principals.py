"""Who sends a request, and how much of what its key allows is used: each gateway knows its own part.

Owns the callers and their limits, `tokens_per_s` and `max_requests`. A caller's tenant, in whose turn its requests are
served, is its key's name, or its address where there are no keys. Pure: no socket, no task. Called by
`vecd.gateway.api.application` and `vecd.gateway.pipeline`.

Limits are of the whole server. Gateways know nothing of one another, so each allows its part: a caller whose
connections all are with one of two gateways gets half of its tokens.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vecd.gateway.admission.auth import Auth, check_scope
from vecd.gateway.types.config import ApiKey
from vecd.gateway.types.errors import RateLimited
from vecd.gateway.types.request import Priority

BURST_S = 5.0
"""Of its `tokens_per_s`, a caller who has been silent may send so many seconds' worth at once."""


class Principal:
    """Whoever sends a request: one without a key, who is not limited."""

    max_priority = Priority.INTERACTIVE
    is_admin = False
    sees_metrics = True
    name = ""
    """Of the key; "" without one."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant

    def check_limits(self) -> None:
        """Raises RateLimited if a request, whatever its size, would be one too many now."""

    def spend(self, num_tokens: int) -> "Reservation":
        """Begin a request of about so many tokens. Raises RateLimited. What it returns is to be entered, and left when
        the request is answered."""
        return _FREE


class KeyPrincipal(Principal):
    """Everybody who sends a certain key."""

    def __init__(self, key: ApiKey, num_gateways: int, clock: Callable[[], float]) -> None:
        super().__init__(key.name)
        self.name = key.name
        self._num_gateways = num_gateways
        self._clock = clock
        self.num_running = 0
        """Embedding requests, at this gateway now."""
        self.num_requests = self.num_tokens = self.num_refused = 0
        """Since this gateway knows the key; those refused were over one of its limits."""
        self._tokens_per_s: float | None = None
        self.set_key(key)

    def set_key(self, key: ApiKey) -> None:
        """Other limits and scopes of the same name. What has been used stays used."""
        self.key = key
        self.max_priority = Priority[key.max_priority.upper()]
        self.is_admin = "admin" in key.scopes
        self.sees_metrics = "metrics" in key.scopes
        self._max_running = key.max_requests and -(-key.max_requests // self._num_gateways)
        self._set_rate(key.tokens_per_s and key.tokens_per_s / self._num_gateways)

    def _set_rate(self, tokens_per_s: float | None) -> None:
        is_first = self._tokens_per_s is None
        self._tokens_per_s = tokens_per_s
        if tokens_per_s is None:
            return
        self._max_level = tokens_per_s * BURST_S
        if is_first:
            self._level = self._max_level
            """Tokens that may be sent; below 0 for what was sent beyond them."""
            self._filled_at = self._clock()

    def check_limits(self) -> None:
        if self._max_running is not None and self.num_running >= self._max_running:
            self._refuse(
                f"{self.num_running} requests with this API key are being served, at most {self._max_running} are at "
                "a time",
                retry_after_s=1.0,
            )
        if self._tokens_per_s is not None and self._fill(self._tokens_per_s) <= 0:
            wait_s = -self._level / self._tokens_per_s
            self._refuse(
                f"this API key may send {self.key.tokens_per_s:g} tokens a second, and has sent what it may for the "
                f"next {wait_s:.2g} s",
                retry_after_s=wait_s,
            )

    def spend(self, num_tokens: int) -> "Reservation":
        self.check_limits()
        self.num_requests += 1
        self.num_running += 1
        return _KeyReservation(self, num_tokens)

    def charge(self, num_tokens: int) -> None:
        """So many more tokens, or fewer than were thought."""
        self.num_tokens += num_tokens
        if self._tokens_per_s is not None:
            self._level -= num_tokens

    def describe(self) -> dict[str, Any]:
        """For `GET /admin/keys`: the key's limits, and what this gateway knows of its use."""
        return {
            "name": self.key.name,
            "scopes": list(self.key.scopes),
            "max_priority": self.key.max_priority,
            "tokens_per_s": self.key.tokens_per_s,
            "max_requests": self.key.max_requests,
            "use": {
                "requests": self.num_requests,
                "running": self.num_running,
                "tokens": self.num_tokens,
                "refused": self.num_refused,
            },
        }

    def _fill(self, tokens_per_s: float) -> float:
        """The level of the key's bucket, now."""
        now = self._clock()
        self._level = min(self._max_level, self._level + (now - self._filled_at) * tokens_per_s)
        self._filled_at = now
        return self._level

    def _refuse(self, reason: str, *, retry_after_s: float) -> None:
        self.num_refused += 1
        raise RateLimited(f"Too many requests: {reason}", retry_after_s=retry_after_s)


class Reservation:
    """What one request takes of its caller's limits, until it is answered. This one: of nobody's."""

    def settle(self, num_tokens: int) -> None:
        """It is known how many tokens the request has: the next ones are judged by that."""

    def note_sent(self, num_tokens: int) -> None:
        """So many are all that workers had of the request: should it fail, they are what it costs. 0 before that."""

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        pass


_FREE = Reservation()


class _KeyReservation(Reservation):
    __slots__ = ("_holder", "_num_sent", "_num_tokens")

    def __init__(self, holder: KeyPrincipal, num_tokens: int) -> None:
        self._holder = holder
        self._num_sent = 0
        self._num_tokens = 0
        self.settle(num_tokens)

    def settle(self, num_tokens: int) -> None:
        self._holder.charge(num_tokens - self._num_tokens)
        self._num_tokens = num_tokens

    def note_sent(self, num_tokens: int) -> None:
        self._num_sent = num_tokens

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            self.settle(self._num_sent)
        self._holder.num_running -= 1


class Principals:
    """Finds out who sends a request."""

    def __init__(
        self, keys: Sequence[ApiKey], num_gateways: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_gateways = num_gateways
        self._clock = clock
        self._holders: dict[str, KeyPrincipal] = {}
        self.set_keys(keys)

    def set_keys(self, keys: Sequence[ApiKey]) -> None:
        """From now on these are the keys. What is running goes on; keys whose name stays keep what they have used."""
        self._auth = Auth(keys)
        holders, self._holders = self._holders, {}
        for key in keys:
            holder = holders.get(key.name)
            if holder is None:
                holder = KeyPrincipal(key, self._num_gateways, self._clock)
            else:
                holder.set_key(key)
            self._holders[key.name] = holder

    @property
    def are_known(self) -> bool:
        """Whether there are keys."""
        return bool(self._holders)

    @property
    def holders(self) -> Sequence[KeyPrincipal]:
        return tuple(self._holders.values())

    def identify(
        self, headers: Mapping[str, str], client: str, scope: str | None, *, is_admin: bool = False
    ) -> Principal:
        """Who sends a request from the address `client` to a path that asks for `scope`; for none: anybody.

        `is_admin`: on the admin listener, which is open unless a key has the scope "admin". Raises InvalidApiKey,
        PermissionDenied.
        """
        if scope is None or (is_admin and not self._auth.has_scope("admin")):
            return Principal(client)
        key = self._auth.check(headers)
        if key is None:
            return Principal(client)
        check_scope(key, scope)
        return self._holders[key.name]
