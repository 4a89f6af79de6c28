"""vecd in Ray Data: a class for `map_batches`, and a function that applies it without the usual traps.

Owns the actor of a node, which has its own vecd and several requests under way, and the arguments of `map_batches`.
Computes nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vecd.client.blocking import Client
from vecd.client.ray.node_server import NodeServer

if TYPE_CHECKING:
    import ray.data

RESOURCE = "vecd"
_ROWS_PER_BLOCK = 1000
_RETRY_FOR_S = 600.0


class RayEmbedder:
    """An actor for `map_batches(RayEmbedder, batch_format="numpy", …)`: adds a column of vectors to batches of texts.

    It starts a `vecd serve` that lives as long as the actor. When vecd dies the actor does, and Ray runs the batch on
    another one, where `max_restarts` and `max_task_retries` say so: `embed_dataset` sets both.
    """

    def __init__(
        self,
        model: str | None = None,
        flags: Sequence[str] = (),
        *,
        text_column: str = "text",
        output_column: str = "embedding",
        fields: dict[str, Any] | None = None,
        identity: str | None = None,
        retry_for: float = _RETRY_FOR_S,
    ) -> None:
        """`model` and `flags` are those of `vecd serve`; `fields` are arguments of `vecd.Client.embed` (`dimensions`,
        `input_type`, `overflow`, …) except `dtype`. `identity` is demanded of every node's vecd: as
        `vecd.Client.identity`, or its part before ";". `retry_for`: seconds for which a batch is tried while vecd
        answers nothing of it.

        Raises NotStarted when the server does not start, or not in time.
        """
        self._text_column, self._output_column, self._fields = text_column, output_column, dict(fields or {})
        self._server = NodeServer(model, flags)
        self._server.serve()
        self._client = Client(f"unix:{self._server.path('public')}", identity=identity, retry_for=retry_for)

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The batch, and float32 [rows, dimensions] in the output column; a row whose text is null (None, NaN, NA) has
        NaN throughout. May be called by several threads at once.

        Raises ValueError when the column holds something else than texts; VecdError when vecd refuses a text, has
        another identity, or answers nothing for `retry_for`.
        """
        try:
            column = pa.array(batch[self._text_column], pa.large_string(), from_pandas=True)
        except pa.ArrowException as error:
            raise ValueError(f"column {self._text_column!r} must hold texts: {error}") from error
        texts = column.drop_null().to_pylist()
        # A batch without texts must be as wide as the others, and only an answer says how wide that is.
        vectors = self._client.embed(texts or ["-"], dtype="float32", **self._fields)
        if column.null_count or not texts:
            # A tensor of Ray's holds no null; with one, the column would become a column of pickled objects.
            found = vectors[: len(texts)]
            vectors = np.full((len(column), found.shape[1]), np.nan, np.float32)
            vectors[column.is_valid().to_numpy(zero_copy_only=False)] = found
        return {**batch, self._output_column: vectors}

    def close(self) -> None:
        """Stop the server. Ray does not call this: the server ends with the actor's process."""
        self._client.close()
        self._server.stop()


def embed_dataset(
    dataset: "ray.data.Dataset",
    model: str | None = None,
    flags: Sequence[str] = (),
    *,
    num_nodes: int,
    num_gpus: float = 0,
    rows_per_block: int = _ROWS_PER_BLOCK,
    identity: str | None = None,
    **options: Any,
) -> "ray.data.Dataset":
    """The dataset with a column of vectors, computed by an actor on each of `num_nodes` nodes that offer {"vecd": 1}.

    `identity` is demanded of all nodes; without it, nodes may differ in number format, unless `flags` have `--dtype`.
    `options` are the others of `RayEmbedder`. Nothing is computed before the result is written or read.
    """
    import ray.data

    # Work is handed out by block, and small files become one block: one actor would do all, and a death redo all.
    blocks = dataset.repartition(target_num_rows_per_block=rows_per_block)
    return blocks.map_batches(
        RayEmbedder,
        fn_constructor_kwargs={"model": model, "flags": list(flags), "identity": identity, **options},
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

    `id_column` tells rows apart. `folder` is on a shared filer or an object store. The ids that are done are held in
    memory: one job has 10^8 rows at most.
    """
    import ray.data
    from ray.data.checkpoint import CheckpointConfig

    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column=id_column, checkpoint_path=folder, delete_checkpoint_on_success=False
    )
