"""What several fields come to together, as POST /v1/embeddings takes them."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.asking import PLAIN, ask
from vecd.gateway.api.dialects.openai import EMBEDDINGS
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.types.errors import BadRequest
from vecd.gateway.types.request import MAX_PROMPT_CHARS, Dtype, EmbedRequest, Encoding, Form, Overflow, Tokenizing
from vecd.shm.output import Output

E5 = replace(
    PLAIN, prompts={"query": "query: ", "passage": "passage: "}, is_matryoshka=True, default_prompt="default: "
)
CUT, LEFT, ERROR, CHUNK = Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT, Overflow.ERROR, Overflow.CHUNK


def parse(model_info: ModelInfo = PLAIN, /, **fields: Any) -> EmbedRequest:
    return ask(EMBEDDINGS, {"input": "a", **fields}, model_info=model_info).request


def refusal(model_info: ModelInfo = PLAIN, /, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(model_info, **fields)
    assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")
    assert f"'{caught.value.param}'" in caught.value.message
    return caught.value


# --- prompts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, None),
        ({"prompt": "p: "}, "p: "),
        ({"prompt": ""}, ""),
        ({"prompt": "x" * MAX_PROMPT_CHARS}, "x" * MAX_PROMPT_CHARS),
        ({"prompt_name": "query"}, "query: "),
        ({"input_type": "search_document"}, "passage: "),
        ({"input_type": "classification"}, None),
        ({"task": "retrieval.passage"}, "passage: "),
        ({"input_type": "string"}, None),
        ({"task": "text"}, None),
        ({"input_type": "string", "model": "e5:query"}, "query: "),
        ({"input_type": "text", "prompt_name": "passage"}, "passage: "),
        ({"model": "e5:query"}, "query: "),
        ({"model": "e5:query", "input_type": "query"}, "query: "),
        ({"model": "e5:query", "prompt": None, "input_type": None}, "query: "),
        ({"model": "e5:clustering", "prompt": "p: "}, "p: "),
        ({"model": "e5:v2", "input_type": "query"}, "query: "),
    ],
)
def test_prompts(fields, prompt):
    assert parse(E5, **fields).tokenizing == Tokenizing(prompt)


def test_a_prompt_may_have_the_name_of_a_kind_of_input():
    model_info = replace(PLAIN, prompts={"text": "text: "})
    assert parse(model_info, input_type="text").tokenizing == Tokenizing("text: ")
    assert parse(model_info, input_type="string").tokenizing == Tokenizing()


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": 5}, "prompt", "must be a string"),
        ({"prompt": "x" * 4097}, "prompt", "at most 4096 characters, has 4097"),
        ({"prompt_name": "document"}, "prompt_name", "has no prompt 'document'; it has 'query', 'passage'"),
        ({"prompt_name": ""}, "prompt_name", "has no prompt ''"),
        ({"input_type": "image"}, "input_type", "must be one of 'query', 'passage', 'search_query'"),
        ({"input_type": ["query"]}, "input_type", "must be a string, is a list"),
        ({"task": "retrieval"}, "task", "must be one of"),
        ({"prompt": "p", "prompt_name": "query"}, "prompt_name", "'prompt' and 'prompt_name' both choose the prompt"),
        ({"prompt": "", "task": "query"}, "task", "'prompt' and 'task' both choose"),
        ({"input_type": "query", "task": "query"}, "task", "'input_type' and 'task' both choose"),
        (
            {"model": "m:query", "input_type": "document"},
            "input_type",
            "'model' and 'input_type' contradict each other",
        ),
        ({"model": "m:query", "prompt": ""}, "prompt", "'model' and 'prompt' contradict each other"),
    ],
)
def test_prompts_that_are_refused(fields, param, says):
    error = refusal(E5, **fields)
    assert error.param == param
    assert says in error.message


def test_a_prompt_is_not_quoted():
    assert "secret" not in refusal(E5, prompt="secret" * 1000).message
    assert "secret" not in refusal(E5, prompt="secret", task="secret").message


# --- overflow ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "overflow", "max_tokens"),
    [
        ({"overflow": "error"}, ERROR, None),
        ({"overflow": "truncate"}, CUT, None),
        ({"overflow": "truncate_left"}, LEFT, None),
        ({"overflow": "chunk"}, CHUNK, None),
        ({"truncate": True}, CUT, None),
        ({"truncate": False}, ERROR, None),
        ({"truncate": "NONE"}, ERROR, None),
        ({"truncate": "START"}, LEFT, None),
        ({"truncate": "END"}, CUT, None),
        ({"truncation": True}, CUT, None),
        ({"truncation": False}, ERROR, None),
        ({"truncate_prompt_tokens": 8}, CUT, 8),
        ({"truncate_prompt_tokens": 256}, CUT, 256),
        ({"truncate_prompt_tokens": -1}, CUT, None),
        ({"truncate_prompt_tokens": 8, "truncation_side": "left"}, LEFT, 8),
        ({"truncate_prompt_tokens": 8, "truncation_side": "right", "truncate": True}, CUT, 8),
        ({"truncation_side": "left"}, LEFT, None),
        ({"truncation_side": "right"}, CUT, None),
        ({"truncate": True, "truncation_side": "left"}, LEFT, None),
        ({"truncate": True, "truncation_direction": "left"}, LEFT, None),
        ({"truncation_direction": "Left"}, LEFT, None),
        ({"truncation_direction": "Right"}, CUT, None),
        ({"truncation_direction": "left", "truncation_side": "left"}, LEFT, None),
        ({"overflow": "error", "truncation_side": "left"}, ERROR, None),
        ({"overflow": "truncate_left", "truncate": True, "truncation": True}, LEFT, None),
        ({"overflow": "error", "truncate": False, "truncation": False}, ERROR, None),
    ],
)
def test_overflow(fields, overflow, max_tokens):
    assert parse(**fields).tokenizing == Tokenizing(None, overflow, max_tokens)


@pytest.mark.parametrize(
    ("fields", "of_the_server", "overflow"),
    [
        ({}, CHUNK, None),
        ({"truncate": True}, LEFT, LEFT),
        ({"truncate": True}, ERROR, CUT),
        ({"truncate": True}, CHUNK, CUT),
        ({"truncation_side": "left"}, ERROR, ERROR),
        ({"truncation_side": "left"}, CHUNK, CHUNK),
        ({"truncation_side": "right"}, LEFT, CUT),
        ({"truncate_prompt_tokens": -1}, LEFT, LEFT),
    ],
)
def test_what_a_request_leaves_open_is_the_servers_to_say(fields, of_the_server, overflow):
    assert parse(replace(PLAIN, overflow=of_the_server), **fields).tokenizing.overflow is overflow


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"overflow": "cut"}, "overflow", "must be one of 'error', 'truncate', 'truncate_left', 'chunk', is 'cut'"),
        ({"truncate": "end"}, "truncate", "must be true, false, 'NONE', 'START' or 'END', is 'end'"),
        ({"truncate": 1}, "truncate", "is a whole number"),
        ({"truncation": "true"}, "truncation", "must be true or false, is a string"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1 for the model's length, is 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "is -2"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens", "must be a whole number, is a boolean"),
        (
            {"truncate_prompt_tokens": 257},
            "truncate_prompt_tokens",
            "at most 256, as many tokens as the model takes, i",
        ),
        ({"truncation_side": "both"}, "truncation_side", "must be one of 'left', 'right', is 'both'"),
        ({"truncation_direction": "up"}, "truncation_direction", "must be one of 'left', 'Left', 'right', 'Right', is"),
        ({"add_special_tokens": 0}, "add_special_tokens", "must be true or false"),
    ],
)
def test_overflow_that_is_refused(fields, param, says):
    error = refusal(**fields)
    assert error.param == param
    assert says in error.message


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"overflow": "error"}, {"truncate": True}),
        ({"overflow": "truncate"}, {"truncate": False}),
        ({"overflow": "truncate"}, {"truncate": "START"}),
        ({"overflow": "chunk"}, {"truncate_prompt_tokens": 8}),
        ({"overflow": "error"}, {"truncate_prompt_tokens": -1}),
        ({"truncate": False}, {"truncation": True}),
        ({"truncate": "END"}, {"truncation_side": "left"}),
        ({"truncate": "NONE"}, {"truncate_prompt_tokens": 8}),
        ({"overflow": "truncate_left"}, {"truncation_side": "right"}),
        ({"truncate": "END"}, {"truncation_direction": "Left"}),
        ({"truncation_side": "right"}, {"truncation_direction": "left"}),
    ],
)
def test_contradictions_are_refused(first, second):
    error = refusal(**first, **second)
    [a], [b] = first, second
    assert error.message == f"'{a}' and '{b}' contradict each other: send one of them"
    assert error.param == b
    parse(**first)
    parse(**second)


ALLOWED: dict[str, dict[Any, set[Overflow]]] = {
    "overflow": {value.value: {value} for value in Overflow},
    "truncate": {True: {CUT, LEFT}, False: {ERROR}, "NONE": {ERROR}, "START": {LEFT}, "END": {CUT}},
    "truncation": {True: {CUT, LEFT}, False: {ERROR}},
    "truncation_side": {"left": {LEFT, ERROR, CHUNK}, "right": {CUT, ERROR, CHUNK}},
    "truncation_direction": {"Left": {LEFT, ERROR, CHUNK}, "right": {CUT, ERROR, CHUNK}},
    "truncate_prompt_tokens": {8: {CUT, LEFT}},
}


def test_no_field_is_ever_ignored():
    """All of the 1,620 ways to fill these fields, on every kind of server."""
    for values in product(*([None, *choices] for choices in ALLOWED.values())):
        fields = {name: value for name, value in zip(ALLOWED, values, strict=True) if value is not None}
        left = set(Overflow).intersection(*(ALLOWED[name][value] for name, value in fields.items()))
        sides = {fields[name].lower() for name in ("truncation_side", "truncation_direction") if name in fields}
        if len(sides) > 1:
            left = set()
        for of_the_server in Overflow:
            model_info = replace(PLAIN, overflow=of_the_server)
            if not left:
                assert "contradict" in refusal(model_info, **fields).message
            else:
                asked = parse(model_info, **fields).tokenizing.overflow
                assert (asked in left) if fields else (asked is None)


def test_special_tokens_may_be_left_out():
    assert parse(add_special_tokens=False).tokenizing == Tokenizing(add_special_tokens=False)
    assert parse(add_special_tokens=True).tokenizing == Tokenizing()


# --- vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dimensions", "output_dimension", "truncate_dim"])
def test_dimensions_by_all_their_names(name):
    assert parse(PLAIN, **{name: 384}).dimensions is None
    assert parse(E5, **{name: 64}).dimensions == 64
    assert parse(E5, **{"dimensions": 64, name: 64}).dimensions == 64
    assert parse(PLAIN, **{name: 0}).dimensions is None
    assert parse(E5, **{name: 0}).dimensions is None
    error = refusal(PLAIN, **{name: 64})
    assert error.param == name
    assert "This model does not support specifying dimensions." in error.message
    assert refusal(E5, **{name: 385}).param == name
    assert refusal(E5, **{name: -1}).param == name
    assert refusal(E5, **{name: 64.0}).param == name


def test_dimensions_that_contradict_each_other():
    error = refusal(E5, dimensions=64, output_dimension=128)
    assert (error.param, error.message[:42]) == ("output_dimension", "'dimensions' and 'output_dimension' contra")


@pytest.mark.parametrize("name", ["normalize", "normalized", "use_activation"])
def test_normalizing_by_all_its_names(name):
    request = parse(PLAIN, **{name: False})
    assert (request.output, request.normalize) == (Output.UNNORMALIZED, False)
    request = parse(PLAIN, **{name: True, "normalize": True})
    assert (request.output, request.normalize) == (Output.VECTORS, True)
    assert parse(PLAIN, **{name: None}) == parse()
    assert refusal(PLAIN, **{name: "yes"}).param == name


def test_normalizing_that_contradicts_itself():
    assert refusal(normalize=True, use_activation=False).param == "use_activation"
    assert refusal(normalized=False, normalize=True).param == "normalized"


# --- forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"output_dtype": "float"}, Form()),
        ({"output_dtype": "int8"}, Form(Encoding.FLOAT, Dtype.INT8)),
        ({"output_dtype": "ubinary", "encoding_format": "base64"}, Form(Encoding.BASE64, Dtype.UBINARY)),
        ({"output_dtype": None, "output_dimension": None, "encoding_format": "base64"}, Form(Encoding.BASE64)),
        ({"output_dtype": "float16"}, Form(Encoding.FLOAT, Dtype.FLOAT16)),
        ({"output_dtype": "bfloat16", "encoding_format": "bytes"}, Form(Encoding.BYTES, Dtype.BFLOAT16)),
        ({"embed_dtype": "float32", "endianness": "native"}, Form()),
        ({"embed_dtype": "float16", "endianness": "little"}, Form(Encoding.FLOAT, Dtype.FLOAT16)),
        ({"embed_dtype": "float16", "output_dtype": "float16"}, Form(Encoding.FLOAT, Dtype.FLOAT16)),
        ({"endianness": "big", "encoding_format": "base64"}, Form(Encoding.BASE64, Dtype.FLOAT32, True)),
        ({"endianness": "big", "encoding_format": "npy"}, Form(Encoding.NPY, Dtype.FLOAT32, True)),
        ({"endianness": "big"}, Form()),
        ({"embedding_type": "float"}, Form()),
        ({"embedding_type": "base64"}, Form(Encoding.BASE64)),
        ({"embedding_type": ["base64"]}, Form(Encoding.BASE64)),
        ({"embedding_type": "binary"}, Form(Encoding.FLOAT, Dtype.BINARY)),
        ({"embedding_type": ["ubinary"], "encoding_format": "base64"}, Form(Encoding.BASE64, Dtype.UBINARY)),
        ({"embedding_type": "float", "encoding_format": "base64"}, Form(Encoding.BASE64)),
        ({"encoding_type": "float"}, Form()),
        ({"encoding_type": "base64", "embedding_type": "base64"}, Form(Encoding.BASE64)),
    ],
)
def test_forms(fields, form):
    assert parse(**fields).forms == (form,)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"output_dtype": "int4"}, "output_dtype", "must be one of 'float', 'float32', 'float16', 'bfloat16', 'int8'"),
        ({"embed_dtype": "fp8_e4m3"}, "embed_dtype", "'float32', 'float16', 'bfloat16', is 'fp8_e4m3'"),
        ({"embed_dtype": "int8"}, "embed_dtype", "is 'int8'"),
        ({"endianness": "middle"}, "endianness", "must be one of 'native', 'little', 'big', is 'middle'"),
        ({"embedding_type": "int8"}, "embedding_type", "must be 'float', 'base64', 'binary' or 'ubinary', is 'int8'"),
        ({"embedding_type": []}, "embedding_type", "must be one type, or a list of one, is a list of 0"),
        ({"embedding_type": ["float", "binary"]}, "embedding_type", "is a list of 2"),
        ({"embedding_type": [5]}, "embedding_type", "is a whole number"),
        ({"output_dtype": "int8", "embed_dtype": "float16"}, "embed_dtype", "'output_dtype' and 'embed_dtype' contra"),
        ({"output_dtype": "int8", "embedding_type": "binary"}, "embedding_type", "contradict each other"),
        ({"encoding_format": "float", "embedding_type": "base64"}, "embedding_type", "contradict each other"),
        ({"encoding_type": "float", "embedding_type": "base64"}, "encoding_type", "contradict each other"),
        ({"output_dtype": "bfloat16", "encoding_format": "npy"}, "encoding_format", "NumPy has no bfloat16"),
        ({"output_dtype": "int8", "normalize": False}, "output_dtype", "int8 is for vectors of length 1"),
    ],
)
def test_forms_that_are_refused(fields, param, says):
    error = refusal(**fields)
    assert error.param == param
    assert says in error.message


@pytest.mark.parametrize("name", ["output_dtype", "embedding_type", "encoding_type"])
def test_a_form_that_the_vectors_cannot_have_names_the_field_that_asked(name):
    error = refusal(replace(PLAIN, dim=12), **{name: "binary"})
    assert error.param == name
    assert "a multiple of 8; there are 12" in error.message
    error = refusal(E5, dimensions=384, output_dimension=None, **{name: "binary", "truncate_dim": 12})
    assert error.param == "truncate_dim"


# --- what would change the answer, and is not supported ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("messages", [{"role": "user", "content": "secret"}], None),
        ("messages", [], None),
        ("late_chunking_params", {"chunk_size": 5}, None),
        ("return_multivector", True, False),
        ("modality", "image", "text"),
        ("padding", "anything", "do_not_pad"),
    ],
)
def test_what_is_not_supported_is_refused(name, value, harmless):
    error = refusal(PLAIN, **{name: value})
    assert error.param == name
    assert "secret" not in error.message
    assert parse(PLAIN, **{name: harmless}) == parse()


@pytest.mark.parametrize("name", ["user", "request_id", "cache_salt", "keep_alive", "options"])
def test_what_changes_no_vector_is_ignored(name):
    assert parse(PLAIN, **{name: "anything"}) == parse()


@given(
    st.dictionaries(
        st.sampled_from([field.name for field in EMBEDDINGS.fields if field.name != "input"]),
        st.sampled_from(
            [None, True, False, 0, 1, -1, 8, "", "query", "float", "base64", "NONE", "left", "text", ["a"]]
        ),
    )
)
def test_every_refusal_names_a_field_that_was_sent(fields):
    for model_info in (PLAIN, E5):
        error = refusal_or_none(model_info, fields)
        if error is not None:
            assert error.param in fields
            assert len(error.message) < 500


def refusal_or_none(model_info: ModelInfo, fields: dict[str, Any]) -> BadRequest | None:
    try:
        parse(model_info, **fields)
    except BadRequest as error:
        return error
    return None
