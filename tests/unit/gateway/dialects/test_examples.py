"""One example of each shape of response of each dialect, and of each status, of a gateway whose worker is played.

What differs from time to time is written as "*", and of long strings only the beginning. `test_attributes` has what a
request may say. Every example is valid by the server's document, too.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest
from jsonschema_rs import validator_for

from tests.support.cards import CLASSIFIER, DENSE, HYBRID, MULTI_VECTOR, RERANKER, SPARSE, TOKEN_CLASSIFIER
from tests.unit.gateway.dialects.played import Client
from vecd.gateway.request import FloatRows
from vecd.model.steps import ScoreHead, Step

MODELS = {
    "dense": replace(DENSE, dim=2, hidden_size=2, steps=(Step("normalize"),), prompts=(("query", "query: "),)),
    "hybrid": replace(HYBRID, dim=2, hidden_size=2, token_dim=2, steps=(Step("normalize"),)),
    "sparse": replace(SPARSE, vocab_size=4, dim=4),
    "multi": replace(MULTI_VECTOR, token_dim=2),
    "ranker": RERANKER,
    "classifier": CLASSIFIER,
    "judge": replace(CLASSIFIER, score=ScoreHead(("Entailment", "neutral", "contradiction"), "softmax", "cls")),
    "tagger": TOKEN_CLASSIFIER,
}
_VOLATILE = {"created", "modified_at", "total_duration", "digest", "version"}
_HEADERS = ("allow", "retry-after", "x-vecd-")
_MOST_CHARS = 60


def rows(num: int, width: int) -> FloatRows:
    """0.6, 0.8, 0.6, ... and 0.8, 0.6, 0.8, ... by turns."""
    return np.array([np.resize([0.6, 0.8][:: 1 - index % 2 * 2], width) for index in range(num)], np.float32)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    client = Client(MODELS, rows, unknown_model="refuse")
    yield client
    client.close()


EXAMPLES = {
    "openai": r"""
dense POST /v1/embeddings {"model": "alias", "input": ["a", "b"]}
200
{"id": "embd-id", "object": "list", "created": "*", "model": "dense", "data": [{"object": "embedding", "index": 0,
 "embedding": [0.6, 0.8]}, {"object": "embedding", "index": 1, "embedding": [0.8, 0.6]}],
 "usage": {"prompt_tokens": 7, "total_tokens": 7}}

dense POST /v1/embeddings {"input": "a", "encoding_format": "base64", "report": true}
200
{"id": "embd-id", "object": "list", "created": "*", "model": "dense", "data": [{"object": "embedding", "index": 0,
 "embedding": "mpkZP83MTD8=", "report": {"tokens": 3, "truncated": false, "chunks": 1, "source": "text"}}],
 "usage": {"prompt_tokens": 7, "total_tokens": 7}}

dense POST /v1/embeddings {"input": ["a", "b"], "encoding_format": "bytes", "output_dtype": "float16"}
200 application/octet-stream
x-vecd-tokens: 7
x-vecd-dimensions: 2
x-vecd-dtype: float16
x-vecd-model: dense
["8 bytes"]

dense POST /v1/embeddings {"input": "a"}
accept: application/x-npy
200 application/x-npy
x-vecd-tokens: 7
x-vecd-dimensions: 2
x-vecd-dtype: float32
x-vecd-model: dense
["136 bytes"]

dense POST /v1/embeddings {"input": "a b", "late_chunking": {"ranges": [[0, 1]]}}
200
{"id": "embd-id", "object": "list", "created": "*", "model": "dense", "data": [{"object": "embedding", "index": 0,
 "input": 0, "start": 0, "end": 1, "embedding": [0.707107, 0.707107]}], "usage": {"prompt_tokens": 7,
 "total_tokens": 7}}

dense POST /v1/classify {"input": "a", "labels": ["b", "c"]}
200
{"id": "classify-id", "object": "list", "created": "*", "model": "dense", "data": [{"object": "classification",
 "index": 0, "prediction": "c", "score": 0.509999, "predictions": [{"label": "b", "score": 0.490001}, {"label": "c",
 "score": 0.509999}]}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}

hybrid POST /v1/embeddings {"input": "a", "output": ["dense", "sparse", "multi-vector"]}
200
{"id": "embd-id", "object": "list", "created": "*", "model": "hybrid", "data": [{"object": "embedding", "index": 0,
 "embedding": [0.6, 0.8], "sparse": {"indices": [1], "values": [0.6]}, "embeddings": [[0.8, 0.6]]}],
 "usage": {"prompt_tokens": 7, "total_tokens": 7}}

sparse POST /v1/embeddings {"input": "a", "output": "sparse", "return_tokens": true}
200
{"id": "embd-id", "object": "list", "created": "*", "model": "sparse", "data": [{"object": "embedding", "index": 0,
 "sparse": {"indices": [0, 1, 2, 3], "values": [0.6, 0.8, 0.6, 0.8], "tokens": ["", "", "", ""]}}],
 "usage": {"prompt_tokens": 7, "total_tokens": 7}}

sparse POST /v1/embeddings {"input": "a", "output": "sparse", "sparse_format": "map"}
200
{"id": "embd-id", "object": "list", "created": "*", "model": "sparse", "data": [{"object": "embedding", "index": 0,
 "sparse": {}}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}

multi POST /v1/multi-vector {"input": "a", "encoding_format": "base64"}
200
{"id": "embd-id", "object": "list", "created": "*", "model": "multi", "data": [{"object": "embedding", "index": 0,
 "embeddings": "mpkZP83MTD/NzEw/mpkZPw=="}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}

dense GET /v1/models
200
{"object": "list", "data": [{"id": "dense", "object": "model", "created": "*", "owned_by": "vecd", "root": "dense",
 "max_model_len": 256, "capabilities": ["dense"], "state": "ready", "identity": null}, {"id": "alias",
 "object": "model", "created": "*", "owned_by": "vecd", "root": "dense", "max_model_len": 256,
 "capabilities": ["dense"], "state": "ready", "identity": null}, {"id": "dense:query", "object": "model",
 "created": "*", "owned_by": "vecd", "root": "dense", "max_model_len": 256, "capabilities": ["dense"],
 "state": "ready", "identity": null}], "models": [{"name": "dense", "endpoints": ["embed"], "context_length": 256},
 {"name": "alias", "endpoints": ["embed"], "context_length": 256}, {"name": "dense:query", "endpoints": ["embed"],
 "context_length": 256}]}

dense GET /v1/models/dense
200
{"id": "dense", "object": "model", "created": "*", "owned_by": "vecd", "root": "dense", "max_model_len": 256,
 "capabilities": ["dense"], "state": "ready", "identity": null}

dense POST /v1/embeddings {"input": ["a", 5]}
400
{"error": {"message": "'input[1]' must be a string, is a whole number", "type": "invalid_request_error",
 "param": "input", "code": null}, "detail": "'input[1]' must be a string, is a whole number"}

dense POST /v1/embeddings {
400
{"error": {"message": "The body is not valid JSON: unexpected end of data: line 1 c…",
 "type": "invalid_request_error", "param": null, "code": null},
 "detail": "The body is not valid JSON: unexpected end of data: line 1 c…"}

dense POST /v1/embeddings []
400
{"error": {"message": "The body must be a JSON object", "type": "invalid_request_error", "param": null, "code": null},
 "detail": "The body must be a JSON object"}

dense POST /v1/embeddings {"input": "a", "model": "gpt-4"}
404
{"error": {"message": "The model `gpt-4` does not exist; this server has 'dense', '…",
 "type": "invalid_request_error", "param": "model", "code": "model_not_found"},
 "detail": "The model `gpt-4` does not exist; this server has 'dense', '…"}

dense GET /v1/models/gpt-4
404
{"error": {"message": "The model `gpt-4` does not exist; this server has 'dense', '…",
 "type": "invalid_request_error", "param": "model", "code": "model_not_found"},
 "detail": "The model `gpt-4` does not exist; this server has 'dense', '…"}

dense GET /v1/embeddings
405
allow: OPTIONS, POST
{"error": {"message": "GET is not allowed on this path, only POST", "type": "invalid_request_error", "param": null,
 "code": "method_not_allowed"}, "detail": "GET is not allowed on this path, only POST"}

dense POST /v1/completions {}
404
{"error": {"message": "There is nothing at this path; this server serves embeddings…",
 "type": "invalid_request_error", "param": null, "code": "unknown_url"},
 "detail": "There is nothing at this path; this server serves embeddings…"}

ranker POST /v1/embeddings {"input": "a"}
400
{"error": {"message": "This model can rerank texts (rerank); it cannot make dense v…",
 "type": "invalid_request_error", "param": null, "code": "wrong_model"},
 "detail": "This model can rerank texts (rerank); it cannot make dense v…"}

dense POST /v1/embeddings {"input": "late"}
503
retry-after: 1
{"error": {"message": "No worker is up", "type": "server_error", "param": null, "code": "service_unavailable"},
 "detail": "No worker is up"}

dense POST /v1/embeddings {"input": "poison"}
500
{"error": {"message": "The engine failed on 'input[0]'", "type": "server_error", "param": "input",
 "code": "internal_error"}, "detail": "The engine failed on 'input[0]'"}
""",
    "vllm": r"""
dense POST /pooling {"input": ["a"]}
200
{"id": "embd-id", "object": "list", "created": "*", "model": "dense", "data": [{"object": "pooling", "index": 0,
 "data": [0.6, 0.8]}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}

dense POST /pooling {"input": "a", "task": "token_embed", "use_activation": false}
200
{"id": "embd-id", "object": "list", "created": "*", "model": "dense", "data": [{"object": "pooling", "index": 0,
 "data": [[0.6, 0.8], [0.8, 0.6]]}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}

classifier POST /pooling {"input": "a"}
200
{"id": "embd-id", "object": "list", "created": "*", "model": "classifier", "data": [{"object": "pooling", "index": 0,
 "data": [0.310424, 0.379152, 0.310424]}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}

tagger POST /pooling {"input": "a", "use_activation": false}
200
{"id": "embd-id", "object": "list", "created": "*", "model": "tagger", "data": [{"object": "pooling", "index": 0,
 "data": [[0.6, 0.8, 0.6], [0.8, 0.6, 0.8]]}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}

classifier POST /classify {"input": "a"}
200
{"id": "classify-id", "object": "list", "created": "*", "model": "classifier", "data": [{"index": 0, "label": "b",
 "probs": [0.310424, 0.379152, 0.310424], "num_classes": 3}], "usage": {"prompt_tokens": 7, "total_tokens": 7}}

classifier POST /classify {"input": "a", "raw_scores": true}
200
{"id": "infinity-id", "object": "classify", "created": "*", "model": "classifier", "data": [[{"score": 0.8,
 "label": "b"}, {"score": 0.6, "label": "a"}, {"score": 0.6, "label": "c"}]], "usage": {"prompt_tokens": 7,
 "total_tokens": 7}}

tagger POST /classify {"input": "a"}
200
{"id": "classify-id", "object": "list", "created": "*", "model": "tagger", "data": [{"index": 0,
 "object": "token-classification", "entities": [{"entity_group": "b", "score": 0.379152, "word": "a", "start": 0,
 "end": 1}, {"entity_group": "a", "score": 0.35477, "word": "a", "start": 0, "end": 1}]}],
 "usage": {"prompt_tokens": 7, "total_tokens": 7}}

ranker POST /score {"text_1": "q", "text_2": ["a", "b"]}
200
{"id": "score-id", "object": "list", "created": "*", "model": "ranker", "data": [{"index": 0, "object": "score",
 "score": 0.645656}, {"index": 1, "object": "score", "score": 0.689974}], "usage": {"prompt_tokens": 7,
 "total_tokens": 7}}

dense POST /tokenize {"prompt": "a", "return_token_strs": true}
200
{"count": 1, "max_model_len": 256, "tokens": [7], "token_strs": ["t"]}

dense POST /detokenize {"tokens": [1, 2]}
200
{"prompt": "a"}

dense GET /version
200
{"version": "*"}

dense POST /pooling {"input": 5}
400
{"error": {"message": "'input' must be a string, a list of strings, or token ids, i…", "type": "BadRequestError",
 "param": "input", "code": 400}}

dense POST /pooling {"input": "a", "model": "gpt-4"}
404
{"error": {"message": "The model `gpt-4` does not exist; this server has 'dense', '…", "type": "NotFoundError",
 "param": "model", "code": 404}}

dense GET /pooling
405
allow: OPTIONS, POST
{"error": {"message": "GET is not allowed on this path, only POST", "type": "Method Not Allowed", "param": null,
 "code": 405}}

dense POST /pooling {"input": "late"}
503
retry-after: 1
{"error": {"message": "No worker is up", "type": "Service Unavailable", "param": null, "code": 503}}

dense POST /pooling {"input": "poison"}
500
{"error": {"message": "The engine failed on 'input[0]'", "type": "InternalServerError", "param": "input",
 "code": 500}}
""",
    "ollama": r"""
dense POST /api/embed {"model": "dense", "input": ["a", "b"]}
200
{"model": "dense", "embeddings": [[0.6, 0.8], [0.8, 0.6]], "total_duration": "*", "load_duration": 0,
 "prompt_eval_count": 7}

dense POST /api/embed {"model": "dense"}
200
{"model": "dense", "embeddings": [], "total_duration": "*", "load_duration": 0, "prompt_eval_count": 0}

dense POST /api/embeddings {"model": "dense", "prompt": "a"}
200
{"embedding": [0.6, 0.8]}

dense POST /api/embeddings {"model": "dense"}
200
{"embedding": []}

dense GET /api/tags
200
{"models": [{"name": "dense:latest", "model": "dense:latest", "modified_at": "*", "size": 0, "digest": "*",
 "details": {"parent_model": "", "format": "safetensors", "family": "bert", "families": ["bert"]}},
 {"name": "alias:latest", "model": "alias:latest", "modified_at": "*", "size": 0, "digest": "*",
 "details": {"parent_model": "", "format": "safetensors", "family": "bert", "families": ["bert"]}}]}

dense GET /api/ps
200
{"models": [{"name": "dense:latest", "model": "dense:latest", "modified_at": "*", "size": 0, "digest": "*",
 "details": {"parent_model": "", "format": "safetensors", "family": "bert", "families": ["bert"]},
 "context_length": 256, "expires_at": "2262-04-11T23:47:16+00:00", "size_vram": 0}]}

dense GET /api/version
200
{"version": "*"}

dense POST /api/show {"name": "dense"}
200
{"modelfile": "", "parameters": "num_ctx 256", "template": "", "details": {"parent_model": "",
 "format": "safetensors", "family": "bert", "families": ["bert"]}, "model_info": {"general.architecture": "bert",
 "general.basename": "dense", "bert.context_length": 256, "bert.embedding_length": 2}, "capabilities": ["embedding"],
 "modified_at": "*"}

dense POST /api/pull {"model": "dense"}
200 application/x-ndjson
{"status": "success"}

dense POST /api/pull {"model": "dense", "stream": false}
200
{"status": "success"}

dense POST /api/embed {"model": "dense", "input": 5}
400
{"error": "invalid input type: 'input' must be a string, is a whole num…"}

dense POST /api/show {}
400
{"error": "model is required"}

dense POST /api/embed {"model": "llama3", "input": "a"}
404
{"error": "model \"llama3\" not found, try pulling it first; this server …"}

dense POST /api/pull {"model": "llama3"}
404
{"error": "pull model manifest: file does not exist: this server has 'd…"}

dense POST /api/generate {}
404
{"error": "There is nothing at this path; this server serves embeddings…"}

dense GET /api/embed
405
allow: OPTIONS, POST
{"error": "GET is not allowed on this path, only POST"}

dense POST /api/embed {"input": "late"}
503
retry-after: 1
{"error": "No worker is up"}
""",
    "tei": r"""
dense POST /embed {"inputs": ["a", "b"]}
200
[[0.6, 0.8], [0.8, 0.6]]

dense POST /embed {"inputs": "a", "encoding_format": "bytes"}
200 application/octet-stream
x-vecd-tokens: 7
x-vecd-dimensions: 2
x-vecd-dtype: float32
x-vecd-model: dense
["8 bytes"]

dense POST /embed_all {"inputs": "a"}
200
[[[0.6, 0.8], [0.8, 0.6]]]

dense POST /similarity {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}
200
[0.96, 1.0]

sparse POST /embed_sparse {"inputs": "a"}
200
[[{"index": 0, "value": 0.6}, {"index": 1, "value": 0.8}, {"index": 2, "value": 0.6}, {"index": 3, "value": 0.8}]]

dense POST /tokenize {"inputs": "a"}
200
[[{"id": 7, "text": "a", "special": false, "start": 0, "stop": 1}]]

dense POST /decode {"ids": [1, 2]}
200
["a"]

ranker POST /rerank {"query": "q", "texts": ["a", "b"], "return_text": true}
200
[{"index": 1, "score": 0.689974, "text": "b"}, {"index": 0, "score": 0.645656, "text": "a"}]

ranker POST / {"inputs": [["q", "a"], ["q", "b"]]}
200
[{"score": 0.645656}, {"score": 0.689974}]

classifier POST /predict {"inputs": "a"}
200
[{"score": 0.379152, "label": "b"}, {"score": 0.310424, "label": "a"}, {"score": 0.310424, "label": "c"}]

classifier POST /predict {"inputs": [["a", "b"]], "raw_scores": true}
200
[[{"score": 0.8, "label": "b"}, {"score": 0.6, "label": "a"}, {"score": 0.6, "label": "c"}]]

judge POST /predict {"inputs": "a", "parameters": {"candidate_labels": ["b", "c"]}}
200
{"sequence": "a", "labels": ["c", "b"], "scores": [0.549834, 0.450166]}

judge POST / {"inputs": ["a", "b"], "parameters": {"candidate_labels": "b, c", "multi_label": true}}
200
[{"sequence": "a", "labels": ["b", "c"], "scores": [0.5, 0.5]}, {"sequence": "b", "labels": ["b", "c"], "scores": [0.5,
 0.5]}]

judge POST /pipeline/zero-shot-classification/judge {"inputs": "a", "parameters": {"candidate_labels": ["b", "c"]}}
200
[{"label": "c", "score": 0.549834}, {"label": "b", "score": 0.450166}]

judge POST /models/judge {"inputs": ["a"], "parameters": {"candidate_labels": ["b"]}}
200
[[{"label": "b", "score": 0.5}]]

dense POST / {"inputs": "a", "parameters": {"candidate_labels": ["b", "c"]}}
424
{"error": "This server's model is for: dense: 'parameters.candidate_lab…", "error_type": "Backend"}

tagger POST /predict {"inputs": "a"}
200
[{"entity_group": "b", "score": 0.379152, "word": "a", "start": 0, "end": 1}, {"entity_group": "a", "score": 0.35477,
 "word": "a", "start": 0, "end": 1}]

tagger POST /predict {"inputs": "a", "aggregation_strategy": "none"}
200
[{"entity": "b", "score": 0.379152, "index": 0, "word": "", "start": 0, "end": 1}, {"entity": "a", "score": 0.35477,
 "index": 1, "word": "", "start": 0, "end": 1}]

classifier POST /models/classifier {"inputs": ["a"]}
200
[[{"score": 0.379152, "label": "b"}, {"score": 0.310424, "label": "a"}, {"score": 0.310424, "label": "c"}]]

dense POST /invocations ["a"]
200
[[0.6, 0.8]]

dense POST /embed {"inputs": []}
400
{"error": "'inputs' cannot be empty", "error_type": "Empty"}

dense POST /embed {
400
{"error": "The body is not valid JSON: unexpected end of data: line 1 c…", "error_type": "Validation"}

dense POST /embed {"inputs": 5}
422
{"error": "'inputs' must be a string, a list of strings, or token ids, …", "error_type": "Validation"}

dense POST /rerank {"query": "q", "texts": ["a"]}
424
{"error": "This model can make dense vectors (dense); it cannot rerank …", "error_type": "Backend"}

dense POST /models/gpt-4 {"inputs": "a"}
404
{"error": "The model `gpt-4` does not exist; this server has 'dense', '…", "error_type": "Validation"}

dense GET /embed
405
allow: OPTIONS, POST
{"error": "GET is not allowed on this path, only POST", "error_type": "Validation"}

dense POST /embed {"inputs": "late"}
503
retry-after: 1
{"error": "No worker is up", "error_type": "Unhealthy"}

dense POST /embed {"inputs": "poison"}
424
{"error": "The engine failed on 'inputs[0]'", "error_type": "Backend"}
""",
    "cohere": r"""
dense POST /v2/embed {"texts": ["a", "b"]}
200
{"id": "id", "embeddings": {"float": [[0.6, 0.8], [0.8, 0.6]]}, "texts": ["a", "b"],
 "meta": {"api_version": {"version": "*"}, "billed_units": {"input_tokens": 7}},
 "response_type": "embeddings_by_type"}

dense POST /v2/embed {"texts": ["a"], "embedding_types": ["base64", "int8"]}
200
{"id": "id", "embeddings": {"base64": ["mpkZP83MTD8="], "int8": [[76, 102]]}, "texts": ["a"],
 "meta": {"api_version": {"version": "*"}, "billed_units": {"input_tokens": 7}},
 "response_type": "embeddings_by_type"}

dense POST /v1/embed {"texts": ["a"]}
200
{"id": "id", "embeddings": [[0.6, 0.8]], "texts": ["a"], "meta": {"api_version": {"version": "*"},
 "billed_units": {"input_tokens": 7}}, "response_type": "embeddings_floats"}

dense POST /v1/tokenize {"text": "a"}
200
{"tokens": [7], "token_strings": ["t"], "meta": {"api_version": {"version": "*"}}}

dense POST /v1/detokenize {"tokens": [1, 2]}
200
{"text": "a"}

dense POST /v1/check-api-key
200
{"valid": true}

dense POST /v2/embed {"texts": ["a"], "truncate": "MIDDLE"}
400
{"message": "'truncate' must be one of 'NONE', 'START', 'END', is 'MIDDLE…"}

dense POST /v2/embed {"texts": ["a"], "model": "gpt-4"}
404
{"message": "The model `gpt-4` does not exist; this server has 'dense', '…"}

dense GET /v2/embed
405
allow: OPTIONS, POST
{"message": "GET is not allowed on this path, only POST"}

dense POST /v2/chat {}
404
{"message": "There is nothing at this path; this server serves embeddings…"}

dense POST /v2/embed {"texts": ["late"]}
503
retry-after: 1
{"message": "No worker is up"}
""",
    "rerank": r"""
ranker POST /v2/rerank {"query": "q", "documents": ["a", "b"], "top_n": 1, "return_documents": true}
200
{"id": "id", "object": "rerank", "model": "ranker", "results": [{"index": 1, "relevance_score": 0.689974,
 "document": {"text": "b"}}], "usage": {"prompt_tokens": 7, "total_tokens": 7},
 "meta": {"billed_units": {"search_units": 1}}}

ranker POST /v1/rerank {"query": "q", "documents": ["a"], "top_k": 1, "return_documents": true}
200
{"id": "id", "object": "list", "model": "ranker", "data": [{"index": 0, "relevance_score": 0.645656,
 "document": "a"}], "usage": {"prompt_tokens": 7, "total_tokens": 7}, "meta": {"billed_units": {"search_units": 1}}}

ranker POST /rerank {"query": "q", "documents": ["a"], "property": ""}
200
{"query": "q", "scores": [{"document": "a", "score": 0.645656}]}

ranker POST /v1/ranking {"query": {"text": "q"}, "passages": [{"text": "a"}, {"text": "b"}]}
200
{"rankings": [{"index": 1, "logit": 0.8}, {"index": 0, "logit": 0.6}], "usage": {"prompt_tokens": 7,
 "total_tokens": 7}}

ranker POST /invocations {"text_pairs": [["q", "a"], ["q", "b"]]}
200
{"scores": [0.645656, 0.689974]}

multi POST /v1/rerank {"query": "q", "documents": ["a"]}
200
{"id": "id", "object": "rerank", "model": "multi", "results": [{"index": 0, "relevance_score": 2.0}],
 "usage": {"prompt_tokens": 7, "total_tokens": 7}, "meta": {"billed_units": {"search_units": 1}}}

ranker POST /v1/rerank {"query": "q", "documents": [5]}
400
{"message": "'documents[0]' must be a string, or an object with a string …",
 "detail": "'documents[0]' must be a string, or an object with a string …",
 "error": "'documents[0]' must be a string, or an object with a string …"}

dense POST /v1/rerank {"query": "q", "documents": ["a"]}
400
{"message": "This model can make dense vectors (dense); it cannot rerank …",
 "detail": "This model can make dense vectors (dense); it cannot rerank …",
 "error": "This model can make dense vectors (dense); it cannot rerank …"}

ranker POST /v1/rerank {"query": "q", "documents": ["a"], "model": "gpt-4"}
404
{"message": "The model `gpt-4` does not exist; this server has 'ranker', …",
 "detail": "The model `gpt-4` does not exist; this server has 'ranker', …",
 "error": "The model `gpt-4` does not exist; this server has 'ranker', …"}

ranker GET /v1/rerank
405
allow: OPTIONS, POST
{"message": "GET is not allowed on this path, only POST", "detail": "GET is not allowed on this path, only POST",
 "error": "GET is not allowed on this path, only POST"}
""",
}
"""By dialect: the model, the request and its body, the status, and the body of the response."""


class Example(NamedTuple):
    model: str
    method: str
    path: str
    headers: dict[str, str]
    body: str
    status: str
    """With the media type, if it is not JSON."""
    response_headers: list[str]
    response: Any


def read(text: str) -> Example:
    request, status, response = re.split(r"\n(\d{3}[^\n]*)\n", text.strip() + "\n", maxsplit=1)
    first, *lines = request.split("\n")
    model, method, path, *body = first.split(" ", 3)
    headers = dict(line.split(": ") for line in lines if line[0].isalpha())
    body += [line for line in lines if not line[0].isalpha()]
    given = [line for line in response.split("\n") if line and line[0].isalpha()]
    rest = [line for line in response.split("\n") if line and not line[0].isalpha()]
    return Example(model, method, path, headers, " ".join(body), status, given, json.loads(" ".join(rest)))


def shortened(value: Any) -> Any:
    match value:
        case dict():
            return {key: "*" if key in _VOLATILE else shortened(item) for key, item in value.items()}
        case list():
            return list(map(shortened, value))
        case str() if len(value) > _MOST_CHARS:
            return value[:_MOST_CHARS] + "…"
        case float():
            return round(value, 6)
    return value


EACH = [
    pytest.param(example, id=f"{dialect}: {example.method} {example.path} {example.status} {number}")
    for dialect, text in EXAMPLES.items()
    for number, example in enumerate(map(read, text.strip().split("\n\n")))
]


@pytest.mark.parametrize("example", EACH)
def test_an_exchange_is_as_written(client: Client, example: Example):
    exchange = client.exchange(example.model, example.path, example.body.encode(), example.headers, example.method)
    is_json = exchange.content_type == "application/json"
    status = f"{exchange.status}" if is_json else f"{exchange.status} {exchange.content_type}"
    headers = [f"{name}: {value}" for name, value in exchange.headers.items() if name.startswith(_HEADERS)]
    is_text = exchange.content_type.endswith("json")
    body = shortened(orjson.loads(exchange.body)) if is_text else [f"{len(exchange.body)} bytes"]
    assert (status, headers, body) == (example.status, example.response_headers, example.response)
    if is_text:
        check_documented(client, example, exchange.status, orjson.loads(exchange.body))


def test_a_bad_header_is_refused_in_the_shape_of_the_path_and_the_method(client: Client):
    """GET of this path is OpenAI's."""
    exchange = client.exchange("dense", "/models/m", {"inputs": "a"}, {"if-vecd-identity": "x"})
    assert (exchange.status, orjson.loads(exchange.body)["error_type"]) == (400, "Validation")


def check_documented(client: Client, example: Example, status: int, body: Any) -> None:
    document = client.document(example.model)
    at = document["paths"].get(re.sub(r"(?<=models/)(dense|classifier|gpt-4)", "m", example.path), {})
    if (operation := at.get(example.method.lower())) is not None:
        schema = operation["responses"][str(status)]["content"]["application/json"]["schema"]
        wrong = validator_for({**schema, "components": document["components"]}).iter_errors(body)
        assert not [error.message for error in wrong]
        if status == 200 and example.body.startswith("{"):
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            assert validator_for(schema).is_valid(orjson.loads(example.body))
