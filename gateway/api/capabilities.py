"""What the served model can do, beside what an operation needs.

Owns the check, which comes before the fields of a request are read, and its message: a client that sends texts to a
model of another kind is told the kind, and where it is served. Called by `vecd.gateway.api.handlers` with the routes of
`vecd.gateway.api.registry`.
"""

from collections.abc import Mapping, Sequence

from vecd.gateway.api.model_info import listed
from vecd.gateway.api.operations import Operation
from vecd.gateway.types.errors import WrongModel

_CAN = {
    "dense": "make dense vectors",
    "rerank": "rerank texts",
    "classify": "classify texts",
    "token-classify": "classify the tokens of texts",
    "sparse": "make sparse vectors",
    "multi-vector": "make a vector for each token",
}
"""By capability (`vecd.shm.heads.CAPABILITIES`)."""
_MAX_ROUTES = 8
"""Routes that a message names."""


def is_able(operation: Operation, capabilities: Sequence[str]) -> bool:
    """Whether a model of these capabilities has one that the operation needs."""
    return not operation.needs or any(need in capabilities for need in operation.needs)


def check_model(
    operation: Operation,
    capabilities: Sequence[str],
    routes: Mapping[str, Sequence[str]],
    able: Sequence[str] = (),
) -> None:
    """Raises WrongModel unless `is_able`. `routes`: by capability, the paths of the operations that need it. `able`:
    the names of other models of this server, if there are any, that are able."""
    if not is_able(operation, capabilities):
        others = f". Models of this server that can: {listed(able)}" if able else ""
        raise WrongModel(_message(operation.needs, capabilities, routes) + others)


def _message(needs: Sequence[str], capabilities: Sequence[str], routes: Mapping[str, Sequence[str]]) -> str:
    paths = list(dict.fromkeys(path for capability in capabilities for path in routes.get(capability, ())))
    more = f" and {len(paths) - _MAX_ROUTES} more" if len(paths) > _MAX_ROUTES else ""
    served = f". It is served at {', '.join(paths[:_MAX_ROUTES])}{more}" if paths else ""
    can = " and ".join(_CAN[capability] for capability in capabilities)
    cannot = " or ".join(_CAN[need] for need in needs)
    return f"This model can {can} ({', '.join(capabilities)}); it cannot {cannot}{served}"
