"""What the served engine's vectors are compared with: the plain model's, and sentence-transformers'.

Owns both ways to such vectors, the comparison by length of text, and the look at weights that are no numbers. Judges by
the bounds of `vecd.workers.engines.parity`. Called by `vecd.workers.check.orders`.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from vecd.shm.card import ModelError
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.parity import Parity, compare, vectors_one_by_one

_LENGTH_STEPS = (16, 64, 256, 1024, 4096)
"""Tokens up to which texts are counted together; the longest are by themselves."""

_SCANNED_ELEMENTS = 1 << 24
"""Of a tensor, at a time: looking takes a copy."""


def plain_vectors(config: WorkerConfig, dtype: str, sequences: list[list[int]]) -> NDArray[np.float32]:
    """transformers' own modules, nothing packed and nothing padded. Raises ModelError."""
    from vecd.workers.engines.torch.build import build_engine
    from vecd.workers.engines.torch.loading import one_line

    torch.set_num_threads(config.num_threads)
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int32)
    batch = PackedBatch(lengths, np.concatenate([np.array(ids, dtype=np.int32) for ids in sequences]))
    try:
        engine = build_engine(replace(config, dtype=dtype), "padded", dtype)
        return vectors_one_by_one(engine, batch, config.card.dim)
    except ModelError:
        raise
    except Exception as error:  # whatever a model raises
        raise ModelError(f"{config.card.folder}: the plain model cannot be run: {one_line(error)}") from error


def reference_vectors(folder: str, max_tokens: int, texts: list[str]) -> NDArray[np.float32]:
    """sentence-transformers' own, in float32 whatever is stored, on the processor, one text at a time. Runs no code of
    the model's. Raises ModelError when it cannot load or run the model."""
    warnings.simplefilter("ignore")
    try:
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(
            folder,
            device="cpu",
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={"dtype": torch.float32},
        )
        model.max_seq_length = max_tokens
        vectors = model.encode(texts, batch_size=1, convert_to_numpy=True, show_progress_bar=False)
    except Exception as error:  # whatever it, transformers and the model raise
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(f"sentence-transformers cannot run the model: {why}") from error
    return np.asarray(vectors, dtype=np.float32)


def compare_by_length(
    ours: NDArray[np.float32], theirs: NDArray[np.float32], lengths: Sequence[int], dtype: str
) -> dict[str, Any]:
    """Agreement of two sets of vectors, each [B, D], of all and of each class of lengths; `dtype` is what ours were
    computed in, and sets the bounds."""
    whole = compare(ours, theirs)
    return {
        **_figures(whole, len(lengths), max(lengths)),
        "is_within_bounds": whole.is_within_bounds(dtype),
        "by_length": [
            _figures(compare(ours[rows], theirs[rows]), rows.size, max(lengths[row] for row in rows))
            for rows in _classes(np.asarray(lengths))
        ],
    }


def _figures(parity: Parity, num_texts: int, longest: int) -> dict[str, Any]:
    return {"num_texts": num_texts, "longest_tokens": longest, **parity.to_json()}


def _classes(lengths: "NDArray[np.int64]") -> Iterator[NDArray[np.int64]]:
    """The rows of each class that has any."""
    classes = np.searchsorted(_LENGTH_STEPS, lengths)
    for number in np.unique(classes):
        yield np.flatnonzero(classes == number)


def find_not_finite(folders: Sequence[str]) -> list[str]:
    """Names of the tensors in safetensors files that have nan or infinity in them, each with its file. Raises
    ModelError."""
    found: list[str] = []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as weights:
                    found += [f"{path}: {name}" for name in weights.keys() if not _is_finite(weights.get_tensor(name))]  # noqa: SIM118
            except Exception as error:  # SafetensorError, OSError, types that torch does not know
                raise ModelError(f"{path}: cannot be read: {type(error).__name__}: {error}".splitlines()[0]) from error
    return found


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    parts: tuple[torch.Tensor, ...] = torch.split(tensor.flatten(), _SCANNED_ELEMENTS)
    return all(bool(torch.isfinite(part if part.element_size() > 1 else part.float()).all()) for part in parts)
