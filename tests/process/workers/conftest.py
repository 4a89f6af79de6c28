"""Tiny models, and the gateway as workers see it."""

from tests.support.workers import _one_thread, checkpoint, endpoint, gateway, minilm, new_endpoint

__all__ = ["_one_thread", "checkpoint", "endpoint", "gateway", "minilm", "new_endpoint"]
