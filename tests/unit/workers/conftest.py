"""Tiny models, and sentence-transformers' vectors of them."""

from tests.support.workers import (
    _one_thread,
    checkpoint,
    minilm,
    random_batch,
    reference,
    torch_without_gpu,
    varlen_by_hand,
    worker_config,
)

__all__ = [
    "_one_thread",
    "checkpoint",
    "minilm",
    "random_batch",
    "reference",
    "torch_without_gpu",
    "varlen_by_hand",
    "worker_config",
]
