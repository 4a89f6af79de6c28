"""Turns a batch message into a batch for an engine.

Owns the checks on the message: no computation may index outside a slot, the vocabulary or the table of positions. Pure.
Called by `vecd.workers.process.loop`.
"""

import numpy as np
from numpy.typing import NDArray

from vecd.shm.arena import ArenaSpec
from vecd.shm.card import ModelCard
from vecd.shm.output import Output, span_of
from vecd.shm.wire import Batch
from vecd.workers.engine import PackedBatch


class BadBatch(Exception):
    """A batch that this worker cannot take. The message holds numbers of tokens and rows, never an id."""


def read_batch(message: Batch, arena: ArenaSpec, card: ModelCard) -> PackedBatch:
    """The arrays of a message, without a copy. Raises BadBatch when they do not fit the arena or the model."""
    if message.slot >= arena.num_slots:
        raise BadBatch(f"slot {message.slot}, there are {arena.num_slots}")
    if message.num_sequences > arena.rows_per_slot:
        raise BadBatch(f"{message.num_sequences} sequences, a slot has {arena.rows_per_slot} rows")
    lengths = np.frombuffer(message.lengths_bytes, dtype="<i4")
    token_ids = np.frombuffer(message.token_ids_bytes, dtype="<i4")
    _check_lengths(lengths, token_ids.size, card.max_tokens)
    if token_ids.min() < 0 or token_ids.max() >= card.vocab_size:
        raise BadBatch(f"a token id outside the vocabulary of {card.vocab_size}")
    is_plain = card.main_output is Output.VECTORS
    if is_plain and not message.outputs_bytes and not message.borders_bytes:
        return PackedBatch(lengths, token_ids, scope=message.scope)
    outputs = np.frombuffer(message.outputs_bytes, dtype=np.uint8) if message.outputs_bytes else None
    if outputs is None and not is_plain:
        outputs = np.zeros(message.num_sequences, dtype=np.uint8)
    borders = np.frombuffer(message.borders_bytes, dtype="<i4") if message.borders_bytes else None
    batch = PackedBatch(lengths, token_ids, outputs, borders, span_of(card), message.scope)
    if borders is not None and not ((borders >= 0) & (borders < lengths)).all():
        raise BadBatch("the second part of a sequence begins outside it")
    if outputs is not None:
        _check_outputs(outputs, batch, arena, card)
    return batch


def _check_outputs(outputs: NDArray[np.uint8], batch: PackedBatch, arena: ArenaSpec, card: ModelCard) -> None:
    if outputs.max() > max(Output):
        raise BadBatch(f"output {outputs.max()}, there are {len(Output)}")
    for output in map(Output, set(outputs.tolist())):
        if output not in card.outputs:
            raise BadBatch(f"the model has no {output.name.lower()}")
    if batch.num_rows > arena.rows_per_slot:
        raise BadBatch(f"{batch.num_rows} rows, a slot has {arena.rows_per_slot}")


def _check_lengths(lengths: "np.ndarray[tuple[int], np.dtype[np.int32]]", num_tokens: int, max_tokens: int) -> None:
    if lengths.min() < 1:
        raise BadBatch("a sequence without tokens")
    if lengths.max() > max_tokens:
        raise BadBatch(f"a sequence of {lengths.max()} tokens, the model takes {max_tokens}")
    total = int(lengths.sum(dtype=np.int64))
    if total != num_tokens:
        raise BadBatch(f"sequences of {total} tokens in all, but {num_tokens} token ids")
