"""An engine computes what it was loaded with, whatever becomes of the files; and one that changes while it is loaded is
an error."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers.sentence_transformer.modules import Dense

from tests.support.checkpoints import Checkpoints, embed, random_batch, worker_config
from tests.support.sparse_checkpoints import asking_for_weights, save_splade, sparse_config, weights_of
from vecd.model.card import ModelError
from vecd.workers import load
from vecd.workers.batch import Engine
from vecd.workers.config import WorkerConfig
from vecd.workers.load import check_headers, load_engine
from vecd.workers.select import build

LENGTHS = [5, 1, 30, 7, 5, 2]
KEPT = "lean with its files"


def copy_zeros_over(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))


def truncate(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        os.truncate(path, 10)


def built(config: WorkerConfig, path: str) -> Engine:
    return build(replace(config, num_threads=2) if path == KEPT else config, path.partition(" ")[0], "float32")


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("lean", truncate),
        (KEPT, copy_zeros_over),
        ("fused", shutil.rmtree),
        ("packed", copy_zeros_over),
        *(
            pytest.param(path, change, marks=pytest.mark.full)
            for path in ("lean", KEPT, "fused", "padded")
            for change in (copy_zeros_over, truncate, shutil.rmtree)
        ),
    ],
)
def test_vectors_stay_those_of_the_loaded_model(
    path: str, change: Callable[[Path], None], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("roberta", steps=[Dense(32, 32)]), tmp_path / "model")
    engine, batch = built(worker_config(folder), path), random_batch(LENGTHS)
    expected = embed(engine, batch)
    change(folder)
    np.testing.assert_array_equal(embed(engine, batch), expected)
    if path != "lean":
        engine.use_threads(2)
        np.testing.assert_allclose(embed(engine, batch), expected, atol=1e-6, rtol=0)
        engine.use_threads(1)


@pytest.mark.parametrize(("path", "change"), [("lean", copy_zeros_over), (KEPT, truncate), ("fused", copy_zeros_over)])
def test_sparse_weights_stay_those_of_the_loaded_model(
    path: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = save_splade(tmp_path)
    config = sparse_config(folder)
    engine, batch = built(config, path), asking_for_weights(random_batch(LENGTHS), config)
    expected = weights_of(engine, config, batch)
    change(folder)
    if path == KEPT:
        engine.use_threads(2)
    np.testing.assert_allclose(weights_of(engine, config, batch), expected, atol=1e-6, rtol=0)


def test_files_that_change_while_they_are_read_are_an_error(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(checkpoint("bert"), tmp_path / "model")

    def build_then_change(*args: Any) -> Any:
        engine = build(*args)
        (folder / "model.safetensors").touch()
        return engine

    load_engine(worker_config(folder, cache_dir=tmp_path / "cache"), lambda stage: None)
    monkeypatch.setattr(load, "build", build_then_change)
    with pytest.raises(ModelError, match="the files have changed while they were read"):
        load_engine(worker_config(folder, cache_dir=tmp_path / "cache"), lambda stage: None)


@pytest.mark.parametrize("name", ["model.safetensors", "2_Dense/model.safetensors"])
def test_headers_are_checked_by_themselves(name: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("bert", steps=[Dense(32, 32)]), tmp_path / "model")
    card = worker_config(folder).card
    check_headers(card)
    os.truncate(folder / name, (folder / name).stat().st_size - 1)
    with pytest.raises(ModelError, match=f"{name}: is cut off"):
        check_headers(card)
    (folder / name).unlink()
    check_headers(card)  # who reads it says that it is missing
