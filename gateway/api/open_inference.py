"""The routes of the Open Inference Protocol that need no tensors: health, and what a model is. KServe probes them.

Owns the handlers and their documentation. `POST /v2/models/{name}/infer` is not served: texts in, vectors out is what
the dialects are for. Whether something is ready is decided by `vecd.gateway.api.system_routes`, as for /health. Read by
`vecd.gateway.api.registry`.

Source of the shapes: the Open Inference Protocol (V2), KServe's documentation. A server that is not ready answers 503,
as KServe's own servers do, where the protocol only says 4xx.
"""

from typing import Any

import orjson

from vecd.gateway.admission.auth import ANY_SCOPE
from vecd.gateway.admission.principals import Principal
from vecd.gateway.api import schemas
from vecd.gateway.api.context import Context
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import Operation
from vecd.gateway.api.routes import Route, name_in
from vecd.gateway.api.system_routes import why_unavailable
from vecd.gateway.types.messages import HttpRequest, Response

_MODEL = "/v2/models/*"
_MODEL_READY = "/v2/models/*/ready"


async def live(context: Context, http: HttpRequest, principal: Principal) -> Response:
    return alive()


def alive() -> Response:
    return Response(200, orjson.dumps({"live": True}))


async def ready(context: Context, http: HttpRequest, principal: Principal) -> Response:
    """The same truth as /health."""
    return _readiness({}, why_unavailable(context, http, principal))


def unready(reason: str) -> Response:
    """What a probe gets while the server starts."""
    return _readiness({}, reason)


async def model_ready(context: Context, http: HttpRequest, principal: Principal) -> Response:
    """A model that is loaded on demand is ready to be asked. Raises ApiError for a model that is not served."""
    named = _named(_MODEL_READY, context, http, principal)
    return _readiness({"name": named.model_info.model}, named.why_unavailable())


async def model(context: Context, http: HttpRequest, principal: Principal) -> Response:
    """What the model is, by any name that an embedding may use. Raises ApiError for others."""
    model_info = _named(_MODEL, context, http, principal).model_info
    outputs = [_tensor(*_output(capability, model_info)) for capability in model_info.capabilities]
    inputs = [_tensor("input", "BYTES", -1)]
    described = {"name": model_info.model, "versions": [], "platform": "vecd", "inputs": inputs, "outputs": outputs}
    return Response(200, orjson.dumps(described))


def _named(pattern: str, context: Context, http: HttpRequest, principal: Principal) -> Context:
    """The model in the path, by any name that finds it, whatever the policy for others is. Raises ApiError."""
    name = name_in(pattern, http.path) or ""
    models = context.models_named(name, http, principal)
    found = models.find(name)
    if found is None:
        raise models.refusal(name)
    return found


def _readiness(named: dict[str, str], reason: str | None) -> Response:
    if reason is None:
        return Response(200, orjson.dumps({**named, "ready": True}))
    return Response(503, orjson.dumps({**named, "ready": False, "reason": reason}), {"retry-after": "1"})


def _output(capability: str, model_info: ModelInfo) -> tuple[str, str, *tuple[int, ...]]:
    """Name, type and shape of what a capability makes of one input each; -1 stands for any length."""
    match capability:
        case "dense":
            return "embedding", "FP32", -1, model_info.num_dimensions
        case "rerank":
            return "score", "FP32", -1
        case "classify":
            return "classify", "FP32", -1, model_info.num_labels
        case "token-classify":
            return "token-classify", "FP32", -1, -1, model_info.num_labels
        case "sparse":
            return "sparse", "FP32", -1, model_info.vocab_size
        case _:
            return "multi-vector", "FP32", -1, -1, model_info.token_dim


def _tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape}


_TENSORS = schemas.list_of(
    schemas.record(
        name=schemas.STRING,
        datatype={"enum": ["BYTES", "FP32"]},
        shape=schemas.described(schemas.list_of({"type": "integer"}, at_least=1), "-1: any length"),
    )
)
_LIVE = schemas.record(live=schemas.BOOLEAN)
_READY = schemas.record("reason", ready=schemas.BOOLEAN, reason=schemas.STRING)
_READY_MODEL = schemas.record("reason", name=schemas.STRING, ready=schemas.BOOLEAN, reason=schemas.STRING)
_METADATA = schemas.record(
    name=schemas.STRING,
    versions=schemas.described(schemas.list_of(schemas.STRING), "none: there is one of each model"),
    platform={"const": "vecd"},
    inputs=_TENSORS,
    outputs=_TENSORS,
)

OPEN_INFERENCE_ROUTES = {
    "/v2/health/live": {"GET": Route(live, None, Operation(summary="Whether the gateway runs", response=_LIVE))},
    "/v2/health/ready": {
        "GET": Route(
            ready,
            None,
            Operation(summary="Whether a worker can serve", response=_READY, other_responses={503: _READY}),
        )
    },
    _MODEL_READY: {
        "GET": Route(
            model_ready,
            None,
            Operation(
                summary="Whether a worker can serve this model",
                response=_READY_MODEL,
                other_responses={503: _READY_MODEL},
            ),
        )
    },
    _MODEL: {
        "GET": Route(model, ANY_SCOPE, Operation(summary="Describe the model, as KServe has it", response=_METADATA))
    },
}
