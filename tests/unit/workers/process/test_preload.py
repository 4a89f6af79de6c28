"""The list of modules for the fork server."""

import importlib.util

import pytest

from vecd.workers.process.preload import modules_to_preload


@pytest.mark.parametrize("engine", ["auto", "packed"])
@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "deberta-v2", "qwen3", "gemma3_text"])
def test_every_module_exists(model_type: str, engine: str) -> None:
    for module in modules_to_preload(model_type, engine):
        assert importlib.util.find_spec(module) is not None, module
