"""What the mosec and the LitServe server have in common: several OpenAI-shaped requests → their answers, in one batch.

Owns the model of one process and the shapes. Knows neither framework and imports nothing of vecd. Called by
`mosec_app` and `litserve_app`, which run in their own virtual environments.

`SentenceTransformer.encode` sorts the texts by length and runs 32 at a time, its default: a bulk request is no one
big padded rectangle. Tokens are not counted, since that would mean tokenizing twice; the load's are known anyway.
"""

import base64
import os
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

NUM_PROCESSES = len(os.sched_getaffinity(0))
"""One per core, each with one torch thread: processes must not fight over the cores."""
MAX_BATCH_REQUESTS = 64
"""Requests in one forward pass: as many as the usual load has clients, so that a batch can hold all that wait."""


class BadRequest(ValueError):
    """Raised when a request holds no text."""


class Embedder:
    """The model of one process."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model = SentenceTransformer(os.environ["BENCH_MODEL"], device="cpu")
        print("embedder ready", flush=True)  # counted by whoever waits for all processes

    def answer(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One answer to each, in their order. All texts go through the model together. Raises BadRequest."""
        texts_of = [_texts(request) for request in requests]
        vectors = iter(self._model.encode([text for texts in texts_of for text in texts], normalize_embeddings=True))
        answers = []
        for request, texts in zip(requests, texts_of, strict=True):
            is_base64 = request.get("encoding_format") == "base64"
            rows = [next(vectors) for _ in texts]
            data = [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": base64.b64encode(row.tobytes()).decode() if is_base64 else row.tolist(),
                }
                for index, row in enumerate(rows)
            ]
            usage = {"prompt_tokens": 0, "total_tokens": 0}
            answers.append({"object": "list", "data": data, "model": request.get("model", ""), "usage": usage})
        return answers


def _texts(request: dict[str, Any]) -> list[str]:
    texts = request.get("input")
    if not texts:
        raise BadRequest("input is empty")
    return [texts] if isinstance(texts, str) else texts
