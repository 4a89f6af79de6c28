"""Whatever a body has in Cohere's and Ollama's fields, it is taken or refused, and no refusal quotes what was to be
embedded. Without a server: parsing is pure."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vecd.gateway.api.dialects import cohere, ollama
from vecd.gateway.api.fields import Field
from vecd.gateway.api.operations import Call, Operation, ParsedDecode, ParsedEmbed, ParsedStay, ParsedTokenize, Work
from vecd.gateway.types.errors import BadRequest, NotFound
from vecd.gateway.types.messages import Response

SECRET = "S3cr3t"
OPERATIONS = {
    at: operation
    for dialect in (cohere.DIALECT, ollama.DIALECT)
    for at, operation in dialect.operations.items()
    if operation.describe is None
}

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8))
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)
leaves = st.one_of(st.just(SECRET), st.just({SECRET: SECRET}), scalars)
items = st.one_of(leaves, st.fixed_dictionaries({"type": st.one_of(st.just("text"), leaves), "text": leaves}))
secrets = st.one_of(
    leaves,
    st.lists(leaves, max_size=3),
    st.lists(st.fixed_dictionaries({"content": st.one_of(leaves, st.lists(items, max_size=2))}), max_size=2),
)
contents = st.lists(st.just({"content": [{"type": "text", "text": SECRET}]}), max_size=3)
likely: dict[str, st.SearchStrategy[Any]] = {
    "texts": st.one_of(st.lists(st.just(SECRET), max_size=3), secrets),
    "inputs": st.one_of(contents, secrets),
    "images": secrets,
    "input": st.one_of(st.lists(st.just(SECRET), max_size=3), secrets),
    "prompt": st.one_of(st.just(SECRET), secrets),
    "model": st.sampled_from(["all-MiniLM-L6-v2", "m:query", "m:latest", "other", ""]),
    "input_type": st.sampled_from(["search_query", "search_document", "image"]),
    "embedding_types": st.lists(st.sampled_from(["float", "int8", "binary", "base64", "x"]), max_size=4),
    "truncate": st.sampled_from(["NONE", "START", "END", True, False]),
    "options": st.one_of(st.dictionaries(st.sampled_from(["num_ctx", "temperature"]), scalars), leaves),
}


@st.composite
def bodies(draw: st.DrawFn, operation: Operation) -> dict[str, Any]:
    fields: list[Field[Any]] = draw(st.lists(st.sampled_from([*operation.fields]), unique_by=lambda field: field.name))
    return {field.name: draw(likely.get(field.name, anything) | _other(field)) for field in fields}


def _other(field: Field[Any]) -> st.SearchStrategy[Any]:
    return secrets if field.is_large else anything


@pytest.mark.slow
@pytest.mark.parametrize("at", OPERATIONS)
@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), is_strict=st.booleans())
def test_a_body_is_taken_or_refused(model_info, at, data, is_strict):
    operation = OPERATIONS[at]
    model_info = replace(
        model_info, is_strict=is_strict, max_inputs=2, prompts={"query": "query: "}, is_matryoshka=True
    )
    body = data.draw(bodies(operation))
    run = operation.embed or operation.reply
    assert run is not None
    refusal = ""
    asked: Work | None = None
    try:
        asked = run(Call(operation.fields.read(body), {}, model_info, "req_1"))
    except (BadRequest, NotFound) as error:
        refusal = error.message
    assert SECRET not in refusal
    if not isinstance(asked, ParsedEmbed):
        assert refusal or isinstance(asked, Response | ParsedTokenize | ParsedDecode | ParsedStay)
        return
    assert 1 <= len(asked.request.inputs) <= 2
    assert all(type(text) is str for text in asked.request.inputs)
    assert asked.request.forms
