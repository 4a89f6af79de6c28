"""text-embeddings-inference's API: vectors that sentence-transformers gives, what `/info` says to whom, and metrics of
all gateways."""

import asyncio
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.serving import eventually, running_server
from tests.support.texts import make_texts
from vecd.gateway.api.system_routes import root

WEIGHTLESS = ("--engine", "weightless", "--workers", "1")
TEXTS = [*make_texts(14), "", "word " * 400]
"""The last one is longer than the model takes."""
MAX_DIFFERENCE = 1e-5


@pytest.fixture(scope="module")
def model(minilm_folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(minilm_folder), device="cpu")


def ask(url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


# --- vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/embed", "/", "/invocations"])
def test_vectors_are_sentence_transformers_own(float32_server, reference, path):
    vectors = np.array(ask(float32_server.url, path, inputs=TEXTS), dtype=np.float32)
    assert np.abs(vectors - reference(TEXTS)).max() < MAX_DIFFERENCE
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-6)
    [alone] = ask(float32_server.url, path, inputs=TEXTS[3])
    assert np.abs(np.array(alone) - vectors[3]).max() < MAX_DIFFERENCE


def test_vectors_that_are_not_normalized(float32_server, model):
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(modules=[model[0], model[1]], device="cpu").encode(TEXTS)
    given = ask(float32_server.url, "/embed", inputs=TEXTS, normalize=False)
    assert np.abs(np.array(given, dtype=np.float32) - expected).max() < MAX_DIFFERENCE
    assert not np.allclose(np.linalg.norm(expected, axis=1), 1, atol=0.05), "or it would prove nothing"


def test_a_vector_for_every_token(float32_server, model):
    expected = model.encode(TEXTS, output_value="token_embeddings")
    given = ask(float32_server.url, "/embed_all", inputs=TEXTS)
    assert [np.shape(rows) for rows in given] == [tuple(rows.shape) for rows in expected]
    for ours, theirs in zip(given, expected, strict=True):
        assert np.abs(np.array(ours, dtype=np.float32) - theirs.numpy()).max() < 2 * MAX_DIFFERENCE


def test_similarity_is_the_cosine(float32_server, reference):
    given = ask(float32_server.url, "/similarity", inputs={"source_sentence": TEXTS[0], "sentences": TEXTS[1:]})
    vectors = reference(TEXTS)
    assert np.array(given) == pytest.approx(vectors[1:] @ vectors[0], abs=MAX_DIFFERENCE)


def test_tokens_are_the_tokenizer_s(float32_server, model):
    text = "Naïve Café: unaffable, 東京 and [SEP]?"
    [tokens] = ask(float32_server.url, "/tokenize", inputs=text)
    assert [token["id"] for token in tokens] == model.tokenizer(text)["input_ids"]
    [without] = ask(float32_server.url, "/tokenize", inputs=text, add_special_tokens=False)
    assert without == [token for token in tokens if not token["special"]]
    data = text.encode()
    for token in without:
        assert data[token["start"] : token["stop"]].decode() == token["text"]
    ids = [token["id"] for token in tokens]
    assert ask(float32_server.url, "/decode", ids=ids) == [model.tokenizer.decode(ids, skip_special_tokens=True)]


# --- /info, and the root ------------------------------------------------------------------------------------------

TEI_KEYS = {
    "model_id", "model_sha", "model_dtype", "served_model_name", "model_type", "max_concurrent_requests",
    "max_input_length", "max_batch_tokens", "max_batch_requests", "max_client_batch_size", "auto_truncate",
    "tokenization_workers", "version", "sha", "docker_label",
}  # fmt: skip


def assert_is_tei_s_alone(info: dict[str, Any]) -> None:
    assert set(info) == TEI_KEYS
    assert (info["model_id"], info["max_input_length"], info["auto_truncate"]) == ("all-MiniLM-L6-v2", 256, True)
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["model_dtype"] == "float32"


def assert_is_ours_too(info: dict[str, Any]) -> None:
    assert info.keys() >= TEI_KEYS | {"model", "limits", "queue", "workers", "gateways"}


def test_info_says_to_each_key_what_it_may_know(tmp_path):
    keys = {name: f"{name}-secret-0123456789abcdef" for name in ("alice", "watcher")}
    scopes = {"alice": "embed", "watcher": "metrics"}
    entries = [
        f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(key.encode()).hexdigest()}"\nscopes = ["{scopes[name]}"]\n'
        for name, key in keys.items()
    ]
    (tmp_path / "keys.toml").write_text("\n".join(entries))
    with running_server(*WEIGHTLESS, "--keys-file", str(tmp_path / "keys.toml")) as server:

        def get(path: str, name: str | None = None) -> httpx.Response:
            headers = {"authorization": f"Bearer {keys[name]}"} if name else {}
            return httpx.get(server.url + path, headers=headers)

        assert get("/info").status_code == 401
        assert_is_tei_s_alone(get("/info", "alice").json())
        assert_is_ours_too(get("/info", "watcher").json())
        assert get("/metrics", "alice").status_code == 403
        assert get("/").status_code == 200, "a probe has no key"
        unlocked = httpx.post(f"{server.url}/embed", json={"inputs": "a"})
        assert (unlocked.status_code, unlocked.json().keys()) == (401, {"error", "error_type"})


def test_beside_an_admin_listener_the_public_info_has_nothing_of_the_operator_s(tmp_path):
    with running_server(*WEIGHTLESS, "--admin-uds", str(tmp_path / "admin.sock")) as server:
        assert_is_tei_s_alone(httpx.get(f"{server.url}/info").json())
        transport = httpx.HTTPTransport(uds=str(tmp_path / "admin.sock"))
        with httpx.Client(transport=transport, base_url="http://admin", timeout=30) as admin:
            assert_is_ours_too(admin.get("/info").json())
            assert admin.get("/").text == "vecd is running"


def test_without_keys_or_admin_listener_info_is_all(float32_server):
    info = float32_server.info()
    assert_is_ours_too(info)
    assert info["model_dtype"] == info["workers"][0]["dtype"] == "float32"


def test_the_root_is_a_probe(float32_server):
    answer = httpx.get(f"{float32_server.url}/")
    assert (answer.status_code, answer.text) == (200, "vecd is running")
    assert answer.headers["content-type"].startswith("text/plain")
    assert httpx.head(f"{float32_server.url}/").status_code == 200


def test_the_root_of_a_server_that_ends_is_no_longer_well():
    reason = "the server is shutting down"
    context: Any = SimpleNamespace(why_unavailable=lambda: reason, config=SimpleNamespace(has_ui=False))
    context.models_for = lambda principal: None
    nobody: Any = None
    response = asyncio.run(root(context, nobody, nobody))
    assert (response.status, response.headers["retry-after"]) == (503, "1")


# --- metrics ----------------------------------------------------------------------------------------------------


def te_metrics(client: httpx.Client) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("te_")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics_are_of_all_gateways_and_all_dialects():
    with (
        running_server(*WEIGHTLESS, "--gateways", "2", "--tei-metrics") as server,
        server.client_of(0) as first,
        server.client_of(1) as second,
    ):
        assert te_metrics(first)['te_request_count{method="single"}'] == 0, "there from the start"
        assert first.post("/embed", json={"inputs": "one"}).status_code == 200
        assert second.post("/v1/embeddings", json={"input": "one"}).status_code == 200
        assert second.post("/embed", json={"inputs": ["one", "two", "three"]}).status_code == 200
        assert first.post("/embed", json={"inputs": 5}).status_code == 422
        assert second.post("/embed", json={"inputs": "word " * 400, "truncate": False}).status_code == 422
        assert second.post("/rerank", json={"query": "a", "texts": ["b"]}).status_code == 424
        assert first.post("/tokenize", json={"inputs": "one"}).status_code == 200, "counts as nothing"
        for client in (first, second):
            metrics = te_metrics(client)
            assert metrics['te_request_count{method="single"}'] == 3
            assert metrics['te_request_success{method="single"}'] == 2
            assert metrics['te_request_count{method="batch"}'] == 1
            failures = {name: value for name, value in metrics.items() if "failure" in name and value}
            assert failures == {
                f'te_request_failure{{err="{err}"}}': 1 for err in ("validation", "tokenization", "model_type")
            }
            assert metrics["te_embed_count"] == metrics["te_embed_success"] == 5
            assert metrics["te_request_duration_count"] == 3
            assert metrics["te_embed_duration_count"] == metrics["te_request_input_length_count"] == 5
            assert metrics["te_batch_next_size_sum"] == 5
            assert metrics["te_batch_next_tokens_sum"] == metrics["te_request_input_length_sum"]
            assert 0 < metrics["te_request_inference_duration_sum"] <= metrics["te_request_duration_sum"]
        eventually(lambda: te_metrics(first)["te_queue_size"] == 0)


def test_there_are_none_unless_they_are_asked_for(float32_server):
    assert "te_request" not in httpx.get(f"{float32_server.url}/metrics").text
