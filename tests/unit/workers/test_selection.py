"""Engines with a model, and the choice between the paths. Their vectors are tested in tests/system/vectors."""

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import Checkpoints, change_weights, worker_config
from vecd.base import files
from vecd.model.card import ModelCard, ModelError
from vecd.model.files import StoredTensor
from vecd.model.steps import ScoreHead
from vecd.shm.arena import ArenaSpec
from vecd.shm.output import Output
from vecd.shm.views import Rows
from vecd.workers import formats
from vecd.workers.batch import Engine, PackedBatch, arrange
from vecd.workers.config import WorkerConfig
from vecd.workers.load import expected_path, load_engine
from vecd.workers.machine import Processor
from vecd.workers.parity import Parity
from vecd.workers.select import WORTH, Times, check_order, in_words, remember, select, speed_of, take_times
from vecd.workers.torch.padded import rectangles


def load(config: Any) -> Engine:
    return load_engine(config, lambda stage: None)


@pytest.mark.parametrize("cache_dir", [None, Path("/proc/no/such/folder")])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_gpu_that_cannot_be_used_is_no_bug(
    dtype: str, cache_dir: Path | None, torch_without_gpu: str, checkpoint: Checkpoints
) -> None:
    config = worker_config(checkpoint("bert"), device="cuda:0", dtype=dtype, cache_dir=cache_dir)
    with pytest.raises(ModelError, match=torch_without_gpu):
        load(config)


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.booleans())
def test_rectangles_cover_every_sequence_once_and_stay_small(lengths: list[int], may_pad: bool) -> None:
    batch = PackedBatch(np.array(lengths, dtype=np.int32), np.zeros(sum(lengths), dtype=np.int32))
    layout = arrange(batch)
    cut = list(rectangles(layout, may_pad=may_pad))
    assert [index for part in cut for index in range(part.start, part.stop)] == list(range(len(lengths)))
    for part in cut:
        longest, count = layout.lengths[part].max(), part.stop - part.start
        assert count == 1 or (count <= 16 and count * longest <= 4096)
        assert may_pad or layout.lengths[part].min() == longest
        num_tokens = layout.lengths[part].sum()
        assert count * longest - num_tokens <= 64 + num_tokens / 4


# --- the choice -------------------------------------------------------------------------------------------------


def measure_with(monkeypatch: pytest.MonkeyPatch, measure: Callable[..., Any]) -> None:
    """A processor with native bfloat16, and the times of engines."""
    native = Processor(frozenset({"avx512_bf16"}), "GenuineIntel")
    monkeypatch.setattr("vecd.workers.formats.this_processor", lambda: native)
    monkeypatch.setattr("vecd.workers.select.take_times", measure)


@pytest.mark.parametrize(("bfloat16_ms", "dtype"), [(1.0, "bfloat16"), (2.8, "float32")])
def test_a_format_is_taken_by_its_speed_and_remembered(
    bfloat16_ms: float, dtype: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With native bfloat16, which this processor may have to emulate: its speed is given here. Then a start imports
    torch only for bfloat16."""
    config = worker_config(checkpoint("bert"), dtype="auto", cache_dir=tmp_path)
    measured: list[Any] = []

    def measure(engines: Any, card: Any) -> Any:
        measured.append({name: (engine.facts["path"], engine.facts["dtype"]) for name, engine in engines.items()})
        return {"1 x 12": {"bfloat16": bfloat16_ms, "float32": 3.0}}

    measure_with(monkeypatch, measure)
    selection, engine = select(config, lambda stage: None)
    assert measured[0]["float32"] == ("lean", "float32")
    assert measured[0]["bfloat16"][1] == "bfloat16"
    assert (selection.dtype, engine.facts["dtype"], selection.warnings) == (dtype, dtype, [])
    assert selection.times == {"1 x 12": {"bfloat16": bfloat16_ms, "float32": 3.0}}
    assert selection.parity["compared_with"] == "float32"
    remember(config, selection)
    assert expected_path(config) == selection.path
    engine = load(config)
    assert (engine.facts["dtype"], engine.facts["times_ms"]) == (dtype, selection.times)


def test_a_format_with_other_vectors_is_not_measured(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parity, "is_within_bounds", lambda self, dtype: dtype != "bfloat16")

    def measure(engines: Any, card: Any) -> Any:
        pytest.fail("one format is left")

    config = worker_config(checkpoint("bert"), dtype="auto")
    measure_with(monkeypatch, measure)
    selection, _ = select(config, lambda stage: None)
    assert (selection.path, selection.dtype) == ("lean", "float32")
    assert all(" bfloat16 is not used: its vectors are not" in warning for warning in selection.warnings)
    assert selection.warnings


@pytest.mark.parametrize("stored", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
def test_a_model_stored_in_16_bits_is_compared_with_float32(stored: str, checkpoint: Checkpoints) -> None:
    found = load(worker_config(checkpoint("bert", stored=stored), dtype="bfloat16")).facts["agreement"]
    assert found["compared_with"] == "float32"
    assert found["max_abs_diff"] > 1e-5, "bfloat16 was compared with itself"


def test_where_float32_does_not_fit_the_format_that_was_compared_with_is_named(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "stored_tensors", lambda path: {"weight": StoredTensor("F32", (1 << 40,), 0, 0)})
    found = load(worker_config(checkpoint("albert"), dtype="bfloat16")).facts["agreement"]
    assert found["compared_with"] == "bfloat16"


@pytest.mark.parametrize(
    ("family", "settings", "path"), [("albert", {}, "packed"), ("bert", {"is_decoder": True}, "packed")]
)
def test_what_cannot_be_fused_is_run_in_the_next_way_without_a_warning(
    family: str, settings: dict[str, Any], path: str, checkpoint: Checkpoints
) -> None:
    folder = checkpoint(family, **settings)
    engine = load(worker_config(folder))
    assert (engine.facts["path"], engine.warnings) == (path, [])
    with pytest.raises(ModelError, match="fused float32 is not used"):
        load(worker_config(folder, engine="fused"))


def test_a_family_that_cannot_be_packed_says_so(checkpoint: Checkpoints) -> None:
    (warning,) = load(worker_config(checkpoint("deberta"))).warnings
    assert warning.startswith("packed float32 is not used: PackingError: ")


def test_a_type_that_cannot_hold_the_model_is_given_up_for_float32(checkpoint: Checkpoints, tmp_path: Path) -> None:
    def enlarge(weights: dict[str, torch.Tensor]) -> None:
        """Beyond float16's 65,504, and harmless in float32: a layer norm follows."""
        weights["embeddings.word_embeddings.weight"] *= 1e6

    folder = change_weights(shutil.copytree(checkpoint("bert"), tmp_path / "large"), enlarge)
    engine = load(worker_config(folder, dtype="float16"))
    assert (engine.facts["dtype"], engine.facts["path"]) == ("float32", "lean")
    assert [warning.split()[:2] for warning in engine.warnings] == [
        ["packed", "float16"],
        ["padded", "float16"],
        ["unpadded", "float16"],
    ]


def test_a_model_that_gives_nan_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["encoder.layer.1.output.dense.bias"][3] = torch.nan

    folder = change_weights(shutil.copytree(checkpoint("bert"), tmp_path / "nan"), spoil)
    with pytest.raises(ModelError, match="the reference model's vectors in float32 contain nan"):
        load(worker_config(folder))


def test_the_stages_of_loading_are_reported(checkpoint: Checkpoints) -> None:
    stages: list[str] = []
    engine = load_engine(worker_config(checkpoint("bert")), stages.append)
    assert stages == [
        "loading the reference model",
        "embedding probes of up to 60 tokens with the reference model",
        "comparing lean float32 with the reference model",
    ]
    assert engine.facts["agreement"]["max_abs_diff"] < 1e-5


# --- times ----------------------------------------------------------------------------------------------------------


class BusyEngine:
    def __init__(self, s_per_token: float) -> None:
        self.s_per_token = s_per_token
        self.sizes: list[int] = []

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        self.sizes.append(int(batch.lengths.sum()))
        rows[:] = 0
        ends_at = time.process_time() + self.s_per_token * batch.lengths.sum()
        while time.process_time() < ends_at:
            pass


def take(folder: Path, **s_per_token: float) -> tuple[Times, Any]:
    engines: Any = {path: BusyEngine(each) for path, each in s_per_token.items()}
    return take_times(engines, worker_config(folder).card, 0.5), engines


def test_every_class_is_measured(checkpoint: Checkpoints) -> None:
    times, _ = take(checkpoint("bert"), float32=1e-4, bfloat16=2e-5)
    assert list(times) == ["1 x 12", "1 x 64", "8 x 59", "16 mixed"]
    assert speed_of(times, "bfloat16") > 2
    assert speed_of(times, "bfloat16") >= WORTH


def test_a_slow_model_is_measured_with_short_texts_alone(checkpoint: Checkpoints) -> None:
    engines: Any = {path: BusyEngine(2e-3) for path in ("float32", "bfloat16")}
    times = take_times(engines, worker_config(checkpoint("bert")).card, 0.4)
    assert list(times) in (["1 x 12"], ["1 x 12", "1 x 64"])
    assert max(engines["float32"].sizes) <= 64
    assert list(take_times(engines, worker_config(checkpoint("bert")).card, 0.0)) == ["1 x 12"], "however long it takes"


@pytest.mark.parametrize(("shorter_ms", "is_worth"), [(9.2, False), (9.0, True), (11.0, False)])
def test_a_format_has_to_be_worth_its_loss(shorter_ms: float, is_worth: bool) -> None:
    assert (speed_of({"1 x 12": {"bfloat16": shorter_ms, "float32": 10.0}}, "bfloat16") >= WORTH) is is_worth


def test_one_class_does_not_outvote_the_others() -> None:
    times = {
        "a": {"bfloat16": 1.0, "float32": 2.0},
        "b": {"bfloat16": 1.0, "float32": 2.0},
        "c": {"bfloat16": 2.0, "float32": 1.0},
    }
    assert speed_of(times, "bfloat16") >= WORTH
    assert speed_of(times, "bfloat16") == pytest.approx(2 ** (1 / 3))
    assert in_words(times) == (
        "bfloat16 is 1.26 times as fast as float32 "
        "(a: 1.0 against 2.0 ms; b: 1.0 against 2.0 ms; c: 2.0 against 1.0 ms)"
    )
    assert in_words({"a": {"float32": 1.0}}) == in_words({}) == ""


# --- the order of a plain pair --------------------------------------------------------------------------------------


RERANKER = ModelCard(
    folder="/models/reranker", weights_folder="/models/reranker", model_type="qwen3", hidden_size=8, dim=1,
    max_tokens=64, vocab_size=50, pooling=("lasttoken",), steps=(), lowercase=False, prompt="",
    capabilities=("rerank",), num_labels=1, score=ScoreHead(("LABEL_0",), "sigmoid", "lasttoken"),
)  # fmt: skip


class Ranking:
    """Gives scores that are fixed, and notes the batch."""

    def __init__(self, *scores: float) -> None:
        self.scores, self.warnings, self.batches = scores, list[str](), list[PackedBatch]()
        self.facts: dict[str, Any] = {}

    def embed(self, batch: PackedBatch, rows: Any) -> None:
        self.batches.append(batch)
        rows[:, 0] = self.scores


@pytest.fixture
def config() -> WorkerConfig:
    pair = ((1, 2, 3), (1, 2))
    return WorkerConfig(
        card=RERANKER,
        arena=ArenaSpec(2, 16, 1),
        engine="auto",
        device="cpu",
        dtype="float32",
        num_threads=1,
        ordered_pair=pair,
    )


def test_the_right_order_is_taken_as_it_is(config: WorkerConfig) -> None:
    assert files.load(WorkerConfig, json.loads(json.dumps(files.dump(config)))) == config, "the pair travels with it"
    engine = Ranking()
    check_order(replace(config, ordered_pair=None), engine)  # type: ignore[arg-type]
    assert (engine.batches, engine.facts) == ([], {}), "a model without such a pair is not asked"
    engine = Ranking(0.2, 0.1)
    check_order(config, engine)  # type: ignore[arg-type]
    (batch,) = engine.batches
    assert (batch.lengths.tolist(), batch.token_ids.tolist()) == ([3, 2], [1, 2, 3, 1, 2])
    assert batch.outputs is not None
    assert batch.outputs.tolist() == [Output.SCORES] * 2
    assert engine.warnings == []
    assert engine.facts == {"ranks_in_order": True}


@pytest.mark.parametrize("scores", [(0.1, 0.2), (0.1, 0.1), (math.nan, 0.1), (0.1, math.nan)])
def test_another_order_is_refused_unless_it_is_accepted(scores: tuple[float, float], config: WorkerConfig) -> None:
    with pytest.raises(ModelError, match=r"/models/reranker: the answer .* the score .*; --accept-unordered serves it"):
        check_order(config, Ranking(*scores))  # type: ignore[arg-type]
    engine = Ranking(*scores)
    check_order(replace(config, accept_unordered=True), engine)  # type: ignore[arg-type]
    (warning,) = engine.warnings
    assert engine.facts == {"ranks_in_order": False}
    assert warning.startswith("--accept-unordered: the answer to a plain question gets the score")
