"""text-embeddings-inference's dialect: every exchange to the byte, and what one server cannot show: prompts, defaults,
the table of errors, large bodies."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.asking import PLAIN
from vecd.gateway.api.dialects.tei import DIALECT, render_error
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import Call, ParsedEmbed, ParsedTokenize
from vecd.gateway.types.errors import (
    ApiError,
    BadRequest,
    DeadlinePassed,
    EmptyInput,
    EngineFailed,
    InputTooLong,
    InvalidApiKey,
    ModelNotFound,
    PayloadTooLarge,
    PoisonInput,
    RateLimited,
    ServerError,
    TooManyInputs,
    TooManyRequests,
    Unavailable,
    WrongModel,
)
from vecd.gateway.types.request import EmbedRequest, Encoding, Overflow
from vecd.shm.output import Output


def call(model_info: ModelInfo, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Call:
    return Call(DIALECT.operations[f"POST {path}"].fields.read(body), headers or {}, model_info, "req_1")


def request_of(
    model_info: ModelInfo, path: str = "/embed", headers: dict[str, str] | None = None, **body: Any
) -> EmbedRequest:
    operation = DIALECT.operations[f"POST {path}"]
    assert operation.embed is not None
    ask = operation.embed(call(model_info, path, {"inputs": "a", **body}, headers))
    assert isinstance(ask, ParsedEmbed)
    return ask.request


# --- what is asked ----------------------------------------------------------------------------------------------

_CUT, _CUT_LEFT, _ERROR, _CHUNK = Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT, Overflow.ERROR, Overflow.CHUNK


@pytest.mark.parametrize(
    ("default", "truncate", "direction", "expected"),
    [
        (_CUT, None, None, _CUT),
        (_CUT, None, "left", _CUT_LEFT),
        (_CUT, True, None, _CUT),
        (_CUT, True, "Right", _CUT),
        (_CUT, True, "Left", _CUT_LEFT),
        (_CUT, False, "left", _ERROR),
        (_CUT_LEFT, None, None, _CUT_LEFT),
        (_CUT_LEFT, None, "right", _CUT),
        (_CUT_LEFT, True, None, _CUT_LEFT),
        (_CUT_LEFT, True, "right", _CUT),
        (_ERROR, None, "left", _ERROR),
        (_ERROR, True, None, _CUT),
        (_ERROR, True, "left", _CUT_LEFT),
        (_ERROR, False, None, _ERROR),
        (_CHUNK, None, None, _CHUNK),
        (_CHUNK, None, "left", _CHUNK),
        (_CHUNK, True, None, _CUT),
        (_CHUNK, False, None, _ERROR),
    ],
)
def test_what_becomes_of_a_long_text(model_info, default, truncate, direction, expected):
    model_info = replace(model_info, overflow=default)
    request = request_of(model_info, truncate=truncate, truncation_direction=direction)
    assert request.tokenizing.overflow is expected


def test_vectors_have_length_1_unless_they_are_asked_for_as_they_are(model_info):
    for body in ({}, {"normalize": None}, {"normalize": True}):
        request = request_of(model_info, **body)
        assert (request.output, request.normalize) == (Output.VECTORS, True)
    request = request_of(model_info, normalize=False)
    assert (request.output, request.normalize) == (Output.UNNORMALIZED, False)


def test_a_prompt_is_one_of_the_model_s(model_info):
    model_info = replace(model_info, prompts={"query": "query: "}, default_prompt="default: ")
    assert request_of(model_info, prompt_name="query").tokenizing.prompt == "query: "
    assert request_of(model_info).tokenizing.prompt is None, "the model's default"
    tokenize = DIALECT.operations["POST /tokenize"].reply
    assert tokenize is not None
    for name, prompt in ((None, "default: "), ("query", "query: ")):
        asked = tokenize(call(model_info, "/tokenize", {"inputs": "a", "prompt_name": name}))
        assert isinstance(asked, ParsedTokenize)
        assert asked.prompt == prompt
    with pytest.raises(BadRequest, match=r"'parameters\.prompt_name': the model has no prompt 'other'"):
        request_of(
            model_info,
            "/similarity",
            inputs={"source_sentence": "a", "sentences": ["b"]},
            parameters={"prompt_name": "other"},
        )


def test_the_name_of_a_model_in_the_path_is_a_name_as_elsewhere(model_info):
    model_info = replace(model_info, prompts={"query": "query: ", "passage": "passage: "})
    path, named = "/models/*", f"{model_info.model}:query"
    assert request_of(model_info, path, model="org/another").tokenizing.prompt is None
    assert request_of(model_info, path, model=named).tokenizing.prompt == "query: "
    assert request_of(model_info, path, model=named, prompt_name="query").tokenizing.prompt == "query: "
    with pytest.raises(BadRequest, match="'model' and 'prompt_name' contradict each other"):
        request_of(model_info, path, model=named, prompt_name="passage")
    with pytest.raises(ModelNotFound):
        request_of(replace(model_info, is_strict=True), path, model="org/another")


COMPARED = {"source_sentence": "a", "sentences": ["b"]}


@pytest.mark.parametrize(
    ("path", "inputs"),
    [
        ("/", "a"),
        ("/", COMPARED),
        ("/invocations", "a"),
        ("/invocations", COMPARED),
        ("/embed", "a"),
        ("/embed_all", "a"),
        ("/similarity", COMPARED),
    ],
)
def test_options_mean_the_same_wherever_they_stand(model_info, path, inputs):
    """Clients of Hugging Face's endpoints have them in `parameters`, those of this API beside the texts."""
    model_info = replace(model_info, prompts={"query": "query: "}, is_matryoshka=True)
    options: dict[str, Any] = {"prompt_name": "query", "truncate": True, "truncation_direction": "left"}
    if path != "/embed_all":
        options["dimensions"] = 64
    asked = [
        request_of(model_info, path, inputs=inputs, **body)
        for body in (
            options,
            {"parameters": options},
            {"parameters": {**options, "prompt_name": None}, "prompt_name": "query"},
            {**options, "parameters": options},
        )
    ]
    assert asked[1:] == asked[:1] * 3
    tokenizing = asked[0].tokenizing
    assert (tokenizing.prompt, tokenizing.overflow) == ("query: ", Overflow.TRUNCATE_LEFT)
    assert asked[0].dimensions == options.get("dimensions")


@pytest.mark.parametrize("inputs", ["a", COMPARED])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"truncate": True, "parameters": {"truncate": False}}, "'truncate' and 'parameters.truncate' contradict"),
        ({"parameters": {"prompt_name": "other"}}, "'parameters.prompt_name': the model has no prompt 'other'"),
        ({"prompt_name": "other"}, "'prompt_name': the model has no prompt 'other'"),
        ({"parameters": {"dimensions": 64}}, "'parameters.dimensions' is 64"),
        ({"dimensions": 64}, "'dimensions' is 64"),
        ({"parameters": {"truncate": 1}}, "'parameters.truncate' must be true or false"),
        ({"parameters": ["truncate"]}, "'parameters' must be an object, is a list"),
    ],
)
def test_options_are_refused_wherever_they_stand(model_info, inputs, body, message):
    with pytest.raises(BadRequest) as caught:
        request_of(replace(model_info, prompts={"query": "query: "}), "/", inputs=inputs, **body)
    assert message in caught.value.message


def test_vectors_are_answered_as_parameters_say_and_cosines_are_numbers(model_info):
    assert request_of(model_info, "/", parameters={"encoding_format": "npy"}).forms[0].encoding is Encoding.NPY
    assert request_of(model_info, "/", parameters={"normalize": False}).output is Output.UNNORMALIZED
    for body in ({"parameters": {"encoding_format": "npy"}}, {"encoding_format": "bytes"}):
        with pytest.raises(BadRequest, match="encoding_format' must be 'float': cosines are JSON"):
            request_of(model_info, "/", inputs=COMPARED, **body)


def test_fewer_dimensions_of_a_model_made_for_it(model_info):
    model_info = replace(model_info, is_matryoshka=True)
    assert request_of(model_info, dimensions=64).dimensions == 64
    assert request_of(model_info, dimensions=384).dimensions is None
    with pytest.raises(BadRequest, match=r"'instances\[0\]\.dimensions'"):
        request_of(model_info, "/vertex", instances=[{"inputs": "a", "dimensions": 385}])


def test_headers_that_mean_the_same_everywhere(model_info):
    headers = {"x-vecd-priority": "bulk", "x-vecd-timeout-ms": "1500", "accept": "application/octet-stream"}
    request = request_of(model_info, headers=headers)
    assert request.priority is not None
    assert (request.priority.name, request.timeout_s, request.forms[0].encoding) == ("BULK", 1.5, Encoding.BYTES)
    assert request_of(model_info, "/embed_all", headers=headers).timeout_s == 1.5
    vertex = request_of(model_info, "/vertex", headers=headers, instances=[{"inputs": "a"}])
    assert (vertex.timeout_s, vertex.forms[0].encoding) == (1.5, Encoding.FLOAT)


# --- every token ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("default", "truncate", "expected"),
    [(_CUT, None, _CUT), (_CHUNK, None, _ERROR), (_CHUNK, True, _CUT), (_ERROR, None, _ERROR), (_CUT, False, _ERROR)],
)
def test_texts_are_not_split_where_every_token_counts(model_info, default, truncate, expected):
    request = request_of(replace(model_info, overflow=default), "/embed_all", truncate=truncate)
    assert (request.output, request.tokenizing.overflow) == (Output.TOKENS, expected)


def test_tokens_that_have_no_room_are_refused(model_info):
    with pytest.raises(WrongModel, match="768 dimensions, and there is room for the 384"):
        request_of(replace(model_info, hidden_size=768, outputs=frozenset({Output.VECTORS})), "/embed_all")


# --- errors -----------------------------------------------------------------------------------------------------


def read_by_the_dialect(error: ApiError) -> ApiError:
    error.dialect = DIALECT.name
    return error


@pytest.mark.parametrize(
    ("error", "status", "error_type"),
    [
        (EmptyInput("m", param="inputs"), 400, "Empty"),
        (BadRequest("m", param="inputs"), 422, "Validation"),
        (BadRequest("The body is not valid JSON"), 400, "Validation"),
        (read_by_the_dialect(BadRequest("Text 0 has no token")), 422, "Validation"),
        (TooManyInputs("m", param="inputs"), 422, "Validation"),
        (InputTooLong(8, 9, param="input"), 422, "Validation"),
        (InvalidApiKey("m"), 401, "Validation"),
        (PayloadTooLarge("m"), 413, "Validation"),
        (WrongModel("m"), 424, "Backend"),
        (EngineFailed("m"), 424, "Backend"),
        (PoisonInput("m"), 424, "Backend"),
        (ServerError("m"), 500, "Backend"),
        (TooManyRequests("m", retry_after_s=1), 429, "Overloaded"),
        (RateLimited("m", retry_after_s=1), 429, "Overloaded"),
        (Unavailable("m", retry_after_s=1), 503, "Unhealthy"),
        (DeadlinePassed(None), 503, "Unhealthy"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ApiError) else str(value),
)
def test_status_and_type_of_an_error(error, status, error_type):
    response = render_error(error)
    assert isinstance(response.body, bytes)
    body = json.loads(response.body)
    assert (response.status, body) == (status, {"error": error.message, "error_type": error_type})


def test_an_error_names_the_field_as_it_is_called_here():
    body = render_error(EngineFailed("The engine failed on 'input[3]'")).body
    assert isinstance(body, bytes)
    assert json.loads(body)["error"] == "The engine failed on 'inputs[3]'"


# --- answers that follow from others ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return ["one", "two words", "three words here", "one"]


@pytest.mark.parametrize(
    ("instances", "message"),
    [
        ([{"inputs": "a"}, {"inputs": "b", "truncate": True}], r"'instances\[1\]' has other options"),
        ([{"inputs": "a"}, {"inputs": [101, 102]}], r"'instances\[1\]\.inputs' are token ids"),
        (
            [{"inputs": ["a", "b"]}, {"inputs": ["c", "d", "e"]}],
            r"'instances' have more than 4 inputs.*\(--max-inputs\)",
        ),
        ([{"inputs": "a", "encoding_format": "npy"}], r"'instances\[0\]\.encoding_format' must be 'float'"),
        ([{"inputs": "a", "normalize": 1}], r"'instances\[0\]\.normalize' must be true or false"),
        (["a"], r"'instances\[0\]' must be an object, is a string"),
        ("a", "'instances' must be a list of objects, is a string"),
    ],
)
def test_instances_that_are_no_one_request_are_refused(model_info, instances, message):
    with pytest.raises(BadRequest, match=message):
        request_of(replace(model_info, max_inputs=4), "/vertex", instances=instances)


def test_instances_with_the_same_options_are_one_request(model_info):
    same: dict[str, Any] = {"truncate": True, "normalize": False}
    instances = [{"inputs": ["a", "b"], **same}, {"inputs": "c", "unknown": 1, "prompt_name": None, **same}]
    request = request_of(model_info, "/vertex", instances=instances)
    assert (request.inputs, request.output) == (["a", "b", "c"], Output.UNNORMALIZED)
    assert request.tokenizing.overflow is Overflow.TRUNCATE


# --- whatever is sent -------------------------------------------------------------------------------------------

PATHS = sorted({at.removeprefix("POST ") for at in DIALECT.operations})
FIELDS = {field.name for operation in DIALECT.operations.values() for field in operation.fields}
NAMES = sorted(FIELDS | {"source_sentence", "sentences", "query", "texts"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["left", "float"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(NAMES), values, max_size=4),
    max_leaves=8,
)
SERVED = replace(
    PLAIN, dim=8, hidden_size=8, max_tokens=16, is_matryoshka=True, max_inputs=3, overflow=Overflow.CHUNK,
    compute_type="gpu", prompts={"query": "query: "},
)  # fmt: skip


@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5))
def test_any_object_is_a_request_or_refused(path, body):
    """And what is refused is answered in the dialect's shape."""
    operation = DIALECT.operations[f"POST {path}"]
    parse = operation.embed or operation.reply
    assert parse is not None
    try:
        ask = parse(call(SERVED, path, body))
    except (BadRequest, WrongModel) as error:
        response = render_error(read_by_the_dialect(error))
        assert response.status in (400, 422, 424)
        assert isinstance(response.body, bytes)
        assert json.loads(response.body).keys() == {"error", "error_type"}
    else:
        asked = getattr(ask, "request", None)
        assert asked is None or 1 <= len(asked.inputs) <= SERVED.max_inputs
