"""Fields of the routes that rank, classify and make sparse vectors, with values that nobody means: each response names
the field, and the limit or the value; the server lives, and its memory does not grow."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.llm_checkpoints import save_causal, save_reranker
from tests.support.score_checkpoints import save_classifier
from tests.support.serving import Server, bundled_model, running_server
from tests.support.shared_servers import DUMMY
from tests.support.soak.faults import own_memory_bytes

MANY = 10_000
LONG = "word " * 200_000
"""1 MB."""
HUGE = 10**30
MAX_GROWTH_BYTES = 192 << 20
"""Of the gateway, by all cases of a server: what a text of 1 MB takes is given back to the allocator, not to the
system."""

Case = tuple[str, dict[str, Any] | bytes, int, tuple[str, ...]]
"""The path, the body, the status of the response, and what its message must have. Values of a wrong type are in
tests/unit/gateway/dialects: here is one of each kind, and what is large or found on the way to the model."""


RANKED = {"query": "a query", "documents": ["one", "two"]}
_OBJECTS = [{"text": "d"}] * MANY
"""Are read in pieces."""
RERANK: list[Case] = [
    ("/rerank", {**RANKED, "max_tokens_per_doc": HUGE}, 400, ("max_tokens_per_doc", "too large")),
    ("/rerank", {**RANKED, "truncate_prompt_tokens": 5}, 400, ("truncate_prompt_tokens", "31", "5")),
    (
        "/rerank",
        {**RANKED, "truncate_prompt_tokens": 100_000},
        400,
        ("truncate_prompt_tokens", "at most 512", "100000"),
    ),
    ("/rerank", {**RANKED, "documents": ["d"] * MANY}, 400, ("documents", str(MANY), "2048", "--max-inputs")),
    ("/rerank", {**RANKED, "documents": _OBJECTS}, 400, ("documents", "at least 2049", "2048", "--max-inputs")),
    ("/v1/ranking", {"query": "a", "passages": _OBJECTS}, 400, ("passages", "at least 2049", "2048")),
    ("/score", {"text_1": "a", "text_2": ["b"] * MANY}, 400, ("text_2", str(MANY), "2048")),
    ("/score", {"text_1": ["a"] * 3, "text_2": ["b"] * 2}, 400, ("text_1", "text_2", "3:2")),
    ("/invocations", {"text_pairs": [["a", "b"]] * MANY}, 400, ("text_pairs", "at least 2049", "2048", "--max-inputs")),
    ("/rerank", {"query": "a", "texts": ["a", LONG], "truncate": False}, 422, ("512", "'texts[1]'")),
    *(
        (path, {**body, "overflow": "error"}, 400, ("512", where))
        for path, body, where in (
            ("/rerank", {"query": "a", "documents": ["a", LONG]}, "'documents[1]'"),
            ("/v1/rerank", {"query": "a", "texts": ["a", LONG]}, "'texts[1]'"),
            ("/v2/rerank", {"query": "a", "documents": ["a", {"text": LONG[:200_000]}]}, "'documents[1]'"),
            ("/v1/ranking", {"query": "a", "passages": ["a", LONG]}, "'passages[1]'"),
            ("/score", {"queries": "a", "items": ["a", LONG]}, "'items[1]'"),
            ("/score", {"text_1": ["a", "b"], "text_2": ["a", LONG]}, "'text_2[1]'"),
            ("/invocations", {"text_pairs": [["a", "b"], ["a", LONG]]}, "'text_pairs[1]'"),
        )
    ),
    # Half a surrogate, and values that are large where no text is expected, are found before the shape is known; a
    # field of one shape alone tells it.
    ("/rerank", {**RANKED, "query": LONG}, 400, ("'query'", "512", "no room is left")),
    ("/rerank", {**RANKED, "instruction": LONG}, 422, ("instruction", "262144 bytes")),
    ("/rerank", b'{"query":"\\ud800","documents":["a"]}', 422, ("query", "surrogate")),
    ("/rerank", b'{"query":"a","documents":["b","\\udc00"]}', 400, ("documents[1]", "surrogate")),
    ("/rerank", b'{"query":"a","documents":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, ("depth",)),
    ("/rerank", b"[]", 400, ("must be a JSON object", "error_type")),
    ("/v1/rerank", b"[]", 400, ("must be a JSON object", "detail")),
    ("/rerank", b'{"query":"a","documents":["b"],"top_n":1e999}', 400, ("not valid JSON", "char 39")),
]
LABELLED: list[Case] = [
    ("/predict", {"inputs": [["a"]] * MANY}, 422, ("inputs", "at least 2049", "2048", "--max-inputs")),
    ("/predict", {"inputs": [{"text": "a", "text_pair": "b"}] * MANY}, 422, ("inputs", "at least 2049", "2048")),
    ("/predict", {"inputs": [["a"], ["a"] * 3 * MANY]}, 422, ("inputs", "[1]", "at least 2049", "2048")),
    ("/predict", {"inputs": [["a", "b"], ["a", LONG]], "truncate": False}, 422, ("maximum", "'inputs[1]'")),
    ("/classify", {"input": ["a"] * MANY}, 400, ("input", str(MANY), "2048")),
    ("/pooling", {"input": "a", "dimensions": 5}, 400, ("dimensions", "3", "5")),
]
HYBRID: list[Case] = [
    ("/embed_sparse", {"inputs": ["a"] * MANY}, 422, ("inputs", str(MANY), "2048")),
    ("/embed_sparse", {"inputs": [[10**9]]}, 422, ("inputs[0]", "vocabulary", "30521")),
    ("/embed_sparse", b'{"inputs":"a","min_weight":1e999}', 400, ("infinity",)),
    ("/v1/classify", {"input": "a", "labels": ["l"] * MANY}, 400, ("labels", str(MANY + 1), "2048")),
    ("/v1/classify", {"input": "a", "labels": ["b", "c"], "temperature": 1e-320}, 400, ("temperature", "0.001")),
]
GOOD: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "rerank": [
        ("/rerank", {"query": LONG, "documents": ["a", "b"], "max_tokens_per_query": 9}),
        ("/rerank", {"query": "a", "documents": ["a", LONG]}),
        ("/rerank", {**RANKED, "max_tokens_per_doc": 0, "top_n": 2**63}),
        ("/rerank", {**RANKED, "max_tokens_per_doc": 2**63, "top_n": 0}),
        ("/rerank", {**RANKED, "documents": ""}),
    ],
    "classify": [("/predict", {"inputs": LONG}), ("/predict", {"inputs": [["", LONG]]}), ("/classify", {"input": ""})],
    "hybrid": [
        ("/embed_sparse", {"inputs": ["", LONG], "min_weight": 1e30}),
        ("/v1/embeddings", {"input": LONG, "output": "multi-vector"}),
        ("/v1/embeddings", {"input": "a", "output": ["dense"] * MANY}),
    ],
}
"""Large, and allowed: what is too long is cut."""
CASES = {"rerank": RERANK, "classify": LABELLED, "hybrid": HYBRID}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the dummy engine: this is the gateway's work. What it logs at any level is searched for canaries."""
    folders = {name: tmp_path_factory.mktemp(name) / "model" for name in CASES}
    save_reranker(folders["rerank"], save_causal(tmp_path_factory.mktemp("causal")))
    save_classifier(folders["classify"], labels=3)
    folders["hybrid"].mkdir()
    for file in bundled_model().iterdir():
        (folders["hybrid"] / file.name).symlink_to(file)
    for name in ("sparse_linear.safetensors", "colbert_linear.safetensors"):
        (folders["hybrid"] / name).touch()
    models = [f"{name}={folder}" for name, folder in folders.items()]
    with running_server(*models, *DUMMY, "--log-level", "debug") as running:
        yield running


@pytest.mark.parametrize("kind", CASES)
def test_a_wrong_value_is_named(server: Server, kind: str) -> None:
    wrong = []
    with httpx.Client(base_url=server.url, timeout=60, headers={"x-vecd-model": kind}) as http:
        for path, good in GOOD[kind]:
            response = http.post(path, json=good)
            assert response.status_code == 200, (path, response.text[:300])
        gateway = server.gateway()
        before = own_memory_bytes(gateway)
        for path, body, status, words in CASES[kind]:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = http.post(path, content=content)
            text = response.text
            if response.status_code != status or any(word not in text for word in words) or len(text) > 2000:
                wrong.append((path, content[:120], status, words, response.status_code, text[:300]))
        assert own_memory_bytes(gateway) - before < MAX_GROWTH_BYTES
        for path, good in GOOD[kind]:
            assert http.post(path, json=good).status_code == 200
    assert wrong == []
    assert server.gateway().pid == gateway.pid
