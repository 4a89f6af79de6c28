"""Tiny models, and sentence-transformers' vectors of them."""

from tests.support.workers import _one_thread, checkpoint, minilm

__all__ = ["_one_thread", "checkpoint", "minilm"]
