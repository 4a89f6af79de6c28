"""`/openapi.json`: the document of all routes, written from the declarations that requests are parsed by.

Owns the frame of the document, and what all routes have in common: headers, errors, limits. Every field, response and
error body is declared by its dialect (`vecd.gateway.api.operation`). Pure. Source of the format: the OpenAPI
Specification, version 3.1.
"""

import copy
import re
from collections.abc import Sequence

from vecd.base.files import JsonMapping, JsonObject
from vecd.gateway.api.fields import MAX_TIMEOUT_MS, Schema
from vecd.gateway.api.operation import Dialect, Operation
from vecd.gateway.api.served import HEADER, PREFIX, ModelInfo
from vecd.gateway.app.conditions import CONDITION
from vecd.gateway.app.routes import Claim, Route, Table
from vecd.gateway.dialects.ask import DIMENSIONS
from vecd.gateway.request import HEADER as IDENTITY

_STATUSES = {
    400: "The request is wrong: the message names the field, the limit and the value",
    401: "No API key, or a wrong one",
    403: "The API key does not have the scope for this",
    404: "There is no such model",
    408: "The request did not arrive in time",
    412: "The model has another identity than if-vecd-identity demands",
    413: "The body is too large",
    415: "The body's Content-Encoding is none of those understood",
    429: "Too much is waiting, or this API key has used up what it may",
    431: "The request's head is too large",
    500: "The server failed",
    503: "No answer before the deadline, or nothing to compute with",
}
_WITH_BODY = {408, 412, 413, 415, 429, 500, 503}
_WITH_KEY = {401, 403}

_REQUEST_ID = {"x-request-id": {"description": "Of the request, as it is in the log", "schema": {"type": "string"}}}
_RETRY_AFTER = {"retry-after": {"description": "Seconds, 1 to 60", "schema": {"type": "integer", "minimum": 1}}}
_RETRY_AFTER_MS = {"retry-after-ms": {"description": "The same in milliseconds", "schema": {"type": "integer"}}}
_WITH_RETRY_AFTER = {429: {**_RETRY_AFTER, **_RETRY_AFTER_MS}, 503: _RETRY_AFTER}


def _header(name: str, description: str, schema: Schema) -> Schema:
    return {"name": name, "in": "header", "description": description, "schema": schema}


_CONDITION = _header(
    CONDITION,
    f"The identity that the model must have, as {IDENTITY} has it; without ;dtype in any number format",
    {"type": "string", "pattern": "^[0-9a-f]{32}(;dtype=[a-z0-9_]{1,32})?$"},
)
_OF_EMBEDDING = [
    _header(
        "x-vecd-priority",
        "How soon an answer is wanted, beside other requests",
        {"enum": ["interactive", "normal", "bulk"]},
    ),
    _header(
        "x-vecd-timeout-ms",
        "Give the request up after so many milliseconds, with a 503",
        {"type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT_MS},
    ),
    _CONDITION,
]
_IDENTITY = {IDENTITY: {"description": "Of the model that has answered", "schema": {"type": "string"}}}


def describe_api(
    table: Table, model_infos: Sequence[ModelInfo], *, has_keys: bool, prefix: str = "", are_several: bool = False
) -> JsonObject:
    """The document of `table`, the routes of one listener, for the models that the reader reaches, one at least.
    `prefix`: that of the routes of one of several models; "": they have none. `are_several`: requests name one of
    the models, and the routes that none of them can answer are left out."""
    names = [name for each in model_infos for name in each.names] if are_several else []
    dialects, paths = dict[str, Dialect](), dict[str, JsonObject]()
    for path, methods in table.items():
        has_name = "*" in path
        for method, route in methods.items():
            claims = route.claims
            able = [claim for claim in claims if not are_several or _able(claim.operation, model_infos)]
            if claims and not able:
                continue
            dialects.update({claim.dialect.name: claim.dialect for claim in able})
            needs_key = has_keys and route.scope is not None
            item = paths.setdefault(path.replace("*", "{name}"), {"parameters": [_NAME]} if has_name else {})
            item[method.lower()] = {
                "operationId": _operation_id(method, path),
                **({"security": [{name: []} for name in _SECURITY]} if needs_key else {}),
                **(
                    _operation(able, model_infos, [] if has_name else names, needs_key=needs_key)
                    if able
                    else _own_operation(route, needs_key=needs_key)
                ),
            }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "vecd",
            "version": model_infos[0].config.version,
            "description": _introduction(model_infos, names),
        },
        **_servers(prefix, names),
        "tags": [{"name": dialect.name, "description": dialect.title} for dialect in dialects.values()]
        + [{"name": "server", "description": "What the server says of itself"}],
        "paths": paths,
        "components": {
            "schemas": {f"{name}-error": dialect.error for name, dialect in dialects.items()},
            "securitySchemes": _SECURITY if has_keys else {},
        },
    }


_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    **{name: {"type": "apiKey", "in": "header", "name": name} for name in ("api-key", "x-api-key")},
}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _introduction(model_infos: Sequence[ModelInfo], names: Sequence[str]) -> str:
    several = (
        f"A request names one of the models in its path, as {PREFIX}NAME/v1/embeddings, in the header {HEADER}, or in "
        "its body; otherwise the first that can answers it. "
    )
    return (
        f"{' '.join(map(_introduce, model_infos))} {several if names else ''}A field that is null is taken for absent, "
        "one that is unknown is ignored."
    )


def _introduce(model_info: ModelInfo) -> str:
    most = "any number of" if model_info.config.max_request_tokens is None else model_info.config.max_request_tokens
    is_dense = "dense" in model_info.card.capabilities
    what = f"{model_info.num_dimensions} dimensions" if is_dense else ", ".join(model_info.card.capabilities)
    return (
        f"Serves `{model_info.model}`: {what}, texts of up to {model_info.config.max_tokens} tokens. "
        f"A request has at most {model_info.config.max_inputs} inputs with {most} tokens in all, and a body of "
        f"at most {model_info.config.max_body_bytes} bytes."
    )


def _servers(prefix: str, names: Sequence[str]) -> JsonObject:
    """Nothing where the document's own place is that of the routes."""
    if prefix:
        return {"servers": [{"url": prefix}]}
    if not names:
        return {}
    variables = {"model": {"enum": [*names], "default": names[0]}}
    one = {"url": f"{PREFIX}{{model}}", "description": "One model", "variables": variables}
    return {"servers": [{"url": "/", "description": "All models"}, one]}


def _able(operation: Operation, model_infos: Sequence[ModelInfo]) -> list[ModelInfo]:
    return [each for each in model_infos if each.can(operation.needs)]


def _operation_id(method: str, path: str) -> str:
    return "-".join([method.lower(), *re.findall(r"[A-Za-z0-9_]+", path)]) + ("-name" if path.endswith("*") else "")


def _own_operation(route: Route, *, needs_key: bool) -> JsonObject:
    about = route.about
    assert about is not None, "a route without documentation"
    responses = {str(about.status): _response([about], {})}
    for status, schema in about.other_responses.items():
        content = {about.media_type: {"schema": schema}}
        responses[str(status)] = {"description": "", "headers": _REQUEST_ID, "content": content}
    if route.scope == "admin" or needs_key:
        responses.update({str(status): _error(status, _STATUSES[status], ["openai"]) for status in sorted(_WITH_KEY)})
    return {"tags": ["server"], "summary": about.summary, "responses": responses}


def _operation(
    claims: Sequence[Claim], model_infos: Sequence[ModelInfo], names: Sequence[str], *, needs_key: bool
) -> JsonObject:
    """`names`: those that the header may have; none if the path names the model, or there is one."""
    operations = [claim.operation for claim in claims]
    described: JsonObject = {
        "tags": list(dict.fromkeys(claim.dialect.name for claim in claims)),
        "summary": "; or: ".join(dict.fromkeys(operation.summary for operation in operations)),
    }
    has_body = any(operation.describe is None for operation in operations)
    if has_body:
        schemas = [_with_limits(operation, model_infos) for operation in operations]
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": _any_of(schemas)}}}
    embeds = any(operation.needs for operation in operations)
    parameters = list(_OF_EMBEDDING) if embeds else [_CONDITION] if has_body else []
    if names:
        parameters.append(_header(HEADER, "The model, whatever the body names", {"enum": [*names]}))
    if parameters:
        described["parameters"] = parameters
    documented = [operation for operation in operations if operation.response]
    responses = described["responses"] = {"200": _response(documented, _IDENTITY)} if documented else {}
    dialects = {claim.dialect.name: claim.dialect for claim in claims}
    left_out = (set() if has_body else _WITH_BODY) | (set() if needs_key else _WITH_KEY)
    texts = {status: text for status, text in _STATUSES.items() if status not in left_out}
    if has_body:
        for dialect in dialects.values():
            texts.update(dialect.statuses)
    for status, text in sorted(texts.items()):
        responses[str(status)] = _error(status, text, [*dialects])
    return described


def _response(operations: Sequence[Operation], headers: JsonMapping) -> JsonObject:
    by_media_type: dict[str, list[Schema]] = {}
    for operation in operations:
        by_media_type.setdefault(operation.media_type, []).append(operation.response)
    content: JsonObject = {media: {"schema": _any_of(schemas)} for media, schemas in by_media_type.items()}
    for operation in operations:
        content.update({media_type: {} for media_type in operation.binary_media_types})
    return {"description": "The answer", "headers": {**_REQUEST_ID, **headers}, "content": content}


def _error(status: int, text: str, dialects: Sequence[str]) -> JsonObject:
    """`dialects`: the names of those whose shapes the error may have."""
    schemas: list[Schema] = [{"$ref": f"#/components/schemas/{dialect}-error"} for dialect in dialects]
    headers = {**_REQUEST_ID, **_WITH_RETRY_AFTER.get(status, {})}
    return {"description": text, "headers": headers, "content": {"application/json": {"schema": _any_of(schemas)}}}


def _any_of(schemas: Sequence[Schema]) -> Schema:
    different = [schema for index, schema in enumerate(schemas) if schema not in schemas[:index]]
    return different[0] if len(different) == 1 else {"anyOf": different}


def _with_limits(operation: Operation, model_infos: Sequence[ModelInfo]) -> Schema:
    """The schema of the body, with the limits of the served models that can answer: the number of inputs, the lengths
    of vectors, and the tokens of a text. What one of them allows is allowed."""
    model_infos = _able(operation, model_infos) or model_infos
    schema = copy.deepcopy(operation.fields.schema())
    for field in operation.fields:
        described = schema["properties"][field.name]
        if field.is_large:
            for part in (described, *described.get("anyOf", ()), *described.get("oneOf", ())):
                if part.get("type") == "array" and part.get("items", {}).get("type") != "integer":
                    part["maxItems"] = max(each.config.max_inputs for each in model_infos)
        if field.key == DIMENSIONS.key:
            described.update(_dimensions_of(model_infos, field.schema, returns_tokens=operation.returns_tokens))
        if field.name == "truncate_prompt_tokens":
            described["maximum"] = max(each.config.max_tokens for each in model_infos)
    return schema


def _dimensions_of(model_infos: Sequence[ModelInfo], declared: Schema, *, returns_tokens: bool) -> Schema:
    """`declared`: the schema of the field without a model. Where its minimum is 0, 0 stands for the model's own."""
    own = {each.card.dim for each in model_infos}
    if returns_tokens:
        own |= {each.card.hidden_size for each in model_infos}
    if any(each.config.is_matryoshka and not each.card.matryoshka_dims for each in model_infos):
        return {"maximum": max(own)}
    zero = [0] if declared.get("minimum") == 0 else []
    return {"enum": [*zero, *sorted(own.union(*(each.card.matryoshka_dims for each in model_infos))), None]}
