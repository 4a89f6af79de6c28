"""What is known of a model without prompts."""

from dataclasses import replace

import pytest

from tests.support.asking import PLAIN
from vecd.gateway.api.model_info import ModelInfo


@pytest.fixture
def model_info() -> ModelInfo:
    """A model without prompts, under any name; tests replace what they are about."""
    return replace(PLAIN, model="all-MiniLM-L6-v2", max_inputs=2048)
