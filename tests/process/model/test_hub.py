"""A hub id is the model of the folder: the same files behind a stand-in of the hub have the same identity."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.gguf_files import save_gguf, save_plain
from tests.support.hub_stand_in import Hub
from tests.support.multi_vector_checkpoints import save_bge_m3, save_body, save_own, save_stanford
from tests.support.pickled import pickled
from tests.support.published.adapters import save_bert_adapter
from vecd.base import programs
from vecd.launch.config import made_weights
from vecd.launch.config.identity import read_identity
from vecd.launch.config.models import load_models
from vecd.launch.config.plan import Plan, make_plan, make_plans
from vecd.launch.config.settings import load_settings
from vecd.model import hub
from vecd.model.card import ModelError
from vecd.workers.torch.making import make_all


def save_template(folder: Path) -> Path:
    save_body(folder, "bert")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


def save_pickled_heads(folder: Path) -> Path:
    save_bge_m3(folder)
    weights = (folder / "model.safetensors").read_bytes()
    pickled(folder)
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def save_export(folder: Path) -> Path:
    save_body(folder, "bert")
    (folder / "model.safetensors").unlink()
    (folder / "onnx").mkdir()
    (folder / "onnx/model.onnx").write_bytes(b"graph")
    (folder / "onnx/model.onnx_data").write_bytes(b"weights")
    return folder


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "a chat template": save_template,
    "modules": lambda folder: save_own(folder, "bert"),
    "Stanford's ColBERT": save_stanford,
    "BGE-M3": save_pickled_heads,
    "pickles": lambda folder: pickled(save_bge_m3(folder)),
    "pickles in shards": lambda folder: pickled(save_template(folder), num_shards=2),
    "pickled modules": lambda folder: pickled(save_own(folder, "bert")),
    "an export": save_export,
    "an adapter": save_bert_adapter,
}


def identity_of(plan: Plan) -> str:
    found = read_identity(plan)
    assert found is not None
    return found.model


def plan_of(model: str, cache: Path, *flags: str) -> Plan:
    return make_plan(load_settings([model, "--device", "cpu", "--cache-dir", str(cache), *flags]))


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Hub], None]:
    """Let the processes of this test ask a hub, with an empty cache of its files."""

    def do(hub: Hub) -> None:
        for name, value in hub.environment(tmp_path / "hub").items():
            monkeypatch.setenv(name, value)

    return do


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in ("BGE-M3", "pickled modules") else []) for name in LAYOUTS],
)
def test_a_hub_id_is_the_model_of_the_folder(name, connect, tmp_path, monkeypatch):
    monkeypatch.setattr(made_weights, "make", lambda title, orders: make_all(orders))  # starts no process
    folder = LAYOUTS[name](tmp_path / "model")
    for other in ("notes.md", "tf_model.h5", "flax_model.msgpack", "training_args.bin", "openvino/openvino_model.bin"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_text("not asked for")
    (folder / "README.md").write_text("its front is read")
    with Hub(model=folder) as stand_in:
        connect(stand_in)
        first = plan_of("org/model", tmp_path / "cache")
        fetched = sorted(stand_in.fetched)
        assert identity_of(first) == identity_of(plan_of(str(folder), tmp_path / "cache"))
        assert not [path for path in fetched if path.endswith(("notes.md", ".h5", ".msgpack", "args.bin"))]
        assert "README.md" in fetched
        assert not [path for path in fetched if path.startswith("openvino") and not path.endswith(".json")]
        assert plan_of("org/model", tmp_path / "cache").card == first.card
        assert sorted(stand_in.fetched) == fetched, "the second start fetches nothing"


def test_pickles_are_fetched_only_where_there_are_no_safetensors(connect, tmp_path):
    folder = save_export(tmp_path / "model")
    save_body(folder, "bert")
    (folder / "pytorch_model.bin").write_text("not asked for")
    with Hub(model=folder) as stand_in:
        connect(stand_in)
        assert plan_of("org/model", tmp_path / "cache").card.export_file == ""
        assert not [path for path in stand_in.fetched if "bin" in path or "onnx" in path]


def test_nothing_is_fetched_in_the_place_of_an_adapter(connect, tmp_path, monkeypatch):
    monkeypatch.setattr(made_weights, "make", lambda title, orders: make_all(orders))  # starts no process
    folder = save_bert_adapter(tmp_path / "model")
    for other in ("adapter.gguf", "model.onnx", "pytorch_model.bin", "adapter_model.bin"):
        (folder / other).write_text("not asked for")
    with Hub(model=folder) as stand_in:
        connect(stand_in)
        assert plan_of("org/model", tmp_path / "cache").card.pooling == ("mean",)
        assert not [path for path in stand_in.fetched if not path.endswith((".json", ".safetensors", ".txt"))]


@pytest.mark.parametrize(
    ("flags", "served", "fetched"),
    [
        ((), "model_fp16.onnx", ["model_fp16.onnx", "model_fp16.onnx_data"]),
        (("--file", "onnx/model_quantized.onnx"), "model_quantized.onnx", ["model_quantized.onnx"]),
    ],
)
def test_of_several_exports_one_is_fetched(flags, served, fetched, connect, tmp_path, capfd):
    folder = save_export(tmp_path / "model")
    for name in ("model_fp16.onnx", "model_quantized.onnx", "model_q4.onnx", "model_fp16.onnx_data"):
        (folder / "onnx" / name).write_text(name)
    for path in folder.glob("onnx/model.onnx*"):
        path.unlink()
    with Hub(model=folder) as stand_in:
        connect(stand_in)
        for _ in range(2):
            assert Path(plan_of("org/model", tmp_path / "cache", *flags).card.export_file).name == served
        assert sorted(path for path in stand_in.fetched if "onnx" in path) == [f"onnx/{name}" for name in fetched]
        with pytest.raises(ModelError) as error:
            plan_of("org/model", tmp_path / "cache", "--file", "onnx/model_q8.onnx")
        there = "onnx/model_fp16.onnx, onnx/model_q4.onnx, onnx/model_quantized.onnx"
        why = "--file 'onnx/model_q8.onnx' given, and must be one of the .onnx and .gguf files"
        assert str(error.value) == f"org/model: {why}: {there}"


def test_of_several_files_of_gguf_one_is_fetched(connect, tmp_path, monkeypatch):
    monkeypatch.setattr(made_weights, "make", lambda title, orders: make_all(orders))
    (tmp_path / "model").mkdir()
    plain = save_plain(tmp_path / "plain", "bert")
    for form in ("F16", "Q8_0"):
        save_gguf(plain, tmp_path / f"model/bge-{form.lower()}.gguf", form)
    (tmp_path / "model/bge-q4_k_m.gguf").write_bytes(b"GGUF")
    with Hub(model=tmp_path / "model") as stand_in:
        connect(stand_in)
        plan_of("org/model", tmp_path / "cache")
        assert stand_in.fetched == ["bge-f16.gguf"]
        plan_of("org/model", tmp_path / "cache", "--file", "bge-q8_0.gguf")
        assert stand_in.fetched == ["bge-f16.gguf", "bge-q8_0.gguf"]
    save_body(tmp_path / "model", "bert")
    with Hub(both=tmp_path / "model") as stand_in:
        connect(stand_in)
        plan_of("org/both", tmp_path / "cache", "--file", "bge-q8_0.gguf")
        for wrong in ("bge-q8.gguf", "onnx/model.onnx"):
            with pytest.raises(ModelError, match="and must be one of"):
                plan_of("org/both", tmp_path / "cache", "--file", wrong)
        assert "model.safetensors" not in stand_in.fetched


def test_a_folder_with_several_exports_says_which_one_is_served(tmp_path, capfd):
    folder = save_export(tmp_path / "model")
    (folder / "onnx/model_quantized.onnx").write_bytes(b"graph")
    plan_of(str(folder), tmp_path / "cache")
    said = "vecd: model is served from onnx/model.onnx, the first of 2 exports: --file names another\n"
    assert capfd.readouterr().err.endswith(said)
    for wrong in ("../model/onnx/model.onnx", "config.json", "onnx/model_q8.onnx"):
        with pytest.raises(ModelError) as error:
            plan_of(str(folder), tmp_path / "cache", "--file", wrong)
        there = "onnx/model.onnx, onnx/model_quantized.onnx"
        assert (
            str(error.value)
            == f"{folder}: --file {wrong!r} given, and must be one of the .onnx and .gguf files: {there}"
        )


def test_without_torch_no_pickle_is_fetched(monkeypatch, tmp_path):
    """In this process, to which the stand-in cannot be told: the library is a function that copies what it is asked
    for."""
    folder = pickled(save_template(tmp_path / "model"))
    asked: list[str] = []

    def download(model: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "has_torch", lambda: False)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError) as caught:
        hub.fetch("org/model", None)
    why = "has neither safetensors nor onnx/model.onnx, and making safetensors of pickles"
    assert str(caught.value) == f"org/model: {why} {programs.NEEDS_TORCH}"
    assert "pytorch_model*.bin" not in asked


def test_a_name_of_one_word_is_the_model_of_the_hub_unless_a_folder_has_it(connect, tmp_path, monkeypatch):
    folder = save_template(tmp_path / "model")
    flags = ["--device", "cpu", "--cache-dir", str(tmp_path / "cache")]
    said: list[str] = []

    def planned(*words: str) -> Plan:
        [plan] = make_plans(load_models(load_settings([*words, *flags])), said.append)
        return plan

    monkeypatch.chdir(tmp_path)
    with Hub({"sentence-transformers/all-MiniLM-L6-v2": folder, "bert-base-uncased": folder}) as stand_in:
        connect(stand_in)
        by_word = planned("all-minilm")
        assert by_word.gateway.model == "all-minilm"
        assert "models--sentence-transformers--all-MiniLM-L6-v2" in by_word.card.folder
        taken = "sentence-transformers/all-MiniLM-L6-v2 of the hub is taken, which is known by this name"
        assert said[0] == f"all-minilm: there is no such folder, so {taken}"
        (tmp_path / "vecd.toml").write_text('[models.mine]\nsource = "all-minilm"\n')
        assert planned("--config", "vecd.toml").card.folder == by_word.card.folder
        said.clear()
        (tmp_path / "all-minilm").symlink_to(folder)
        by_folder = planned("all-minilm")
        assert by_folder.card.folder == str(folder)
        assert said[0].startswith(f"all-minilm: the folder {tmp_path}/all-minilm is taken, not sentence-transformers/")
        without_owner = planned("bert-base-uncased")
        assert "models--bert-base-uncased" in without_owner.card.folder
        said_of_none = r"^all-minilms: no such folder, and the hub has no .*; no model is known by .*; did you mean all"
        with pytest.raises(ModelError, match=said_of_none):
            planned("all-minilms")
    for plan in (by_word, by_folder, without_owner):
        plan.close()
