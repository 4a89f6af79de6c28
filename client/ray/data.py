"""vecd in Ray Data: a class for `map_batches`, and a function that applies it without the usual traps.

Owns the actor of a node, which has its own vecd and several requests under way, and the arguments of `map_batches`.
Computes nothing. Called by users' pipelines; deploy/bulk/ray_data.py is an example.
"""

import asyncio
import base64
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray.data
from numpy.typing import NDArray

from vecd.client.connection import BadResponse, ClientConnection, connect, parse_target, render_request
from vecd.client.ray.node_server import NodeServer, exit_at_once

RESOURCE = "vecd"
_ROWS_PER_BLOCK = 1000
_TEXTS_PER_REQUEST, _NUM_CONNECTIONS = 64, 4
_CONNECT_TIMEOUT_S, _TIMEOUT_S = 10.0, 300.0
_BUSY, _FIRST_PAUSE_S, _MAX_PAUSE_S = (429, 503), 0.2, 10.0
_MAX_BROKEN = 8
"""With the pauses between them, half a minute."""


class RayEmbedder:
    """An actor for `map_batches(RayEmbedder, batch_format="numpy", …)`: adds a column of vectors to batches of texts.

    It starts a `vecd serve` that lives as long as the actor. When vecd dies the actor does, and Ray runs the batch
    again on another one, where `max_restarts` and `max_task_retries` say so: `embed_dataset` sets both.
    """

    def __init__(
        self,
        model: str | None = None,
        flags: Sequence[str] = (),
        *,
        text_column: str = "text",
        output_column: str = "embedding",
        fields: dict[str, Any] | None = None,
    ) -> None:
        """`model` and `flags` are those of `vecd serve`; `fields` stand in each request's body (`dimensions`,
        `input_type`, `overflow`, …). Raises RuntimeError when the server does not start."""
        self._text_column, self._output_column, self._fields = text_column, output_column, dict(fields or {})
        self._server = NodeServer(model, flags, exit_at_once)
        self._server.await_ready()
        self._target = parse_target(f"unix:{self._server.path}")

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The batch, and float32 [rows, dimensions] in the output column. Raises ValueError for a text that vecd
        refuses. May be called by several threads at once."""
        texts = [str(text) for text in batch[self._text_column]]
        return {**batch, self._output_column: asyncio.run(self._embed(texts))}

    async def _embed(self, texts: list[str]) -> NDArray[np.float32]:
        parts = [texts[start : start + _TEXTS_PER_REQUEST] for start in range(0, len(texts), _TEXTS_PER_REQUEST)]
        found: list[NDArray[np.float32]] = [np.empty((0, 0), np.float32)] * len(parts)
        todo = iter(enumerate(parts))

        async def work() -> None:
            connections: list[ClientConnection] = []
            for index, part in todo:
                found[index] = await self._request(connections, part)
            for connection in connections:
                connection.close()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(_NUM_CONNECTIONS, len(parts))):
                group.create_task(work())
        return np.concatenate(found)

    async def _request(self, connections: list[ClientConnection], texts: list[str]) -> NDArray[np.float32]:
        """Repeated while vecd is busy. A connection that breaks is no error of the batch: either vecd has a new gateway
        in a moment, or this process ends with vecd."""
        body = json.dumps({**self._fields, "input": texts, "encoding_format": "base64"}).encode()
        request = render_request(
            self._target, "/v1/embeddings", body, api_key=os.environ.get("VECD_API_KEY"), user_agent="vecd-ray"
        )
        pause_s, num_broken = _FIRST_PAUSE_S, 0
        while True:
            retry_after_s = None
            try:
                connection = connections.pop() if connections else await connect(self._target, _CONNECT_TIMEOUT_S)
                response = await connection.exchange(request, _TIMEOUT_S)
                if connection.is_open:
                    connections.append(connection)
                if response.status not in _BUSY:
                    break
                retry_after_s = response.retry_after_s
            except (OSError, BadResponse):
                num_broken += 1
                if num_broken == _MAX_BROKEN:
                    raise
            await asyncio.sleep(min(max(pause_s, retry_after_s or 0), _MAX_PAUSE_S))
            pause_s *= 2
        if response.status != 200:
            raise ValueError(f"vecd answers {response.status}: {response.body[:300].decode(errors='replace')}")
        answer = json.loads(response.body)["data"]
        if len(answer) != len(texts):
            raise BadResponse(f"{len(answer)} vectors for {len(texts)} texts")
        return np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in answer])


def embed_dataset(
    dataset: "ray.data.Dataset",
    model: str | None = None,
    flags: Sequence[str] = (),
    *,
    num_nodes: int,
    num_gpus: float = 0,
    rows_per_block: int = _ROWS_PER_BLOCK,
    **options: Any,
) -> "ray.data.Dataset":
    """The dataset with a column of vectors, computed by an actor on each of `num_nodes` nodes that offer {"vecd": 1}.

    `options` are those of `RayEmbedder`. Nothing is computed before the result is written or read.
    """
    # Work is handed out by block, and small files become one block: one actor would do all, and a death redo all.
    blocks = dataset.repartition(target_num_rows_per_block=rows_per_block)
    return blocks.map_batches(
        RayEmbedder,
        fn_constructor_kwargs={"model": model, "flags": list(flags), **options},
        batch_format="numpy",
        batch_size=rows_per_block,
        compute=ray.data.ActorPoolStrategy(size=num_nodes),
        # Actors that take a node's CPUs leave none for reading and writing: the job would hang in silence.
        num_cpus=0,
        num_gpus=num_gpus or None,
        resources={RESOURCE: 1},
        # A second block is there when the first is done; with one at a time, vecd idles between blocks.
        max_concurrency=2,
        max_restarts=-1,
        max_task_retries=-1,
    )


def checkpoint_by(id_column: str, folder: str) -> None:
    """Have a job that is run again leave out the rows that it has written: to be called before the dataset is made.

    `id_column` tells rows apart. `folder` is on a shared filer or an object store. All ids that are done are held in
    memory, so one job has 10^8 rows at most.
    """
    from ray.data.checkpoint import CheckpointConfig

    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column=id_column, checkpoint_path=folder, delete_checkpoint_on_success=False
    )
