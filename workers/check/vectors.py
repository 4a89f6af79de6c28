"""The vectors that the served engine's are compared with: the reference model's, and sentence-transformers'.

Owns both sources of vectors, the comparison by length of text, and the search for weights that are not finite. The
bounds are those of `vecd.workers.engines.parity`. Called by `vecd.workers.check.run`.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from vecd.shm.batch_limits import MAX_BATCH_TOKENS
from vecd.shm.card import ModelCard, ModelError, one_line
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Engine, PackedBatch
from vecd.workers.engines.parity import Parity, compare, vectors_of, vectors_one_by_one
from vecd.workers.weights import broken

_LENGTH_STEPS = (16, 64, 256, 1024, 4096)
"""Upper limits, in tokens, of the classes of lengths; longer texts are one more class."""

_SCANNED_ELEMENTS = 1 << 24
"""Elements of a tensor that are examined at a time, because that makes a copy."""


def embed(engine: Engine, sequences: Sequence[list[int]], dim: int) -> NDArray[np.float32]:
    """The engine's vectors, [B, dim], in batches of several lengths, as they are served: that is where paths fail."""
    batches: list[list[list[int]]] = [[]]
    for ids in sequences:
        if batches[-1] and sum(map(len, batches[-1])) + len(ids) > MAX_BATCH_TOKENS:
            batches.append([])
        batches[-1].append(ids)
    return np.concatenate([vectors_of(engine, _packed(batch), dim) for batch in batches])


def _packed(sequences: Sequence[list[int]]) -> PackedBatch:
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int32)
    return PackedBatch(lengths, np.concatenate([np.array(ids, dtype=np.int32) for ids in sequences]))


def reference_model_vectors(config: WorkerConfig, dtype: str, sequences: Sequence[list[int]]) -> NDArray[np.float32]:
    """The vectors of transformers' own modules, one sequence at a time. Raises ModelError."""
    from vecd.workers.engines.torch.build import build_engine

    try:
        engine = build_engine(config, "padded", dtype)
        return vectors_one_by_one(engine, _packed(sequences), config.card.row_dim)
    except ModelError:
        raise
    except Exception as error:  # a model may raise anything
        raise ModelError(f"{config.card.folder}: the reference model cannot be run: {one_line(error)}") from error


def sentence_transformers_vectors(folder: str, max_tokens: int, texts: Sequence[str], dim: int) -> NDArray[np.float32]:
    """sentence-transformers' vectors, [B, dim], in float32 for any stored type, on the processor, one text at a time.

    Runs no code of the model's. Raises ModelError for another dimension, and whatever the library, transformers and the
    model raise.
    """
    warnings.simplefilter("ignore")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        folder, device="cpu", local_files_only=True, trust_remote_code=False, model_kwargs={"dtype": torch.float32}
    )
    model.float()  # StaticEmbedding ignores the type
    if hasattr(model[0], "auto_model"):  # StaticEmbedding takes texts of any length
        model.max_seq_length = max_tokens
    vectors = model.encode(list(texts), batch_size=1, convert_to_numpy=True, show_progress_bar=False)
    if vectors.shape[1] != dim:
        raise ModelError(f"its vectors have {vectors.shape[1]} dimensions, vecd's {dim}")
    return np.asarray(vectors, dtype=np.float32)


def compare_by_length(
    ours: NDArray[np.float32], theirs: NDArray[np.float32], lengths: Sequence[int], dtype: str
) -> dict[str, Any]:
    """Parity of two sets of vectors, each [B, D], for all texts and for each class of lengths. `dtype` is the type in
    which ours were computed, and sets the bounds."""
    tokens = np.asarray(lengths)
    classes = np.searchsorted(_LENGTH_STEPS, tokens)
    rows_by_class = [np.flatnonzero(classes == number) for number in np.unique(classes)]
    whole = compare(ours, theirs)
    return {
        **_figures(whole, tokens),
        "is_within_bounds": whole.is_within_bounds(dtype),
        "by_length": [_figures(compare(ours[rows], theirs[rows]), tokens[rows]) for rows in rows_by_class],
    }


def _figures(parity: Parity, lengths: NDArray[Any]) -> dict[str, Any]:
    return {"num_texts": lengths.size, "longest_tokens": int(lengths.max()), **parity.to_json()}


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
