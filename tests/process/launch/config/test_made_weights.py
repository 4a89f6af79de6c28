"""A model whose weights are pickles is converted once, by a process of its own, and is then read as any other."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from tests.support.multi_vector_checkpoints import save_bge_m3, save_body
from tests.support.pickled import pickled
from vecd.launch.config import made_weights
from vecd.launch.config.identity import read_identity
from vecd.launch.config.made_weights import with_made_weights
from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import load_settings
from vecd.model.card import ModelError
from vecd.model.files import source_of
from vecd.workers.config import REFERENCE_FILE
from vecd.workers.parity import Reference, digest_of, recall_reference, write_reference
from vecd.workers.torch.making import make_all


def save_with_dense(folder: Path) -> Path:
    body = folder.with_name("body")
    save_body(body, "bert")
    modules = [Transformer(str(body)), Pooling(32), Dense(32, 8)]
    SentenceTransformer(modules=modules).save(str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_with_dense(tmp_path / "model")


def plan_of(folder: Path, *flags: str) -> Plan:
    flags = ("--device", "cpu", "--cache-dir", str(folder.parent / "cache"), *flags)
    return make_plan(load_settings([str(folder), *flags]))


def identity_of(plan: Plan) -> str:
    found = read_identity(plan)
    assert found is not None
    return found.model


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that starts no process."""
    monkeypatch.setattr(made_weights, "make", lambda title, orders: make_all(orders))


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_weights, "has_torch", lambda: False)


def test_it_is_converted_once_and_then_needs_no_torch(folder, monkeypatch, capfd):
    weights = load_file(folder / "model.safetensors")
    dense = load_file(folder / "2_Dense/model.safetensors")
    pickled(folder)
    before = sorted(folder.rglob("*"))
    first = plan_of(folder)
    assert capfd.readouterr() == ("", "vecd: converting the pickled weights of model to safetensors (once)\n")
    made = Path(first.card.folder)
    for path, expected in ((made / "model.safetensors", weights), (made / "2_Dense/model.safetensors", dense)):
        found = load_file(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not [path for path in made.rglob("*") if path.suffix == ".bin"]
    assert sorted(folder.rglob("*")) == before
    without_torch(monkeypatch)
    second = plan_of(folder, "--engine", "lean")
    assert second.card == first.card
    assert second.model_files == first.model_files
    assert capfd.readouterr() == ("", "")


def test_shards_and_pickles_in_a_file_are_the_same_model(folder, quick):
    sharded = pickled(shutil.copytree(folder, folder.with_name("sharded")), num_shards=3)
    assert len(list(sharded.glob("pytorch_model*.bin"))) == 3
    assert identity_of(plan_of(sharded)) == identity_of(plan_of(pickled(folder)))


def test_a_change_of_the_models_own_folder_is_seen(folder, quick):
    plan = plan_of(pickled(folder))
    before = identity_of(plan)
    dense = torch.load(folder / "2_Dense/pytorch_model.bin", weights_only=True)
    changes: list[Callable[[], object]] = [
        lambda: torch.save({name: tensor + 1 for name, tensor in dense.items()}, folder / "2_Dense/pytorch_model.bin"),
        lambda: (folder / "config.json").write_text((folder / "config.json").read_text() + " "),
        lambda: (folder / "chat_template.jinja").write_text("{{ messages }}"),
        lambda: (folder / "vocab.txt").write_text("a word"),
        (folder / "vocab.txt").unlink,
    ]
    for change in changes:
        assert not plan.model_has_changed()
        change()
        assert plan.model_has_changed()
        plan = plan_of(folder)
        assert identity_of(plan) != before
    (folder / "README.md").write_text("not of the model")
    assert not plan.model_has_changed()


@pytest.mark.parametrize("damage", ["cut off", "gone", "link gone"])
def test_a_damaged_cache_is_made_anew(folder, damage, quick, capfd):
    first = plan_of(pickled(folder))
    capfd.readouterr()
    link = Path(first.card.folder) / "model.safetensors"
    made = link.resolve()
    content = made.read_bytes()
    (link if damage == "link gone" else made).unlink()
    if damage == "cut off":
        made.write_bytes(content[:-1])
    assert plan_of(folder).card == first.card
    assert link.read_bytes() == content
    assert ("converting" in capfd.readouterr().err) == (damage != "link gone")


def test_a_link_that_was_half_made_by_a_process_of_the_same_id_is_made(folder, quick):
    made = Path(plan_of(pickled(folder)).card.folder)
    (made / "model.safetensors").rename(made / f"model.safetensors.{os.getpid()}")
    plan_of(folder)
    assert (made / "model.safetensors").is_file()


def test_without_torch_a_pickle_is_refused_and_an_export_beside_it_served(folder, monkeypatch):
    pickled(folder)
    without_torch(monkeypatch)
    with pytest.raises(ModelError) as caught:
        plan_of(folder)
    why = "a pickle, and making safetensors of it needs torch and transformers ("
    assert str(caught.value).startswith(f"{folder}/pytorch_model.bin: {why}")
    shutil.rmtree(folder / "2_Dense")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    (folder / "onnx").mkdir()
    (folder / "onnx/model.onnx").touch()
    assert plan_of(folder).card.export_file == f"{folder}/onnx/model.onnx"


def test_messages_and_reference_vectors_are_of_the_models_own_folder(folder, quick):
    plan = plan_of(pickled(folder))
    assert plan.card.folder != str(folder)
    assert source_of(plan.card.folder) == str(folder)
    [config] = plan.workers[:1]
    reference = Reference((5,), torch.ones(1, 8).numpy())
    write_reference(reference, digest_of(plan.card), folder / REFERENCE_FILE)
    found = recall_reference(config)
    assert found is not None
    assert found.lengths == reference.lengths
    assert plan_of(folder).card == plan.card, "a reference is no file of the model's"
    (folder / "2_Dense/config.json").write_text("[]")
    with pytest.raises(ModelError) as caught:
        plan_of(folder)
    assert str(caught.value) == f"{folder}/2_Dense/config.json: must be a JSON object"


def test_a_pickle_that_names_more_than_tensors_is_refused(folder, quick):
    pickled(folder)
    torch.save(torch.nn.Linear(1, 1), folder / "2_Dense/pytorch_model.bin")
    with pytest.raises(ModelError) as caught:
        plan_of(folder)
    why = "is a pickle that names torch.nn.modules.linear.Linear, which torch's safe loader refuses"
    assert str(caught.value) == f"{folder}/2_Dense/pytorch_model.bin: {why}"


def test_a_cache_that_cannot_be_written_is_named(folder, quick):
    (folder.parent / "cache").touch()
    with pytest.raises(ModelError, match=r"cache/converted: the converted weights cannot be written: Not a directory"):
        plan_of(pickled(folder))


def test_the_heads_of_bge_m3_alone_may_be_pickles(tmp_path, quick):
    folder = save_bge_m3(tmp_path / "model")
    expected = plan_of(folder)
    heads = [folder / f"{name}_linear.safetensors" for name in ("sparse", "colbert")]
    for path in heads:
        torch.save(load_file(path), path.with_suffix(".pt"))
        path.unlink()
    found = plan_of(folder)
    assert found.card.capabilities == ("dense", "sparse", "multi-vector")
    assert found.card.main_output is expected.card.main_output


@pytest.mark.parametrize("place", ["../outside", "/tmp"])
def test_a_module_outside_of_the_folder_is_left_alone(folder, place):
    outside = folder.with_name("outside")
    outside.mkdir()
    torch.save({"a": torch.zeros(1)}, outside / "pytorch_model.bin")
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["path"] = place
    (folder / "modules.json").write_text(json.dumps(modules))
    assert with_made_weights(folder, "", "m", folder.parent / "cache", pytest.fail) == folder
