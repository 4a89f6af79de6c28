"""The list of modules for the fork server."""

import importlib.util

import pytest

from vecd.workers.process.preload import modules_to_preload


@pytest.mark.parametrize("engine", ["auto", "packed"])
@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "deberta-v2", "modernbert", "qwen3", "gemma3_text"])
def test_every_module_exists(model_type: str, engine: str) -> None:
    for module in modules_to_preload(model_type, engine):
        assert importlib.util.find_spec(module) is not None, module


def test_transformers_is_imported_for_the_packed_path_of_a_family_that_is_not_fused() -> None:
    assert "transformers" not in modules_to_preload("electra", "auto")
    assert "transformers" not in modules_to_preload("modernbert", "auto")
    assert "transformers.models.modernbert.modeling_modernbert" in modules_to_preload("modernbert", "packed")
    assert "transformers.models.albert.modeling_albert" in modules_to_preload("albert", "auto")
