import pytest

from vecd.launch.config import architectures
from vecd.launch.config.architectures import refuse_unknown
from vecd.shm.card import ModelCard, ModelError


def card(model_type: str) -> ModelCard:
    return ModelCard("/m", "/m", model_type, 8, 8, 10, 10, ("mean",), (), False, "")


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "qwen3", "gemma3_text", "nomic_bert", "gte"])
def test_what_transformers_names(model_type):
    refuse_unknown(card(model_type))


@pytest.mark.parametrize("model_type", ["new", "nosuch"])
def test_what_it_does_not_name(model_type):
    with pytest.raises(ModelError, match=rf"^/m/config\.json: transformers 5\..* has no architecture '{model_type}'"):
        refuse_unknown(card(model_type))


def test_another_layout_of_transformers_is_left_to_the_worker(monkeypatch, tmp_path):
    monkeypatch.setattr(architectures, "_FILES", ("moved.py",))
    refuse_unknown(card("nosuch"))


def test_every_name_is_among_them():
    from transformers import CONFIG_MAPPING

    for model_type in CONFIG_MAPPING:
        refuse_unknown(card(model_type))
