"""The memory that a model's processes are predicted to need."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import load_settings
from vecd.launch.memory.book import MemoryBook
from vecd.launch.memory.footprint import Footprint, measured, predict, predict_server
from vecd.shm.card import ModelError
from vecd.workers.processor import Processor

MB = 1 << 20


@pytest.fixture
def plan_of(minilm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Plan]]:
    """Makes a plan of the bundled model, or of a copy, from flags."""
    native = Processor(frozenset({"avx512_bf16"}), "AuthenticAMD")
    monkeypatch.setattr("vecd.workers.engines.formats.this_processor", lambda: native)
    plans: list[Plan] = []

    def plan(*flags: str, folder: Path = minilm_folder) -> Plan:
        plans.append(made := make_plan(load_settings([str(folder), "--device", "cpu", "--workers", "2", *flags])))
        return made

    yield plan
    for made in plans:
        made.close()


def test_a_parked_one_has_no_workers() -> None:
    found = Footprint(100, 10, 3)
    assert (found.total, found.parked) == (130, 100)


@pytest.mark.parametrize(
    ("flags", "measured_mb"),
    [
        (["--engine", "lean"], 175),
        (["--engine", "lean", "--dtype", "int8"], 148),
        ([], 359),
        (["--engine", "fused", "--dtype", "float32"], 389),
        (["--engine", "packed"], 480),
        (["--engine", "padded", "--dtype", "float32"], 440),
    ],
)
def test_it_is_a_little_more_than_was_measured(
    flags: list[str], measured_mb: int, plan_of: Callable[..., Plan]
) -> None:
    pytest.importorskip("torch")
    predicted = predict(plan_of(*flags))
    assert measured_mb < predicted.total / MB < 1.35 * measured_mb
    assert 15 * MB < predicted.per_worker < 80 * MB
    assert predicted.num_workers == 2


def test_shorter_types_need_less(plan_of: Callable[..., Plan]) -> None:
    pytest.importorskip("torch")
    full, half, quarter = (
        predict(plan_of("--engine", engine, "--dtype", dtype)).shared
        for engine, dtype in (("fused", "float32"), ("fused", "bfloat16"), ("lean", "int8"))
    )
    assert full > half > quarter


def test_a_zygote_has_the_imports_of_several_models(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of()
    alone, beside_others = predict(plan), predict(plan, is_only_model=False)
    assert alone.shared - beside_others.shared > 30 * MB
    server_of_one, server_of_two = predict_server([plan]), predict_server([plan, plan])
    assert 80 * MB < server_of_one < 110 * MB, "83 to 86 MB were measured"
    assert server_of_two - server_of_one > alone.shared - beside_others.shared
    of_two_gateways = replace(plan, gateway=replace(plan.gateway, num_gateways=2))
    assert predict_server([of_two_gateways]) - server_of_one > 50 * MB


def test_weights_that_vanish_after_the_plan(plan_of: Callable[..., Plan], minilm_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder, symlinks=False)
    plan = plan_of(folder=folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="the weights cannot be read"):
        predict(plan)
    expected = MemoryBook(None, tmp_path).expect(plan).total
    assert expected > plan.card.weights_bytes > 0


@pytest.mark.parametrize(
    "header",
    [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{}"],
)
def test_weights_that_are_broken(
    header: bytes, plan_of: Callable[..., Plan], minilm_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder)
    plan = plan_of(folder=folder)
    (folder / "model.safetensors").write_bytes(header)
    assert MemoryBook(None, tmp_path).expect(plan).total > plan.card.weights_bytes


@pytest.mark.parametrize(
    "shape",
    [[-5, 5], [10**30], ["x"], "x", None],
)
def test_sizes_in_a_header_that_make_no_sense(
    shape: object, plan_of: Callable[..., Plan], minilm_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder)
    plan = plan_of(folder=folder)
    text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert MemoryBook(None, tmp_path).expect(plan).total > plan.card.weights_bytes


def test_this_process_is_measured() -> None:
    found = measured([os.getpid()], [])
    assert found is not None
    assert found.num_workers == 0
    assert found.total > 10 * MB
    as_worker = measured([os.getpid()], [os.getpid()])
    assert as_worker is not None
    assert 0 < as_worker.per_worker <= as_worker.total
    assert measured([os.getpid(), 2**22 + 1], []) is None, "one has ended"
