"""A checkpoint that is quantized is made into plain weights once, and is then read as any other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from tests.support.checkpoints import assert_same_vectors, random_batch, sequences_of
from tests.support.gguf_files import save_plain
from tests.support.quantized_checkpoints import SCHEMES, save_quantized
from vecd.launch.config import made_weights
from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import load_settings
from vecd.model.card import ModelError
from vecd.workers.load import load_engine
from vecd.workers.parity import vectors_of
from vecd.workers.torch.making import make_all


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A making that starts no process."""
    monkeypatch.setattr(made_weights, "make", lambda title, orders: make_all(orders))


def plan_of(folder: Path, *flags: str) -> Plan:
    flags = ("--device", "cpu", "--dtype", "float32", "--cache-dir", str(folder.parent / "cache"), *flags)
    return make_plan(load_settings([str(folder), *flags]))


def save(tmp_path: Path, scheme: str, dtype: str = "bfloat16") -> tuple[Path, Path]:
    """The quantized model, and the plain one that it stands for."""
    plain = save_plain(tmp_path / "plain", "qwen3", num_hidden_layers=2)
    (tmp_path / "model").mkdir()
    return save_quantized(plain, tmp_path / "model", scheme, dtype), plain


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_the_model_that_its_weights_stand_for(scheme: str, tmp_path: Path) -> None:
    folder, plain = save(tmp_path, scheme, "float16" if "q" in scheme else "bfloat16")
    plan = plan_of(folder)
    found, expected = load_file(Path(plan.card.weight_files[0])), load_file(plain / "model.safetensors")
    assert found.keys() == expected.keys()
    assert not [name for name in found if found[name].dtype != expected[name].dtype]
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


def test_its_vectors_are_those_of_the_plain_model(tmp_path: Path) -> None:
    folder, plain = save(tmp_path, "awq", "float16")
    plan, batch = plan_of(folder), random_batch([5, 1, 30, 12], 100)
    model = AutoModel.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.inference_mode():
        ids = [torch.from_numpy(each.astype(np.int64))[None] for each in sequences_of(batch)]
        rows = [model(input_ids=each).last_hidden_state[0].mean(0).numpy() for each in ids]
    engine = load_engine(plan.workers[0], lambda stage: None)
    assert_same_vectors(vectors_of(engine, batch, plan.card.row_dim), np.stack(rows))


def test_shards_are_one_model_and_a_folder_of_modules_is_read(tmp_path: Path) -> None:
    folder, plain = save(tmp_path, "fp8")
    tensors = load_file(folder / "model.safetensors")
    places = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for place in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == place}, folder / place)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found, expected = load_file(plan_of(folder).card.weight_files[0]), load_file(plain / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_adapter_is_merged_into_the_plain_weights(tmp_path: Path) -> None:
    folder, plain = save(tmp_path, "awq", "float16")
    (tmp_path / "adapter").mkdir()
    config: dict[str, Any] = {"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 2, "lora_alpha": 4}
    config |= {"target_modules": ["q_proj"], "task_type": "FEATURE_EXTRACTION"}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    first, second = torch.randn(2, 64), torch.randn(64, 2)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(2):
        name = f"base_model.model.layers.{layer}.self_attn.q_proj"
        tensors |= {f"{name}.lora_A.weight": first.clone(), f"{name}.lora_B.weight": second.clone()}
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    found = load_file(plan_of(tmp_path / "adapter").card.weight_files[0])["layers.1.self_attn.q_proj.weight"]
    base = load_file(plain / "model.safetensors")["layers.1.self_attn.q_proj.weight"].float()
    torch.testing.assert_close(found, base + second @ first * 2, atol=1e-5, rtol=1e-6)


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


def change_tensor(last: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        name = f"layers.1.self_attn.q_proj.{last}"
        made = change(tensors.pop(name))
        save_file(tensors if made is None else tensors | {name: made.contiguous()}, folder / "model.safetensors")

    return do


def add_tensor(last: str) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(load_file(path) | {f"layers.1.self_attn.q_proj.{last}": torch.ones(64, 1)}, path)

    return do


REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "method": ("awq", change_config(quant_method="bitsandbytes"), ": bitsandbytes is not known; known"),
    "no method": ("awq", change_config(quant_method=None), "quantization_config: None is not known; known: fp8, awq"),
    "format": ("int8", change_config(format="marlin-24"), ": compressed-tensors marlin-24 is not known"),
    "bits": ("gptq", change_config(bits=3), "quantization_config: bits is 3; known: 4, 8"),
    "version": ("awq", change_config(version="gemv"), "quantization_config: version is 'gemv'; known: gemm"),
    "zero": ("awq", change_config(zero_point=False), "quantization_config: zero_point is False; known: True"),
    "second": ("gptq", change_config(checkpoint_format="marlin"), "quantization_config: checkpoint_format is 'marlin'"),
    "group": ("gptq", change_config(group_size=32), "mlp.down_proj.scales has the shape (8, 64), and should have (4"),
    "group 0": ("awq", change_config(group_size=0), "group_size is missing or not a positive whole number"),
    "scale": ("fp8", change_tensor("weight_scale_inv", lambda t: t[:, :1]), "should have (3, 3)"),
    "no scale": ("fp8", change_tensor("weight_scale_inv", lambda t: None), "q_proj.weight is not known as F8_E4M3"),
    "type of scale": ("fp8", change_tensor("weight_scale_inv", lambda t: t.to(torch.float8_e8m0fnu)), "as F8_E8M0"),
    "scales of blocks": ("int8", change_tensor("weight_scale", lambda t: t.reshape(8, 8)), "should have (1, 1)"),
    "type of words": ("awq", change_tensor("qweight", lambda t: t.float()), "q_proj.qweight is not known as F32"),
    "number for shape": ("int4", change_tensor("weight_shape", lambda t: t[0]), "is not as compressed-tensors has"),
    "zeros": ("awq", change_tensor("qzeros", lambda t: t[:1]), "qzeros has the shape (1, 8), and should have (4, 8)"),
    "no zeros": ("gptq", change_tensor("qzeros", lambda t: None), "q_proj.qzeros has the shape None, and should have"),
    "order": ("gptq", change_tensor("g_idx", lambda t: t + 1), "q_proj.g_idx has a group beyond the 4 of"),
    "one dimension": ("gptq", change_tensor("qweight", lambda t: t[0]), "self_attn.q_proj is not as gptq has it"),
    "whole shape": ("int4", change_tensor("weight_shape", lambda t: t * 0), "is not as compressed-tensors has it"),
    "other shape": ("int4", change_tensor("weight_shape", lambda t: t.flip(0) * 2), "is not as compressed-tensors has"),
    "not symmetric": ("int8", add_tensor("weight_zero_point"), "int-quantized, layers.1.self_attn.q_proj.weight_z"),
    "ordered": ("int4", add_tensor("weight_g_idx"), "of compressed-tensors pack-quantized, layers.1.self_attn.q_proj."),
    "rotated": ("int4", change_config(transform_config={"config_groups": {"R1": {}}}), "transform_config is {'config_"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_as_its_scheme_says_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    scheme, change, why = REFUSED[name]
    folder, _ = save(tmp_path, scheme)
    change(folder)
    with pytest.raises(ModelError) as error:
        plan_of(folder)
    assert str(error.value).startswith(f"{folder}/config.json: ")
    assert why in str(error.value)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache/converted").glob("*.safetensors"))


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = save(tmp_path, "gptq")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 1, 99))
    with pytest.raises(ModelError, match=r"cache/converted: the converted weights have [\d,]+ bytes, and 99 are free"):
        plan_of(folder)
