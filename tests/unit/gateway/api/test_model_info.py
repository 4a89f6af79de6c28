from dataclasses import replace

import pytest

from tests.support.asking import PLAIN
from vecd.gateway.api.model_info import PURPOSES
from vecd.gateway.types.errors import BadRequest, ModelNotFound

E5 = replace(PLAIN, model="e5", aliases=("org/e5",), prompts={"query": "query: ", "passage": "passage: "})
NOMIC = replace(
    PLAIN, model="nomic-embed-text", prompts={"search_query": "search_query: ", "clustering": "clustering: "}
)


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        (None, None),
        ("e5", None),
        ("org/e5", None),
        ("anything", None),
        ("", None),
        ("e5:query", "query: "),
        ("org/e5:query", "query: "),
        ("other:query", "query: "),
        ("e5:document", "passage: "),
        ("e5:search_document", "passage: "),
        ("e5:retrieval.query", "query: "),
        ("e5:classification", None),
        ("e5:latest", None),
        ("org/e5:latest", None),
        ("sentence-transformers/x:latest", None),
        ("nomic-embed-text:v1.5", None),
        ("e5:v2", None),
        ("e5:335m", None),
        ("other:large", None),
        ("other:query2", None),
        ("e5:335m-v1-fp16", None),
        ("e5:bf16", None),
        ("e5:q8_0", None),
        ("a:b:query", "query: "),
    ],
)
def test_a_models_name_may_ask_for_a_prompt(name, prompt):
    assert E5.prompt_of_model_name(name) == prompt


def test_a_name_with_a_colon_may_be_the_models_own():
    model_info = replace(E5, model="mxbai:query", aliases=("all-minilm:document",))
    assert model_info.prompt_of_model_name("mxbai:query") is None
    assert model_info.prompt_of_model_name("all-minilm:document") is None
    assert model_info.prompt_of_model_name("mxbai:query:document") == "passage: "


@pytest.mark.parametrize(
    "name", ["e5:qeury", "org/e5:querry", "e5:", "e5:Query", "e5:query2", "e5:s2p_qery", "e5:doc-v2", "e5:" + "x" * 500]
)
def test_a_prompts_name_with_a_mistake_in_it_is_told(name):
    with pytest.raises(BadRequest, match=r"'model': the model has no prompt .*; it has 'query', 'passage'") as caught:
        E5.prompt_of_model_name(name)
    assert (caught.value.status, caught.value.param) == (400, "model")
    assert len(caught.value.message) < 200
    assert PLAIN.prompt_of_model_name(name.replace("org/e5", "minilm").replace("e5", "minilm")) is None  # it has none


@pytest.mark.parametrize("name", ["gpt", "", "E5", "other:query", "e5:v2", "e5:qeury", "org:query", ":query", "query"])
def test_other_models_are_not_found_where_names_matter(name):
    with pytest.raises(ModelNotFound) as caught:
        replace(E5, is_strict=True).prompt_of_model_name(name)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    assert caught.value.message == f"The model `{name}` does not exist; this server has 'e5', 'org/e5'"


@pytest.mark.parametrize("name", [None, "e5", "org/e5", "e5:query", "org/e5:passage", "e5:latest"])
def test_the_models_own_names_are_found_where_they_matter(name):
    assert replace(E5, is_strict=True).prompt_of_model_name(name) == E5.prompt_of_model_name(name)


@pytest.mark.parametrize(
    ("purpose", "of_e5", "of_nomic"),
    [
        ("query", "query: ", "search_query: "),
        ("search_query", "query: ", "search_query: "),
        ("document", "passage: ", None),
        ("passage", "passage: ", None),
        ("clustering", None, "clustering: "),
        ("separation", None, "clustering: "),
        ("code.query", "query: ", "search_query: "),
        ("text-matching", None, None),
    ],
)
def test_a_purpose_is_a_prompt_by_another_name(purpose, of_e5, of_nomic):
    assert (E5.prompt_for(purpose), NOMIC.prompt_for(purpose)) == (of_e5, of_nomic)
    assert PLAIN.prompt_for(purpose) is None


@pytest.mark.parametrize("purpose", ["document", "passage", "search_document", "retrieval.passage", "code.passage"])
def test_a_document_does_not_get_the_default_prompt_which_may_be_a_query_s(purpose):
    model_info = replace(E5, prompts={"query": "query: "}, default_prompt="query: ")
    assert model_info.prompt_for(purpose) == ""
    assert model_info.prompt_of_model_name(f"e5:{purpose}") == ""
    assert (model_info.prompt_for("query"), model_info.prompt_for("classification")) == ("query: ", None)


def test_a_query_does_not_get_the_default_prompt_which_may_be_a_document_s():
    model_info = replace(E5, prompts={"document": "passage: "}, default_prompt="passage: ")
    assert model_info.prompt_for("search_query") == ""


def test_no_purpose_is_without_its_own_prompt():
    for purpose in PURPOSES:
        model_info = replace(PLAIN, prompts={**dict.fromkeys(PURPOSES, "other: "), purpose: "own: "})
        assert model_info.prompt_for(purpose) == "own: "


def test_a_purpose_that_nobody_knows_is_refused():
    many = replace(PLAIN, prompts={f"prompt number {n} {'x' * 100}": "p" for n in range(100)})
    for model_info in (E5, PLAIN, many):
        with pytest.raises(BadRequest, match=r"'task' must be one of .*, is 'image'") as caught:
            model_info.prompt_for("image", "task")
        assert caught.value.param == "task"
        assert len(caught.value.message) < 1000


def test_prompts_by_name():
    assert E5.prompt_named("passage", "prompt_name") == "passage: "
    with pytest.raises(BadRequest, match=r"'prompt_name': the model has no prompt 'document'; it has 'query', 'pass"):
        E5.prompt_named("document", "prompt_name")
    with pytest.raises(BadRequest, match="it has none"):
        PLAIN.prompt_named("query", "prompt_name")


def test_a_model_that_leaves_prompts_out_of_its_pooling_takes_none():
    model_info = replace(E5, pools_prompt=False)
    for ask in (
        lambda: model_info.prompt_named("query", "prompt_name"),
        lambda: model_info.prompt_for("query", "prompt_name"),
        lambda: model_info.checked("x: ", "prompt_name"),
    ):
        with pytest.raises(BadRequest, match="'prompt_name': this model leaves prompts out") as caught:
            ask()
        assert caught.value.param == "prompt_name"
    with pytest.raises(BadRequest) as caught:
        model_info.prompt_of_model_name("e5:query")
    assert caught.value.param == "model"
    assert (model_info.checked("", "prompt"), model_info.prompt_for("clustering")) == ("", None)


ONE_OF, ALLOWS_ANY = "'d' must be one of", "(--matryoshka allows any)"
NO_DIMENSIONS = "This model does not support specifying dimensions. Its vectors have 384, 'd' is"


@pytest.mark.parametrize(
    ("changes", "dimensions", "expected"),
    [
        ({}, 384, None),
        ({}, 383, f"{NO_DIMENSIONS} 383: leave it out, or set 384 (--matryoshka allows fewer)"),
        ({}, 1536, f"{NO_DIMENSIONS} 1536: leave it out, or set 384"),
        ({}, 0, f"{NO_DIMENSIONS} 0: leave it out, or set 384"),
        ({}, -1, f"{NO_DIMENSIONS} -1: leave it out, or set 384"),
        ({"is_matryoshka": True}, 384, None),
        ({"is_matryoshka": True}, 1, 1),
        ({"is_matryoshka": True}, 383, 383),
        ({"is_matryoshka": True}, 0, "'d' must be 1 to 384, is 0"),
        ({"is_matryoshka": True}, 385, "'d' must be 1 to 384, is 385"),
        ({"is_matryoshka": True, "matryoshka_dims": (64, 128)}, 128, 128),
        ({"is_matryoshka": True, "matryoshka_dims": (64, 128)}, 384, None),
        ({"is_matryoshka": True, "matryoshka_dims": (64, 128)}, 100, f"{ONE_OF} 64, 128, 384, is 100 {ALLOWS_ANY}"),
        ({"is_matryoshka": True, "matryoshka_dims": (64, 384)}, 100, f"{ONE_OF} 64, 384, is 100 {ALLOWS_ANY}"),
        ({"is_matryoshka": True, "truncate_dim": 64}, 64, 64),
        ({"is_matryoshka": True, "truncate_dim": 64}, 384, 384),  # None would be 64
    ],
)
def test_dimensions(changes, dimensions, expected):
    model_info = replace(PLAIN, **changes)
    if isinstance(expected, str):
        with pytest.raises(BadRequest) as caught:
            model_info.check_dimensions(dimensions, "d")
        assert caught.value.message == expected
        assert caught.value.param == "d"
    else:
        assert model_info.check_dimensions(dimensions, "d") == expected


def test_a_limit_that_leaves_no_room_for_a_text_names_its_field():
    model_info = replace(PLAIN, least_tokens=3)
    assert model_info.check_max_tokens(3, "max_tokens") == 3
    with pytest.raises(BadRequest, match=r"'max_tokens' must be at least 3, .*, is 2") as caught:
        model_info.check_max_tokens(2, "max_tokens")
    assert caught.value.param == "max_tokens"
