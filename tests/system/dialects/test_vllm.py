"""vLLM's dialect, its vectors beside those of /v1/embeddings, and what is asked of the tokenizer itself."""

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.serving import RunningServer

TEXT = "Unaffable: naïve café, 東京 漢字 👍?"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize("text", ["a", "a " * 50_000], ids=["small", "large"])
def test_a_request_is_named_by_its_body_unless_a_header_names_it(dummy, path, text):
    def ask(headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
        body = {"input": text, "request_id": "batch-7", **fields}
        return httpx.post(f"{dummy.url}{path}", json=body, headers=headers, timeout=30)

    for response, name in ((ask(), "batch-7"), (ask({"x-request-id": "mine"}), "mine")):
        assert (response.headers["x-request-id"], response.json()["id"]) == (name, f"embd-{name}")
    response = ask(dimensions="no")
    assert (response.status_code, response.headers["x-request-id"]) == (400, "batch-7")
    for unfit in ("a\r\nset-cookie: b", "", "é", "x" * 129):
        response = ask(request_id=unfit)
        assert response.headers["x-request-id"].startswith("req_")
        assert response.json()["id"] == f"embd-{response.headers['x-request-id']}"
    response = ask(request_id=5)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")


def test_pooling_is_embedding_in_another_shape(dummy):
    for fields in ({}, {"encoding_format": "base64"}, {"use_activation": False}, {"task": "embed", "prompt": "p: "}):
        pooled = dummy.post("/pooling", input=["a b", "c"], **fields)
        fields.pop("task", None)
        embedded = dummy.post("/v1/embeddings", input=["a b", "c"], **fields)
        assert [item["data"] for item in pooled["data"]] == [item["embedding"] for item in embedded["data"]]
        assert {item["object"] for item in pooled["data"]} == {"pooling"}
        assert pooled["usage"] == embedded["usage"]


def test_each_token_has_a_vector(dummy):
    raw = dummy.post("/pooling", input=["a b c", "d"], task="token_embed", use_activation=False)
    rows = [np.array(item["data"], np.float32) for item in raw["data"]]
    assert [array.shape for array in rows] == [(5, 384), (3, 384)]
    normalized = dummy.post("/pooling", input=["a b c", "d"], task="token_embed")
    for item, expected in zip(normalized["data"], rows, strict=True):
        lengths = np.linalg.norm(expected, axis=1, keepdims=True)
        assert np.allclose(item["data"], expected / lengths, atol=1e-6)
    encoded = dummy.post("/pooling", input="d", task="token_embed", use_activation=False, encoding_format="base64")
    assert base64.b64decode(encoded["data"][0]["data"]) == rows[1].astype("<f4").tobytes()


def test_sagemaker_is_answered_as_v1_embeddings(dummy):
    invoked = dummy.post("/invocations", input=["a", "b"], encoding_format="base64")
    assert invoked["data"] == dummy.post("/v1/embeddings", input=["a", "b"], encoding_format="base64")["data"]
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{dummy.url}/ping").status_code == 200


# --- tokens -----------------------------------------------------------------------------------------------------


def post(server: RunningServer, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)


def tokens_of(server: RunningServer, *, add_special_tokens: bool) -> list[int]:
    [described] = server.post("/tokenize", inputs=TEXT, add_special_tokens=add_special_tokens)
    ids = [token["id"] for token in described]
    counted = server.post("/tokenize", prompt=TEXT, add_special_tokens=add_special_tokens, return_token_strs=True)
    assert counted["tokens"] == ids
    assert counted["count"] == len(ids) == len(counted["token_strs"])
    return ids


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_come_back_as_the_same_tokens(dummy, add_special_tokens):
    """Framed or not: these paths' callers have them from this server."""
    ids = tokens_of(dummy, add_special_tokens=add_special_tokens)
    whole = dummy.post("/v1/embeddings", input=TEXT, add_special_tokens=add_special_tokens)
    expected = whole["data"][0]["embedding"]
    assert whole["usage"]["prompt_tokens"] == len(ids)
    rows = {path: post(dummy, path, inputs=[ids]) for path in ("/embed", "/", "/invocations")}
    rows |= {"/embed flat": post(dummy, "/embed", inputs=ids), "/pooling": post(dummy, "/pooling", input=ids)}
    for path, answer in rows.items():
        assert answer.status_code == 200, (path, answer.text)
        assert answer.headers["x-vecd-token-ids"] == "model", path
        given = answer.json()
        given = given["data"][0]["data"] if path == "/pooling" else given[0]
        assert np.abs(np.array(given) - expected).max() < 1e-6, path
    [tokens] = dummy.post("/embed_all", inputs=[ids])
    assert len(tokens) == len(ids)


def test_openai_s_path_takes_framed_ids_for_the_model_s_and_others_for_cl100k(dummy):
    ids = tokens_of(dummy, add_special_tokens=False)
    for path in ("/v1/embeddings", "/invocations"):
        assert post(dummy, path, input=[15339, 1917]).headers["x-vecd-token-ids"] == "cl100k"
        assert post(dummy, path, input=[101, *ids, 102]).headers["x-vecd-token-ids"] == "model"


def test_a_detokenized_text_has_the_vector_of_the_text(dummy):
    back = dummy.post("/detokenize", tokens=tokens_of(dummy, add_special_tokens=False))["prompt"]
    assert dummy.embed(back) == dummy.embed(TEXT)


def test_a_long_text_s_tokens_are_all_there(dummy):
    """More than are written on the event loop, and than are embedded."""
    [long] = dummy.post("/tokenize", inputs="wörd " * 3000)
    [short] = dummy.post("/tokenize", inputs="wörd")
    inner = [(token["id"], token["text"]) for token in short[1:-1]]
    assert [(token["id"], token["text"]) for token in long[1:-1]] == inner * 3000
    assert all(token["start"] < token["stop"] for token in long[1:-1])
    tokenized = dummy.post("/tokenize", prompt="word " * 40_000)
    assert tokenized["count"] == len(tokenized["tokens"]) == 40_002


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/embeddings", {"input": [[101, 30522, 102]]}, 400, '"param":"input"'),
        ("/pooling", {"input": [[30522]]}, 400, '"param":"input"'),
        ("/tokenize", {"prompt": "a" * 300_000}, 400, '"param":"prompt"'),
        ("/detokenize", {"tokens": [30522]}, 400, '"param":"tokens"'),
        (
            "/v2/embed",
            {"texts": ["a", " " * 300_000], "truncate": "NONE"},
            400,
            "'texts[1]' has more than 256000 characters",
        ),
        ("/embed", {"inputs": [[101, 102], [30522]]}, 422, "'inputs[1]' has a token id outside the model's vocabulary"),
        ("/v1/embeddings", {"input": [200000]}, 400, "'input[0]' has a token id outside cl100k_base's vocabulary"),
        ("/v1/embeddings", {"input": "a " * 300, "overflow": "error"}, 400, "maximum context length is 256 tokens"),
        ("/v1/embeddings", {"input": "a " * 300, "late_chunking": True}, 400, "you requested 302 tokens"),
        ("/v1/embeddings", {"input": TEXT, "late_chunking": {"ranges": [[10, 11]]}}, 400, "[10, 11], has no token"),
        ("/v1/embeddings", {"input": TEXT, "late_chunking": {"ranges": [[0, 99]]}}, 400, "ends behind the text"),
        ("/v2/embed", {"texts": ["a b c"], "truncate": "NONE", "max_tokens": 4}, 400, "length is 4 tokens"),
        ("/embed", {"inputs": "a " * 300, "truncate": False}, 422, "maximum context length is 256 tokens"),
        (
            "/api/embed",
            {"input": "a b c", "options": {"num_ctx": 4}, "truncate": False},
            400,
            "the input length exceeds the context length: This model's maximum context length is 4 tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_of_the_tokenizer_names_the_callers_field(dummy, path, body, status, words):
    """In the message, in dialects whose errors have no `param`."""
    answer = post(dummy, path, **body)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text[:500]


@pytest.mark.parametrize("field", ["inputs", "prompt"])
def test_a_deadline_holds_for_tokens_too(dummy, field):
    body = {field: "a " * 100_000}
    no_time = post(dummy, "/tokenize", {"x-vecd-timeout-ms": "1"}, **body)
    assert no_time.status_code in (429, 503), "429: where it is known before"
    refused = post(dummy, "/tokenize", {"x-vecd-timeout-ms": "soon"}, **body)
    assert refused.status_code in (400, 422)
    assert "x-vecd-timeout-ms" in refused.text


# --- conversations ----------------------------------------------------------------------------------------------


def refusal(server: RunningServer, path: str, **fields: Any) -> str:
    """The message of the 400 for `messages`, in vLLM's shape."""
    refused = post(server, path, **fields)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["param"]) == (400, "BadRequestError", "messages")
    message: str = error["message"]
    return message


@pytest.mark.parametrize("path", ["/pooling", "/invocations", "/tokenize"])
def test_a_model_without_a_template_refuses_conversations(dummy, path):
    message = refusal(dummy, path, messages=[{"role": "user", "content": "secret"}])
    assert "the model has no chat template" in message
    assert "secret" not in message


CHAT = [{"role": "user", "content": "The cat"}, {"role": "assistant", "content": "A feline"}]
TEXTS = ["[CLS]user: The cat\n\nassistant: A feline\n\n[SEP]", "[CLS]user: The cat\n\n[SEP]"]


@pytest.fixture(scope="module")
def chat(served) -> RunningServer:
    """Of a model with `CHAT_TEMPLATE`, chunks by default, and at most 600 tokens."""
    server: RunningServer = served("chat")
    return server


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/invocations"])
def test_conversations_have_the_vectors_of_their_texts(chat, path):
    answered = chat.post(path, messages=[CHAT, CHAT[:1]])
    expected = chat.post(path, input=TEXTS, add_special_tokens=False)
    assert (answered["data"], answered["usage"]) == (expected["data"], expected["usage"])


def test_a_conversation_s_tokens_are_those_of_its_text(chat):
    tokens = chat.post("/tokenize", messages=CHAT, add_generation_prompt=False)
    assert tokens["count"] == len(chat.post("/tokenize", prompt=TEXTS[0], add_special_tokens=False)["tokens"])
    assert chat.post("/tokenize", messages=CHAT)["count"] == tokens["count"] + 2


def test_a_template_that_loops_fails_its_request_alone(chat):
    body = {"messages": [{"role": "user", "content": "loop"}]}
    for path in ("/pooling", "/invocations"):
        assert "takes more than a second" in refusal(chat, path, **body)
    assert post(chat, "/pooling", {"x-vecd-timeout-ms": "200"}, **body).status_code == 503
    pooled = chat.post("/pooling", messages=CHAT)["data"]
    assert pooled == chat.post("/pooling", input=TEXTS[0], add_special_tokens=False)["data"]


def test_a_conversation_and_a_text_contradict_each_other(chat):
    assert "send one of them" in refusal(chat, "/invocations", input="a", messages=CHAT)


def test_the_length_of_an_input_may_have_a_bound_above_the_model_s(chat):
    assert chat.post("/pooling", input="a " * 598)["usage"]["prompt_tokens"] > 600, "with each chunk's own two"
    too_long = post(chat, "/pooling", input="a " * 599)
    assert too_long.status_code == 400
    assert "maximum context length is 600 tokens" in too_long.json()["error"]["message"]
