"""The text part of EmbeddingGemma 2, in files with and without its towers."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import assert_same_vectors, embed, engine_of, random_batch
from tests.support.published import folder_of
from tests.support.published.relative import LAYOUTS
from vecd.model.card import ModelError, read_card
from vecd.workers.check.vectors import refuse_not_finite
from vecd.workers.description import NotDescribed

[LAYOUT] = (layout for layout in LAYOUTS if layout.name == "google/embeddinggemma-2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(folder_of(LAYOUT), tmp_path / "model")


def change_text(folder: Path, **settings: object) -> Path:
    """Settings of the part for text; None: without it."""
    config = json.loads((folder / "config.json").read_text())
    text = {**config["text_config"], **settings}
    config["text_config"] = {name: value for name, value in text.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_card_has_the_width_of_the_vectors(folder: Path) -> None:
    card = read_card(folder)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    assert (card.hidden_size, card.dim, text["hidden_size"]) == (64, 64, 48)


def test_texts_are_as_long_as_those_that_it_was_trained_with(folder: Path) -> None:
    assert read_card(folder).max_tokens == 120
    assert read_card(change_text(folder, max_position_embeddings=262_144)).max_tokens == 8192


def test_a_file_without_the_towers_gives_the_same_vectors(folder: Path) -> None:
    batch = random_batch([5, 1, 40, 5, 12])
    expected = embed(engine_of(folder, "packed"), batch, 64)
    weights = load_file(folder / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in weights)
    text = {name: weights[name] for name in weights if name.startswith("language_model.")}
    save_file(text, folder / "model.safetensors", metadata={"format": "pt"})
    for path in ("lean", "packed", "padded"):
        assert_same_vectors(embed(engine_of(folder, path), batch, 64), expected)


def test_weights_of_the_towers_may_be_infinite(folder: Path) -> None:
    """As the limits of some are that are not limited. Those of the text may not."""
    card, weights = read_card(folder), load_file(folder / "model.safetensors")
    assert not all(bool(tensor.isfinite().all()) for tensor in weights.values())
    refuse_not_finite(card)
    weights["language_model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"language_model\.norm\.weight: weights are not finite"):
        refuse_not_finite(card)


def test_a_token_for_images_is_read_as_padding(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    places = [config["image_token_id"], config["audio_token_id"], config["video_token_id"]]
    batch = random_batch([7, 7])
    batch.token_ids[2:5] = places
    batch.token_ids[7:] = batch.token_ids[:7]
    batch.token_ids[9:12] = config["text_config"]["pad_token_id"]
    for path in ("lean", "packed", "padded"):
        vectors = embed(engine_of(folder, path), batch, 64)
        assert_same_vectors(vectors[:1], vectors[1:])


def test_a_config_without_the_width_of_the_vectors_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="embedding_dim is missing or not a positive whole number"):
        read_card(change_text(folder, embedding_dim=None))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"hidden_activation": "tanh"}, "activation tanh"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "scaled"),
    ],
)
def test_the_lean_engine_refuses_other_computations(folder: Path, settings: dict[str, object], why: str) -> None:
    with pytest.raises(NotDescribed, match=why):
        engine_of(change_text(folder, **settings), "lean")


def test_a_tensor_of_another_size_is_named(folder: Path) -> None:
    change_text(folder, intermediate_size=100)
    with pytest.raises(ModelError, match=r"mlp\.\w+\.weight is \[\d+, \d+\] in the weights and .* in config.json"):
        engine_of(folder, "packed")
