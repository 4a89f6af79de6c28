"""Whatever a body has in the fields of Cohere, Ollama and text-embeddings-inference, it is taken or refused in the
dialect's shape, and no refusal quotes what was to be embedded. Without a server: parsing is pure."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.arrays import MOODS, RERANKER, SPLADE
from tests.support.asking import PLAIN, body_of, changed
from vecd.gateway.api.fields import Field
from vecd.gateway.api.operation import Call, Operation, ParsedDecode, ParsedEmbed, ParsedStay, ParsedTokenize
from vecd.gateway.dialects import cohere, ollama, tei
from vecd.gateway.errors import BadRequest, NotFound, WrongModel
from vecd.gateway.request import Overflow, Response

SECRET = "S3cr3t"
OPERATIONS = {
    id(operation): pytest.param(dialect, operation, id=f"{dialect.name} {at}")
    for dialect in (cohere.DIALECT, ollama.DIALECT, tei.DIALECT)
    for at, operation in dialect.operations.items()
    if operation.describe is None
}
"""Each once, at whatever paths it is."""
SERVED = changed(
    PLAIN, max_tokens=16, max_inputs=2, prompts={"query": "query: "}, is_matryoshka=True, overflow=Overflow.CHUNK
)
KINDS = {"dense": SERVED, "classify": MOODS, "rerank": RERANKER, "sparse": SPLADE}

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
    st.fixed_dictionaries({"source_sentence": leaves, "sentences": st.one_of(leaves, st.lists(leaves, max_size=3))}),
)
texts = st.one_of(st.just(SECRET), st.lists(st.just(SECRET), max_size=3), secrets)
contents = st.lists(st.just({"content": [{"type": "text", "text": SECRET}]}), max_size=3)
options = st.dictionaries(st.sampled_from(["num_ctx", "temperature", "truncate", "prompt_name"]), scalars)
likely: dict[str, st.SearchStrategy[Any]] = {
    "inputs": st.one_of(contents, texts),
    "model": st.sampled_from(["all-MiniLM-L6-v2", "m:query", "m:latest", "other", ""]),
    "input_type": st.sampled_from(["search_query", "search_document", "image"]),
    "embedding_types": st.lists(st.sampled_from(["float", "int8", "binary", "base64", "x"]), max_size=4),
    "truncate": st.sampled_from(["NONE", "START", "END", True, False]),
    **dict.fromkeys(("texts", "input", "images", "prompt", "query", "documents"), texts),
    **dict.fromkeys(("options", "parameters"), st.one_of(options, leaves)),
}


@st.composite
def bodies(draw: st.DrawFn, operation: Operation) -> dict[str, Any]:
    fields: list[Field[Any]] = draw(st.lists(st.sampled_from([*operation.fields]), unique_by=lambda field: field.name))
    return {field.name: draw(likely.get(field.name, anything) | _other(field)) for field in fields}


def _other(field: Field[Any]) -> st.SearchStrategy[Any]:
    return secrets if field.is_large else anything


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "operation"), OPERATIONS.values())
@settings(max_examples=50)
@given(data=st.data(), is_strict=st.booleans())
def test_a_body_is_taken_or_refused(dialect, operation, data, is_strict):
    body = data.draw(bodies(operation))
    model_info = next(kind for name, kind in KINDS.items() if name in operation.needs or not operation.needs)
    run = operation.embed or operation.reply
    assert run is not None
    try:
        asked = run(Call(operation.fields.read(body), {}, changed(model_info, is_strict=is_strict), "req_1"))
    except (BadRequest, NotFound, WrongModel) as error:
        refusal = body_of(dialect.render_error(error))
        assert SECRET.encode() not in refusal
        assert orjson.loads(refusal)
        return
    if not isinstance(asked, ParsedEmbed):
        assert isinstance(asked, Response | ParsedTokenize | ParsedDecode | ParsedStay)
        return
    assert 1 <= len(asked.request.inputs) <= model_info.config.max_inputs
    assert asked.request.forms
    assert dialect is tei.DIALECT or all(type(text) is str for text in asked.request.inputs)
