"""A reranker that gets its pairs through a template has to rank a plain pair right, or is refused."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from vecd.shm.arena import ArenaSpec
from vecd.shm.card import ModelCard, ModelError
from vecd.shm.heads import ScoreHead
from vecd.shm.output import Output
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.ordered_pair import check_order

CARD = ModelCard(
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
    return WorkerConfig(CARD, ArenaSpec(2, 16, 1), "auto", "cpu", "float32", 1, "info", "", ordered_pair=pair)


def test_the_right_order_is_taken_as_it_is(config: WorkerConfig) -> None:
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


def test_a_model_without_such_a_pair_is_not_asked(config: WorkerConfig) -> None:
    engine = Ranking()
    check_order(replace(config, ordered_pair=None), engine)  # type: ignore[arg-type]
    assert engine.batches == []
    assert engine.facts == {}


def test_the_pair_travels_with_the_configuration(config: WorkerConfig) -> None:
    for each in (config, replace(config, ordered_pair=None, accept_unordered=True)):
        assert WorkerConfig.from_json(json.loads(json.dumps(each.to_json()))) == each
