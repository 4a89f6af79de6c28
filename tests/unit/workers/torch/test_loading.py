"""Weights are loaded whole, or the model is refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertForMaskedLM, BertForPreTraining, BertModel

from vecd.model.card import ModelError, read_card
from vecd.workers.torch.loading import load_model

Checkpoint = Callable[..., Path]
CPU = torch.device("cpu")


@pytest.fixture
def copied(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    def copy(family: str = "bert", **settings: Any) -> Path:
        return shutil.copytree(checkpoint(family, **settings), tmp_path / family)

    return copy


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def test_the_weights_are_the_file_s_and_silence_is_kept(
    checkpoint: Checkpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint("bert")
    stored = load_file(folder / "model.safetensors")
    model = load_model(read_card(folder), "float32", CPU)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name]), name
        assert not parameter.requires_grad
    assert not model.training
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_converted(checkpoint: Checkpoint, dtype: str) -> None:
    model = load_model(read_card(checkpoint("bert")), dtype, CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda w: {n: t for n, t in w.items() if n != "encoder.layer.1.output.dense.weight"}, "lack encoder.layer.1"),
        (lambda w: {**w, "embeddings.LayerNorm.bias": torch.zeros(31)}, r"LayerNorm.bias is \[31\] .* and \[32\]"),
        (lambda w: {**w, "encoder.layer.3.output.dense.weight": torch.zeros(2)}, "have encoder.layer.3.* no place"),
        (lambda w: {f"other.{n}": t for n, t in w.items()}, "lack .* more"),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_refused(
    copied: Callable[..., Path],
    capfd: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    why: str,
) -> None:
    folder = copied()
    change_weights(folder, change)
    with pytest.raises(ModelError, match=why) as refusal:
        load_model(read_card(folder), "float32", CPU)
    assert str(refusal.value).startswith(str(folder))
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr() == ("", "")


def test_weights_in_several_files(copied: Callable[..., Path]) -> None:
    folder = copied()
    stored = load_file(folder / "model.safetensors")
    BertModel.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    card = read_card(folder)
    model = load_model(card, "float32", CPU)
    assert all(torch.equal(parameter, stored[name]) for name, parameter in model.named_parameters())
    # A tensor that is in no file is missed.
    name = "encoder.layer.1.output.dense.weight"
    shard = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    save_file({n: tensor for n, tensor in load_file(shard).items() if n != name}, shard, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name}|cannot be loaded"):
        load_model(card, "float32", CPU)


def test_the_layout_of_sentence_transformers_2(copied: Callable[..., Path], checkpoint: Checkpoint) -> None:
    folder = copied()
    (folder / "0_Transformer").mkdir()
    for path in [path for path in folder.iterdir() if path.is_file() and path.name != "modules.json"]:
        path.rename(folder / "0_Transformer" / path.name)
    kinds = {"0_Transformer": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    chain = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(chain))
    model = load_model(read_card(folder), "float32", CPU)
    stored = load_file(checkpoint("bert") / "model.safetensors")
    assert all(torch.equal(parameter, stored[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("model_class", [BertForMaskedLM, BertForPreTraining])
def test_the_heads_of_training_are_no_reason_to_refuse(copied: Callable[..., Path], model_class: Any) -> None:
    folder = copied()
    pretrained = model_class.from_pretrained(folder)
    pretrained.save_pretrained(folder)
    model: Any = load_model(read_card(folder), "float32", CPU)
    assert torch.equal(model.embeddings.word_embeddings.weight, pretrained.bert.embeddings.word_embeddings.weight)


def test_of_other_parts_some_may_be_there_and_the_pooler_may_be_missing(copied: Callable[..., Path]) -> None:
    """What the architecture does not have is a head."""
    folder = copied()
    change_weights(folder, lambda w: {n: t for n, t in w.items() if not n.startswith("pooler")})
    change_weights(folder, lambda w: {**w, "mlp.dense.weight": torch.zeros(32, 32)})
    assert load_model(read_card(folder), "float32", CPU).pooler is None


def test_of_an_encoder_with_a_decoder_the_encoder_is_taken(copied: Callable[..., Path]) -> None:
    folder = copied("t5")
    change_config(folder, is_encoder_decoder=True, architectures=["T5Model"])
    change_weights(folder, lambda w: {**w, "decoder.block.0.layer.0.SelfAttention.k.weight": torch.zeros(32, 32)})
    assert type(load_model(read_card(folder), "float32", CPU)).__name__ == "T5EncoderModel"


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("content", [None, b"", b"nonsense" * 20])
def test_a_broken_file_and_an_unknown_architecture_are_refused(
    copied: Callable[..., Path], content: bytes | None
) -> None:
    folder = copied()
    if content is None:
        change_config(folder, model_type="never_heard_of")
    else:
        (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="never_heard_of" if content is None else re.escape(str(folder))):
        load_model(read_card(folder), "float32", CPU)


def test_positions_that_stretch_with_the_batch_are_refused(copied: Callable[..., Path]) -> None:
    folder = copied("qwen3", pooling="lasttoken")
    rope: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    change_config(folder, rope_parameters=rope)
    assert load_model(read_card(folder), "float32", CPU) is not None  # texts stay within the natural length
    change_config(folder, rope_parameters={**rope, "original_max_position_embeddings": 30})
    with pytest.raises(ModelError, match="more than 30 tokens"):
        load_model(read_card(folder), "float32", CPU)
