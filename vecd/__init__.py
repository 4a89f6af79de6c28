"""vecd, the vector daemon: one importable package, and its clients from Python (docs/python.md).

The rooms lie at the top of the repository; this folder holds links to them, so that a checkout, an installed wheel and
every tool see the same names. Imports nothing until one of the names below is used (docs/adr/0020-one-package.md).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vecd.client.aio import AsyncClient
    from vecd.client.blocking import Client, Server
    from vecd.client.calls import Entity, Label, RankedDocument, SparseVector, Token
    from vecd.client.exchanges import (
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

    if name in __all__:
        for module in ("exchanges", "calls", "aio", "blocking"):  # what they import first
            if hasattr(found := import_module(f"vecd.client.{module}"), name):
                globals()[name] = value = getattr(found, name)
                return value
    raise AttributeError(f"module 'vecd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
