"""vecd, the vector daemon: one importable package, and its clients from Python (docs/python.md).

The rooms lie at the top of the repository (`gateway/`, `workers/`, `shm/`, `client/`, `launch/`, `supervisor.py`); this
folder holds links to them, so that a checkout, an installed wheel and every tool see the same names. Imports nothing
until one of the names below is used: each process imports what it needs (docs/adr/0020-one-package.md).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vecd.client.sdk.aio import AsyncClient
    from vecd.client.sdk.client import Client
    from vecd.client.sdk.errors import (
        AuthenticationError,
        BadRequest,
        IdentityMismatch,
        NotFound,
        Overloaded,
        PermissionDenied,
        ServerError,
        ServerNotStarted,
        ServerUnavailable,
        Timeout,
        VecdError,
    )
    from vecd.client.sdk.results import Entity, Label, RankedDocument, SparseVector, Token
    from vecd.client.sdk.server import Server

_MODULES = {
    "aio": ("AsyncClient",),
    "client": ("Client",),
    "errors": (
        "AuthenticationError", "BadRequest", "IdentityMismatch", "NotFound", "Overloaded", "PermissionDenied",
        "ServerError", "ServerNotStarted", "ServerUnavailable", "Timeout", "VecdError",
    ),
    "results": ("Entity", "Label", "RankedDocument", "SparseVector", "Token"),
    "server": ("Server",),
}  # fmt: skip
"""By module of `vecd.client.sdk`, what this package has of it."""

__all__ = [
    "AsyncClient",
    "AuthenticationError",
    "BadRequest",
    "Client",
    "Entity",
    "IdentityMismatch",
    "Label",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "RankedDocument",
    "Server",
    "ServerError",
    "ServerNotStarted",
    "ServerUnavailable",
    "SparseVector",
    "Timeout",
    "Token",
    "VecdError",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            value: object = getattr(import_module(f"vecd.client.sdk.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'vecd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
