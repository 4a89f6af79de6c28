"""What the served model can do, beside what an operation needs.

Owns the check, which comes before the fields of a request are read, and its message: a client that sends texts to a
model of another kind is told the kind, where it is served, and which other models could answer. A dialect that refuses
a request for the model's sake says only why; the rest is added here. Called by `vecd.gateway.api.handlers` with the
routes of `vecd.gateway.api.registry`.
"""

from collections.abc import Iterable, Mapping, Sequence

from vecd.gateway.api.model_info import ModelInfo, listed
from vecd.gateway.api.operations import Operation
from vecd.gateway.types.errors import ApiError, WrongModel

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


def check_model(operation: Operation, capabilities: Sequence[str], routes: Mapping[str, Sequence[str]]) -> None:
    """Raises WrongModel unless `is_able`. `routes`: by capability, the paths of the operations that need it."""
    if not is_able(operation, capabilities):
        can = " and ".join(_CAN[capability] for capability in capabilities)
        cannot = " or ".join(_CAN[need] for need in operation.needs)
        raise WrongModel(
            f"This model can {can} ({', '.join(capabilities)}); it cannot {cannot}{_served_at(capabilities, routes)}",
            can=lambda info: True,
        )


def add_others(
    error: ApiError,
    operation: Operation,
    model_info: ModelInfo,
    all_infos: Iterable[ModelInfo],
    routes: Mapping[str, Sequence[str]],
) -> None:
    """Add to the message of an error about the kind of `model_info` what the client can do about it: where this model
    is served, and which of all models of this server could answer the request. Leaves other errors as they are."""
    if error.can is None:
        return
    served = _served_at(model_info.capabilities, routes)
    if isinstance(error, WrongModel) and served not in error.message:
        error.message += served
    others = (info for info in all_infos if info is not model_info)
    able = [info.model for info in others if is_able(operation, info.capabilities) and error.can(info)]
    if able:
        error.message += f". Models of this server that can: {listed(able)}"


def _served_at(capabilities: Sequence[str], routes: Mapping[str, Sequence[str]]) -> str:
    paths = list(dict.fromkeys(path for capability in capabilities for path in routes.get(capability, ())))
    more = f" and {len(paths) - _MAX_ROUTES} more" if len(paths) > _MAX_ROUTES else ""
    return f". It is served at {', '.join(paths[:_MAX_ROUTES])}{more}" if paths else ""
