"""Tiny models, and the gateway as workers see it."""

from tests.support.workers import (
    _one_thread,
    as_message,
    checkpoint,
    endpoint,
    gateway,
    minilm,
    new_endpoint,
    new_gateway,
    random_batch,
    reference,
    varlen_by_hand,
    worker_config,
)

__all__ = [
    "_one_thread",
    "as_message",
    "checkpoint",
    "endpoint",
    "gateway",
    "minilm",
    "new_endpoint",
    "new_gateway",
    "random_batch",
    "reference",
    "varlen_by_hand",
    "worker_config",
]
