from pathlib import Path

import pytest

from benchmarks.checkpoints import BUNDLED, SHAPES, NoSuchModel, Shape, make_checkpoint, model_folder
from benchmarks.servers import bundled_model
from vecd.shm.card import read_card
from vecd.workers.families.encoders import FAMILIES


def test_a_model_is_a_shape_or_a_folder(tmp_path: Path) -> None:
    assert str(model_folder(BUNDLED)) == bundled_model()
    assert model_folder(bundled_model()) == Path(bundled_model()).resolve()
    with pytest.raises(NoSuchModel, match="bert-huge: neither a model's folder nor one of minilm, bert-base"):
        model_folder("bert-huge", tmp_path)


def test_a_shape_that_was_made_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "bert-base").mkdir()
    assert model_folder("bert-base", tmp_path) == tmp_path / "bert-base"


def test_shapes_are_of_families_that_the_lean_engine_computes() -> None:
    transformers = pytest.importorskip("transformers")
    for shape in SHAPES.values():
        config = getattr(transformers, shape.config)(**shape.settings)
        assert config.model_type in FAMILIES
        assert config.max_position_embeddings >= 512


@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
def test_a_checkpoint_is_one_that_vecd_serves(pooling: str, tmp_path: Path) -> None:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    make_checkpoint(Shape("BertConfig", small, pooling), tmp_path / "small")
    card = read_card(tmp_path / "small")
    assert (card.model_type, card.dim, card.max_tokens) == ("bert", 32, 512)
    assert card.pooling == (pooling,)
    assert card.is_normalized
    assert Path(card.tokenizer_file).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
