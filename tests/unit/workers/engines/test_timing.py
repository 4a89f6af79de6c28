"""The times of engines by number format, and when a format is worth its loss of precision."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vecd.shm.views import Rows
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.timing import Times, in_words, is_worth_it, speed_beside, take_times


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


def test_every_class_is_measured(checkpoint: Callable[..., Path], worker_config: Callable[..., Any]) -> None:
    times, _ = take(worker_config, checkpoint("bert"), float32=1e-4, bfloat16=2e-5)
    assert list(times) == ["1 x 12", "1 x 64", "8 x 59", "16 mixed"]
    assert speed_beside(times, "bfloat16", "float32") > 2
    assert is_worth_it(times, "bfloat16")


def test_a_slow_model_is_measured_with_short_texts_alone(
    checkpoint: Callable[..., Path], worker_config: Callable[..., Any]
) -> None:
    engines: Any = {path: BusyEngine(2e-3) for path in ("float32", "bfloat16")}
    times = take_times(engines, worker_config(checkpoint("bert")).card, 0.4)
    assert list(times) in (["1 x 12"], ["1 x 12", "1 x 64"])
    assert max(engines["float32"].sizes) <= 64


def test_the_first_class_is_measured_however_long_it_takes(
    checkpoint: Callable[..., Path], worker_config: Callable[..., Any]
) -> None:
    engines: Any = {"float32": BusyEngine(1e-3)}
    times = take_times(engines, worker_config(checkpoint("bert")).card, 0.0)
    assert list(times) == ["1 x 12"]


@pytest.mark.parametrize(("shorter_ms", "is_worth"), [(9.2, False), (9.0, True), (11.0, False)])
def test_a_format_has_to_be_worth_its_loss(shorter_ms: float, is_worth: bool) -> None:
    assert is_worth_it({"1 x 12": {"bfloat16": shorter_ms, "float32": 10.0}}, "bfloat16") is is_worth


def test_one_class_does_not_outvote_the_others() -> None:
    times = {
        "a": {"bfloat16": 1.0, "float32": 2.0},
        "b": {"bfloat16": 1.0, "float32": 2.0},
        "c": {"bfloat16": 2.0, "float32": 1.0},
    }
    assert is_worth_it(times, "bfloat16")
    assert speed_beside(times, "bfloat16", "float32") == pytest.approx(2 ** (1 / 3))
    assert in_words(times) == (
        "bfloat16 is 1.26 times as fast as float32 "
        "(a: 1.0 against 2.0 ms; b: 1.0 against 2.0 ms; c: 2.0 against 1.0 ms)"
    )


def test_of_one_format_there_is_nothing_to_say() -> None:
    assert in_words({"a": {"float32": 1.0}}) == in_words({}) == ""
