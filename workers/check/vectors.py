"""The rows that the served engine's are compared with: the reference model's. Those of libraries that read texts are
in `vecd.workers.check.libraries`.

Owns the batches of the comparison, the comparison by length of text, and the search for weights that are not finite.
The bounds are those of `vecd.workers.engines.parity`. Called by `vecd.workers.check.run`.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from vecd.shm.batch_limits import MAX_BATCH_TOKENS
from vecd.shm.card import ModelCard, ModelError, one_line
from vecd.shm.output import Output, span_of
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Engine, PackedBatch
from vecd.workers.engines.parity import Parity, compare, vectors_of
from vecd.workers.weights import broken

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Rows: TypeAlias = NDArray[np.float32]

_LENGTH_STEPS = (16, 64, 256, 1024, 4096)
"""Upper limits, in tokens, of the classes of lengths; longer texts are one more class."""

_SCANNED_ELEMENTS = 1 << 24
"""Elements of a tensor that are examined at a time, because that makes a copy."""


def batch_of(card: ModelCard, sequences: Sequence[list[int]], borders: Sequence[int]) -> PackedBatch:
    """All sequences, with the model's main output. `borders`: as in `PackedBatch`; 0: none."""
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int32)
    token_ids = np.concatenate([np.array(ids, dtype=np.int32) for ids in sequences])
    output = card.main_output
    if output is Output.VECTORS:
        return PackedBatch(lengths, token_ids)
    outputs = np.full(lengths.size, output, dtype=np.uint8)
    is_divided = any(borders)
    span = span_of(card) if output.spans_rows else 1
    return PackedBatch(lengths, token_ids, outputs, np.array(borders, np.int32) if is_divided else None, span)


def embed(engine: Engine, card: ModelCard, batch: PackedBatch) -> Rows:
    """The engine's rows, [`batch.num_rows`, row_dim], in batches of several lengths, as they are served: that is where
    paths fail."""
    firsts, num_tokens = [0], 0
    for index, length in enumerate(batch.lengths.tolist()):
        if num_tokens and num_tokens + length > MAX_BATCH_TOKENS:
            firsts.append(index)
            num_tokens = 0
        num_tokens += length
    parts = itertools.pairwise([*firsts, batch.lengths.size])
    return np.concatenate([vectors_of(engine, batch.part(first, last), card.row_dim) for first, last in parts])


def reference_model_vectors(config: WorkerConfig, dtype: str, batch: PackedBatch) -> Rows:
    """The rows of transformers' own modules, [`batch.num_rows`, row_dim], one sequence at a time. Raises ModelError."""
    from vecd.workers.engines.torch.loading import load_model
    from vecd.workers.engines.torch.reference import reference_rows

    def load(dtype: str) -> "PreTrainedModel":
        return load_model(config.card, dtype, torch.device(config.device))

    try:
        return reference_rows(config, dtype, load, batch)
    except ModelError:
        raise
    except Exception as error:  # a model may raise anything
        raise ModelError(f"{config.card.folder}: the reference model cannot be run: {one_line(error)}") from error


def compare_by_length(
    ours: Rows,
    theirs: Rows,
    batch: PackedBatch,
    rows_of_each: Sequence[int],
    output: Output,
    dtype: str,
    probes: Mapping[str, Any],
) -> dict[str, Any]:
    """Parity of two sets of rows of an output, for all texts and for each class of lengths. `rows_of_each`: how many
    of the rows, which are end to end, each sequence of `batch` has. `dtype` is the type in which ours were computed,
    and sets the bounds. `probes`: the figures of the engine's parity on random probes; empty if there are none."""
    tokens, num_rows = batch.lengths, np.asarray(rows_of_each)
    span = batch.span if output.spans_rows else 1
    classes = np.searchsorted(_LENGTH_STEPS, tokens)
    whole = compare(ours, theirs, span, output)
    by_length = []
    for number in np.unique(classes):
        is_of_class = np.repeat(classes == number, num_rows)
        if is_of_class.any():
            parity = compare(ours[is_of_class], theirs[is_of_class], span, output)
            by_length.append(_figures(parity, tokens[classes == number]))
    is_within_bounds = _in_units_of(probes, whole).is_within_bounds(dtype)
    return {**_figures(whole, tokens), "is_within_bounds": is_within_bounds, "by_length": by_length}


def _in_units_of(probes: Mapping[str, Any], parity: Parity) -> Parity:
    """Scores may hardly differ between a few texts, all of which are harmless to a classifier of abuse. The spread of
    the probes counts, if it is larger."""
    if not parity.relative_diff or not probes.get("relative_diff"):
        return parity
    unit = probes["max_abs_diff"] / probes["relative_diff"]
    return replace(parity, relative_diff=min(parity.relative_diff, parity.max_abs_diff / unit))


def _figures(parity: Parity, lengths: NDArray[Any]) -> dict[str, Any]:
    return {
        "num_texts": lengths.size,
        "longest_tokens": int(lengths.max()),
        "min_cosine": None,
        **parity.to_json(),
    }


def refuse_not_finite(card: ModelCard) -> None:
    """Raises ModelError for weights that contain nan or infinity, and for a file that cannot be read."""
    folders = [card.weights_folder, *(f"{card.folder}/{step.path}" for step in card.all_steps if step.path)]
    found: list[str] = []
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.safetensors"))):
        try:
            with safe_open(path, framework="pt") as weights:
                found += [f"{path}: {name}" for name in weights.keys() if not _is_finite(weights.get_tensor(name))]  # noqa: SIM118
        except Exception as error:  # SafetensorError, OSError, types that torch does not know
            raise broken(path, error) from error
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise ModelError(f"{found[0]}{more}: weights are not finite (nan or infinity)")


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    parts: tuple[torch.Tensor, ...] = torch.split(tensor.flatten(), _SCANNED_ELEMENTS)
    return all(bool(torch.isfinite(part if part.element_size() > 1 else part.float()).all()) for part in parts)
