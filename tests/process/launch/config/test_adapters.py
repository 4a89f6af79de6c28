"""An adapter is merged into its base once, by a process of its own, and is then read as any other model."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.support.published import RowsOf
from tests.support.published import adapters as published
from tests.support.published.adapters import V3_TASKS, change, save_bert, save_bert_adapter, save_v3, save_v5
from vecd.launch.config import made_weights, plan
from vecd.launch.config.adapters import with_adapter
from vecd.launch.config.made_weights import make
from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import load_settings
from vecd.model.card import ModelError
from vecd.model.files import Folder, source_of
from vecd.model.steps import read_modules
from vecd.workers.batch import PackedBatch
from vecd.workers.parity import vectors_of
from vecd.workers.select import build
from vecd.workers.torch.linear import type_between_layers
from vecd.workers.torch.making import make_all

IDS = np.array([2, 45, 7, 119, 63, 8, 8, 31, 3], np.int32)
LENGTHS = (9, 4, 1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that starts no process."""
    monkeypatch.setattr(made_weights, "make", lambda title, orders: make_all(orders))


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def save(write: Callable[[Path], object], name: str = "model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        write(folder)
        return folder

    return save


def plan_of(source: object, cache: Path, *flags: str) -> Plan:
    return make_plan(load_settings([str(source), "--device", "cpu", "--cache-dir", str(cache), *flags]))


def refusal(source: object, cache: Path) -> str:
    with pytest.raises(ModelError) as error:
        plan_of(source, cache)
    message = str(error.value)
    assert "\n" not in message
    assert not list(cache.glob("converted/*.safetensors"))
    return message


def rows_of(plan: Plan, path: str, dtype: str) -> list[NDArray[np.float32]]:
    """Of IDS cut to each of LENGTHS, in one batch."""
    batch = PackedBatch(np.array(LENGTHS, np.int32), np.concatenate([IDS[:length] for length in LENGTHS]))
    card = plan.card
    engine = build(replace(plan.workers[0], num_threads=1), path, dtype)
    return list(vectors_of(engine, batch, card.row_dim))


def assert_equal(plan: Plan, reference: RowsOf, path: str = "lean") -> None:
    expected = [reference(IDS[:length].astype(np.int64), 0) for length in LENGTHS]
    for ours, theirs in zip(rows_of(plan, path, "float32"), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    if type_between_layers("bfloat16") is None:
        return  # no linear kernels for it here
    for ours, theirs in zip(rows_of(plan, "fused", "bfloat16"), expected, strict=True):
        assert ours @ theirs >= 0.998 * np.linalg.norm(ours)


# --- PEFT -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", published.LAYOUTS[:2], ids=lambda layout: layout.name.partition("/")[2])
def test_the_vectors_are_those_of_the_sum(layout, saved, tmp_path):
    folder = saved(layout.save)
    plan = plan_of(folder, tmp_path / "cache")
    assert_equal(plan, layout.reference(folder))
    base = plan_of(folder / "base", tmp_path / "cache")
    assert not np.allclose(
        rows_of(base, "lean", "float32")[0], layout.reference(folder)(IDS.astype(np.int64), 0), atol=0.05
    )


def test_modules_and_prompts_are_the_adapters_where_it_has_some(saved, tmp_path):
    plain = plan_of(saved(save_bert_adapter, "plain"), tmp_path / "cache").card
    own = plan_of(saved(published.save_sentence_adapter, "own"), tmp_path / "cache").card
    assert (plain.pooling, plain.prompts) == (("mean",), ())
    assert (own.pooling, own.prompts) == (("cls",), (("query", "query: "), ("document", "")))


def test_it_is_merged_once_and_then_needs_no_torch(saved, monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(made_weights, "make", make)
    folder, cache = saved(save_bert_adapter), tmp_path / "cache"
    capfd.readouterr()
    first = plan_of(folder, cache)
    assert capfd.readouterr() == ("", "vecd: converting the adapted weights of model to safetensors (once)\n")
    monkeypatch.setattr(made_weights, "has_torch", lambda: False)
    second = plan_of(folder, cache)
    assert (second.card, second.model_files) == (first.card, first.model_files)
    assert capfd.readouterr() == ("", "")
    assert source_of(second.card.folder) == str(folder)
    assert second.card.weights_bytes == pytest.approx((folder / "base/model.safetensors").stat().st_size, rel=0.01)


def test_changed_tensors_are_float32_and_others_stay(saved, tmp_path):
    folder = saved(save_bert_adapter)
    stored = {name: tensor.bfloat16() for name, tensor in load_file(folder / "base/model.safetensors").items()}
    save_file(stored, folder / "base/model.safetensors", {"format": "pt"})
    merged = load_file(Path(plan_of(folder, tmp_path / "cache").card.folder, "model.safetensors"))
    assert merged.keys() == stored.keys()
    pairs = load_file(folder / "adapter_model.safetensors")
    for name, tensor in merged.items():
        a = pairs.get(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight")
        if a is None:
            assert torch.equal(tensor, stored[name])
        else:
            b = pairs[f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"]
            torch.testing.assert_close(tensor, stored[name].float() + b @ a * 2, atol=1e-6, rtol=0)


def test_a_base_in_several_files_or_of_pickles(saved, tmp_path):
    folder, cache = saved(save_bert_adapter), tmp_path / "cache"
    path = folder / "base/model.safetensors"
    tensors, expected = load_file(path), load_file(Path(plan_of(folder, cache).card.folder, path.name))
    places = {name: f"model-{index % 2 + 1}-of-2.safetensors" for index, name in enumerate(tensors)}
    for place in set(places.values()):
        of_place = {name: tensor for name, tensor in tensors.items() if places[name] == place}
        save_file(of_place, path.with_name(place), {"format": "pt"})
    (folder / "base/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    path.unlink()
    in_shards = Path(plan_of(folder, cache).card.folder)
    assert not [each for each in in_shards.iterdir() if "-of-2" in each.name or "index" in each.name]
    for place in set(places.values()):
        path.with_name(place).unlink()
    (folder / "base/model.safetensors.index.json").unlink()
    torch.save(tensors, folder / "base/pytorch_model.bin")
    of_pickles = Path(plan_of(folder, cache).card.folder)
    for merged in (load_file(each / "model.safetensors") for each in (in_shards, of_pickles)):
        assert merged.keys() == expected.keys()
        assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())


def test_what_a_killed_merge_has_left_is_not_read(saved, tmp_path):
    folder, cache = saved(save_bert_adapter), tmp_path / "cache"
    first = plan_of(folder, cache)
    made = Path(first.card.folder, "model.safetensors").resolve()
    whole = made.read_bytes()
    (made.parent / "partial").write_bytes(whole[:9999])
    for left in (whole[:-1], b"", None):
        made.unlink()
        if left is not None:
            made.write_bytes(left)
        assert plan_of(folder, cache).card == first.card
        assert made.read_bytes() == whole
    assert not (made.parent / "partial").exists()


@pytest.mark.parametrize("part", ["adapter_model.safetensors", "base/model.safetensors", "base/config.json"])
def test_a_change_of_either_is_seen(part, saved, tmp_path):
    folder = saved(save_bert_adapter)
    plan = plan_of(folder, tmp_path / "cache")
    assert not plan.model_has_changed()
    copy = folder / "copy"
    shutil.copy(folder / part, copy)
    copy.replace(folder / part)
    assert plan.model_has_changed()


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"use_rslora": True}, 8 / 2),
        ({"lora_alpha": 3}, 3 / 4),
        ({"alpha_pattern": {r"layer\.\d+\.output.dense": 1, "dense": 6, "query|value": 6}}, 6 / 4),
    ],
)
def test_the_scale_is_as_in_peft(settings, scale, saved, tmp_path):
    folder = saved(save_bert_adapter)
    change(folder / "adapter_config.json", **settings)
    merged = load_file(Path(plan_of(folder, tmp_path / "cache").card.folder, "model.safetensors"))
    name = "encoder.layer.1.attention.self.query"
    pairs = load_file(folder / "adapter_model.safetensors")
    a, b = (pairs[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    weight = load_file(folder / "base/model.safetensors")[f"{name}.weight"]
    torch.testing.assert_close(merged[f"{name}.weight"], weight + b @ a * scale, atol=1e-5, rtol=0)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def test_names_may_have_the_class_before_them_and_ranks_may_differ(saved, tmp_path):
    """Of a class with a head, whose layers are one level down, and with the adapter's name in PEFT's first versions."""
    folder = saved(save_bert_adapter)
    plain = load_file(Path(plan_of(folder, tmp_path / "cache").card.folder, "model.safetensors"))

    def renamed(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            if ".query." in name:
                tensor = torch.cat([tensor, 0 * tensor], 0 if "lora_A" in name else 1)
            below = name.replace("base_model.model.", "base_model.model.bert.")
            tensors[below.replace(".weight", ".default.weight")] = tensor

    rewrite(folder, renamed)
    change(folder / "adapter_config.json", rank_pattern={"query": 8}, alpha_pattern={"query": 16})
    merged = load_file(Path(plan_of(folder, tmp_path / "cache").card.folder, "model.safetensors"))
    assert all(torch.equal(merged[name], tensor) for name, tensor in plain.items())


def test_a_layer_that_is_stored_the_other_way_round(saved, tmp_path):
    """As GPT-2's Conv1D."""
    folder = saved(save_bert_adapter)
    plain = load_file(Path(plan_of(folder, tmp_path / "cache").card.folder, "model.safetensors"))
    path = folder / "base/model.safetensors"
    stored = load_file(path)
    changed = [name for name in stored if not torch.equal(plain[name], stored[name])]
    save_file({name: each.T.contiguous() if name in changed else each for name, each in stored.items()}, path)
    change(folder / "adapter_config.json", fan_in_fan_out=True)
    merged = load_file(Path(plan_of(folder, tmp_path / "cache").card.folder, "model.safetensors"))
    assert all(torch.allclose(merged[name].T, plain[name], atol=1e-6) for name in changed)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora is True"),
    "heads": ({"modules_to_save": ["classifier"]}, r"modules_to_save is \['classifier'\]"),
    "biases": ({"bias": "lora_only"}, "bias is 'lora_only'"),
    "bias of B": ({"lora_bias": True}, "lora_bias is True"),
    "tokens": ({"trainable_token_indices": [3]}, r"trainable_token_indices is \[3\]"),
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3', and only LORA"),
    "a later setting": ({"use_wonder": True}, "use_wonder is True"),
    "a changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base"),
    "no base": ({"base_model_name_or_path": None}, "names no base model"),
    "no such base": ({"base_model_name_or_path": "/home/me/base"}, "its base is the folder /home/me/base, which is"),
    "a rank": ({"r": 5}, r"lora_A.weight is \[4, \d+\], and rank 5 with the base's encoder.* \[\d+, \d+\] needs \[5, "),
    "no rank": ({"r": 0}, "the rank of encoder.* is 0, and must be"),
    "a text as rank": ({"r": "4"}, "r is '4', and must be a number"),
    "a pattern": ({"rank_pattern": {"(": 3}}, "rank_pattern has a pattern that cannot be read"),
    "a target": ({"target_modules": ["query", "value", "output.dense", "key"]}, "has nothing for 'key', which target"),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "why"), REFUSED.values(), ids=REFUSED)
def test_settings_that_are_not_merged(settings, why, saved, tmp_path):
    folder = saved(save_bert_adapter)
    change(folder / "adapter_config.json", **settings)
    message = refusal(folder, tmp_path / "cache")
    assert re.match(rf"{folder}/adapter_(config\.json|model\.safetensors): .*{why}", message), message


def test_an_adapter_of_another_base(saved, tmp_path):
    other = saved(lambda folder: save_bert(folder, hidden_size=32), "narrow")
    deep = saved(lambda folder: save_bert(folder, num_hidden_layers=3), "deep")
    qwen = saved(save_v5, "qwen")
    change(qwen / "config.json", model_type="qwen3")
    folder = saved(save_bert_adapter)
    expected = {
        other: r"lora_A.weight is \[4, 64\], and rank 4 with the base's .*weight \[32, 32\] needs \[4, 32\]",
        deep: "has nothing for encoder.layer.2.attention.* of the base, as for its other layers",
        qwen: f"changes encoder.layer.* which the base in {qwen} does not have",
    }
    for base, why in expected.items():
        change(folder / "adapter_config.json", base_model_name_or_path=str(base))
        assert re.search(why, refusal(folder, tmp_path / "cache"))


def test_a_base_that_is_an_adapter(saved, tmp_path):
    first, second = saved(save_bert_adapter), saved(save_bert_adapter, "second")
    change(second / "adapter_config.json", base_model_name_or_path=str(first))
    assert "is an adapter, or has some" in refusal(second, tmp_path / "cache")


def test_tensors_that_are_missing_or_too_many(saved, tmp_path):
    folder, name = saved(save_bert_adapter), "base_model.model.encoder.layer.0.attention.self.query.lora_{}.weight"
    whole = load_file(folder / "adapter_model.safetensors")
    b = name.format("B")
    rewrite(folder, lambda tensors: tensors.pop(b))
    assert f"{name.format('A')} is there without the other matrix" in refusal(folder, tmp_path / "cache")
    rewrite(folder, lambda tensors: tensors.update(whole, **{"base_model.model.classifier.weight": whole[b].clone()}))
    assert "classifier.weight is neither lora_A nor lora_B" in refusal(folder, tmp_path / "cache")
    save_file({**whole, b: whole[b].int()}, folder / "adapter_model.safetensors", {"format": "pt"})
    assert f"{b} is I32" in refusal(folder, tmp_path / "cache")
    (folder / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors: file missing" in refusal(folder, tmp_path / "cache")


def test_a_base_where_the_server_is_started(saved, monkeypatch, tmp_path):
    folder = saved(save_bert_adapter)
    (folder / "base").rename(tmp_path / "bge")
    change(folder / "adapter_config.json", base_model_name_or_path="bge")
    monkeypatch.chdir(tmp_path)
    assert plan_of(folder, tmp_path / "cache").card.pooling == ("mean",)


def test_a_base_of_the_hub_is_fetched_in_its_revision(saved, monkeypatch, tmp_path):
    folder = saved(save_bert_adapter)
    (folder / "base").rename(tmp_path / "fetched")
    change(folder / "adapter_config.json", base_model_name_or_path="org/base", revision="v2")
    asked: list[tuple[object, ...]] = []

    def fetch(*args: object) -> Path:
        asked.append(args[:2])
        return tmp_path / "fetched"

    monkeypatch.setattr(plan, "_fetch", fetch)
    assert plan_of(folder, tmp_path / "cache").card.pooling == ("mean",)
    assert asked == [("org/base", "v2")]


# --- tasks ------------------------------------------------------------------------------------------------------


def test_a_task_of_jina_v5(saved, tmp_path):
    folder, cache = saved(save_v5, "v5"), tmp_path / "cache"
    for task in ("retrieval", "text-matching"):
        plan = plan_of(f"{folder}/{task}", cache)
        assert (plan.gateway.model, plan.card.task, plan.card.model_type) == (f"v5/{task}", task, "qwen3")
        assert dict(plan.card.prompts) == {"query": "Query: ", "document": "Document: "}
        assert_equal(plan, published.v5_reference(folder, task))
    assert "one of which must be named behind it and /: classification, clust" in refusal(folder, tmp_path / "other")
    assert "has no adapter 'code'; it has classification, clustering, retri" in refusal(
        f"{folder}/code", tmp_path / "o"
    )


@pytest.mark.parametrize("task", ["retrieval.query", "separation", ""])
def test_the_tensors_of_a_task_of_jina_v3(task, saved, tmp_path):
    """They have the names that the file of a model without adapters would have; of no task they are those stored."""
    folder = saved(save_v3, "v3")
    place, found = with_adapter(folder, task, "", "v3", tmp_path / "cache", print, plan._fetch)
    assert found == task
    merged, expected = load_file(place / "model.safetensors"), published.v3_tensors(folder, task)
    assert merged.keys() == {f"roberta.{name}" for name in expected}
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[f"roberta.{name}"], tensor, atol=1e-6, rtol=0)
    stated = json.loads((place / "config_sentence_transformers.json").read_text())
    prompts = {"retrieval.query": published.QUERY, "separation": ""}
    assert stated["prompts"] == ({task: prompts[task]} if task else {})
    assert stated["default_prompt_name"] == (task or None)
    assert [module.kind for module in read_modules(Folder(place))] == ["Transformer", "Pooling", "Normalize"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"lora_rank": 8}, r"are \[5, 1, 4\] and \[5, 4, 64\], which lora_rank 8, 5 tasks and \[1, 64\] of the layer"),
        ({"lora_rank": None}, "lora_rank is missing"),
        ({"lora_adaptations": V3_TASKS[:4]}, "which lora_rank 4, 4 tasks and"),
        ({"lora_adaptations": "retrieval"}, "lora_adaptations must be a list of names"),
        ({"lora_alpha": "1"}, "lora_alpha is '1', and must be a number"),
        ({"lora_adaptations": ["a", "b"]}, "has no adapter 'retrieval.query'; it has a, b"),
    ],
)
def test_wrong_settings_of_jina_v3(settings, why, saved, tmp_path):
    folder = saved(save_v3, "v3")
    change(folder / "config.json", **settings)
    assert re.search(why, refusal(f"{folder}/retrieval.query", tmp_path / "cache"))


def test_an_adapter_in_a_folder_of_its_base(saved, tmp_path):
    """As jina-embeddings-v3-hf has them."""
    folder = saved(save_bert_adapter, "peft")
    base = folder / "base"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (base / "retrieval_query").mkdir(exist_ok=True)
        shutil.copy(folder / name, base / "retrieval_query")
    change(base / "retrieval_query/adapter_config.json", base_model_name_or_path="org/the-same")
    monkey = partial(plan_of, cache=tmp_path / "cache")
    assert monkey(base).card.task is None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plan, "_fetch", lambda *_: base)
        merged = monkey("org/model/retrieval_query")
    assert (merged.gateway.model, merged.card.task) == ("org/model/retrieval_query", "retrieval_query")
    assert json.loads(Path(merged.card.folder, "config.json").read_text())["model_type"] == "bert"
    assert_equal(merged, published.LAYOUTS[0].reference(folder))
