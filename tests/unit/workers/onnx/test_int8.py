"""int8 in the lean engine: its numbers with and without VNNI, its vectors, and when it is selected."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.support.checkpoints import Checkpoints, worker_config
from vecd.model.card import ModelError, read_card
from vecd.workers import formats
from vecd.workers import select as selection
from vecd.workers.config import WorkerConfig
from vecd.workers.load import expected_path, load_engine
from vecd.workers.machine import has_vnni
from vecd.workers.onnx import graph
from vecd.workers.onnx.engine import LeanEngine
from vecd.workers.onnx.file import Element, Graph, Int8Products, quantize
from vecd.workers.parity import Parity, all_probes, compare, vectors_of, vectors_one_by_one

FAMILIES = [
    *("bert", "modernbert", "qwen3", "gemma3_text"),
    *(
        pytest.param(family, marks=pytest.mark.full)
        for family in ("distilbert", "mpnet", "nomic_bert", "gte", "qwen2", "mistral")
    ),
]
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
    zeros = np.zeros((3, 16), np.float32)
    assert not product(np.ones((2, 16), np.float32), zeros, is_signed=is_signed).any(), "no division by zero"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_it(family: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
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
    engine.use_threads(2)
    np.testing.assert_allclose(vectors_of(engine, probes, card.dim), vectors[1], atol=1e-6, rtol=0)


# --- selection --------------------------------------------------------------------------------------------------


@pytest.fixture
def config(compared: WorkerConfig) -> WorkerConfig:
    """Asks for int8 of a model whose reference vectors are remembered."""
    return replace(compared, dtype="int8")


@pytest.fixture(params=[2.0, 0.9])
def is_fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether int8 is measured as faster than float32."""

    def measured(engines: Any, card: Any) -> Any:
        assert [engine.facts["dtype"] for engine in engines.values()] == ["int8", "float32"]
        return {"1 x 12": {"int8": 1.0, "float32": request.param}}

    monkeypatch.setattr(selection, "take_times", measured)
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
        config = replace(config, cache_dir=None, unverified=True)
    path, dtype, warnings = loaded(config)
    assert (path, dtype) == ("lean", "int8" if is_fast else "float32")
    assert (SLOW in warnings) is not is_fast
    assert any(warning.startswith("--unverified") for warning in warnings) is unverified
    if not unverified:
        assert loaded(config) == (path, dtype, warnings), "from the cache"


def test_other_vectors_are_not_served(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parity, "is_within_bounds", lambda self, dtype: dtype != "int8")
    path, dtype, [warning] = loaded(config)
    assert (path, dtype) == ("lean", "float32")
    assert warning.startswith("lean int8 is not used: its vectors are not the reference model's: ")


@pytest.mark.parametrize("is_remembered", [True, False])
def test_with_torch_nothing_else_is_tried(is_remembered: bool, is_fast: bool, config: WorkerConfig) -> None:
    config = config if is_remembered else replace(config, cache_dir=None)
    assert expected_path(config) == ("lean" if is_remembered else None)
    path, dtype, warnings = loaded(config)
    assert (path, dtype) == ("lean", "int8" if is_fast else "float32")
    assert warnings == ([] if is_fast else [SLOW])


def test_a_model_without_an_engine_for_it_is_refused_with_what_serves_it(checkpoint: Checkpoints) -> None:
    with pytest.raises(ModelError, match="no engine for --dtype int8: albert has no table of its layers; --dtype auto"):
        load_engine(worker_config(checkpoint("albert"), dtype="int8"), lambda stage: None)
