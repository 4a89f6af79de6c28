"""Tiny models, and sentence-transformers' vectors of them."""

import pytest

from tests.support import checkpoints
from tests.support.workers import _one_thread, checkpoint

__all__ = ["_one_thread", "checkpoint"]


@pytest.fixture(scope="session")
def reference() -> checkpoints.Reference:
    return checkpoints.reference
