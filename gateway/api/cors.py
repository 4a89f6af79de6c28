"""Which web pages may call: cross-origin resource sharing, off unless origins are configured.

Owns the headers by which a browser lets a page read an answer, and the answers to its preflights. Knows no path and no
key: a preflight never carries one, and a key is still asked for of the request that follows. Nothing is ever allowed
with cookies, so that a page of an allowed origin can do no more than its key. Pure; called by `vecd.gateway.pipeline`,
never for the admin listener, which answers no page at all.

Source: the Fetch standard, "CORS protocol"; "Private Network Access" for the one header of it.
"""

import re
from collections.abc import Mapping, Sequence

from vecd.gateway.admission.principals import Principal
from vecd.gateway.api.context import Context
from vecd.gateway.api.routes import Route
from vecd.gateway.types.messages import HttpRequest, Response

ANY = "*"
_METHODS = "GET, HEAD, POST, OPTIONS"
_USUAL_HEADERS = "authorization, content-type"
_MAX_AGE_S = 7200
"""For so long a browser need not ask again; Chromium remembers no longer."""
_ALWAYS_EXPOSED = ("x-request-id", "retry-after")
_READABLE_ANYWAY = {"content-type", "content-length", "vary", "access-control-allow-origin"}
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_HEADER_NAMES = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")


class Cors:
    """What pages of some origins may. Immutable."""

    def __init__(self, origins: Sequence[str]) -> None:
        """`origins`: as `GatewayConfig.cors_origins`; none: no page may."""
        self._allows_any = ANY in origins
        self.preflight_route = Route(self._handle_preflight, scope=None)
        """Taken instead of whatever is at the path of a preflight."""
        self._origins = frozenset(map(_as_browsers_write_it, origins))

    def is_preflight(self, request: HttpRequest) -> bool:
        """Whether a browser asks, for a page of an allowed origin, what it may send."""
        headers = request.headers
        return (
            request.method == "OPTIONS"
            and "access-control-request-method" in headers
            and self._allowed(headers) is not None
        )

    async def _handle_preflight(self, context: Context, http: HttpRequest, principal: Principal) -> Response:
        return self.answer_preflight(http)

    def answer_preflight(self, request: HttpRequest) -> Response:
        """Whatever the path, or the page could not read that there is nothing at it.

        The headers asked for are allowed by name: "*" would leave out Authorization.
        """
        asked = request.headers.get("access-control-request-headers", "")
        headers = {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": asked if _HEADER_NAMES.fullmatch(asked) else _USUAL_HEADERS,
            "access-control-max-age": str(_MAX_AGE_S),
        }
        if request.headers.get("access-control-request-private-network", "").lower() == "true":
            headers["access-control-allow-private-network"] = "true"
        return Response(204, headers=headers)

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        """What every answer to `request` has, errors included; None: it was not understood."""
        if not self._origins:
            return
        allowed = self._allowed({"origin": ""} if request is None else request.headers)
        added = {}
        if allowed is not None:
            added["access-control-allow-origin"] = allowed
            if response.status != 204:
                names = [name for name in response.headers if name not in _READABLE_ANYWAY]
                added["access-control-expose-headers"] = ", ".join(dict.fromkeys((*_ALWAYS_EXPOSED, *names)))
        if not self._allows_any:
            # Also to those who get nothing else: a cache must not give their answer to others.
            vary = response.headers.get("vary")
            added["vary"] = f"{vary}, origin" if vary else "origin"
        response.headers = {**response.headers, **added}

    def _allowed(self, headers: Mapping[str, str]) -> str | None:
        """The value of Access-Control-Allow-Origin, if there is to be one."""
        origin = headers.get("origin")
        if origin is None:
            return None
        if self._allows_any:
            return ANY
        return origin if origin in self._origins else None


def _as_browsers_write_it(origin: str) -> str:
    """In lower case, and without the port that the scheme has anyway."""
    origin = origin.lower()
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition(":")[0], ""))
