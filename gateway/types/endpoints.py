"""The names that requests are counted under.

Owns the type and the two names that no dialect has. The table of all endpoints is made by `vecd.gateway.api.registry`.
"""

from typing import NamedTuple


class Endpoint(NamedTuple):
    """What a request is counted under."""

    route: str
    """A path of the table, never as the caller wrote it."""
    dialect: str


OWN, NO_ROUTE = "vecd", Endpoint("other", "none")
"""The dialect of what the server says of itself; and where a request is counted that went nowhere."""
