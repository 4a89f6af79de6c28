"""Builds the engine of a path by its name.

Owns the list of paths and their imports: the fused path does not import transformers, which takes seconds. Compares
nothing. Called by `vecd.workers.engines.torch.selection` and by `vecd.workers.engines.load`.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from vecd.shm.card import ModelCard, ModelError
from vecd.workers import prefix
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Engine
from vecd.workers.engines.lean.engine import LeanEngine
from vecd.workers.engines.torch.fused import load_fused
from vecd.workers.engines.torch.heads import load_heads
from vecd.workers.engines.torch.transformer import Forward, TransformerEngine
from vecd.workers.families.description import NotDescribed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PATHS = {
    "auto": ("lean", "fused", "packed", "padded", "unpadded"),
    "lean": ("lean",),
    "fused": ("fused",),
    "packed": ("packed",),
    "padded": ("padded", "unpadded"),
}
"""By `WorkerConfig.engine`: the paths to try, in this order."""

Load = Callable[[str], "PreTrainedModel"]
"""Gives the transformers model in a dtype."""


def build_engine(config: WorkerConfig, path: str, dtype: str, load: Load | None = None) -> Engine:
    """Build the engine that runs the model of `config` on `path` in `dtype`.

    Raises NotDescribed for a model without a lean or fused path, ModelError for one that cannot be loaded, and anything
    that a model raises on a path that it does not support.
    """
    if path == "lean":
        if config.device != "cpu" or dtype not in ("float32", "int8"):
            raise NotDescribed("the lean engine computes float32 and int8 on a processor")
        return LeanEngine(config.card, dtype=dtype)
    device = torch.device(config.device)
    forward = _forward(config.card, path, dtype, device, load or partial(_load, config.card, device))
    engine = TransformerEngine(forward, load_heads(config.card, device), dtype, device)
    score = config.card.score
    if score is not None and score.pooling == "lasttoken" and score.pair_template is not None:
        engine.share_prefixes(prefix.probe(config.card))
    return engine


def _forward(card: ModelCard, path: str, dtype: str, device: torch.device, load: Load) -> Forward:
    if path == "fused":
        if device.type != "cpu":
            raise NotDescribed(f"the fused path is for processors, not for {device.type}")
        return load_fused(card, dtype)
    if path == "packed":
        from vecd.workers.engines.torch.packed import PackedForward  # not below: it needs names inside transformers

        return PackedForward(load(dtype), device)
    if path not in ("padded", "unpadded"):
        raise ModelError(f"{card.folder}: there is no path {path}")
    from vecd.workers.engines.torch.padded import PaddedForward

    return PaddedForward(load(dtype), device, may_pad=path == "padded")


def _load(card: ModelCard, device: torch.device, dtype: str) -> "PreTrainedModel":
    from vecd.workers.engines.torch.loading import load_model

    return load_model(card, dtype, device)
