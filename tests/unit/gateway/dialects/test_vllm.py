"""vLLM's dialect beyond its words, which `test_attributes` has: errors, tokens, conversations."""

from typing import Any

import orjson
import pytest

from tests.support.asking import PLAIN, ask, body_of, changed, read_in_pieces, refusal
from vecd.gateway import errors
from vecd.gateway.api.operation import Call, Operation, ParsedDecode, ParsedEmbed, ParsedMessages, ParsedTokenize
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.config import ChatTemplateSpec
from vecd.gateway.dialects.openai import EMBEDDINGS
from vecd.gateway.dialects.vllm import DIALECT
from vecd.gateway.request import Dtype, Encoding, Form, Overflow, Tokenizing
from vecd.shm.output import Output

POOLING = DIALECT.operations["POST /pooling"]
TOKENIZE = DIALECT.operations["POST /tokenize"]
DETOKENIZE = DIALECT.operations["POST /detokenize"]
E5 = changed(PLAIN, prompts={"query": "query: "}, prompt="default: ")
CHATTY = changed(E5, chat_template=ChatTemplateSpec("", {}))
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
    fields = {"input": "a", "task": "token_embed", "normalize": False, "dimensions": 384, "truncate_prompt_tokens": -1}
    request = ask(POOLING, fields, model_info=changed(PLAIN, overflow=Overflow.CHUNK)).request
    assert (request.output, request.normalize, request.dimensions) == (Output.TOKENS, False, None)
    assert request.tokenizing.overflow is Overflow.TRUNCATE, "which the request says, whatever the server's default"


@pytest.mark.parametrize(
    ("fields", "model_info", "param", "says"),
    [
        ({"task": "token_embed", "truncate_dim": 1}, PLAIN, "truncate_dim", "must be 384, as many as a token's"),
        ({"task": "token_embed"}, changed(PLAIN, overflow=Overflow.CHUNK), "overflow", "does not go with chunks"),
        ({"report": True, "encoding_format": "bytes"}, PLAIN, "report", "is part of a JSON answer"),
    ],
)
def test_what_pooling_refuses(fields, model_info, param, says):
    error = refusal(POOLING, {"input": "a", **fields}, model_info)
    assert error.param == param
    assert says in error.message


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.BadRequest("no", param="input"), "BadRequestError"),
        (errors.ModelNotFound("gpt", "minilm"), "NotFoundError"),
        (errors.InvalidApiKey("no"), "Unauthorized"),
        (errors.MethodNotAllowed("no"), "Method Not Allowed"),
        (errors.TooManyRequests("no", retry_after_s=1), "Too Many Requests"),
        (errors.NotImplementedByServer("no"), "NotImplementedError"),
        (errors.ServerError("no"), "InternalServerError"),
        (errors.Unavailable("no", retry_after_s=1), "Service Unavailable"),
    ],
)
def test_errors_have_vllms_types_and_numbers_as_codes(error, kind):
    response = DIALECT.render_error(error)
    expected = {"message": error.message, "type": kind, "param": error.param, "code": error.status}
    assert (response.status, orjson.loads(body_of(response))) == (error.status, {"error": expected})


# --- tokens -----------------------------------------------------------------------------------------------------


def tokenize(body: dict[str, Any], model_info: ModelInfo = PLAIN) -> ParsedTokenize:
    assert TOKENIZE.parse is not None
    asked = TOKENIZE.parse(Call(TOKENIZE.fields.read(body), {}, model_info))
    assert isinstance(asked, ParsedTokenize)
    return asked


def detokenize(body: dict[str, Any], model_info: ModelInfo = PLAIN) -> ParsedDecode:
    assert DETOKENIZE.parse is not None
    asked = DETOKENIZE.parse(Call(DETOKENIZE.fields.read(body), {}, model_info))
    assert isinstance(asked, ParsedDecode)
    return asked


def test_another_models_tokens_are_not_counted_where_names_matter():
    strict = changed(PLAIN, unknown_model="refuse")
    for read, body in ((tokenize, {"prompt": "a"}), (detokenize, {"tokens": [1]})):
        with pytest.raises(errors.ModelNotFound):
            read({**body, "model": "gpt"}, strict)


def test_all_ids_of_a_large_body_are_decoded():
    ids = list(range(5000))
    fields = read_in_pieces(DETOKENIZE, {"tokens": ids}, max_ids=10, window_bytes=64)
    assert detokenize(fields).lists == [ids]


# --- conversations ----------------------------------------------------------------------------------------------


def messages_of(operation: Operation, body: dict[str, Any], model_info: ModelInfo = CHATTY) -> ParsedMessages:
    parse = operation.parse
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
    with pytest.raises(errors.TooManyInputs, match="2 conversations, at most 1"):
        messages_of(TOKENIZE, {"messages": [CHAT, CHAT]})


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": [CHAT] * 5}, "messages", "5 conversations, at most 4"),
        ({"messages": [{"role": "user", "content": "x" * 2**18}]}, "messages", "bytes as JSON, at most 262144"),
        ({"messages": [{"role": "user", "content": "secret", "x": DEEP}]}, "messages", "are nested too deeply"),
        ({"messages": CHAT, "chat_template_kwargs": {"x": DEEP}}, "messages", "are nested too deeply"),
        ({"messages": CHAT, "input": "a"}, "input", "'messages' and 'input' contradict each other"),
        ({"messages": CHAT, "model": "m:query"}, "messages", "contradict each other: send the prompt as one"),
        ({"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
         "add_generation_prompt", "contradict each other"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused_before_it_is_rendered(body, param, says):
    for operation in (POOLING, EMBEDDINGS):
        with pytest.raises(errors.BadRequest, match=says) as caught:
            messages_of(operation, body)
        assert caught.value.param == param
        assert "secret" not in caught.value.message
