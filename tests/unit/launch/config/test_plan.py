"""What a plan makes of a model and settings."""

import errno
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.cards import DENSE
from vecd.base.failures import ConfigurationError, StartFailure
from vecd.launch.check.model import describe, purpose
from vecd.launch.config import plan
from vecd.launch.config.plan import Plan, make_plan, num_visible_gpus, refuse_unknown, server_problems
from vecd.launch.config.settings import load_settings
from vecd.model.card import ModelError, read_card
from vecd.model.steps import SparseHead, TokenHead
from vecd.shm.arena import original_of
from vecd.shm.settings import Settings

Make = Callable[..., Plan]


@pytest.fixture
def make(minilm_folder: Path) -> Make:
    """Makes a plan of the bundled model, for the processor, from further flags."""
    return lambda *flags: make_plan(load_settings([str(minilm_folder), "--device", "cpu", *flags]))


@pytest.fixture
def change_card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the card of every folder have these values."""

    def change(**values: Any) -> None:
        monkeypatch.setattr(plan, "card_of", lambda folder: replace(read_card(folder.path), **values))

    return change


def test_what_a_model_has_no_use_or_no_room_for_is_refused(make: Make, change_card: Callable[..., None]) -> None:
    change_card(capabilities=("sparse",), sparse=SparseHead(()), dim=30522)
    with pytest.raises(ConfigurationError, match="--vector-cache: 1000000000 bytes given, which keep dense vectors"):
        make("--vector-cache", "1000000000")
    change_card(max_tokens=10**30, token_dim=384, capabilities=("multi-vector",), tokens=TokenHead(()))
    with pytest.raises(ModelError, match="rows of 384 floats are too many for a batch"):
        make()


@pytest.mark.parametrize(
    ("max_tokens", "flags", "rows"),
    [
        (256, [], 512),  # a batch's sequences are the more
        (1000, [], 1000),
        (32768, [], 8192),  # a text of more tokens has no rows of them
        (8192, ["--max-tokens", "600"], 600),
        (256, ["--max-batch-tokens", "100", "--max-tokens", "32"], 100),
    ],
)
def test_a_slot_has_a_row_for_each_token_of_a_text(
    max_tokens: int, flags: list[str], rows: int, make: Make, change_card: Callable[..., None]
) -> None:
    change_card(max_tokens=max_tokens)
    made = make(*flags)
    assert made.gateway.arena.rows_per_slot == rows
    assert {worker.arena for worker in made.workers} == {made.gateway.arena}


def test_fewer_rows_are_enough_for_a_model_without_late_chunks(make: Make, change_card: Callable[..., None]) -> None:
    for changes, rows_per_slot in (({"pooling": ("cls",), "dim": 384}, 2048), ({"dim": 128}, 512)):
        change_card(max_tokens=8192, **changes)
        arena = make().gateway.arena
        assert (arena.rows_per_slot, arena.dim) == (rows_per_slot, changes["dim"])


@pytest.mark.parametrize(
    ("flags", "workers"),
    [
        ([], (16, 1, 16)),
        (["--threads-per-worker", "auto", "--workers", "3"], (3, 1, 16)),
        (["--threads-per-worker", "4"], (4, 4, 1)),
        (["--threads-per-worker", "1"], (16, 1, 1)),
    ],
)
def test_cores_are_leased_unless_the_number_of_threads_is_given(
    flags: list[str], workers: tuple[int, int, int], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "usable_cores", lambda: 16)
    made = make(*flags).workers
    assert (len(made), made[0].num_threads, made[0].max_threads) == workers


def test_a_machine_of_more_threads_than_there_may_be_workers_gets_the_most(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "usable_cores", lambda: 2000)
    assert len(make().workers) == 1024


def test_nothing_is_leased_on_a_gpu(minilm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "usable_cores", lambda: 16)
    monkeypatch.setattr(plan, "devices_for", lambda wanted: ["cuda:0", "cuda:1"])
    made = make_plan(load_settings([str(minilm_folder)])).workers
    assert [(worker.num_threads, worker.max_threads) for worker in made] == [(1, 1)] * 2


def test_what_other_flags_need(make: Make) -> None:
    assert make("--max-embed-len", "10000", "--overflow", "chunk").gateway.max_embed_len == 10_000
    slow = make("--dummy-ms-per-text", "2.5", "--engine", "dummy", "--workers", "1")
    assert [worker.dummy_ms_per_text for worker in slow.workers] == [2.5]
    assert make("--engine", "lean").workers[0].engine == "lean"
    worker = make("--engine", "lean", "--dtype", "int8").workers[0]
    assert (worker.engine, worker.dtype) == ("lean", "int8")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--max-embed-len 10000", "--max-embed-len: given without --overflow chunk"),
        ("--dummy-ms-per-text 2.5", r"--dummy-ms-per-text: 2\.5 given without --engine dummy"),
        ("--engine lean --dtype bfloat16", "lean given, which needs --device cpu and --dtype auto, float32 or"),
        ("--engine fused --dtype int8", "int8 given, which needs --device cpu and --engine auto or lean"),
        (
            "--quantization-ranges /nowhere",
            "^--quantization-ranges: /nowhere: cannot be read: No such file",
        ),
        ("--quantization-ranges /tmp", "^--quantization-ranges: /tmp: cannot be read: is not a regular file$"),
    ],
)
def test_flags_that_do_not_go_together_or_lead_nowhere(flags: str, problem: str, make: Make) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        make(*flags.split())


@pytest.mark.parametrize("has_torch", [True, False])
def test_an_export_is_computed_on_the_processor(
    has_torch: bool, minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(minilm_folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "onnx").mkdir()
    (folder / "onnx/model.onnx").write_bytes(b"x" * 1000)
    monkeypatch.setattr(plan, "num_visible_gpus", lambda: 1)
    monkeypatch.setattr(plan, "has_torch", lambda: has_torch)
    made = make_plan(load_settings([str(folder), "--workers", "1", "--unverified"]))
    assert [(worker.device, worker.unverified) for worker in made.workers] == [("cpu", True)]
    with pytest.raises(ConfigurationError, match="--device: cuda given, but ONNX exports are computed on the"):
        make_plan(load_settings([str(folder), "--device", "cuda"]))
    with pytest.raises(ConfigurationError, match="--engine: lean given, but ONNX exports have an engine of their own"):
        make_plan(load_settings([str(folder), "--engine", "lean"]))
    model = describe(made.card, "export")
    assert (model["num_parameters"], model["weights_bytes"]) == (0, 1000)


@pytest.mark.parametrize(
    ("files", "visible", "count"),
    [
        ([], "0", 0),  # as images of CUDA set it, on a machine without a GPU
        (["nvme0", "nvidiactl"], None, 0),
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], None, 2),
        (["nvidia0", "nvidia1"], "1", 1),
        (["nvidia0", "nvidia1"], "", 0),
        (["nvidia0"], "MIG-1, MIG-2", 2),
        (["dxg"], "0", 1),
    ],
)
def test_visible_gpus_are_those_of_the_variable_where_there_is_any(
    files: list[str], visible: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_visible_gpus(tmp_path) == count


@pytest.mark.parametrize(
    ("build", "num_gpus", "why"),
    [
        ("2.13.0+cu130", 0, "no GPU is visible"),
        ("2.13.0+cpu", 1, "the installed torch is a CPU build"),
    ],
)
def test_without_a_gpu_or_the_build_for_it_the_processor_is_used(
    build: str, num_gpus: int, why: str, minilm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: build if name == "torch" else found(name))
    monkeypatch.setattr(plan, "num_visible_gpus", lambda: num_gpus)
    assert {worker.device for worker in make_plan(load_settings([str(minilm_folder)])).workers} == {"cpu"}
    with pytest.raises(ConfigurationError, match=why):
        make_plan(load_settings([str(minilm_folder), "--device", "cuda"]))


def test_static_embeddings_are_computed_on_the_processor(
    minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"embeddings": np.zeros((30522, 4), np.float16)}, tmp_path / "model.safetensors")
    shutil.copy(minilm_folder / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "model2vec", "normalize": true}')
    monkeypatch.setattr(plan, "num_visible_gpus", lambda: 1)
    made = make_plan(load_settings([str(tmp_path), "--workers", "2"]))
    assert {worker.device for worker in made.workers} == {"cpu"}
    assert (made.gateway.compute_type, made.gateway.card.is_static) == ("cpu", True)
    with pytest.raises(ConfigurationError, match="--device: cuda given"):
        make_plan(load_settings([str(tmp_path), "--device", "cuda"]))
    with pytest.raises(ConfigurationError, match="--engine: packed given"):
        make_plan(load_settings([str(tmp_path), "--engine", "packed"]))
    model = describe(made.card, "table")
    assert (model["num_parameters"], model["architecture"], purpose(model)) == (30522 * 4, "", ([], []))


def test_a_folder_behind_a_link_has_not_changed(minilm_folder: Path, tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(minilm_folder)
    plan = make_plan(load_settings([str(link), "--engine", "dummy"]))
    try:
        assert not plan.model_has_changed()
    finally:
        plan.close()


def test_gateways_read_copies_of_files(minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(minilm_folder / "tokenizer.json", tmp_path)
    (tmp_path / "idf.json").write_text("{}")
    (tmp_path / "ranges.npy").write_bytes(b"loaded")
    card = replace(read_card(minilm_folder), capabilities=("sparse",), dim=30522)
    card = replace(card, folder=str(tmp_path), tokenizer_file=str(tmp_path / "tokenizer.json"))
    card = replace(card, sparse=SparseHead((), query_weights="idf.json"))
    monkeypatch.setattr(plan, "card_of", lambda folder: card)
    num_open = len(os.listdir("/proc/self/fd"))
    ranges = str(tmp_path / "ranges.npy")
    made = make_plan(load_settings([str(minilm_folder), "--engine", "dummy", "--quantization-ranges", ranges]))
    names = [f"{tmp_path}/{name}" for name in ("tokenizer.json", "idf.json", "ranges.npy")]
    copies = [made.gateway.card.tokenizer_file, made.gateway.query_weights, made.gateway.ranges]
    loaded = [Path(name).read_bytes() for name in names]
    for name in names:
        Path(name).write_bytes(b"another")
    assert [original_of(copy or "") for copy in copies] == names
    assert [Path(copy or "").read_bytes() for copy in copies] == loaded
    made.close()
    assert len(os.listdir("/proc/self/fd")) == num_open
    (tmp_path / "idf.json").unlink()
    with pytest.raises(ModelError, match=r"idf\.json: cannot be read: No such file"):
        make_plan(load_settings([str(minilm_folder), "--engine", "dummy"]))
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_file_that_is_too_large_for_ranges_is_not_copied(tmp_path: Path) -> None:
    with (path := tmp_path / "vectors.npy").open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(ConfigurationError, match=r"vectors\.npy: has 17,179,869,184 bytes, ranges have at most"):
        make_plan(load_settings(["--engine", "dummy", "--quantization-ranges", str(path)]))


def test_it_says_which_loaded_files_are_no_longer_what_they_were(
    minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(minilm_folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "model.safetensors").symlink_to(minilm_folder / "model.safetensors")
    (ranges := tmp_path / "ranges.npy").touch()
    made = make_plan(load_settings([str(folder), "--engine", "dummy", "--quantization-ranges", str(ranges)]))
    made.close()
    assert made.changed_files() == ""
    (folder / "new.json").touch()
    assert made.changed_files() == "", "what was added was not loaded"
    ranges.write_bytes(b"other")
    (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (folder / "1_Pooling" / "config.json").unlink()
    found = made.changed_files()
    assert found == "1_Pooling/config.json is missing, tokenizer.json has changed, ranges.npy has changed"
    for path in folder.glob("*.json"):
        path.touch()
    assert made.changed_files().endswith(", …")
    folder.rename(tmp_path / "gone")
    assert made.changed_files() == "the model's folder is missing"

    def fail(path: object, **options: object) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(os, "stat", fail)
    assert made.changed_files() == "the model's folder is missing", "as on a mount that is stale"


# --- what is installed -----------------------------------------------------------------------------------------------

MISSING = ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]


@pytest.mark.parametrize("name", [*MISSING, "opentelemetry.sdk", "opentelemetry.exporter"])
def test_what_is_missing_is_told_before_anything_starts(name, monkeypatch):
    for module in [module for module in sys.modules if module.startswith(name)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    [problem] = server_problems(Settings(otlp_endpoint="http://localhost:4318"))
    assert problem.startswith("--otlp-endpoint: needs OpenTelemetry, ")
    assert problem.endswith("pip install 'vecd[otel]'")


def test_nothing_is_fetched_for_a_server_that_cannot_start(tmp_path: Path) -> None:
    stages: list[str] = []
    settings = load_settings(["org/name", "--tls-cert", str(tmp_path / "cert.pem")])
    with pytest.raises(ConfigurationError) as failed:
        make_plan(settings, stages.append)
    assert failed.value.problems == ["--tls-cert: given without --tls-key; TLS needs both"]
    assert stages == []


@pytest.mark.parametrize("settings", [["--tls-cert", "cert.pem"], []])
def test_too_few_open_files_hide_no_problem_of_the_settings(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "max_open_files", lambda: 16)
    with pytest.raises(ConfigurationError if settings else StartFailure, match="open files: the limit is 16"):
        make_plan(load_settings(["--engine", "dummy", *settings]))


@pytest.mark.parametrize("model_type", ["new", "nosuch"])
def test_what_it_does_not_name(model_type):
    with pytest.raises(ModelError, match=rf"^/m/config\.json: transformers 5\..* has no architecture '{model_type}'"):
        refuse_unknown(replace(DENSE, model_type=model_type))


def test_another_layout_of_transformers_is_left_to_the_worker(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None, origin=f"{tmp_path}/a.py"))
    refuse_unknown(replace(DENSE, model_type="nosuch"))


def test_every_name_is_among_them():
    from transformers import CONFIG_MAPPING

    for model_type in CONFIG_MAPPING:
        refuse_unknown(replace(DENSE, model_type=model_type))
