"""Cross-origin resource sharing: which web pages may call. Off unless origins are configured.

Cookies are never allowed, so a page of an allowed origin can do no more than its key. Sources: the Fetch standard,
"CORS protocol"; "Private Network Access" for the one header of it.
"""

import re
from collections.abc import Sequence

from vecd.gateway.api.fields import Headers
from vecd.gateway.request import HttpRequest, Response

ANY = "*"
_METHODS = "GET, HEAD, POST, OPTIONS"
_USUAL_HEADERS = "authorization, content-type"
_MAX_AGE_S = 7200
"""How long a browser may keep the response to a preflight; Chromium keeps none for longer."""
_ALWAYS_EXPOSED = ("x-request-id", "retry-after", "retry-after-ms")
_READABLE_ANYWAY = {"content-type", "content-length", "vary", "access-control-allow-origin"}
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_HEADER_NAMES = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")


class Cors:
    def __init__(self, origins: Sequence[str]) -> None:
        """`origins`: as in `GatewayConfig.cors_origins`; empty: no page may call."""
        self._origins = frozenset(map(_as_browsers_write_it, origins))

    def is_preflight(self, request: HttpRequest) -> bool:
        """For a page of an allowed origin."""
        headers = request.headers
        return (
            request.method == "OPTIONS"
            and "access-control-request-method" in headers
            and self._allowed(headers) is not None
        )

    async def respond_to_preflight(self, app: object, service: object, request: HttpRequest, _: object) -> Response:
        """The same at an unknown path, or else the page could not read the 404. The requested headers are allowed by
        name, because "*" would leave out Authorization."""
        requested = request.headers.get("access-control-request-headers", "")
        headers = {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": requested if _HEADER_NAMES.fullmatch(requested) else _USUAL_HEADERS,
            "access-control-max-age": str(_MAX_AGE_S),
        }
        if request.headers.get("access-control-request-private-network", "").lower() == "true":
            headers["access-control-allow-private-network"] = "true"
        return Response(204, headers=headers)

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        """Add the headers that every response to `request` has, errors included; None: it could not be parsed."""
        if not self._origins:
            return
        allowed = self._allowed({"origin": ""} if request is None else request.headers)
        added = {}
        if allowed is not None:
            added["access-control-allow-origin"] = allowed
            if response.status != 204:
                names = [name for name in response.headers if name not in _READABLE_ANYWAY]
                added["access-control-expose-headers"] = ", ".join(dict.fromkeys((*_ALWAYS_EXPOSED, *names)))
        if ANY not in self._origins:
            # Also on responses without the other headers: a cache must not give them to other origins.
            vary = response.headers.get("vary")
            added["vary"] = f"{vary}, origin" if vary else "origin"
        response.headers = {**response.headers, **added}

    def _allowed(self, headers: Headers) -> str | None:
        """The value of Access-Control-Allow-Origin, if there is to be one."""
        origin = headers.get("origin")
        if origin is None:
            return None
        if ANY in self._origins:
            return ANY
        return origin if origin in self._origins else None


def _as_browsers_write_it(origin: str) -> str:
    """In lower case, and without the default port of the scheme."""
    origin = origin.lower()
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition(":")[0], ""))
