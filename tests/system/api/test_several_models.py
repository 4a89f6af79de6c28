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

from tests.support.every_kind import folders, remember_reference
from tests.support.score_checkpoints import save_minilm_cross_encoder
from tests.support.serving import Server, eventually, exact_server
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
    return remember_reference(save_minilm_cross_encoder(tmp_path_factory.mktemp("ranker") / "model", minilm_folder))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path, ranker_folder: Path) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("config") / "vecd.toml"
    file.write_text(TABLES.format(ranker=ranker_folder, embedder=minilm_folder))
    with exact_server("--workers", "1", "--config", str(file), f"org/words={folders()['splade']}") as server:
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
        ("/v1/embeddings", "Embedder", {"model": "ranker"}),
        ("/m/Embedder/v1/embeddings", "ranker", {"model": "ranker"}),
    ],
    ids=["default", "header", "path"],
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


QUERY = {"prompt_name": "query", "dimensions": 64}


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/m/{}/v1/embeddings", {"input": TEXTS}, QUERY),
        ("/m/{}/similarity", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}, QUERY),
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
    return np.array([item["embedding"] for item in response["data"]] if "data" in response else response)


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
