"""Rerank requests of programs that cannot be installed here, as their sources send them, and what these read.

Shapes of requests, and what is read of a response: the sources of Open WebUI's external reranker, Dify's plugins,
RAGFlow, Weaviate's reranker modules, Milvus' functions, Elasticsearch's inference service `hugging_face`, OpenSearch's
ml-commons, LangChain's SageMaker endpoint, NVIDIA's NIM, the Vercel AI SDK and OmniRoute, in November 2026. A reader
fails on what its program fails on.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.clients.corpus import LONG, QUERY, RANKED

Ranked = list[tuple[int, float]]
_NUM = len(RANKED)
_BODY = {"model": "m", "query": QUERY, "documents": RANKED}
_ALL = {**_BODY, "top_n": _NUM}
_TEI = {"query": QUERY, "texts": RANKED}


# --- what programs read: the places of the documents and their scores, the best first ----------------------------


def by_score(scores: list[float]) -> Ranked:
    return sorted(enumerate(scores), key=lambda item: -item[1])


def results(body: Any) -> Ranked:
    """In the order of the response: LocalAI's, GPUStack's and the AI SDK's clients."""
    return [(item["index"], item["relevance_score"]) for item in body["results"]]


def results_by_index(body: Any) -> Ranked:
    """Open WebUI sorts by the index, and RAGFlow and Milvus put scores at it: there must be one for each document."""
    assert sorted(item["index"] for item in body["results"]) == list(range(_NUM))
    return by_score([item["relevance_score"] for item in sorted(body["results"], key=lambda item: item["index"])])


def results_with_text(body: Any) -> Ranked:
    """Dify's plugins for Cohere and Xinference."""
    assert [item["document"]["text"] for item in body["results"]] == [RANKED[index] for index, _ in results(body)]
    return results(body)


def results_and_usage(body: Any) -> Ranked:
    """RAGFlow's and Dify's clients of Jina count tokens; Weaviate's has whole numbers for them."""
    assert type(body["usage"]["total_tokens"]) is int
    assert isinstance(body["model"], str)
    return results(body)


def results_without_documents(body: Any) -> Ranked:
    """Weaviate's client of Jina has seen strings and objects there: it reads neither, but fails on the other one."""
    assert not any("document" in item for item in body["results"])
    return results_and_usage(body)


def results_as_doubles(body: Any) -> Ranked:
    """OpenSearch casts each score to a Double, which a number without a point is not, and the index to an Integer."""
    first = body["results"][0]
    assert {"index", "relevance_score"} <= set(first)
    assert all((type(index), type(score)) == (int, float) for index, score in results(body))
    return results_by_index(body)


def vercel(body: Any) -> Ranked:
    """Its schema: `id` a string or absent, `meta` anything."""
    assert isinstance(body["id"], str)
    return results(body)


def texts_of_tei(body: Any) -> Ranked:
    """Dify's plugin for text-embeddings-inference."""
    assert [item["text"] for item in body] == [RANKED[item["index"]] for item in body]
    return [(item["index"], item["score"]) for item in body]


def list_of_tei(body: Any) -> Ranked:
    return [(item["index"], item["score"]) for item in body]


def elasticsearch(body: Any) -> Ranked:
    """A list; every key that it does not know is an error. Its scores are single floats."""
    ranked = []
    for item in body:
        assert set(item) <= {"index", "score", "relevance_score", "text", "document"}
        assert type(item["index"]) is int
        ranked.append((item["index"], float(item.get("score", item.get("relevance_score")))))
    return sorted(ranked, key=lambda item: -item[1])


def elasticsearch_with_texts(body: Any) -> Ranked:
    assert [item["text"] for item in body] == [RANKED[item["index"]] for item in body]
    return elasticsearch(body)


def voyage(body: Any) -> Ranked:
    assert type(body["usage"]["total_tokens"]) is int
    return [(item["index"], item["relevance_score"]) for item in body["data"]]


def weaviate(body: Any) -> Ranked:
    """In the order of the request, and without an error."""
    assert [item["document"] for item in body["scores"]] == RANKED
    assert body["query"] == QUERY
    assert not body.get("error")
    return by_score([item["score"] for item in body["scores"]])


def sagemaker(body: Any) -> Ranked:
    return by_score(body["scores"])


def pair_scores(body: Any) -> Ranked:
    return by_score([item["score"] for item in body])


def vllm_scores(body: Any) -> Ranked:
    assert [item["index"] for item in body["data"]] == list(range(_NUM))
    return by_score([item["score"] for item in body["data"]])


class Request(NamedTuple):
    path: str
    body: dict[str, Any]
    read: Callable[[Any], Ranked]
    headers: dict[str, str] = {}  # noqa: RUF012 (nobody changes it)


_KEY = {"authorization": "Bearer x"}
REQUESTS = {
    "Open WebUI, external": Request("/rerank", _ALL, results_by_index, {**_KEY, "x-openwebui-user-name": "n"}),
    "Dify, huggingface_tei": Request("/rerank", {**_TEI, "return_text": True}, texts_of_tei),
    "Dify, openai_api_compatible before": Request("/rerank", {**_BODY, "top_n": None}, results),
    "Dify, xinference": Request("/v1/rerank", {**_ALL, "return_documents": True}, results_with_text),
    "Dify, ollama": Request("/api/rerank", _ALL, results),
    "RAGFlow, Xinference": Request(
        "/v1/rerank", {**_BODY, "return_documents": "true", "return_len": "true"}, results_by_index
    ),
    "RAGFlow, SiliconFlow": Request(
        "/v1/rerank",
        {**_ALL, "return_documents": False, "max_chunks_per_doc": 1024, "overlap_tokens": 80},
        results_by_index,
    ),
    "Weaviate, reranker-transformers": Request(
        "/rerank", {"query": QUERY, "documents": RANKED, "property": ""}, weaviate
    ),
    "Weaviate, reranker-jinaai": Request("/v1/rerank", _BODY, results_without_documents, _KEY),
    "Weaviate, reranker-cohere": Request("/v2/rerank", {**_BODY, "return_documents": False}, results, _KEY),
    "Weaviate, reranker-voyageai": Request("/v1/rerank", {**_BODY, "truncation": True}, voyage, _KEY),
    "Milvus, tei": Request(
        "/rerank", {**_TEI, "truncate": True, "truncation_direction": "Right", "return_text": False}, list_of_tei
    ),
    "Elasticsearch, hugging_face": Request(
        "/", {"query": QUERY, "documents": RANKED, "return_documents": False, "top_n": _NUM}, elasticsearch, _KEY
    ),
    "Elasticsearch, with texts": Request(
        "/", {"query": QUERY, "documents": RANKED, "return_documents": True}, elasticsearch_with_texts
    ),
    "OpenSearch, Cohere": Request("/v2/rerank", _ALL, results_as_doubles, _KEY),
    "OpenSearch, SageMaker": Request(
        "/invocations", {"inputs": [{"text": QUERY, "text_pair": text} for text in RANKED]}, pair_scores
    ),
    "LangChain, SageMaker": Request("/invocations", {"text_pairs": [[QUERY, text] for text in RANKED]}, sagemaker),
    "Vercel AI SDK": Request("/v2/rerank", {**_ALL, "max_tokens_per_doc": 4096, "priority": 0}, vercel, _KEY),
    "vLLM, score": Request("/v1/score", {"model": "m", "text_1": QUERY, "text_2": RANKED}, vllm_scores),
    "OmniRoute": Request("/v1/rerank", {**_BODY, "texts": RANKED, "return_documents": False}, results),
}


def post(url: str, request: Request) -> httpx.Response:
    return httpx.post(url + request.path, json=request.body, headers=request.headers, timeout=60)


@pytest.mark.parametrize("program", REQUESTS)
def test_what_programs_read(reranker, is_ranked, program):
    request = REQUESTS[program]
    answer = post(reranker.url, request)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert is_ranked([list(item) for item in request.read(answer.json())])


@pytest.mark.parametrize("program", REQUESTS)
def test_a_long_document_fails_no_program(reranker, program):
    request = REQUESTS[program]
    body = json.loads(json.dumps(request.body).replace(json.dumps(RANKED[0]), json.dumps(LONG)))
    assert body != request.body
    answer = post(reranker.url, request._replace(body=body))
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["x-vecd-truncated"]) == 1


@pytest.mark.parametrize("program", [name for name, request in REQUESTS.items() if "inputs" not in request.body])
def test_programs_can_read_the_error_of_another_model(float32_server, program):
    """Each reads one of these, or shows the whole body."""
    body = post(float32_server.url, REQUESTS[program]).json()
    texts = [body.get(name) for name in ("detail", "message", "error")]
    messages = [text["message"] if isinstance(text, dict) else text for text in texts if text]
    assert messages
    assert all("it cannot" in message for message in messages)


def test_nvidia_s_scores_are_logits(reranker, ranked):
    """Haystack's and RAGFlow's clients."""
    body = {"query": {"text": QUERY}, "passages": [{"text": text} for text in RANKED], "truncate": "END", "model": "m"}
    answer = httpx.post(f"{reranker.url}/v1/ranking", json=body, timeout=60).raise_for_status().json()
    assert [item["index"] for item in answer["rankings"]] == [place for place, _ in ranked]
    raw = httpx.post(f"{reranker.url}/rerank", json={**_TEI, "raw_scores": True}, timeout=60).json()
    assert [item["logit"] for item in answer["rankings"]] == pytest.approx([item["score"] for item in raw], rel=1e-6)


def test_weaviate_s_chunks_are_one_ranking(reranker, ranked):
    """It sends 32 documents at a time, and sorts them by score itself."""
    body = {"query": QUERY, "documents": RANKED[:2], "property": ""}
    first = httpx.post(f"{reranker.url}/rerank", json=body, timeout=60).json()["scores"]
    body = {"query": QUERY, "documents": RANKED[2:], "property": ""}
    scores = [*first, *httpx.post(f"{reranker.url}/rerank", json=body, timeout=60).json()["scores"]]
    places = sorted(range(_NUM), key=lambda place: -scores[place]["score"])
    assert places == [place for place, _ in ranked]


@pytest.mark.parametrize(("kind", "key"), [("reranker", "reranker"), ("float32_server", "embedding")])
def test_dify_reads_what_the_model_is_for(request, kind, key):
    """Its plugin for text-embeddings-inference takes the first key of `model_type`, and reads both limits."""
    info = httpx.get(f"{request.getfixturevalue(kind).url}/info", timeout=30).json()
    assert next(iter(info["model_type"])) == key
    assert type(info["max_input_length"]) is int
    assert type(info["max_client_batch_size"]) is int
    assert isinstance(info["model_id"], str)


def test_dify_tries_a_model_with_a_threshold(reranker):
    """To validate it: between 0 and 1 is all that it takes for granted."""
    texts = [
        "Kasumi is a girl's name of Japanese origin meaning mist.",
        "Her music is a kawaii bass, a mix of future bass, pop, and kawaii music and she leads a team named PopiParty.",
    ]
    body = {"query": "Who is Kasumi?", "texts": texts, "return_text": True}
    answer = httpx.post(f"{reranker.url}/rerank", json=body, timeout=30).raise_for_status().json()
    assert all(0 < item["score"] < 1 for item in answer)


@pytest.mark.parametrize("key", ["detail", "message"])
def test_too_many_documents_name_both_numbers(reranker, key):
    body = {"query": QUERY, "documents": ["w5"] * 2049}
    answer = httpx.post(f"{reranker.url}/v1/rerank", json=body, timeout=30)
    assert answer.status_code == 400
    assert "2049" in answer.json()[key]
    assert "2048" in answer.json()[key]
