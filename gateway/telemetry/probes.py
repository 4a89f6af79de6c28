"""What machines ask a server for again and again: whether it lives, and its figures.

Owns that list. Answered, it is not worth a line in a log at level info, nor a trace of its own. Read by
`vecd.gateway.telemetry.access_log` and `vecd.gateway.telemetry.tracing`.
"""

from vecd.gateway.api.registry import ENDPOINTS
from vecd.gateway.types.endpoints import OWN

_PROBED = {"/", "/health", "/live", "/ping", "/metrics", "/stats"}

PROBES = frozenset(index for index, (route, dialect) in enumerate(ENDPOINTS) if dialect == OWN and route in _PROBED)
"""By the index that records have."""
