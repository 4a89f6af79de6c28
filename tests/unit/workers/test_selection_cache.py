"""The choice of an engine and its reference vectors are remembered for as long as they hold, and no longer."""

import hashlib
import os
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import Checkpoints, worker_config
from vecd.base.files import dump
from vecd.model.card import read_card
from vecd.workers import select as choices
from vecd.workers.config import REFERENCE_FILE, WorkerConfig
from vecd.workers.load import expected_path, load_engine
from vecd.workers.machine import cpuinfo
from vecd.workers.parity import Reference, digest_of, recall_reference, write_reference
from vecd.workers.select import Selection, forget, recall, remember

CHOICE = Selection("fused", "float32", {"min_cosine": 1.0}, np.arange(6, dtype=np.float32).reshape(3, 2), ["a warning"])


@pytest.fixture
def config(checkpoint: Checkpoints, tmp_path: Path) -> WorkerConfig:
    folder = shutil.copytree(checkpoint("bert"), tmp_path / "model")
    return worker_config(folder, cache_dir=tmp_path / "cache")


def weights_of(config: WorkerConfig) -> Path:
    return Path(config.card.weights_folder) / "model.safetensors"


def test_what_is_remembered_is_recalled_until_it_is_forgotten(config: WorkerConfig) -> None:
    assert recall(config) is None
    remember(config, CHOICE)
    recalled = recall(config)
    assert recalled is not None
    assert dump(recalled) == dump(CHOICE)
    assert recalled.reference.dtype == np.float32
    remember(config, CHOICE)
    [file] = (config.cache_folder / "engines").iterdir()
    assert file.suffix == ".json"
    Path(config.card.folder, REFERENCE_FILE).write_text("{}")
    assert recall(config) is not None, "reference vectors beside the model are no other model"
    forget(config)
    assert recall(config) is None


def test_what_cannot_be_written_leaves_no_file(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    remember(config, CHOICE)
    assert list((config.cache_folder / "engines").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "is_the_same"),
    [
        ({"num_threads": 2, "log_level": "error"}, True),
        ({"dtype": "bfloat16"}, False),
        ({"engine": "packed"}, False),
        ({"cache_dir": None}, False),
    ],
)
def test_another_wish_is_another_choice(config: WorkerConfig, changes: dict[str, Any], is_the_same: bool) -> None:
    changed = replace(config, **changes)
    remember(config, CHOICE)
    remember(replace(changed, cache_dir=None), CHOICE)  # nowhere
    assert (recall(changed) is not None) is is_the_same


@pytest.mark.parametrize("changed", ["code", "processor", "instructions"])
def test_a_choice_holds_for_one_code_and_one_processor(
    changed: str, config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(config, CHOICE)
    match changed:
        case "code":
            monkeypatch.setattr(metadata, "version", lambda name: "another version")
        case "processor":
            other = "another processor's"
            monkeypatch.setattr(choices, "cpuinfo", lambda name: other if "flags" in name else cpuinfo(name))
        case "instructions":
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert recall(config) is None


def test_weights_of_the_same_size_and_time_are_other_weights(config: WorkerConfig) -> None:
    remember(config, CHOICE)
    before, weights = weights_of(config).stat(), weights_of(config).read_bytes()
    weights_of(config).write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    os.utime(weights_of(config), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_of(config).stat().st_size == before.st_size
    assert recall(config) is None


@pytest.mark.parametrize("content", ["", "null", '{"path": "fused"}', "[" * 100_000])
def test_a_broken_file_is_no_memory(config: WorkerConfig, content: str, caplog: pytest.LogCaptureFixture) -> None:
    remember(config, CHOICE)
    [file] = (config.cache_folder / "engines").iterdir()
    file.write_text(content)
    assert recall(config) is None
    assert recall(config) is None
    assert caplog.text.count("made anew") == 1


def test_a_folder_that_cannot_be_made_costs_a_warning(config: WorkerConfig, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = replace(config, cache_dir=Path("/proc/no/such/folder"))
    remember(nowhere, CHOICE)
    assert recall(nowhere) is None
    assert "cannot be remembered" in caplog.text


# --- what is made of it -----------------------------------------------------------------------------------------


def stages_of_loading(config: WorkerConfig) -> list[str]:
    stages: list[str] = []
    load_engine(config, stages.append)
    return stages


def test_a_second_load_takes_the_choice_of_the_first(config: WorkerConfig) -> None:
    assert len(stages_of_loading(config)) == 3
    assert stages_of_loading(config) == ["loading weights for lean float32"]


@pytest.mark.parametrize(
    "lie",
    [
        {"path": "no such path"},
        {"reference": "other vectors"},
    ],
)
def test_a_memory_that_is_wrong_is_made_anew(config: WorkerConfig, lie: dict[str, str]) -> None:
    load_engine(config, lambda stage: None)
    remembered = recall(config)
    assert remembered is not None
    changes = {"reference": -remembered.reference} if "reference" in lie else lie
    remember(config, replace(remembered, **changes))
    engine = load_engine(config, lambda stage: None)
    assert engine.facts["path"] == "lean"
    again = recall(config)
    assert again is not None
    assert dump(again) == dump(remembered)


def test_a_pipe_in_its_place_is_made_anew(config: WorkerConfig, caplog: pytest.LogCaptureFixture) -> None:
    """And nothing waits for a writer."""
    remember(config, CHOICE)
    [path] = (config.cache_folder / "engines").iterdir()
    path.unlink()
    os.mkfifo(path)
    assert recall(config) is None
    assert "not a regular file" in caplog.text
    remember(config, CHOICE)
    assert recall(config) is not None


# --- reference vectors, which follow the content of the files -------------------------------------------------------


def stages_of(config: WorkerConfig) -> list[str]:
    stages: list[str] = []
    load_engine(config, stages.append)
    return stages


def test_a_second_selection_needs_no_reference_model(compared: WorkerConfig) -> None:
    assert expected_path(compared) == "lean"
    assert stages_of(compared) == ["comparing lean float32 with the remembered reference vectors"]


def test_a_start_reads_the_weights_for_it_once(compared: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    digest = hashlib.file_digest

    def noted(file: Any, name: str) -> Any:
        read.append(file.name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    os.utime(Path(compared.card.folder) / "model.safetensors")
    assert expected_path(compared) == "lean"
    load_engine(compared, lambda stage: None)
    assert len(read) == len(set(read)) > 0


def test_it_belongs_to_the_content_of_the_files(compared: WorkerConfig, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(compared.card.folder, tmp_path / "elsewhere"))
    assert digest_of(read_card(elsewhere)) == digest_of(compared.card)
    weights = load_file(elsewhere / "model.safetensors")
    weights["encoder.layer.1.output.dense.bias"][3] += 1e-3
    save_file(weights, elsewhere / "model.safetensors", metadata={"format": "pt"})
    assert digest_of(read_card(elsewhere)) != digest_of(compared.card)
    assert recall_reference(replace(compared, card=read_card(elsewhere))) is None


def test_it_travels_beside_the_model(compared: WorkerConfig) -> None:
    reference = recall_reference(compared)
    assert reference is not None
    write_reference(reference, digest_of(compared.card), Path(compared.card.folder) / REFERENCE_FILE)
    alone = replace(compared, cache_dir=None)
    found = recall_reference(alone)
    assert found is not None
    assert np.array_equal(found.vectors, reference.vectors)
    assert expected_path(alone) == "lean"


@pytest.mark.parametrize("content", ["", "null", '{"format": 2}', "[" * 100_000, "other"])
def test_a_broken_file_costs_a_warning(content: str, compared: WorkerConfig, caplog: pytest.LogCaptureFixture) -> None:
    alone = replace(compared, cache_dir=None)
    path = Path(compared.card.folder) / REFERENCE_FILE
    if content == "other":
        write_reference(Reference((3,), np.zeros((1, 32), np.float32)), "0" * 64, path)
    else:
        path.write_text(content)
    assert recall_reference(alone) is None
    assert str(path) in caplog.text


def test_vectors_that_the_lean_engine_does_not_give_are_not_taken(compared: WorkerConfig) -> None:
    reference = recall_reference(compared)
    assert reference is not None
    folder = Path(compared.card.folder)
    write_reference(Reference(reference.lengths, -reference.vectors), digest_of(compared.card), folder / REFERENCE_FILE)
    with pytest.raises(Exception, match="not the reference model's"):
        load_engine(replace(compared, cache_dir=None, engine="lean"), lambda stage: None)
