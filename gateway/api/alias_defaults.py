"""The request defaults of an alias: what a request by that name gets where it does not say otherwise.

Owns which field of a request keeps which default out, in all dialects. A field counts as given unless it is null, as
everywhere. What `ModelInfo.by_alias` has as the model's own default (the prompt, the policy for long inputs) needs
nothing here but to be put into the request. An operation that has no use for a default ignores it. Pure. Called by
`vecd.gateway.api.handlers`, for requests that name such an alias alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import Call, Operation, ParsedEmbed, ParsedMessages, ParsedStay, Work
from vecd.gateway.types.config import AliasDefaults
from vecd.gateway.types.request import EmbedRequest, Overflow, Pair, Role
from vecd.shm.output import Output

_DIMENSIONS = ("dimensions", "output_dimension", "truncate_dim")
_DTYPES = ("output_dtype", "embed_dtype", "embedding_type", "encoding_type")
_RAW_SCORES = ("raw_scores", "use_activation")
_DENSE_ALONE = (None, "dense", ["dense"])
"""Values of `output` for which the response has a dense vector alone."""
_OTHER_TASKS = ("token_embed", "classify", "token_classify")
"""Values of vLLM's `task` for other rows than a vector for each input."""
_COHERE_S_TYPES = ("int8", "uint8", "binary", "ubinary")
_VECTORS = (Output.VECTORS, Output.UNNORMALIZED)


def fill_in(body: Mapping[str, Any], operation: Operation, defaults: AliasDefaults) -> Mapping[str, Any]:
    """The fields of the body that the operation has, and the defaults that decide the shape of its response in those
    that it has for them."""
    names, dtype = operation.fields.small, defaults.dtype
    body = {name: value for name, value in body.items() if name in names or name in operation.fields.large}
    filled: dict[str, Any] = {}
    if dtype is not None and operation.needs[:1] == ("dense",) and _is_dense_alone(body):
        if "output_dtype" in names and not _gives(body, _DTYPES):
            filled["output_dtype"] = dtype
        elif "embedding_types" in names and dtype in _COHERE_S_TYPES and not _gives(body, ("embedding_types",)):
            filled["embedding_types"] = [dtype]
    is_ranking = "rerank" in operation.needs and "raw_scores" in names
    if defaults.raw_scores is not None and is_ranking and not _gives(body, _RAW_SCORES):
        filled["raw_scores"] = defaults.raw_scores
    return {**body, **filled}


def parse_with_defaults(parse: Callable[[Call], Work], body: Mapping[str, Any], call: Call) -> Work:
    """As `parse`, with the defaults of `call.model_info` in the request. `body`: as `fill_in` returns it. Raises what
    `parse` raises. A form that vectors of the default dimensions cannot have is refused when they are collected."""
    return _completed(parse(call), body, call.model_info)


def _completed(work: Work, body: Mapping[str, Any], model_info: ModelInfo) -> Work:
    match work:
        case ParsedEmbed():
            return work._replace(request=_complete(work.request, body, model_info))
        case ParsedMessages(payload, proceed):

            def proceed_with_defaults(texts: list[str]) -> Any:
                return _completed(proceed(texts), body, model_info)

            return ParsedMessages(payload, proceed_with_defaults)
        case ParsedStay(work=ParsedEmbed() as embed):
            return work._replace(work=embed._replace(request=_complete(embed.request, body, model_info)))
        case _:
            return work


def _complete(request: EmbedRequest, body: Mapping[str, Any], model_info: ModelInfo) -> EmbedRequest:
    """The request, in which None means a default wherever its tokenizing has it."""
    defaults, how = model_info.defaults, request.tokenizing
    assert defaults is not None
    is_ranking = how.num_queries > 0 or isinstance(request.inputs[0], Pair)
    if how.prompt is None and model_info.model_prompt is not None and not is_ranking:
        how = how._replace(prompt=model_info.default_prompt)
    if how.role is None and defaults.role is not None:
        how = how._replace(role=Role(defaults.role))
    if how.overflow is None and defaults.overflow is not None:
        how = how._replace(overflow=Overflow(defaults.overflow))
    request = request._replace(tokenizing=how)
    if defaults.dimensions is None or request.output not in _VECTORS or _gives(body, _DIMENSIONS):
        return request
    is_default = defaults.dimensions == (model_info.truncate_dim or model_info.dim)
    return request._replace(dimensions=None if is_default else defaults.dimensions)


def _is_dense_alone(body: Mapping[str, Any]) -> bool:
    is_multi_vector = body.get("return_multivector") is True or body.get("task") in _OTHER_TASKS
    return body.get("output") in _DENSE_ALONE and not is_multi_vector


def _gives(body: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """Whether the body has one of the fields, or the object in it that text-embeddings-inference and Vertex AI have
    for options."""
    instances = body.get("instances")
    first = instances[0] if isinstance(instances, list) and instances else None
    places = (place for place in (body, body.get("parameters"), first) if isinstance(place, Mapping))
    return any(place.get(name) is not None for place in places for name in names)
