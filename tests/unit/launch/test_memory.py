"""What a model's memory is predicted to be, what is remembered of it, and which configurations fit into a budget."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vecd.base.failures import ConfigurationError
from vecd.launch import memory
from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import load_settings
from vecd.launch.memory import Footprint, MemoryBook, make_book, measured, predict, predict_server
from vecd.model.card import ModelError
from vecd.workers.machine import Processor

MB = 1 << 20


@pytest.fixture
def plan_of(minilm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Plan]]:
    """Makes a plan of the bundled model, or of a copy, from flags."""
    native = Processor(frozenset({"avx512_bf16"}), "AuthenticAMD")
    monkeypatch.setattr("vecd.workers.formats.this_processor", lambda: native)
    plans: list[Plan] = []

    def plan(*flags: str, folder: Path = minilm_folder) -> Plan:
        plans.append(made := make_plan(load_settings([str(folder), "--device", "cpu", "--workers", "2", *flags])))
        return made

    yield plan
    for made in plans:
        made.close()


@pytest.mark.parametrize(
    ("flags", "measured_mb"),
    [
        (["--engine", "lean"], 175),
        (["--engine", "lean", "--dtype", "int8"], 148),
        ([], 359),
        (["--engine", "fused", "--dtype", "float32"], 389),
        (["--engine", "packed"], 480),
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
    alone, beside_others = predict(plan), predict(replace(plan, is_only_model=False))
    assert alone.shared - beside_others.shared > 30 * MB
    server_of_one, server_of_two = predict_server([plan]), predict_server([plan, plan])
    assert 80 * MB < server_of_one < 110 * MB, "83 to 86 MB were measured"
    assert server_of_two - server_of_one > alone.shared - beside_others.shared
    of_two_gateways = replace(plan, gateway=replace(plan.gateway, gateways=2))
    assert predict_server([of_two_gateways]) - server_of_one > 50 * MB


def test_weights_that_vanish_after_the_plan(plan_of: Callable[..., Plan], minilm_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder, copy_function=os.symlink)
    plan = plan_of(folder=folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: file missing"):
        predict(plan)
    expected = MemoryBook(None, tmp_path).expect(plan).total
    assert expected > plan.card.weights_bytes > 0


@pytest.mark.parametrize(
    "header",
    [b"", b"[]", b"{}", *(json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
                          for shape in ([-5, 5], [10**30], ["x"], None))],
)  # fmt: skip
def test_weights_whose_header_is_broken(
    header: bytes, plan_of: Callable[..., Plan], minilm_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder, copy_function=os.symlink)
    plan = plan_of(folder=folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header if header else b"")
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


# --- what is remembered ---------------------------------------------------------------------------------------------


Planned = Callable[..., Plan]

FOUND = Footprint(200 << 20, 20 << 20, 2)


def test_a_footprint_is_remembered_for_the_next_start(planned: Planned, tmp_path: Path) -> None:
    plan = planned("--workers", "2")
    book = MemoryBook(None, tmp_path)
    assert book.recall(plan) is None
    book.remember(plan, FOUND)
    assert MemoryBook(None, tmp_path).expect(plan) == FOUND
    assert [path.suffix for path in (tmp_path / "memory").iterdir()] == [".json"]


def test_it_holds_for_one_configuration_and_one_set_of_files(planned: Planned, tmp_path: Path) -> None:
    plan = planned("--workers", "2")
    MemoryBook(None, tmp_path).remember(plan, FOUND)
    others = [
        planned("--workers", "3"),
        planned("--workers", "2", "--dtype", "float32"),
        planned("--workers", "2", "--max-batch-tokens", "100"),
        replace(plan, model_files=frozenset({("/model.safetensors", 1, 2, 3)})),
        replace(plan, is_only_model=False),
    ]
    for other in others:
        assert MemoryBook(None, tmp_path).recall(other) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"shared": "1", "per_worker": 1}',
        '{"shared": true, "per_worker": 1}',
        '{"shared": NaN, "per_worker": 1}',
        json.dumps({"shared": 10**30, "per_worker": 1}),
        "[" * 100_000,
        "\udcff",
        '{"shared": 1, "per_worker": 1}' + " " * 10_000 + "x",
    ],
)
def test_a_file_with_anything_else_is_ignored(content: str, planned: Planned, tmp_path: Path) -> None:
    plan = planned()
    book = MemoryBook(None, tmp_path)
    book.remember(plan, FOUND)
    [file] = (tmp_path / "memory").iterdir()
    file.write_bytes(content.encode(errors="surrogateescape"))
    found = MemoryBook(None, tmp_path).recall(plan)
    assert found is None or content.startswith('{"shared": 1, "per_worker": 1}')
    assert MemoryBook(None, tmp_path).expect(plan).total > 0


def test_a_folder_that_cannot_be_written_is_no_error(
    planned: Planned, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "memory").write_text("a file")
    plan, book = planned(), MemoryBook(None, tmp_path)
    assert book.recall(plan) is None
    book.remember(plan, FOUND)
    assert book.expect(plan) == FOUND, "until the server ends"
    assert "cannot be remembered" in caplog.text


# --- budgets --------------------------------------------------------------------------------------------------------


GB = 10**9


@pytest.fixture
def of_models(
    planned: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Plan]]:
    """Makes plans of models, each of 1 GB, in a server that needs 0.1 GB for itself."""
    monkeypatch.setattr("vecd.launch.memory.predict", lambda plan: Footprint(GB - 2, 1, 2))
    monkeypatch.setattr(memory, "predict_server", lambda plans: GB // 10)

    def plans(limit: str, **flags: str) -> list[Plan]:
        made = []
        for name, given in flags.items():
            plan = planned("--cache-dir", str(tmp_path), "--memory-budget", limit, *given.split())
            card = replace(plan.gateway.card, tokenizer_file="")  # a descriptor, which `planned` closes
            made.append(replace(plan, gateway=replace(plan.gateway, model=name, card=card)))
        return made

    return plans


@pytest.mark.parametrize(
    ("limit", "flags", "is_enough"),
    [
        ("1.09GB", {"a": ""}, False),
        ("2.0GB", {"a": "", "b": ""}, False),
        ("1.1GB", {"a": "", "b": "--load demand"}, True),
        ("1.1GB", {"a": "--load demand", "b": "--load demand"}, True),
        ("1.0GB", {"a": "--load demand", "b": "--load demand"}, False),
        ("2.1GB", {"a": "--pinned", "b": "--load demand", "c": "--load demand"}, True),
        ("2.0GB", {"a": "--load demand --pinned", "b": "--load demand --pinned"}, False),
    ],
)
def test_what_must_be_there_together_must_fit(
    limit: str, flags: dict[str, str], is_enough: bool, of_models: Callable[..., list[Plan]]
) -> None:
    plans = of_models(limit, **flags)
    if is_enough:
        assert make_book(plans).budget == float(limit.removesuffix("GB")) * GB
    else:
        with pytest.raises(ConfigurationError, match="--memory-budget"):
            make_book(plans)


def test_the_operator_learns_who_needs_what(of_models: Callable[..., list[Plan]]) -> None:
    first, second, third = of_models("1.5GB", small="", large="--pinned", other="--load demand --workers 3")
    MemoryBook(None, third.settings.cache_folder).remember(third, Footprint(GB - 2, 1, 2))
    with pytest.raises(ConfigurationError) as refused:
        make_book([first, second, third])
    assert refused.value.problems == [
        "--memory-budget: 1.5GB given, which is 1,500 MB: the models that are loaded at the start would need 2,100 MB "
        "with the server itself",
        "--memory-budget: 1.5GB given, which is 1,500 MB: other would need 2,100 MB with the server itself and the "
        "pinned models",
        "model                load    memory    pinned  known by",
        "small                start   1,000 MB  no      prediction",
        "large                start   1,000 MB  yes     prediction",
        "other                demand  1,000 MB  no      measurement",
        "(the server itself)  start   100 MB    yes     prediction",
    ]


def test_without_a_budget_no_file_is_read(
    of_models: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vecd.launch.memory.predict", None)
    assert make_book(of_models("", a="", b="")).budget is None


def test_plans_that_are_refused_are_closed(minilm_folder: Path) -> None:
    plan = make_plan(load_settings([str(minilm_folder), "--engine", "dummy", "--memory-budget", "1"]))
    assert Path(plan.gateway.card.tokenizer_file).exists()
    with pytest.raises(ConfigurationError):
        make_book([plan])
    assert not Path(plan.gateway.card.tokenizer_file).exists()


def test_a_share_is_of_the_limit_of_the_cgroup(
    of_models: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit_mb", lambda: 4000)
    assert make_book(of_models("80%", a="")).budget == 3200 << 20


def test_a_share_of_what_is_not_known_is_refused(
    of_models: Callable[..., list[Plan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit_mb", lambda: 0)
    with pytest.raises(ConfigurationError, match="80% given, but the system does not say of how much; give bytes"):
        make_book(of_models("80%", a=""))
    assert make_book(of_models("2GB", a="")).budget == 2 * GB
