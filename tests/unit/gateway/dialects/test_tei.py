"""text-embeddings-inference's dialect: what its golden file cannot show, of one server without prompts: prompts,
defaults, the table of errors."""

from typing import Any

import orjson
import pytest

from tests.support.asking import PLAIN, ask, body_of, changed
from vecd.gateway import errors
from vecd.gateway.api.operation import Call, ParsedTokenize
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects.tei import DIALECT, render_error
from vecd.gateway.request import EmbedRequest, Encoding, Overflow, Priority
from vecd.shm.output import Output

E5 = changed(PLAIN, prompts={"query": "query: ", "passage": "passage: "}, prompt="default: ")
COMPARED = {"source_sentence": "a", "sentences": ["b"]}
_CUT, _CUT_LEFT, _ERROR, _CHUNK = Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT, Overflow.ERROR, Overflow.CHUNK


def request_of(
    path: str = "/embed", model_info: ModelInfo = E5, headers: dict[str, str] | None = None, **body: Any
) -> EmbedRequest:
    return ask(DIALECT.operations[f"POST {path}"], {"inputs": "a", **body}, headers, model_info).request


# --- what is asked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("default", "truncate", "direction", "expected"),
    [
        (_CUT, None, "left", _CUT_LEFT),
        (_CUT, False, "left", _ERROR),
        (_CUT_LEFT, None, None, _CUT_LEFT),
        (_CUT_LEFT, None, "right", _CUT),
        (_ERROR, None, "left", _ERROR),
        (_ERROR, True, "Left", _CUT_LEFT),
        (_CHUNK, None, "left", _CHUNK),
        (_CHUNK, True, None, _CUT),
        (_CHUNK, False, None, _ERROR),
    ],
)
@pytest.mark.parametrize("path", ["/embed", "/embed_all"])
def test_what_becomes_of_a_long_text(path, default, truncate, direction, expected):
    """It is not split where every token counts."""
    request = request_of(path, changed(E5, overflow=default), truncate=truncate, truncation_direction=direction)
    is_of_tokens = path == "/embed_all"
    assert request.output is (Output.TOKENS if is_of_tokens else Output.VECTORS)
    assert request.tokenizing.overflow is (_ERROR if is_of_tokens and expected is _CHUNK else expected)


@pytest.mark.parametrize(
    ("body", "output", "normalize"),
    [
        ({"normalize": None}, Output.VECTORS, True),
        ({"normalize": False}, Output.UNNORMALIZED, False),
    ],
)
def test_vectors_have_length_1_unless_they_are_asked_for_as_they_are(body, output, normalize):
    request = request_of(**body)
    assert (request.output, request.normalize) == (output, normalize)


@pytest.mark.parametrize(("name", "prompt", "of_tokens"), [(None, None, "default: "), ("query", "query: ", "query: ")])
def test_a_prompt_is_one_of_the_model_s(name, prompt, of_tokens):
    assert request_of(prompt_name=name).tokenizing.prompt == prompt
    tokenize = DIALECT.operations["POST /tokenize"]
    assert tokenize.reply is not None
    asked = tokenize.reply(Call(tokenize.fields.read({"inputs": "a", "prompt_name": name}), {}, E5))
    assert isinstance(asked, ParsedTokenize)
    assert asked.prompt == of_tokens


def test_the_name_of_a_model_in_the_path_is_a_name_as_elsewhere():
    path, named = "/models/*", "minilm:query"
    assert request_of(path, model="org/another").tokenizing.prompt is None
    assert request_of(path, model=named).tokenizing.prompt == "query: "
    assert request_of(path, model=named, prompt_name="query").tokenizing.prompt == "query: "
    with pytest.raises(errors.BadRequest, match="'model' and 'prompt_name' contradict each other"):
        request_of(path, model=named, prompt_name="passage")
    with pytest.raises(errors.ModelNotFound):
        request_of(path, changed(E5, is_strict=True), model="org/another")


@pytest.mark.parametrize(
    ("path", "inputs"),
    [
        ("/", "a"),
        ("/", COMPARED),
        ("/invocations", COMPARED),
        ("/embed", "a"),
        ("/embed_all", "a"),
        ("/similarity", COMPARED),
    ],
)
def test_options_mean_the_same_wherever_they_stand(path, inputs):
    """Clients of Hugging Face's endpoints have them in `parameters`, those of this API beside the texts."""
    options: dict[str, Any] = {"prompt_name": "query", "truncate": True, "truncation_direction": "left"}
    if path != "/embed_all":
        options["dimensions"] = 64
    asked = [
        request_of(path, changed(E5, is_matryoshka=True), inputs=inputs, **body)
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
        ({"parameters": {"dimensions": 64}}, "'parameters.dimensions' is 64"),
        ({"parameters": ["truncate"]}, "'parameters' must be an object, is a list"),
    ],
)
def test_options_are_refused_wherever_they_stand(inputs, body, message):
    with pytest.raises(errors.BadRequest) as caught:
        request_of("/", inputs=inputs, **body)
    assert message in caught.value.message


def test_vectors_are_answered_as_parameters_say_and_cosines_are_numbers():
    assert request_of("/", parameters={"encoding_format": "npy"}).forms[0].encoding is Encoding.NPY
    assert request_of("/", parameters={"normalize": False}).output is Output.UNNORMALIZED
    for body in ({"parameters": {"encoding_format": "npy"}}, {"encoding_format": "bytes"}):
        with pytest.raises(errors.BadRequest, match="encoding_format' must be 'float': cosines are JSON"):
            request_of("/", inputs=COMPARED, **body)


def test_headers_that_mean_the_same_everywhere():
    headers = {"x-vecd-priority": "bulk", "x-vecd-timeout-ms": "1500", "accept": "application/octet-stream"}
    request = request_of(headers=headers)
    assert (request.priority, request.timeout_s) == (Priority.BULK, 1.5)
    assert request.forms[0].encoding is Encoding.BYTES
    assert request_of("/embed_all", headers=headers).timeout_s == 1.5


def test_tokens_that_have_no_room_are_refused():
    with pytest.raises(errors.WrongModel, match="768 dimensions, and there is room for the 384"):
        request_of("/embed_all", changed(E5, hidden_size=768))


# --- errors -----------------------------------------------------------------------------------------------------


def read_by_the_dialect(error: errors.ApiError) -> errors.ApiError:
    error.dialect = DIALECT.name
    return error


@pytest.mark.parametrize(
    ("error", "status", "error_type"),
    [
        (errors.EmptyInput("m", param="inputs"), 400, "Empty"),
        (errors.BadRequest("m", param="inputs"), 422, "Validation"),
        (errors.BadRequest("The body is not valid JSON"), 400, "Validation"),
        (read_by_the_dialect(errors.BadRequest("Text 0 has no token")), 422, "Validation"),
        (errors.InputTooLong(8, 9, param="input"), 422, "Validation"),
        (errors.PayloadTooLarge("m"), 413, "Validation"),
        (errors.WrongModel("m"), 424, "Backend"),
        (errors.EngineFailed("m"), 424, "Backend"),
        (errors.ServerError("m"), 500, "Backend"),
        (errors.TooManyRequests("m", retry_after_s=1), 429, "Overloaded"),
        (errors.Unavailable("m", retry_after_s=1), 503, "Unhealthy"),
        (errors.DeadlinePassed(None), 503, "Unhealthy"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, errors.ApiError) else str(value),
)
def test_status_and_type_of_an_error(error, status, error_type):
    response = render_error(error)
    body = {"error": error.message, "error_type": error_type}
    assert (response.status, orjson.loads(body_of(response))) == (status, body)


def test_an_error_names_the_field_as_it_is_called_here():
    body = body_of(render_error(errors.EngineFailed("The engine failed on 'input[3]'")))
    assert orjson.loads(body)["error"] == "The engine failed on 'inputs[3]'"
