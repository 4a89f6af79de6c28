"""The choice of an engine is remembered for as long as it holds, and no longer."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vecd.workers.config import WorkerConfig
from vecd.workers.engines import selection_cache as choices
from vecd.workers.engines.load import load_engine
from vecd.workers.engines.selection_cache import Selection, forget, recall, remember

CHOICE = Selection("fused", "float32", {"min_cosine": 1.0}, np.arange(6, dtype=np.float32).reshape(3, 2), ["a warning"])


@pytest.fixture
def config(checkpoint: Callable[..., Path], worker_config: Callable[..., WorkerConfig], tmp_path: Path) -> WorkerConfig:
    folder = shutil.copytree(checkpoint("bert"), tmp_path / "model")
    return worker_config(folder, cache_folder=str(tmp_path / "cache"))


def weights_of(config: WorkerConfig) -> Path:
    return Path(config.card.weights_folder) / "model.safetensors"


def test_what_is_remembered_is_recalled_until_it_is_forgotten(config: WorkerConfig) -> None:
    assert recall(config) is None
    remember(config, CHOICE)
    recalled = recall(config)
    assert recalled is not None
    assert recalled.to_json() == CHOICE.to_json()
    assert recalled.reference.dtype == np.float32
    forget(config)
    assert recall(config) is None


def test_no_other_file_stays_beside_it(config: WorkerConfig) -> None:
    remember(config, CHOICE)
    remember(config, CHOICE)
    [file] = (Path(config.cache_folder) / "engines").iterdir()
    assert file.suffix == ".json"


def test_what_cannot_be_written_leaves_no_file(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    remember(config, CHOICE)
    assert list((Path(config.cache_folder) / "engines").iterdir()) == []


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"engine": "packed"}])
def test_another_wish_is_another_choice(config: WorkerConfig, changes: dict[str, str]) -> None:
    remember(config, CHOICE)
    assert recall(replace(config, **changes)) is None  # type: ignore[arg-type]


def test_the_number_of_threads_is_no_other_wish(config: WorkerConfig) -> None:
    remember(config, CHOICE)
    assert recall(replace(config, num_threads=2, log_level="error")) is not None


def test_weights_of_the_same_size_and_time_are_other_weights(config: WorkerConfig) -> None:
    remember(config, CHOICE)
    before, weights = weights_of(config).stat(), weights_of(config).read_bytes()
    weights_of(config).write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    os.utime(weights_of(config), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_of(config).stat().st_size == before.st_size
    assert recall(config) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("_digest_of_code", "other code"), ("_device_name", "another processor"), ("_FORMAT", 3)],
)
def test_a_choice_holds_for_one_code_and_one_processor(
    name: str, value: Any, config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(config, CHOICE)
    monkeypatch.setattr(choices, name, (lambda *_: value) if callable(getattr(choices, name)) else value)
    assert recall(config) is None


def test_a_variable_that_takes_instructions_away_is_part_of_the_key(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(config, CHOICE)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert recall(config) is None


@pytest.mark.parametrize("content", ["", "null", "{", '{"path": "fused"}', "\x00" * 50, "[" * 100_000])
def test_a_broken_file_is_no_memory(config: WorkerConfig, content: str, caplog: pytest.LogCaptureFixture) -> None:
    remember(config, CHOICE)
    [file] = (Path(config.cache_folder) / "engines").iterdir()
    file.write_text(content)
    assert recall(config) is None
    assert recall(config) is None
    assert caplog.text.count("made anew") == 1


def test_without_a_folder_nothing_is_remembered(config: WorkerConfig) -> None:
    homeless = replace(config, cache_folder="")
    remember(homeless, CHOICE)
    assert recall(homeless) is None


def test_a_folder_that_cannot_be_made_costs_a_warning(config: WorkerConfig, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = replace(config, cache_folder="/proc/no/such/folder")
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
        {"dtype": "no such type"},
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
    assert again.to_json() == remembered.to_json()


def test_a_pipe_in_its_place_is_made_anew(config: WorkerConfig, caplog: pytest.LogCaptureFixture) -> None:
    """And nothing waits for a writer."""
    remember(config, CHOICE)
    [path] = (Path(config.cache_folder) / "engines").iterdir()
    path.unlink()
    os.mkfifo(path)
    assert recall(config) is None
    assert "not a regular file" in caplog.text
    remember(config, CHOICE)
    assert recall(config) is not None
