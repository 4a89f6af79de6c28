"""What changes the identity of a model, and what does not."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from vecd.gateway.config import AliasDefaults
from vecd.launch.config import identity
from vecd.launch.config.identity import Digests, read_identity
from vecd.launch.config.plan import make_plan
from vecd.launch.config.settings import load_settings
from vecd.model import architecture, digests
from vecd.model.steps import Step


@dataclass
class Model:
    """A folder with the bundled model's small files, and weights of a few bytes."""

    folder: Path
    cache: Path

    def digests(self, *flags: str, aliases: tuple[AliasDefaults, ...] = ()) -> Digests | None:
        plan = make_plan(load_settings([str(self.folder), "--cache-dir", str(self.cache), *flags]))
        try:
            return read_identity(replace(plan, gateway=replace(plan.gateway, alias_defaults=aliases)))
        finally:
            plan.close()

    def digest(self, *flags: str) -> str:
        found = self.digests(*flags)
        assert found is not None
        return found.model

    def save_weights(self, value: float) -> None:
        save_file({"weight": np.full(8, value, np.float32)}, self.folder / "model.safetensors")

    def change(self, name: str, **values: object) -> None:
        path = self.folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}, indent=3))

    def drop_last_module(self) -> None:
        path = self.folder / "modules.json"
        path.write_text(json.dumps(json.loads(path.read_text())[:-1]))


@pytest.fixture
def model(minilm_folder: Path, tmp_path: Path) -> Model:
    made = Model(tmp_path / "model", tmp_path / "cache")
    shutil.copytree(minilm_folder, made.folder, ignore=shutil.ignore_patterns("*.safetensors"))
    made.save_weights(1.0)
    return made


def ranges(model: Model) -> list[str]:
    path = model.folder.parent / "ranges.npy"
    np.save(path, np.stack([np.full(384, -1, np.float32), np.ones(384, np.float32)]))
    return ["--quantization-ranges", str(path)]


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-tokens", "128"],
        ["--overflow", "error"],
        ["--token-ids", "model"],
        ["--literal-special-tokens"],
        ["--matryoshka"],
        ["--pooling", "cls"],
        ["--engine", "dummy"],
    ],
    ids=" ".join,
)
def test_a_setting_that_decides_what_a_text_gets_changes_it(model: Model, flags: list[str]) -> None:
    assert model.digest() != model.digest(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        "--engine lean --dtype int8 --max-tokens 256 --pooling mean --vector-cache 100000000 --api-key of-somebody",
        "--workers 3 --gateways 2 --max-batch-tokens 512 --max-inputs 7 --max-requests 9 --uds /tmp/another.sock",
        "--served-model-name another --model-aliases one,two",
    ],
)
def test_settings_that_do_not_leave_it(model: Model, flags: str) -> None:
    assert model.digest() == model.digest(*flags.split())


CHANGES: dict[str, Callable[[Model], None]] = {
    "weights": lambda model: model.save_weights(2.0),
    "tokenizer": lambda model: model.change("tokenizer.json", added=1),
    "layer norm": lambda model: model.change("config.json", layer_norm_eps=1e-5),
    "longest text": lambda model: model.change("sentence_bert_config.json", max_seq_length=100),
    "lower case": lambda model: model.change("sentence_bert_config.json", do_lower_case=True),
    "pooling": lambda model: model.change(
        "1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True
    ),
    "normalization": lambda model: model.drop_last_module(),
    "prompt": lambda model: model.change("config_sentence_transformers.json", prompts={"query": "query: "}),
    "Matryoshka": lambda model: model.change("config.json", is_matryoshka=True),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_file_that_decides_what_a_text_gets_changes_it(model: Model, what: str) -> None:
    before = model.digest()
    CHANGES[what](model)
    assert model.digest() != before


def test_the_default_prompt_changes_it(model: Model) -> None:
    prompts = {"query": "query: ", "document": "passage: "}
    model.change("config_sentence_transformers.json", prompts=prompts)
    before = model.digest()
    model.change("config_sentence_transformers.json", prompts=prompts, default_prompt_name="query")
    assert model.digest() != before


def test_the_content_of_the_ranges_changes_it(model: Model) -> None:
    flags = ranges(model)
    before = model.digest(*flags)
    assert before != model.digest()
    np.save(flags[1], np.stack([np.full(384, -2, np.float32), np.ones(384, np.float32)]))
    assert model.digest(*flags) != before


def test_a_pooling_is_the_same_assumed_or_given(model: Model) -> None:
    (model.folder / "modules.json").unlink()
    assert model.digest() == model.digest("--pooling", "mean") != model.digest("--pooling", "cls")


def test_names_places_and_times_leave_it(model: Model) -> None:
    before = model.digest()
    model.change("config.json", _name_or_path="of-somebody/else", transformers_version="9.9", torch_dtype="float16")
    (model.folder / "README.md").write_text("Another text.")
    os.utime(model.folder / "model.safetensors", (1, 1))
    model.folder = model.folder.rename(model.folder.with_name("renamed"))
    assert model.digest() == before


def test_a_field_of_a_later_version_changes_only_the_models_that_use_it() -> None:
    assert identity.facts_of(Step("normalize")) == {"kind": "normalize"}
    assert identity.facts_of(Step("dense", path="2_Dense", in_dim=8)) == {"kind": "dense", "in_dim": 8}


def test_an_alias_has_another_if_its_defaults_are_others(model: Model) -> None:
    aliases = (
        AliasDefaults("query", prompt="query: "),
        AliasDefaults("same", prompt="query: "),
        AliasDefaults("short", dimensions=128),
    )
    found = model.digests(aliases=aliases)
    assert found is not None
    assert found.model == model.digest()
    assert found.by_alias["query"] == found.by_alias["same"]
    assert len({found.model, *found.by_alias.values()}) == 3
    assert all(len(each) == 32 and int(each, 16) for each in (found.model, *found.by_alias.values()))


def test_weights_are_read_once_and_again_when_the_file_is_another(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    digest_of_content = digests.digest_of_content

    def record(path: Path) -> str:
        read.append(path.name)
        return digest_of_content(path)

    monkeypatch.setattr(digests, "digest_of_content", record)
    monkeypatch.setattr(digests, "MIN_AGE_S", -1.0)
    before = model.digest()
    assert read.count("model.safetensors") == 1
    assert model.digest() == before
    assert read.count("model.safetensors") == 1
    for file in (model.cache / "digests").iterdir():
        file.write_text('{"sha256')
    assert model.digest() == before
    assert read.count("model.safetensors") == 2, "a broken file in the cache counts as none"
    model.save_weights(2.0)
    assert model.digest() != before
    assert read.count("model.safetensors") == 3


def test_a_file_that_was_just_written_is_not_remembered(model: Model) -> None:
    model.save_weights(3.0)
    model.digest()
    assert not (model.cache / "digests").exists()


def test_nothing_is_known_of_files_that_have_changed_since_the_plan_was_made(model: Model) -> None:
    plan = make_plan(load_settings([str(model.folder), "--cache-dir", str(model.cache), *ranges(model)]))
    assert read_identity(plan) is not None
    model.save_weights(2.0)
    assert read_identity(plan) is None
    plan.close()
    other = make_plan(load_settings([str(model.folder), "--cache-dir", str(model.cache), *(flags := ranges(model))]))
    assert read_identity(other) is not None
    np.save(flags[1], np.zeros((2, 384), np.float32))
    assert read_identity(other) is None
    other.close()


def test_a_file_that_does_not_count_may_change(model: Model) -> None:
    plan = make_plan(load_settings([str(model.folder), "--cache-dir", str(model.cache)]))
    before = read_identity(plan)
    assert before is not None
    (model.folder / "README.md").write_text("Another text.")
    (model.folder / ".git").mkdir()
    (model.folder / ".git" / "index").write_text("Another index.")
    assert read_identity(plan) == before
    (model.folder / "config.json").unlink()
    assert read_identity(plan) is None
    plan.close()


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(digests, "MIN_AGE_S", -1.0)
    before = model.digest()
    shutil.rmtree(model.cache)
    model.cache.write_text("a file")
    assert model.digest() == before
    assert "cannot be remembered" in caplog.text


def test_a_setting_that_vecd_ignored_at_first(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of two versions compute other vectors from the same files."""
    before = model.digest()
    monkeypatch.setattr(architecture, "_IGNORING_BIDIRECTIONAL", ("bert",))
    assert model.digest() == before
    model.change("config.json", use_bidirectional_attention=True)
    anew = model.digest()
    monkeypatch.undo()
    assert model.digest() not in (before, anew)
