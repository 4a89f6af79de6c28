"""What many documents cost: from the rate of one machine to node-hours, nodes, bandwidth, bytes and shards.

Owns the arithmetic and the units. Pure: measures nothing, prints nothing. Called by `vecd.client.plan.command`.
"""

import math
from dataclasses import dataclass

SHARD_S = 600.0
"""Work of a shard, on one node: the most that a node's death loses."""
ITEM_BYTES = {"float32": 4, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is to be embedded."""

    num_documents: int
    num_tokens: int
    """Of each document."""
    document_bytes: float
    """UTF-8 of each document."""
    dimensions: int
    dtype: str
    """One of ITEM_BYTES, of the output."""

    @property
    def row_bytes(self) -> int:
        return self.dimensions * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Rates are in bytes or documents a second."""

    node_hours: float
    num_nodes: int
    hours: float
    """That so many nodes take."""
    read_bytes_per_s: float
    """Of all nodes together."""
    write_bytes_per_s: float
    text_bytes: float
    output_bytes: float
    num_shards: int
    shard_documents: int
    """The last one may have fewer."""
    shard_output_bytes: float


def cost_of(
    work: Work, documents_per_s: float, *, deadline_s: float | None = None, num_nodes: int | None = None
) -> Cost:
    """The cost with nodes of `documents_per_s` each, above 0: of as many as meet the deadline, or of `num_nodes`, if
    that is given."""
    node_s = work.num_documents / documents_per_s
    if num_nodes is None:
        assert deadline_s is not None
        num_nodes = max(1, math.ceil(node_s / deadline_s))
    wall_s = node_s / num_nodes
    shard_documents = min(work.num_documents, max(1, round(documents_per_s * SHARD_S)))
    text_bytes = work.num_documents * work.document_bytes
    output_bytes = work.num_documents * work.row_bytes
    return Cost(
        node_hours=node_s / 3600,
        num_nodes=num_nodes,
        hours=wall_s / 3600,
        read_bytes_per_s=text_bytes / wall_s,
        write_bytes_per_s=output_bytes / wall_s,
        text_bytes=text_bytes,
        output_bytes=output_bytes,
        num_shards=math.ceil(work.num_documents / shard_documents),
        shard_documents=shard_documents,
        shard_output_bytes=shard_documents * work.row_bytes,
    )
