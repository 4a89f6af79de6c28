"""int8 in the lean engine: its numbers with and without VNNI, its vectors, and when it is selected."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from vecd.shm.card import ModelError, read_card
from vecd.workers.config import WorkerConfig
from vecd.workers.engines import formats, load, selection
from vecd.workers.engines.lean import graph
from vecd.workers.engines.lean.engine import LeanEngine
from vecd.workers.engines.lean.int8 import Int8Products, quantize
from vecd.workers.engines.lean.onnx_file import Element, Graph
from vecd.workers.engines.load import expected_path, load_engine
from vecd.workers.engines.parity import all_probes, compare, vectors_of, vectors_one_by_one
from vecd.workers.engines.selection import select, select_lean
from vecd.workers.processor import has_vnni

FAMILIES = (
    "bert", "distilbert", "mpnet", "modernbert", "nomic_bert", "gte", "qwen2", "qwen3", "mistral", "gemma3_text"
)  # fmt: skip
KINDS = [pytest.param(True, marks=pytest.mark.skipif(not has_vnni(), reason="sums of this processor overflow")), False]


def product(x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], *, is_signed: bool) -> np.ndarray[Any, Any]:
    """x times weight, computed by the operators alone."""
    made = Graph("product")
    products = Int8Products(made, is_signed=is_signed)
    values, scales = quantize(weight, is_signed=is_signed)
    given = made.input("x", Element.FLOAT32, ["tokens", x.shape[1]])
    made.output(products(given, made.constant(values), made.constant(scales)), Element.FLOAT32, ["tokens", len(weight)])
    [found] = onnxruntime.InferenceSession(made.to_bytes(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    return np.asarray(found)


@pytest.mark.parametrize("is_signed", KINDS)
def test_a_product_is_that_of_the_rounded_numbers(is_signed: bool) -> None:
    """Also where sums of 16 bits would overflow: in every pair of columns, both products are the largest possible."""
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((7, 64), np.float32), random.standard_normal((5, 64), np.float32)
    x[3], weight[2] = 2.0, -3.0
    x[4] = 0
    scales = [np.maximum(np.abs(each).max(axis=1, keepdims=True), 1e-20) / 127 for each in (x, weight)]
    rounded = [np.rint(each / scale) * scale for each, scale in zip((x, weight), scales, strict=True)]
    found = product(x, weight, is_signed=is_signed)
    np.testing.assert_allclose(found, rounded[0] @ rounded[1].T, rtol=1e-5, atol=1e-5)
    assert found[3, 2] == pytest.approx(-64 * 6)
    assert not found[4].any()


@pytest.mark.parametrize("is_signed", KINDS)
def test_weights_of_zero_are_no_division_by_zero(is_signed: bool) -> None:
    assert not product(np.ones((2, 16), np.float32), np.zeros((3, 16), np.float32), is_signed=is_signed).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_it(family: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bounds for int8, without regard to neighbours, and the same on processors with and without VNNI."""
    card = read_card(checkpoint(family))
    probes = all_probes(card, 10**9)
    plain = vectors_of(LeanEngine(card), probes, card.dim)
    vectors = []
    for is_signed in (False, has_vnni()):
        monkeypatch.setattr(graph, "has_vnni", lambda is_signed=is_signed: is_signed)
        engine = LeanEngine(card, dtype="int8")
        vectors.append(vectors_of(engine, probes, card.dim))
        assert compare(vectors[-1], plain).is_within_bounds("int8")
        assert compare(vectors_one_by_one(engine, probes, card.dim), vectors[-1]).min_cosine > 0.9995
    assert np.abs(vectors[0] - plain).max() > 1e-4, "nothing was quantized"
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6, rtol=0)
    assert (engine.facts["dtype"], engine.facts["path"]) == ("int8", "lean")


def test_several_threads_compute_in_int8_too(checkpoint: Callable[..., Path], random_batch: Any) -> None:
    engine, batch = LeanEngine(read_card(checkpoint("bert")), dtype="int8"), random_batch([5, 30, 2])
    expected = vectors_of(engine, batch, 32)
    engine.use_threads(2)
    np.testing.assert_allclose(vectors_of(engine, batch, 32), expected, atol=1e-6, rtol=0)


# --- selection --------------------------------------------------------------------------------------------------


@pytest.fixture
def config(checkpoint: Callable[..., Path], worker_config: Callable[..., WorkerConfig], tmp_path: Path) -> WorkerConfig:
    """Asks for int8 of a model whose reference vectors are remembered."""
    config = worker_config(checkpoint("bert"), cache_folder=str(tmp_path / "cache"))
    load_engine(config, lambda stage: None)
    shutil.rmtree(tmp_path / "cache/engines")
    return replace(config, dtype="int8")


@pytest.fixture(params=[2.0, 0.9])
def is_fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether int8 is measured as faster than float32."""

    def measured(engines: Any, card: Any) -> Any:
        assert [engine.facts["dtype"] for engine in engines.values()] == ["int8", "float32"]
        return {"1 x 12": {"int8": 1.0, "float32": request.param}}

    monkeypatch.setattr(load, "select_lean", partial(select_lean, measure=measured))
    monkeypatch.setattr(load, "select", partial(select, measure=measured))
    return bool(request.param > 1)


SLOW = "lean int8 is not used: it is 0.90 times as fast as float32 on this processor"


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (selection, formats):
        monkeypatch.setattr(module, "has_torch", lambda: False)


def loaded(config: WorkerConfig) -> tuple[str, str, list[str]]:
    engine = load_engine(config, lambda stage: None)
    return engine.facts["path"], engine.facts["dtype"], engine.warnings


@pytest.mark.parametrize("unverified", [False, True])
def test_without_torch_it_is_served_if_it_is_faster(
    unverified: bool, is_fast: bool, config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_torch(monkeypatch)
    if unverified:
        config = replace(config, cache_folder="", unverified=True)
    path, dtype, warnings = loaded(config)
    assert (path, dtype) == ("lean", "int8" if is_fast else "float32")
    assert (SLOW in warnings) is not is_fast
    assert any(warning.startswith("--unverified") for warning in warnings) is unverified
    if not unverified:
        assert loaded(config) == (path, dtype, warnings), "from the cache"


def test_other_vectors_are_not_served(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vecd.workers.engines.parity._MIN_COSINE", {"int8": 1.1})
    path, dtype, [warning] = loaded(config)
    assert (path, dtype) == ("lean", "float32")
    assert warning.startswith("lean int8 is not used: its vectors are not the reference model's: ")


@pytest.mark.parametrize("is_remembered", [True, False])
def test_with_torch_nothing_else_is_tried(is_remembered: bool, is_fast: bool, config: WorkerConfig) -> None:
    config = config if is_remembered else replace(config, cache_folder="")
    assert expected_path(config) == ("lean" if is_remembered else None)
    path, dtype, warnings = loaded(config)
    assert (path, dtype) == ("lean", "int8" if is_fast else "float32")
    assert warnings == ([] if is_fast else [SLOW])


def test_a_model_without_an_engine_for_it_is_refused_with_what_serves_it(
    checkpoint: Callable[..., Path], worker_config: Callable[..., WorkerConfig]
) -> None:
    with pytest.raises(ModelError, match="no engine for --dtype int8: albert has no table of its layers; --dtype auto"):
        load_engine(worker_config(checkpoint("albert"), dtype="int8"), lambda stage: None)
