"""The speed of an engine with short texts, measured once and remembered."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Engine
from vecd.workers.engines import load
from vecd.workers.engines.load import load_engine
from vecd.workers.short_texts import recall_texts_per_s

Config: TypeAlias = Callable[..., WorkerConfig]


@pytest.mark.parametrize("engine", ["lean", "dummy"])
def test_the_first_load_measures_and_later_ones_know(
    engine: str,
    checkpoint: Callable[..., Path],
    worker_config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unasked = worker_config(checkpoint("bert"), engine=engine, cache_folder=str(tmp_path), unverified=True)
    load_engine(unasked, lambda stage: None)
    config = replace(unasked, measures_short_texts=True)
    measured: list[float] = []

    def measure(config: WorkerConfig, engine: Engine) -> float:
        measured.append(whole(config, engine))
        return measured[-1]

    whole = load._texts_per_s
    monkeypatch.setattr(load, "_texts_per_s", measure)
    assert recall_texts_per_s(config) is None
    for _ in range(2):
        load_engine(config, lambda stage: None)
        assert measured == [recall_texts_per_s(config)]
    assert recall_texts_per_s(replace(config, dtype="int8")) is None
    load_engine(replace(config, cache_folder=""), lambda stage: None)
    assert len(measured) == 1, "without a cache directory it would be measured at each start"


def test_a_folder_that_cannot_be_written_is_only_a_warning(
    checkpoint: Callable[..., Path], worker_config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "short-texts").touch()
    config = worker_config(checkpoint("bert"), engine="dummy", cache_folder=str(tmp_path), measures_short_texts=True)
    load_engine(config, lambda stage: None)
    assert "cannot be remembered" in caplog.text
    assert recall_texts_per_s(config) is None
    shutil.rmtree(tmp_path)
