"""Which number formats and engines are tried, on processors of every class, whatever the one at hand is."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from tests.support.checkpoints import Checkpoints, worker_config
from vecd.model.files import StoredTensor
from vecd.model.steps import PairTemplate, ScoreHead
from vecd.workers import formats
from vecd.workers.config import WorkerConfig
from vecd.workers.formats import formats_of, is_lean_wanted, is_measured, reference_format
from vecd.workers.machine import Processor

AVX2 = Processor(frozenset({"avx2"}), "GenuineIntel")
INTEL = Processor(frozenset({"avx2", "avx512f", "avx512_vnni", "avx512_bf16"}), "GenuineIntel")
AMX = Processor(INTEL.flags | {"amx_tile", "amx_bf16", "amx_int8"}, "GenuineIntel")
AMD = replace(INTEL, vendor="AuthenticAMD")
BOTH, EXACT = ("bfloat16", "float32"), ("float32",)
LARGE = int(3e9)

_OF_4_GIB = StoredTensor("F32", (1 << 10, 1 << 20), 0, 0)


@pytest.fixture
def config(checkpoint: Checkpoints) -> WorkerConfig:
    return worker_config(checkpoint("bert"), dtype="auto")


On: TypeAlias = Callable[[Processor], None]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    """`on(processor)`: that is the one here."""
    return lambda processor: monkeypatch.setattr(formats, "this_processor", lambda: processor)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`memory(mb)`: so much is available."""
    return lambda mb: monkeypatch.setattr(formats, "available_mb", lambda: mb)


def of_size(config: WorkerConfig, nbytes: int) -> WorkerConfig:
    return replace(config, card=replace(config.card, weights_bytes=nbytes))


@pytest.mark.parametrize(
    ("changes", "processor", "expected"),
    [
        ({}, AVX2, EXACT),
        ({}, INTEL, BOTH),
        ({}, AMX, BOTH),
        ({"engine": "lean"}, AMX, EXACT),
        ({"dtype": "bfloat16"}, AVX2, ("bfloat16",)),
        ({"dtype": "int8"}, AMX, ("int8", "float32")),
    ],
)
def test_the_formats_to_try(
    changes: dict[str, Any], processor: Processor, expected: tuple[str, ...], config: WorkerConfig, on: On
) -> None:
    on(processor)
    assert formats_of(replace(config, **changes)) == expected
    assert is_measured(replace(config, **changes)) is (changes.get("dtype", "auto") in ("auto", "int8"))


def test_without_torch_there_is_float32(config: WorkerConfig, on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    on(AMX)
    monkeypatch.setattr(formats, "has_torch", lambda: False)
    assert formats_of(config) == EXACT


@pytest.mark.parametrize(("processor", "expected"), [(AVX2, EXACT), (INTEL, EXACT), (AMD, BOTH), (AMX, BOTH)])
def test_a_model_too_large_to_be_measured_gets_what_is_known_to_be_fast(
    processor: Processor, expected: tuple[str, ...], config: WorkerConfig, memory: Callable[[int], None], on: On
) -> None:
    on(processor)
    memory(100_000)
    large = of_size(config, LARGE)
    assert formats_of(large) == expected
    assert not is_measured(large)
    memory(0)  # the kernel does not say
    assert formats_of(large) == expected


def test_where_float32_does_not_fit_it_is_bfloat16(
    config: WorkerConfig, memory: Callable[[int], None], on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has fewer parameters than its card says bytes, so they are made up here."""
    on(AVX2)
    monkeypatch.setattr(
        formats, "stored_tensors", lambda path: {"weight": StoredTensor("F32", (1 << 10, 1 << 20), 0, 0)}
    )
    memory(5 << 10)
    assert formats_of(of_size(config, LARGE)) == EXACT
    memory(4 << 10)
    assert formats_of(of_size(config, LARGE)) == BOTH
    assert formats_of(config) == EXACT, "of a small model nothing is read"


def test_the_reference_is_float32_wherever_that_fits(
    config: WorkerConfig, memory: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        formats, "stored_tensors", lambda path: {"weight": StoredTensor("F32", (1 << 10, 1 << 20), 0, 0)}
    )
    memory(8 << 10)
    assert reference_format(config, BOTH) == "float32"
    memory(7 << 10)
    assert reference_format(config, BOTH) == "bfloat16"
    assert reference_format(config, EXACT) == reference_format(config, ("int8", "float32")) == "float32"


@pytest.mark.parametrize(
    ("changes", "processor", "has_torch", "is_wanted"),
    [
        ({"dtype": "float32"}, AMX, True, True),
        ({}, AVX2, True, True),
        ({}, AMX, True, False),
        ({}, AMX, False, True),
        ({"dtype": "bfloat16"}, AMX, True, False),
        ({"dtype": "int8"}, AMX, True, True),
        ({"engine": "fused"}, AVX2, True, False),
        ({"engine": "lean"}, AMX, True, True),
        ({"device": "cuda:0"}, AVX2, True, False),
    ],
)
def test_when_the_lean_engine_comes_first(
    changes: dict[str, Any],
    processor: Processor,
    has_torch: bool,
    is_wanted: bool,
    config: WorkerConfig,
    on: On,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formats, "has_torch", lambda: has_torch)
    on(processor)
    assert is_lean_wanted(replace(config, **changes)) is is_wanted


@pytest.mark.parametrize("has_torch", [True, False])
def test_pairs_that_share_a_template_are_for_torch(
    has_torch: bool, config: WorkerConfig, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine computes what they share once."""
    on(AVX2)
    monkeypatch.setattr(formats, "has_torch", lambda: has_torch)
    for template, is_wanted in ((PairTemplate("", "", ""), not has_torch), (None, True)):
        score = ScoreHead(("a",), "sigmoid", "lasttoken", pair_template=template)
        of_model = replace(config, card=replace(config.card, score=score), dtype="float32")
        assert is_lean_wanted(of_model) is is_wanted
