"""Builds an engine that needs torch by the name of its path.

Owns the imports of each: the fused path does not import transformers, which takes seconds. Compares nothing. Called by
`vecd.workers.engines.selection`.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from vecd.shm.card import ModelCard, ModelError
from vecd.workers import prefix
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Engine
from vecd.workers.engines.torch.fused import load_fused
from vecd.workers.engines.torch.heads import load_heads
from vecd.workers.engines.torch.transformer import Forward, TransformerEngine
from vecd.workers.families.description import NotDescribed
from vecd.workers.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Load = Callable[[str], "PreTrainedModel"]
"""Gives the transformers model in a dtype."""


def build_engine(config: WorkerConfig, path: str, dtype: str, load: Load | None = None) -> Engine:
    """Build the engine that runs the model of `config` on `path` in `dtype`.

    Raises NotDescribed for a model without a fused path, ModelError for one that cannot be loaded, and anything
    that a model raises on a path that it does not support.
    """
    device = torch.device(config.device)
    load, score = load or partial(_load, config.card, device), config.card.score
    if path in ("padded", "unpadded") and score is not None and not score.steps:
        # No table describes its head: transformers' class computes that, too.
        forward = _padded(config.card, path, device, load(dtype), has_head=True)
        return TransformerEngine(forward, {config.card.main_output: _as_they_are}, dtype, device)
    heads = load_heads(config.card, device)
    engine = TransformerEngine(_forward(config.card, path, dtype, device, load), heads, dtype, device)
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

        return PackedForward(_body(card, load(dtype)), device, has_segments=card.has_segments)
    if path not in ("padded", "unpadded"):
        raise ModelError(f"{card.folder}: there is no path {path}")
    return _padded(card, path, device, _body(card, load(dtype)))


def _as_they_are(logits: torch.Tensor, layout: Layout) -> torch.Tensor:
    return logits.float()


def _padded(
    card: ModelCard, path: str, device: torch.device, model: "PreTrainedModel", *, has_head: bool = False
) -> Forward:
    from vecd.workers.engines.torch.padded import PaddedForward

    may_pad = path == "padded"
    return PaddedForward(model, device, may_pad=may_pad, has_segments=card.has_segments, has_head=has_head)


def _body(card: ModelCard, model: "PreTrainedModel") -> "PreTrainedModel":
    """The model without the head that one for classification has."""
    return model if card.score is None else cast("PreTrainedModel", model.base_model)


def _load(card: ModelCard, device: torch.device, dtype: str) -> "PreTrainedModel":
    from vecd.workers.engines.torch.loading import load_model

    return load_model(card, dtype, device)
