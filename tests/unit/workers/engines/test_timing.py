"""The choice among engines by their measured speed."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vecd.shm.views import Rows
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.timing import Times, fastest, in_words, speed_beside, take_times, why_slow


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


def take(worker_config: Callable[..., Any], folder: Path, **s_per_token: float) -> tuple[Times, Any]:
    engines: Any = {path: BusyEngine(each) for path, each in s_per_token.items()}
    return take_times(engines, worker_config(folder).card), engines


def test_the_fastest_engine_is_taken(checkpoint: Callable[..., Path], worker_config: Callable[..., Any]) -> None:
    times, _ = take(worker_config, checkpoint("bert"), lean=1e-4, fused=2e-5)
    assert list(times) == ["1 x 12", "1 x 64", "8 x 59", "16 mixed"]
    assert fastest(times) == "fused"
    assert speed_beside(times, "fused", "lean") > 2


def test_a_slow_model_is_measured_with_short_texts_alone(
    checkpoint: Callable[..., Path], worker_config: Callable[..., Any]
) -> None:
    engines: Any = {path: BusyEngine(2e-3) for path in ("lean", "fused")}
    times = take_times(engines, worker_config(checkpoint("bert")).card, 0.4)
    assert list(times) in (["1 x 12"], ["1 x 12", "1 x 64"])
    assert max(engines["lean"].sizes) <= 64


def test_the_first_class_is_measured_however_long_it_takes(
    checkpoint: Callable[..., Path], worker_config: Callable[..., Any]
) -> None:
    engines: Any = {"lean": BusyEngine(1e-3)}
    times = take_times(engines, worker_config(checkpoint("bert")).card, 0.0)
    assert list(times) == ["1 x 12"]


@pytest.mark.parametrize(("fused_ms", "path"), [(9.6, "lean"), (9.4, "fused"), (11.0, "lean")])
def test_the_first_engine_stays_unless_another_is_clearly_faster(fused_ms: float, path: str) -> None:
    assert fastest({"1 x 12": {"lean": 10.0, "fused": fused_ms}}) == path


def test_one_class_does_not_outvote_the_others() -> None:
    times = {"a": {"lean": 1.0, "fused": 2.0}, "b": {"lean": 1.0, "fused": 2.0}, "c": {"lean": 2.0, "fused": 1.0}}
    assert fastest(times) == "lean"
    assert speed_beside(times, "lean", "fused") == pytest.approx(2 ** (1 / 3))
    assert in_words(times) == (
        "lean is 1.26 times as fast as fused (a: 1.0 against 2.0 ms; b: 1.0 against 2.0 ms; c: 2.0 against 1.0 ms)"
    )


def test_without_a_rival_there_is_nothing_to_say() -> None:
    assert fastest({"a": {"lean": 1.0}}) == "lean"
    assert in_words({"a": {"lean": 1.0}}) == ""
    assert np.isclose(speed_beside({"a": {"lean": 1.0}}, "lean", "lean"), 1)


def test_int8_has_to_be_worth_its_loss(checkpoint: Callable[..., Path], worker_config: Callable[..., Any]) -> None:
    card = worker_config(checkpoint("bert")).card
    fast, slow = (BusyEngine(each) for each in (2e-5, 4e-5))
    assert why_slow(card, fast, slow) == ""  # type: ignore[arg-type]
    assert "times as fast as float32 on this processor" in why_slow(card, slow, fast)  # type: ignore[arg-type]
