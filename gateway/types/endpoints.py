"""The names that requests are counted under.

Owns the type and the two names that no dialect has. The table of all endpoints is made by `vecd.gateway.api.registry`
and passed to everything that reads it.
"""

from typing import NamedTuple

OWN = "vecd"
"""The dialect of the server's own routes."""

_PROBED = {
    "/", "/health", "/live", "/ping", "/metrics", "/stats",
    "/v2/health/live", "/v2/health/ready", "/v2/models/*/ready",
}  # fmt: skip


class Endpoint(NamedTuple):
    """What a request is counted under."""

    route: str
    """A path of the table of routes, never as the client wrote it."""
    dialect: str

    @property
    def is_probe(self) -> bool:
        """Whether machines request it again and again, to know whether the server lives, or its figures."""
        return self.dialect == OWN and self.route in _PROBED


NO_ROUTE = Endpoint("other", "none")
"""Requests at paths that do not exist."""
