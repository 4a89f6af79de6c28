"""What is asked of the tokenizer itself, in the dialects that have it, through a server: its ids come back as the same
tokens; and the errors name what the caller has sent."""

import httpx
import numpy as np
import pytest

TEXT = "Unaffable: naïve café, 東京?"


def post(server, path, headers=None, **body):
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)


def tokens_of(server, *, add_special_tokens: bool) -> list[int]:
    [described] = post(server, "/tokenize", inputs=TEXT, add_special_tokens=add_special_tokens).json()
    ids = [token["id"] for token in described]
    counted = post(server, "/tokenize", prompt=TEXT, add_special_tokens=add_special_tokens).json()
    assert counted["tokens"] == ids
    return ids


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_come_back_as_the_same_tokens(weightless, add_special_tokens):
    """Framed or not: these paths' callers have them from this server."""
    ids = tokens_of(weightless, add_special_tokens=add_special_tokens)
    whole = post(
        weightless, "/v1/embeddings", input=TEXT, add_special_tokens=add_special_tokens, encoding_format="float"
    ).json()
    expected = whole["data"][0]["embedding"]
    assert whole["usage"]["prompt_tokens"] == len(ids)
    rows = {}
    for path in ("/embed", "/", "/invocations"):
        rows[path] = post(weightless, path, inputs=[ids])
    rows["/embed flat"] = post(weightless, "/embed", inputs=ids)
    rows["/vertex"] = post(weightless, "/vertex", instances=[{"inputs": ids}])
    rows["/pooling"] = post(weightless, "/pooling", input=ids)
    for path, answer in rows.items():
        assert answer.status_code == 200, (path, answer.text)
        assert answer.headers["x-vecd-token-ids"] == "model", path
        given = answer.json()
        if path == "/vertex":
            given = given["predictions"][0]
        given = given["data"][0]["data"] if path == "/pooling" else given[0]
        assert np.abs(np.array(given) - expected).max() < 1e-6, path
    [tokens] = post(weightless, "/embed_all", inputs=[ids]).json()
    assert len(tokens) == len(ids)


def test_openai_s_path_keeps_its_rule(weightless):
    ids = tokens_of(weightless, add_special_tokens=False)
    for path in ("/v1/embeddings", "/invocations"):
        assert post(weightless, path, input=[15339, 1917]).headers["x-vecd-token-ids"] == "cl100k"
        assert post(weightless, path, input=[101, *ids, 102]).headers["x-vecd-token-ids"] == "model"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": [[101, 30522, 102]]}, "input"),
        ("/pooling", {"input": [[30522]]}, "input"),
        ("/tokenize", {"prompt": "a" * 300_000}, "prompt"),
        ("/detokenize", {"tokens": [30522]}, "tokens"),
    ],
)
def test_an_error_of_the_tokenizer_names_the_callers_field(weightless, path, body, param):
    answer = post(weightless, path, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_message_names_the_callers_field(weightless):
    """Of dialects whose errors have no `param`."""
    answer = post(
        weightless, "/v2/embed", model="m", truncate="NONE", input_type="search_query", embedding_types=["float"],
        texts=["a", " " * 300_000],
    )  # fmt: skip
    assert answer.status_code == 400
    assert "'texts[1]' has more than 256000 characters" in answer.text
    answer = post(weightless, "/embed", inputs=[[101, 102], [30522]])
    assert answer.status_code == 422
    assert "'inputs[1]' has a token id outside the model's vocabulary" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": "a " * 100_000}),
        ("/tokenize", {"prompt": "a " * 100_000}),
    ],
)
def test_a_deadline_holds_for_tokens_too(weightless, path, body):
    answer = post(weightless, path, {"x-vecd-timeout-ms": "1"}, **body)
    assert answer.status_code == 503
    refused = post(weightless, path, {"x-vecd-timeout-ms": "soon"}, **body)
    assert refused.status_code in (400, 422)
    assert "x-vecd-timeout-ms" in refused.text
