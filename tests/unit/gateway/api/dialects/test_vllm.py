"""vLLM's dialect: every exchange to the byte, and its vectors beside those of /v1/embeddings."""

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from tests.support.asking import PLAIN, answer, ask, body_of, read_in_pieces
from vecd.gateway.api.dialects.openai import EMBEDDINGS
from vecd.gateway.api.dialects.vllm import DIALECT
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import Call, Operation, ParsedDecode, ParsedEmbed, ParsedMessages, ParsedTokenize
from vecd.gateway.types.errors import (
    BadRequest,
    InvalidApiKey,
    MethodNotAllowed,
    ModelNotFound,
    NotImplementedByServer,
    ServerError,
    TooManyInputs,
    TooManyRequests,
    TooManyTokens,
    Unavailable,
)
from vecd.gateway.types.request import Dtype, Encoding, Form, Overflow, Token, Tokenizing
from vecd.shm.output import Output

POOLING = DIALECT.operations["POST /pooling"]
TOKENIZE = DIALECT.operations["POST /tokenize"]
DETOKENIZE = DIALECT.operations["POST /detokenize"]
E5 = replace(PLAIN, prompts={"query": "query: "}, default_prompt="default: ")
CHATTY = replace(E5, has_chat_template=True)
DEEP: Any = orjson.loads("[" * 300 + "]" * 300)
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "name": "b"}]


# --- pooling ----------------------------------------------------------------------------------------------------


def test_pooling_takes_what_embeddings_take():
    fields = {"input": ["a"], "model": "m:query", "truncate_prompt_tokens": 8, "embed_dtype": "float16"}
    request = ask(POOLING, fields, model_info=E5).request
    assert (request.forms, request.output) == ((Form(Encoding.FLOAT, Dtype.FLOAT16),), Output.VECTORS)
    assert request.tokenizing == Tokenizing("query: ", Overflow.TRUNCATE, 8, are_ids_of_model=True)
    request = ask(POOLING, {**fields, "task": "token_embed"}, model_info=E5).request
    assert (request.output, request.normalize) == (Output.TOKENS, True)
    request = ask(POOLING, {"input": "a", "task": "token_embed", "normalize": False, "dimensions": 384}).request
    assert (request.output, request.normalize, request.dimensions) == (Output.TOKENS, False, None)


@pytest.mark.parametrize(
    ("fields", "model_info", "param", "says"),
    [
        (
            {"task": "retrieval.query"},
            PLAIN,
            "task",
            "'classify', 'token_classify', is 'retrieval.query'",
        ),
        ({"task": "token_embed", "dimensions": 64}, PLAIN, "dimensions", "must be 384, as many as a token's"),
        ({"task": "token_embed", "truncate_dim": 1}, PLAIN, "truncate_dim", "must be 384"),
        ({"task": "token_embed", "overflow": "chunk"}, PLAIN, "overflow", "does not go with chunks"),
        ({"task": "token_embed"}, replace(PLAIN, overflow=Overflow.CHUNK), "overflow", "does not go with chunks"),
        ({"task": "token_embed", "encoding_format": "npy"}, PLAIN, "encoding_format", "must be 'float' or 'base64'"),
        ({"report": True, "encoding_format": "bytes"}, PLAIN, "report", "is part of a JSON answer"),
        ({"messages": []}, PLAIN, "messages", "the model has no chat template"),
        ({"input": []}, PLAIN, "input", "the list is empty"),
        ({"input_type": "query", "prompt": ""}, PLAIN, "input_type", "both choose the prompt"),
    ],
)
def test_what_pooling_refuses(fields, model_info, param, says):
    with pytest.raises(BadRequest) as caught:
        ask(POOLING, {"input": "a", **fields}, model_info=model_info)
    assert caught.value.param == param
    assert says in caught.value.message


def test_tokens_go_with_a_server_whose_default_is_chunks_if_the_request_says_so():
    model_info = replace(PLAIN, overflow=Overflow.CHUNK)
    request = ask(
        POOLING, {"input": "a", "task": "token_embed", "truncate_prompt_tokens": -1}, model_info=model_info
    ).request
    assert request.tokenizing.overflow is Overflow.TRUNCATE


def test_the_answers_shape():
    response = answer(ask(POOLING, {"input": ["a", "b"]}), np.arange(6, dtype=np.float32).reshape(2, 3))
    assert b'"data":[{"object":"pooling","index":0,"data":[0.0,1.0,2.0]},' in body_of(response)


@pytest.mark.parametrize("operation", [POOLING, EMBEDDINGS], ids=["pooling", "embeddings"])
def test_padding_that_vllm_has_changes_nothing_and_other_is_refused(operation):
    for value in ("max_length", "do_not_pad", None):
        assert ask(operation, {"input": "a", "padding": value}).request == ask(operation, {"input": "a"}).request
    for refused, given in (("longest", "'longest'"), (True, "a boolean")):
        with pytest.raises(BadRequest) as caught:
            ask(operation, {"input": "a", "padding": refused})
        assert caught.value.message == f"'padding' must be one of 'max_length', 'do_not_pad', is {given}"
        assert caught.value.param == "padding"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("no", param="input"), "BadRequestError"),
        (TooManyTokens("no"), "BadRequestError"),
        (ModelNotFound("gpt", "minilm"), "NotFoundError"),
        (InvalidApiKey("no"), "Unauthorized"),
        (MethodNotAllowed("no", allow="POST"), "Method Not Allowed"),
        (TooManyRequests("no", retry_after_s=1), "Too Many Requests"),
        (NotImplementedByServer("no"), "NotImplementedError"),
        (ServerError("no"), "InternalServerError"),
        (Unavailable("no", retry_after_s=1), "Service Unavailable"),
    ],
)
def test_errors_have_vllms_types_and_numbers_as_codes(error, kind):
    response = DIALECT.render_error(error)
    expected = {"message": error.message, "type": kind, "param": error.param, "code": error.status}
    assert (response.status, orjson.loads(body_of(response))) == (error.status, {"error": expected})


# --- tokens -----------------------------------------------------------------------------------------------------


def tokenize(body: dict[str, Any], model_info: ModelInfo = PLAIN) -> ParsedTokenize:
    assert TOKENIZE.reply is not None
    asked = TOKENIZE.reply(Call(TOKENIZE.fields.read(body), {}, model_info))
    assert isinstance(asked, ParsedTokenize)
    return asked


def detokenize(body: dict[str, Any], model_info: ModelInfo = PLAIN) -> ParsedDecode:
    assert DETOKENIZE.reply is not None
    asked = DETOKENIZE.reply(Call(DETOKENIZE.fields.read(body), {}, model_info))
    assert isinstance(asked, ParsedDecode)
    return asked


@pytest.mark.parametrize(
    ("model", "prompt"), [(None, "default: "), ("m", "default: "), ("m:query", "query: "), ("m:document", "")]
)
def test_a_text_is_tokenized_as_it_would_be_embedded(model, prompt):
    asked = tokenize({"prompt": "a", "model": model}, E5)
    assert (asked.texts, asked.prompt, asked.add_special_tokens) == (["a"], prompt, True)
    assert tokenize({"prompt": "a", "add_special_tokens": False}).add_special_tokens is False


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"messages": CHAT}, "messages"),
        ({"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
    ],
)
def test_what_cannot_be_tokenized(body, param):
    with pytest.raises(BadRequest) as caught:
        tokenize(body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [{}, {"tokens": []}, {"tokens": "a"}, {"tokens": [1.5]}, {"tokens": [True]}, {"tokens": [[1]]}, {"tokens": None}],
)
def test_what_is_no_list_of_ids(body):
    with pytest.raises(BadRequest) as caught:
        detokenize(body)
    assert caught.value.param == "tokens"


def test_another_models_tokens_are_not_counted_where_names_matter():
    strict = replace(PLAIN, is_strict=True)
    with pytest.raises(ModelNotFound):
        tokenize({"prompt": "a", "model": "gpt"}, strict)
    with pytest.raises(ModelNotFound):
        detokenize({"tokens": [1], "model": "gpt"}, strict)


def test_all_ids_of_a_large_body_are_decoded():
    ids = list(range(5000))
    fields = read_in_pieces(DETOKENIZE, {"tokens": ids}, max_ids=10, window_bytes=64)
    assert detokenize(fields).lists == [ids]


def test_tokens_are_answered_with_their_texts_if_they_are_wanted():
    tokens = [Token(101, "[CLS]", True, None, None), Token(1037, "a", False, 0, 1)]
    answers = []
    for more in ({}, {"return_token_strs": True}):
        asked = tokenize({"prompt": "a", **more})
        for some in ([], tokens[:1], tokens[1:], []):
            asked.collector.put(0, some)
        answers.append(body_of(asked.render()))
    assert answers == [
        b'{"count":2,"max_model_len":256,"tokens":[101,1037],"token_strs":null}',
        b'{"count":2,"max_model_len":256,"tokens":[101,1037],"token_strs":["[CLS]","a"]}',
    ]


# --- conversations ----------------------------------------------------------------------------------------------


def messages_of(operation: Operation, body: dict[str, Any], model_info: ModelInfo = CHATTY) -> ParsedMessages:
    parse = operation.embed or operation.reply
    assert parse is not None
    asked = parse(Call(operation.fields.read(body), {}, model_info))
    assert isinstance(asked, ParsedMessages)
    return asked


@pytest.mark.parametrize("operation", [POOLING, EMBEDDINGS], ids=["pooling", "embeddings"])
def test_conversations_are_embedded_as_the_texts_that_the_template_makes(operation):
    asked = messages_of(operation, {"messages": CHAT, "embed_dtype": "float16", "truncate_prompt_tokens": 8})
    rendered = [CHAT[0], {**CHAT[1], "content": ""}]
    assert orjson.loads(asked.payload) == {
        "conversations": [rendered], "kwargs": {"add_generation_prompt": False}, "continue_final_message": False,
    }  # fmt: skip
    parsed = asked.proceed(["text"])
    assert isinstance(parsed, ParsedEmbed)
    request = parsed.request
    assert (request.inputs, request.forms[0].dtype) == (["text"], Dtype.FLOAT16)
    tokenizing = request.tokenizing._replace(are_ids_of_model=False)
    assert tokenizing == Tokenizing("", Overflow.TRUNCATE, 8, add_special_tokens=False)

    options = {"add_generation_prompt": True, "chat_template_kwargs": {"x": 1}, "add_special_tokens": True}
    asked = messages_of(operation, {"messages": [CHAT, CHAT[:1]], **options})
    sent = orjson.loads(asked.payload)
    assert (sent["conversations"], sent["kwargs"]) == (
        [rendered, CHAT[:1]], {"x": 1, "add_generation_prompt": True},
    )  # fmt: skip
    parsed = asked.proceed(["a", "b"])
    assert isinstance(parsed, ParsedEmbed)
    assert parsed.request.tokenizing.add_special_tokens


def test_a_conversation_is_tokenized_with_the_beginning_of_a_reply():
    asked = messages_of(TOKENIZE, {"messages": CHAT})
    assert orjson.loads(asked.payload)["kwargs"] == {"add_generation_prompt": True}
    parsed = asked.proceed(["text"])
    assert isinstance(parsed, ParsedTokenize)
    assert (parsed.texts, parsed.prompt, parsed.add_special_tokens) == (["text"], "", False)
    asked = messages_of(TOKENIZE, {"messages": CHAT, "continue_final_message": True})
    sent = orjson.loads(asked.payload)
    assert (sent["kwargs"], sent["continue_final_message"]) == ({"add_generation_prompt": False}, True)
    with pytest.raises(TooManyInputs, match="2 conversations, at most 1"):
        messages_of(TOKENIZE, {"messages": [CHAT, CHAT]})


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": "secret"}, "messages", "is a string"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": [[]]}, "messages", r"'messages\[0\]' must be a list of messages, is empty"),
        ({"messages": [CHAT, "secret"]}, "messages", r"'messages\[1\]' must be a list of messages, is a string"),
        ({"messages": ["secret"]}, "messages", r"'messages\[0\]' must be an object"),
        ({"messages": [{"content": "secret"}]}, "messages", "a string as its 'role'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "is a whole number"),
        ({"messages": [{"role": "user", "content": ["secret"]}]}, "messages", r"\.content\[0\]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "embeds texts alone"),
        ({"messages": [CHAT] * 5}, "messages", "5 conversations, at most 4"),
        ({"messages": [{"role": "user", "content": "x" * 2**18}]}, "messages", "bytes as JSON, at most 262144"),
        ({"messages": [{"role": "user", "content": "secret", "x": DEEP}]}, "messages", "are nested too deeply"),
        ({"messages": CHAT, "chat_template_kwargs": {"x": DEEP}}, "messages", "are nested too deeply"),
        ({"messages": CHAT, "input": "a"}, "messages", "send one of them"),
        ({"messages": CHAT, "prompt": ""}, "prompt", "with the role 'system'"),
        ({"messages": CHAT, "model": "m:query"}, "prompt", "contradict each other"),
        ({"messages": CHAT, "dimensions": 64}, "dimensions", "does not support"),
        ({"messages": CHAT, "chat_template": "{{ 1 }}"}, "chat_template", "the model's own"),
        ({"messages": CHAT, "chat_template_kwargs": 1}, "chat_template_kwargs", "must be an object"),
        ({"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", "Cannot set both"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused_before_it_is_rendered(body, param, says):
    for operation in (POOLING, EMBEDDINGS):
        with pytest.raises(BadRequest, match=says) as caught:
            messages_of(operation, body)
        assert caught.value.param == param
        assert "secret" not in caught.value.message
