"""The load of a run as data: requests, target, rate and duration.

Has no socket and no clock. Made by `vecd.client.bench.command` and the benchmarks, run by `vecd.client.bench.run`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vecd.client.connection import Target

DEFAULT_MAX_CONNECTIONS = 1024
MAX_RATE_PER_S = 100_000.0
"""Several times what this generator can send."""


class Unreachable(Exception):
    """Raised by `LoadRun.run` when no connection can be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run: a closed loop of `clients`, or an open one of `rate_per_s`. Immutable.

    Raises ValueError when it is neither or both.
    """

    target: Target
    requests: Sequence[bytes]
    """Whole HTTP requests, sent in turn by all clients together."""
    texts_per_request: int
    clients: int = 0
    """Each sends its next request when it has the last one's answer."""
    rate_per_s: float | None = None
    """Average arrivals a second, at random moments (a Poisson process), whatever the server does."""
    max_connections: int = DEFAULT_MAX_CONNECTIONS
    """Connections of an open loop. An arrival that finds all of them busy is an error."""
    warmup_s: float
    duration_s: float
    """Length of the measured window; ignored when `num_requests` is given."""
    num_requests: int | None = None
    timeout_s: float
    """Longest time from sending a request to its whole response."""
    encoding_format: str = "base64"
    """Encoding of the responses, which `requests` demand. One of `vecd.client.bench.responses.READERS`."""
    goodput_ms: float | None = None
    """An answer is good when it comes within this of the request's arrival."""
    seed: int = 0
    """Seed of the arrivals of an open loop."""
    bulk: "Load | None" = None
    """A closed loop that runs beside; its duration is infinite beside a run of `num_requests`, at whose end it ends."""

    def __post_init__(self) -> None:
        if (self.rate_per_s is None) == (self.clients == 0):
            raise ValueError("a load has clients or a rate, and not both")
        if self.rate_per_s is not None and not 0 < self.rate_per_s <= MAX_RATE_PER_S:
            raise ValueError(f"a rate must be above 0 and at most {MAX_RATE_PER_S:,.0f} a second")
