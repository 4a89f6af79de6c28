"""Remembered reference vectors: they follow the content of a model's files, and a wrong file is never believed."""

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from vecd.shm.card import read_card
from vecd.workers.config import REFERENCE_FILE, WorkerConfig
from vecd.workers.engines.load import expected_path, load_engine
from vecd.workers.engines.references import Reference, digest_of, recall_reference, write_reference


@pytest.fixture
def config(checkpoint: Callable[..., Path], worker_config: Callable[..., WorkerConfig], tmp_path: Path) -> WorkerConfig:
    """Of a model that has been loaded once, and whose selection has been forgotten."""
    folder = shutil.copytree(checkpoint("bert"), tmp_path / "model")
    config = worker_config(folder, cache_folder=str(tmp_path / "cache"))
    load_engine(config, lambda stage: None)
    shutil.rmtree(tmp_path / "cache/engines")
    return config


def stages_of(config: WorkerConfig) -> list[str]:
    stages: list[str] = []
    load_engine(config, stages.append)
    return stages


def test_a_second_selection_needs_no_reference_model(config: WorkerConfig) -> None:
    assert expected_path(config) == "lean"
    assert stages_of(config) == ["comparing lean float32 with the remembered reference vectors"]


def test_a_start_reads_the_weights_for_it_once(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    digest = hashlib.file_digest

    def noted(file: Any, name: str) -> Any:
        read.append(file.name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    os.utime(Path(config.card.folder) / "model.safetensors")
    assert expected_path(config) == "lean"
    load_engine(config, lambda stage: None)
    assert len(read) == len(set(read)) > 0


def test_it_belongs_to_the_content_of_the_files(config: WorkerConfig, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(config.card.folder, tmp_path / "elsewhere"))
    assert digest_of(read_card(elsewhere)) == digest_of(config.card)
    weights = load_file(elsewhere / "model.safetensors")
    weights["encoder.layer.1.output.dense.bias"][3] += 1e-3
    save_file(weights, elsewhere / "model.safetensors", metadata={"format": "pt"})
    assert digest_of(read_card(elsewhere)) != digest_of(config.card)
    assert recall_reference(replace(config, card=read_card(elsewhere))) is None


def test_it_travels_beside_the_model(config: WorkerConfig) -> None:
    reference = recall_reference(config)
    assert reference is not None
    write_reference(reference, digest_of(config.card), Path(config.card.folder) / REFERENCE_FILE)
    alone = replace(config, cache_folder="")
    found = recall_reference(alone)
    assert found is not None
    assert np.array_equal(found.vectors, reference.vectors)
    assert expected_path(alone) == "lean"


def test_a_file_beside_the_model_does_not_undo_the_selection(config: WorkerConfig) -> None:
    load_engine(config, lambda stage: None)
    reference = recall_reference(config)
    assert reference is not None
    write_reference(reference, digest_of(config.card), Path(config.card.folder) / REFERENCE_FILE)
    assert stages_of(config) == ["loading weights for lean float32"]


@pytest.mark.parametrize("content", ["", "{", "null", '{"format": 1}', '{"format": 2}', "[" * 100_000, "other"])
def test_a_broken_file_costs_a_warning(content: str, config: WorkerConfig, caplog: pytest.LogCaptureFixture) -> None:
    alone = replace(config, cache_folder="")
    path = Path(config.card.folder) / REFERENCE_FILE
    if content == "other":
        write_reference(Reference((3,), np.zeros((1, 32), np.float32)), "0" * 64, path)
    else:
        path.write_text(content)
    assert recall_reference(alone) is None
    assert str(path) in caplog.text


def test_vectors_that_the_lean_engine_does_not_give_are_not_taken(config: WorkerConfig) -> None:
    reference = recall_reference(config)
    assert reference is not None
    folder = Path(config.card.folder)
    write_reference(Reference(reference.lengths, -reference.vectors), digest_of(config.card), folder / REFERENCE_FILE)
    with pytest.raises(Exception, match="not the reference model's"):
        load_engine(replace(config, cache_folder="", engine="lean"), lambda stage: None)
