"""text-embeddings-inference's dialect beyond its words, which `test_attributes` has: names, tokens, errors."""

from typing import Any

import orjson
import pytest

from tests.support.asking import PLAIN, ask, body_of, changed
from vecd.gateway import errors
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects.tei import DIALECT, render_error
from vecd.gateway.request import EmbedRequest, Overflow
from vecd.model.steps import ScoreHead

E5 = changed(PLAIN, prompts={"query": "query: ", "passage": "passage: "}, prompt="default: ")
COMPARED = {"source_sentence": "a", "sentences": ["b"]}
_CUT, _CUT_LEFT, _ERROR, _CHUNK = Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT, Overflow.ERROR, Overflow.CHUNK


def request_of(
    path: str = "/embed", model_info: ModelInfo = E5, headers: dict[str, str] | None = None, **body: Any
) -> EmbedRequest:
    return ask(DIALECT.operations[f"POST {path}"], {"inputs": "a", **body}, headers, model_info).request


# --- what is asked ----------------------------------------------------------------------------------------------


def test_the_name_of_a_model_in_the_path_is_a_name_as_elsewhere():
    path, named = "/models/*", "minilm:query"
    assert request_of(path, model="org/another").tokenizing.prompt is None
    assert request_of(path, model=named).tokenizing.prompt == "query: "
    assert request_of(path, model=named, prompt_name="query").tokenizing.prompt == "query: "
    with pytest.raises(errors.BadRequest, match="'model' and 'prompt_name' contradict each other"):
        request_of(path, model=named, prompt_name="passage")
    with pytest.raises(errors.ModelNotFound):
        request_of(path, changed(E5, unknown_model="refuse"), model="org/another")


def test_sentences_that_a_small_body_makes_of_labels_and_a_template_are_limited():
    labels, head = ["b"] * 32, ScoreHead(("entailment", "contradiction"), "softmax", "cls")
    judge = changed(PLAIN, capabilities=("classify",), score=head, max_inputs=2048)
    template = "{}" + "x" * (2**17 - 3)
    made = request_of("/predict", judge, candidate_labels=labels, hypothesis_template=template).inputs
    assert len(made) == 32
    with pytest.raises(errors.BadRequest, match=r"in the template have 4194336 characters, once for .* most 4194304"):
        request_of("/predict", judge, candidate_labels=labels, hypothesis_template=template + "x")


def test_labels_of_a_request_ask_for_a_classifier_and_for_texts():
    judge = changed(PLAIN, capabilities=("classify",), score=ScoreHead(("entailment", "no"), "softmax", "cls"))
    for path in ("/", "/models/*", "/invocations"):
        asks_for = DIALECT.operations[f"POST {path}"].asks_for
        assert asks_for is not None
        assert asks_for({"inputs": "a", "candidate_labels": ["b"]}) == ("classify",)
        assert asks_for({"inputs": "a", "parameters": {"candidate_labels": "b"}}) == ("classify",)
        assert asks_for({"inputs": "a", "parameters": []}) == asks_for({"inputs": "a"}) == ()
        with pytest.raises(errors.BadRequest, match="'inputs' is required: a string or a list of strings"):
            request_of(path, judge, inputs=None, candidate_labels=["b"])


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
