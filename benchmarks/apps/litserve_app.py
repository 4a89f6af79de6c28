"""LitServe with an embedding worker per core and its batching: `python litserve_app.py PORT`.

Owns how the worker meets LitServe. Imports nothing of vecd. Started by `benchmarks.servers` in a virtual environment
of its own (`requirements/litserve.txt`) with BENCH_MODEL in the environment.

LitServe's own `OpenAIEmbeddingSpec` is not used: it answers 400 to a list of inputs once requests are batched
(0.2.19, "does not support dynamic batching when client-side batching is used"). The route here takes and gives the
same shapes.
"""

import sys
from typing import Any

import litserve
from embedding import MAX_BATCH_REQUESTS, NUM_PROCESSES, Embedder

_BATCH_TIMEOUT_S = 0.001
"""How long a batch that is not full waits for more, even when its worker is idle."""
_REQUEST_TIMEOUT_S = 120.0
"""As long as the load generator is patient, and more: what waits is counted as slow, not as failed."""


class EmbeddingAPI(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self._embedder = Embedder()

    def decode_request(self, request: dict[str, Any]) -> dict[str, Any]:
        return request

    def batch(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return inputs

    def predict(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._embedder.answer(inputs)

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    api = EmbeddingAPI(api_path="/v1/embeddings", max_batch_size=MAX_BATCH_REQUESTS, batch_timeout=_BATCH_TIMEOUT_S)
    server = litserve.LitServer(
        api, accelerator="cpu", workers_per_device=NUM_PROCESSES, timeout=_REQUEST_TIMEOUT_S, track_requests=False
    )
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
