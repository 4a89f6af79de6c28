"""vLLM's dialect: every exchange to the byte, and its vectors beside those of /v1/embeddings."""

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support import goldens
from tests.support.serving import Server, running_server


def test_golden(weightless):
    goldens.check("vllm", weightless.url, {"id", "created", "version"})


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_a_request_is_named_by_its_body_unless_a_header_names_it(weightless, path, size):
    body = {"input": "a" if size == "small" else "a " * 50_000, "request_id": "batch-7"}
    response = httpx.post(f"{weightless.url}{path}", json=body)
    assert (response.headers["x-request-id"], response.json()["id"]) == ("batch-7", "embd-batch-7")
    response = httpx.post(f"{weightless.url}{path}", json=body, headers={"x-request-id": "mine"})
    assert (response.headers["x-request-id"], response.json()["id"]) == ("mine", "embd-mine")
    response = httpx.post(f"{weightless.url}{path}", json={**body, "dimensions": "no"})
    assert (response.status_code, response.headers["x-request-id"]) == (400, "batch-7")
    for unfit in ("a\r\nset-cookie: b", "", "é", "x" * 129):
        response = httpx.post(f"{weightless.url}{path}", json={**body, "request_id": unfit})
        assert response.headers["x-request-id"].startswith("req_")
        assert response.json()["id"] == f"embd-{response.headers['x-request-id']}"
    response = httpx.post(f"{weightless.url}{path}", json={**body, "request_id": 5})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")


def test_pooling_is_embedding_in_another_shape(weightless):
    for fields in ({}, {"encoding_format": "base64"}, {"use_activation": False}, {"task": "embed", "prompt": "p: "}):
        pooled = weightless.post("/pooling", input=["a b", "c"], **fields)
        fields.pop("task", None)
        embedded = weightless.post("/v1/embeddings", input=["a b", "c"], **fields)
        assert [item["data"] for item in pooled["data"]] == [item["embedding"] for item in embedded["data"]]
        assert {item["object"] for item in pooled["data"]} == {"pooling"}
        assert pooled["usage"] == embedded["usage"]


def test_each_token_has_a_vector(weightless):
    raw = weightless.post("/pooling", input=["a b c", "d"], task="token_embed", use_activation=False)
    rows = [np.array(item["data"], np.float32) for item in raw["data"]]
    assert [array.shape for array in rows] == [(5, 384), (3, 384)]
    normalized = weightless.post("/pooling", input=["a b c", "d"], task="token_embed")
    for item, expected in zip(normalized["data"], rows, strict=True):
        lengths = np.linalg.norm(expected, axis=1, keepdims=True)
        assert np.allclose(item["data"], expected / lengths, atol=1e-6)
    encoded = weightless.post("/pooling", input="d", task="token_embed", use_activation=False, encoding_format="base64")
    assert base64.b64decode(encoded["data"][0]["data"]) == rows[1].astype("<f4").tobytes()


def test_tokens_and_back_again(weightless):
    text = "Hello, wörld 漢字 👍"
    tokenized = weightless.post("/tokenize", prompt=text, return_token_strs=True)
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
    embedded = weightless.post("/v1/embeddings", input=text)
    assert tokenized["count"] == embedded["usage"]["prompt_tokens"]
    by_ids = weightless.post("/v1/embeddings", input=tokenized["tokens"])
    assert by_ids["data"] == embedded["data"]
    back = weightless.post("/detokenize", tokens=tokenized["tokens"][1:-1])["prompt"]
    assert weightless.post("/v1/embeddings", input=back)["data"] == embedded["data"]


def test_a_long_text_is_counted_whole(weightless):
    for num_words in (1000, 40_000):
        tokenized = weightless.post("/tokenize", prompt="word " * num_words)
        assert tokenized["count"] == len(tokenized["tokens"]) == num_words + 2


def test_sagemaker_is_answered_as_v1_embeddings(weightless):
    invoked = weightless.post("/invocations", input=["a", "b"], encoding_format="base64")
    assert invoked["data"] == weightless.post("/v1/embeddings", input=["a", "b"], encoding_format="base64")["data"]
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{weightless.url}/ping").status_code == 200


def refusal(server: Server, path: str, **fields: Any) -> str:
    """The message of the 400 for `messages`, in vLLM's shape."""
    refused = httpx.post(f"{server.url}{path}", json=fields, timeout=30)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["param"]) == (400, "BadRequestError", "messages")
    message: str = error["message"]
    return message


@pytest.mark.parametrize("path", ["/pooling", "/invocations", "/tokenize"])
def test_a_model_without_a_template_refuses_conversations(weightless, path):
    message = refusal(weightless, path, messages=[{"role": "user", "content": "secret"}])
    assert "the model has no chat template" in message
    assert "secret" not in message


TEMPLATE = """{% for m in messages %}{{ cls_token if loop.first }}{{ m.role }}: {{ m.content }}
{% if m.content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}{{ sep_token }}"""


def test_conversations_have_the_vectors_of_their_texts(minilm_folder, tmp_path):
    for file in minilm_folder.rglob("*"):
        if file.is_file():
            copy = tmp_path / "model" / file.relative_to(minilm_folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(file)
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    chat = [{"role": "user", "content": "The cat"}, {"role": "assistant", "content": "A feline"}]
    texts = ["[CLS]user: The cat\n\nassistant: A feline\n\n[SEP]", "[CLS]user: The cat\n\n[SEP]"]
    flags = ("--engine", "dummy", "--workers", "1", "--overflow", "chunk", "--max-embed-len", "600")
    with running_server(str(tmp_path / "model"), *flags) as server:
        for path in ("/v1/embeddings", "/pooling", "/invocations"):
            answered = server.post(path, messages=[chat, chat[:1]])
            expected = server.post(path, input=texts, add_special_tokens=False)
            assert (answered["data"], answered["usage"]) == (expected["data"], expected["usage"])
        tokens = server.post("/tokenize", messages=chat, add_generation_prompt=False)
        assert tokens["count"] == len(server.post("/tokenize", prompt=texts[0], add_special_tokens=False)["tokens"])
        assert server.post("/tokenize", messages=chat)["count"] == tokens["count"] + 2
        body = {"messages": [{"role": "user", "content": "loop"}]}
        for path in ("/pooling", "/invocations"):
            assert "takes more than a second" in refusal(server, path, **body)
        assert "send one of them" in refusal(server, "/invocations", messages=chat, input="a")
        assert server.post("/pooling", input="a " * 598)["usage"]["prompt_tokens"] > 600, "with each chunk's own two"
        too_long = httpx.post(f"{server.url}/pooling", json={"input": "a " * 599}, timeout=30)
        assert too_long.status_code == 400
        assert "maximum context length is 600 tokens" in too_long.json()["error"]["message"]
        late = httpx.post(f"{server.url}/pooling", json=body, headers={"x-vecd-timeout-ms": "200"}, timeout=30)
        assert late.status_code == 503
        assert (
            server.post("/pooling", messages=chat)["data"]
            == server.post("/pooling", input=texts[0], add_special_tokens=False)["data"]
        )
