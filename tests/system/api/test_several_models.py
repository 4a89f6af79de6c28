"""Several models in one server, with real engines: each is reached by every way to name it, gives what its own library
gives, and is left alone by the death of another one's worker."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sentence_transformers import CrossEncoder

from tests.support.score_checkpoints import save_minilm_cross_encoder
from tests.support.serving import Server, eventually, exact_server
from tests.support.sparse_checkpoints import save_splade
from tests.support.texts import make_texts

TEXTS = [text[:200] for text in make_texts(20, seed=11)]
TABLES = """
[models.ranker]
source = "{ranker}"

[models.ranker.aliases.logits]
raw-scores = true

[models.Embedder]
source = "{embedder}"
matryoshka = true
prompts = {{ query = "search: " }}

[models.Embedder.aliases.asked]
role = "query"
dimensions = 64

[models.Embedder.aliases.small]
prompt = "small: "
dtype = "int8"
"""


@pytest.fixture(scope="module")
def ranker_folder(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    return save_minilm_cross_encoder(tmp_path_factory.mktemp("ranker") / "model", minilm_folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path, ranker_folder: Path) -> Iterator[Server]:
    words = save_splade(tmp_path_factory.mktemp("words") / "model")
    file = tmp_path_factory.mktemp("config") / "vecd.toml"
    file.write_text(TABLES.format(ranker=ranker_folder, embedder=minilm_folder))
    with exact_server("--workers", "1", "--config", str(file), f"org/words={words}") as server:
        yield server


def ask(server: Server, path: str, name: str = "", **body: Any) -> tuple[Any, str]:
    """The body of the response, and the model that has answered. `name`: of the header; "": without it."""
    headers = {"x-vecd-model": name} if name else {}
    response = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    return response.json(), response.headers["x-vecd-model"]


@pytest.mark.parametrize(
    ("path", "header", "fields"),
    [
        ("/v1/embeddings", "", {}),
        ("/v1/embeddings", "", {"model": "Embedder"}),
        ("/v1/embeddings", "", {"model": "embedder:latest"}),
        ("/v1/embeddings", "", {"model": "text-embedding-3-small"}),
        ("/v1/embeddings", "Embedder", {"model": "ranker"}),
        ("/m/Embedder/v1/embeddings", "ranker", {"model": "ranker"}),
    ],
    ids=["default", "body", "tag", "unknown", "header", "path"],
)
def test_vectors_are_the_embedder_s(
    server: Server, reference: Any, path: str, header: str, fields: dict[str, str]
) -> None:
    found, answered = ask(server, path, header, input=TEXTS, **fields)
    assert (answered, found["model"]) == ("Embedder", "Embedder")
    vectors = np.array([item["embedding"] for item in found["data"]], dtype=np.float32)
    np.testing.assert_allclose(vectors, reference(TEXTS), atol=1e-5, rtol=0)


def test_scores_are_the_ranker_s(server: Server, ranker_folder: Path) -> None:
    model: Any = CrossEncoder(str(ranker_folder), device="cpu", local_files_only=True)
    expected = model.predict([(TEXTS[0], text) for text in TEXTS])
    for path in ("/rerank", "/m/ranker/rerank"):
        found, answered = ask(server, path, query=TEXTS[0], texts=TEXTS)
        assert answered == "ranker"
        scores = {item["index"]: item["score"] for item in found}
        np.testing.assert_allclose([scores[index] for index in range(len(TEXTS))], expected, atol=1e-5, rtol=0)


def test_sparse_vectors_are_the_sparse_model_s(server: Server) -> None:
    rows, answered = ask(server, "/embed_sparse", inputs=["w5 w6", "w7"])
    assert (answered, len(rows)) == ("org/words", 2)
    found, answered = ask(server, "/m/org/words/v1/embeddings", input=["w5 w6", "w7"], output="sparse")
    assert answered == "org/words"
    for row, item in zip(rows, found["data"], strict=True):
        assert [each["index"] for each in row] == item["sparse"]["indices"]


def test_what_a_model_cannot_do_names_those_that_can(server: Server) -> None:
    response = httpx.post(f"{server.url}/v1/embeddings", json={"model": "ranker", "input": "a"}, timeout=30)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "wrong_model"
    assert "Embedder" in error["message"]


def test_all_models_are_listed(server: Server) -> None:
    listed = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"]
    names = [model["id"] for model in listed]
    assert [name for name in names if ":" not in name] == [
        "org/words",
        "ranker",
        "logits",
        "Embedder",
        "asked",
        "small",
    ]  # without prompts
    assert httpx.get(f"{server.url}/m/nothing/v1/models", timeout=30).status_code == 404


QUERY = {"prompt_name": "query", "dimensions": 64}
IN_TEI_S = {"inputs": TEXTS}


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/m/{}/v1/embeddings", {"input": TEXTS}, QUERY),
        ("/m/{}/v2/embed", {"texts": TEXTS}, {"input_type": "search_query", "output_dimension": 64}),
        ("/m/{}/api/embed", {"input": TEXTS}, {"model": "Embedder:query", "dimensions": 64}),
        ("/m/{}/embed", IN_TEI_S, QUERY),
        ("/m/{}/similarity", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}, QUERY),
        ("/m/{}/vertex", {"instances": [IN_TEI_S]}, {"instances": [{**IN_TEI_S, **QUERY}]}),
        ("/models/{}", IN_TEI_S, QUERY),
    ],
)
def test_vectors_by_an_alias_are_those_with_the_fields(
    server: Server, path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    found, answered = ask(server, path.format("asked"), **body)
    expected, _ = ask(server, path.format("Embedder"), **{**body, **fields})
    assert answered == "Embedder"
    np.testing.assert_allclose(numbers_of(found), numbers_of(expected), atol=1e-5, rtol=0)
    plain = numbers_of(ask(server, path.format("Embedder"), **body)[0])
    assert plain.shape != numbers_of(found).shape or not np.allclose(plain, numbers_of(found), atol=1e-3)


def numbers_of(response: Any) -> Any:
    """The vectors of a response, or the cosines."""
    if "data" in response:
        return np.array([item["embedding"] for item in response["data"]])
    found = next((response[key] for key in ("embeddings", "predictions") if key in response), response)
    return np.array(found["float"] if isinstance(found, dict) else found)


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/embeddings", "input"), ("/v2/embed", "texts"), ("/api/embed", "input")]
)
def test_the_body_and_the_header_name_an_alias(server: Server, path: str, field: str) -> None:
    texts: dict[str, Any] = {field: TEXTS}
    expected, _ = ask(server, f"/m/asked{path}", **texts)
    for found in (
        ask(server, path, **texts, model="asked")[0],
        ask(server, path, **texts, model="Asked:latest")[0],
        ask(server, path, "asked", **texts, model="Embedder")[0],
    ):
        np.testing.assert_allclose(numbers_of(found), numbers_of(expected), atol=1e-5, rtol=0)
        assert found.get("model", "Embedder") == "Embedder"


def test_a_default_dtype_is_a_type_of_each_dialect(server: Server) -> None:
    found, _ = ask(server, "/v1/embeddings", model="small", input=TEXTS)
    expected, _ = ask(server, "/v1/embeddings", model="Embedder", input=TEXTS, prompt="small: ", output_dtype="int8")
    np.testing.assert_allclose(numbers_of(found), numbers_of(expected), atol=1, rtol=0)
    of_cohere, _ = ask(server, "/v2/embed", model="small", texts=TEXTS)
    assert of_cohere["embeddings"].keys() == {"int8"}
    np.testing.assert_allclose(of_cohere["embeddings"]["int8"], numbers_of(expected), atol=1, rtol=0)


def test_a_reranker_s_alias_has_raw_scores(server: Server) -> None:
    body: dict[str, Any] = {"query": TEXTS[0], "documents": TEXTS[:3]}
    found, _ = ask(server, "/v1/rerank", model="logits", **body)
    expected, _ = ask(server, "/v1/rerank", model="ranker", raw_scores=True, **body)
    plain, _ = ask(server, "/v1/rerank", model="logits", raw_scores=False, **body)
    scores, logits, between = (
        [item["relevance_score"] for item in each["results"]] for each in (found, expected, plain)
    )
    np.testing.assert_allclose(scores, logits, atol=1e-5, rtol=0)
    np.testing.assert_allclose(between, 1 / (1 + np.exp(-np.array(logits))), atol=1e-5, rtol=0)


def test_figures_tell_the_models_apart(server: Server) -> None:
    def tokens_of(name: str) -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics", timeout=30).raise_for_status().text.splitlines()
        samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        counted = float(samples[f'vecd_tokens_total{{model="{name}"}}'])
        by_worker = [
            float(value) for key, value in samples.items()
            if key.startswith("vecd_worker_tokens_total{") and f'model="{name}"' in key
        ]  # fmt: skip
        [listed] = [one for one in httpx.get(f"{server.url}/stats").json()["models"] if one["model"] == name]
        return {"counter": counted, "workers": sum(by_worker), "stats": listed["tokens"]}

    before = {name: tokens_of(name) for name in ("ranker", "Embedder")}
    ask(server, "/rerank", query=TEXTS[0], texts=TEXTS)
    ranked = tokens_of("ranker")
    grown = {kind: value - before["ranker"][kind] for kind, value in ranked.items()}
    assert len(set(grown.values())) == 1
    assert grown["counter"] > 0
    assert tokens_of("Embedder") == before["Embedder"]
    text = httpx.get(f"{server.url}/metrics").text
    assert 'vecd_requests_total{dialect="tei",model="ranker",route="/rerank",status="200"}' in text


def test_the_death_of_one_model_s_worker_fails_no_request(server: Server, reference: Any) -> None:
    expected = reference(TEXTS[:1])

    def pid_of(name: str) -> int:
        [worker] = httpx.get(f"{server.url}/m/{name}/info", timeout=30).json()["workers"]
        return int(worker["pid"])

    embedder, ranker = pid_of("Embedder"), pid_of("ranker")
    os.kill(ranker, signal.SIGKILL)
    for _ in range(10):
        found, _ = ask(server, "/v1/embeddings", input=TEXTS[0])
        np.testing.assert_allclose([found["data"][0]["embedding"]], expected, atol=1e-5, rtol=0)
    assert len(ask(server, "/rerank", query=TEXTS[0], texts=TEXTS)[0]) == len(TEXTS)
    eventually(lambda: pid_of("ranker") != ranker)
    assert pid_of("Embedder") == embedder
