"""Checks a caller's key. Owns the digest of the configured key, never the key itself, and logs neither."""

import hmac
from collections.abc import Mapping
from hashlib import sha256

from gateway.errors import InvalidApiKey


class Auth:
    def __init__(self, api_key: str | None) -> None:
        self._digest = sha256(api_key.encode()).digest() if api_key is not None else None

    def check(self, headers: Mapping[str, str]) -> None:
        """Accept `Authorization: Bearer KEY`, `api-key: KEY` and `x-api-key: KEY`, or any caller without a key set.

        Raises InvalidApiKey. Digests are compared, in constant time, so neither length nor content leaks by timing.
        """
        if self._digest is None:
            return
        given = _key_of(headers)
        if given is None:
            raise InvalidApiKey("You didn't provide an API key: send it as 'Authorization: Bearer YOUR_KEY'")
        if not hmac.compare_digest(sha256(given.encode("latin-1")).digest(), self._digest):
            raise InvalidApiKey("Incorrect API key provided")


def _key_of(headers: Mapping[str, str]) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("api-key") or headers.get("x-api-key") or None
