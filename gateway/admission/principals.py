"""Principals: the senders of requests, and the quotas of their keys.

Owns the quotas `tokens_per_s` and `max_requests`, and how much of them is used. A principal's tenant, in whose turn its
requests are served, is the name of its key, or its address where there are no keys. Pure: no socket, no task. Called by
`vecd.gateway.api.application` and `vecd.gateway.pipeline`.

Quotas are for the whole server. Gateways share no counters, so each allows its part: a principal with all its
connections at one of two gateways gets half of its tokens.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vecd.gateway.admission.auth import Auth, check_scope
from vecd.gateway.types.config import ApiKey
from vecd.gateway.types.errors import RateLimited
from vecd.gateway.types.request import Priority

BURST_S = 5.0
"""Seconds of its `tokens_per_s` that a principal may send at once after a silence."""


class Principal:
    """The sender of a request. This one has no key, and no quota."""

    max_priority = Priority.INTERACTIVE
    is_admin = False
    sees_metrics = True
    name = ""
    """The name of its key; "" without one."""

    def __init__(self, tenant: str, models: tuple[str, ...] | None = None) -> None:
        self.tenant = tenant
        self.models = models
        """The names of the models that it reaches; None: all."""

    def check_quota(self) -> None:
        """Raises RateLimited if no request, whatever its size, would be accepted now."""

    def reserve(self, num_tokens: int) -> "Reservation":
        """Begin a request of about `num_tokens`. Raises RateLimited. The reservation must be entered, and left when the
        request is over."""
        return _UNLIMITED


class KeyPrincipal(Principal):
    """All senders of one key."""

    def __init__(self, key: ApiKey, num_gateways: int, clock: Callable[[], float]) -> None:
        super().__init__(key.name)
        self.name = key.name
        self._num_gateways = num_gateways
        self._clock = clock
        self.num_running = 0
        """Embedding requests that this gateway is serving."""
        self.num_requests = self.num_tokens = self.num_refused = 0
        """Since this gateway knows the key. Requests over the quota are refused."""
        self._level = math.inf
        """Tokens that may be sent now, as of `_filled_at`; below 0 after a request that took more than there were.
        Infinite until there is a quota to fill it from."""
        self._filled_at = clock()
        self.set_key(key)

    def set_key(self, key: ApiKey) -> None:
        """Replace quota and scopes by those of another key of the same name. What has been used stays used."""
        self.key = key
        self.max_priority = Priority[key.max_priority.upper()]
        self.is_admin = "admin" in key.scopes
        self.sees_metrics = "metrics" in key.scopes
        self.models = key.models
        self._max_running = key.max_requests and -(-key.max_requests // self._num_gateways)
        self._tokens_per_s = key.tokens_per_s and key.tokens_per_s / self._num_gateways
        if self._tokens_per_s is None:
            self._level = math.inf

    def check_quota(self) -> None:
        if self._max_running is not None and self.num_running >= self._max_running:
            requests = "request" if self.num_running == 1 else "requests"
            self._refuse(
                f"this key already has {self.num_running} {requests} in progress; its limit is {self._max_running}",
                retry_after_s=1.0,
            )
        if self._tokens_per_s is not None and self._fill(self._tokens_per_s) <= 0:
            wait_s = -self._level / self._tokens_per_s
            self._refuse(
                f"this API key may send {self.key.tokens_per_s:g} tokens a second, and has sent what it may for the "
                f"next {wait_s:.2g} s",
                retry_after_s=wait_s,
            )

    def reserve(self, num_tokens: int) -> "Reservation":
        self.check_quota()
        self.num_requests += 1
        self.num_running += 1
        return _KeyReservation(self, num_tokens)

    def charge(self, num_tokens: int) -> None:
        """Count `num_tokens` as used; below 0: give them back."""
        self.num_tokens += num_tokens
        self._level -= num_tokens

    def describe(self) -> dict[str, Any]:
        """For `GET /admin/keys`: the key's quota, and how much of it is used at this gateway."""
        return {
            "name": self.key.name,
            "scopes": list(self.key.scopes),
            "max_priority": self.key.max_priority,
            "tokens_per_s": self.key.tokens_per_s,
            "max_requests": self.key.max_requests,
            "models": None if self.models is None else list(self.models),
            "use": {
                "requests": self.num_requests,
                "running": self.num_running,
                "tokens": self.num_tokens,
                "refused": self.num_refused,
            },
        }

    def _fill(self, tokens_per_s: float) -> float:
        """Refill the key's bucket, up to BURST_S of its quota; returns its level."""
        now = self._clock()
        self._level = min(tokens_per_s * BURST_S, self._level + (now - self._filled_at) * tokens_per_s)
        self._filled_at = now
        return self._level

    def _refuse(self, reason: str, *, retry_after_s: float) -> None:
        self.num_refused += 1
        raise RateLimited(f"Too many requests: {reason}", retry_after_s=retry_after_s)


class Reservation:
    """The part of a quota that one request takes until it is over. This one takes nothing."""

    def settle(self, num_tokens: int) -> None:
        """Replace the estimate: the request has `num_tokens`."""

    def note_sent(self, num_tokens: int) -> None:
        """Workers had `num_tokens` of the request, which is its price if it fails; 0 until this is called."""

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        pass


_UNLIMITED = Reservation()


class _KeyReservation(Reservation):
    __slots__ = ("_num_sent", "_num_tokens", "_principal")

    def __init__(self, principal: KeyPrincipal, num_tokens: int) -> None:
        self._principal = principal
        self._num_sent = 0
        self._num_tokens = 0
        self.settle(num_tokens)

    def settle(self, num_tokens: int) -> None:
        self._principal.charge(num_tokens - self._num_tokens)
        self._num_tokens = num_tokens

    def note_sent(self, num_tokens: int) -> None:
        self._num_sent = num_tokens

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            self.settle(self._num_sent)
        self._principal.num_running -= 1


class Principals:
    """Identifies the sender of a request."""

    def __init__(
        self, keys: Sequence[ApiKey], num_gateways: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_gateways = num_gateways
        self._clock = clock
        self._by_name: dict[str, KeyPrincipal] = {}
        self.set_keys(keys)

    def set_keys(self, keys: Sequence[ApiKey]) -> None:
        """Replace the keys. Running requests go on; a key with the name of an old one keeps its use."""
        self._auth = Auth(keys)
        before, self._by_name = self._by_name, {}
        for key in keys:
            principal = before.get(key.name) or KeyPrincipal(key, self._num_gateways, self._clock)
            principal.set_key(key)
            self._by_name[key.name] = principal

    @property
    def have_keys(self) -> bool:
        return bool(self._by_name)

    @property
    def with_keys(self) -> Sequence[KeyPrincipal]:
        return tuple(self._by_name.values())

    @property
    def limit_models(self) -> bool:
        """Whether some key does not reach all models."""
        return self._auth.limits_models

    def models_of(self, headers: Mapping[str, str], *, is_admin: bool = False) -> tuple[str, ...] | None:
        """The names of the models that a request reaches, as `identify` finds them; None: all, or the request has no
        key that is known. Checks nothing: `identify` must be called, too."""
        is_open = is_admin and not self._auth.has_scope("admin")
        return None if is_open else self._auth.models_of(headers)

    def identify(
        self, headers: Mapping[str, str], client: str, scope: str | None, *, is_admin: bool = False
    ) -> Principal:
        """The sender of a request from the address `client` to a path that needs `scope`; None: any sender may.

        `is_admin`: the request came on the admin listener, which is open unless a key has the scope "admin". Raises
        InvalidApiKey for an unknown or missing key, PermissionDenied for a key without the scope.
        """
        if scope is None or (is_admin and not self._auth.has_scope("admin")):
            return Principal(client, self.models_of(headers, is_admin=is_admin))
        key = self._auth.check(headers)
        if key is None:
            return Principal(client)
        check_scope(key, scope)
        return self._by_name[key.name]
