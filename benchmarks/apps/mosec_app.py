"""mosec with an embedding worker per core and its dynamic batching: `python mosec_app.py --address … --port …`.

Owns how the worker meets mosec. Imports nothing of vecd. Started by `benchmarks.servers` in a virtual environment of
its own (`requirements/mosec.txt`) with BENCH_MODEL in the environment.
"""

from typing import Any

import orjson
from embedding import MAX_BATCH_REQUESTS, NUM_PROCESSES, BadRequest, Embedder
from mosec import Server, ValidationError, Worker

_MAX_WAIT_MS = 1
"""mosec lets a batch wait so long even when its worker is idle. 1 is the least that it takes, and its default of 10
would be ten milliseconds more for a lonely request; under load requests wait for a worker anyway."""


class EmbeddingWorker(Worker):
    """Reads and writes JSON with orjson: in mosec both happen in the worker's process, between two batches."""

    def __init__(self) -> None:
        super().__init__()
        self._embedder = Embedder()

    def deserialize(self, data: bytes) -> Any:
        return orjson.loads(data)

    def serialize(self, data: Any) -> bytes:
        return orjson.dumps(data)

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            return self._embedder.answer(data)
        except BadRequest as error:
            raise ValidationError(str(error)) from error


if __name__ == "__main__":
    server = Server()
    server.append_worker(
        EmbeddingWorker,
        num=NUM_PROCESSES,
        max_batch_size=MAX_BATCH_REQUESTS,
        max_wait_time=_MAX_WAIT_MS,
        route="/v1/embeddings",
    )
    server.run()
