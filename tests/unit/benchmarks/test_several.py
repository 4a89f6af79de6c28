import base64
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from safetensors.numpy import load_file

from benchmarks.callers import Called, Callers
from benchmarks.checkpoints import save_mirrored, signs
from benchmarks.servers import Server, bundled_model
from benchmarks.several import KINDS, Canaries, ModelTable, Question, draw_requests
from benchmarks.several_trials import judge_trial
from benchmarks.trials import Stretch, Trial


def respond(told: Any) -> bytes:
    return b"HTTP/1.1 200 OK\r\n\r\n" + orjson.dumps(told)


def dense(*numbers: float) -> bytes:
    vector = base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()
    return respond({"data": [{"embedding": vector}]})


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (dense(1.0, 2.00005), ""),
        (dense(1.0, 2.1), "wrong figures: they differ by 0.1"),
        (dense(1.0, float("nan")), "wrong figures"),
        (dense(1.0), "1 figures instead of 2"),
        (respond({"data": [{}]}), "no figures"),
        (respond([]), "no figures"),
    ],
)
def test_a_response_is_compared_with_what_is_right(response: bytes, problem: str) -> None:
    found = Question(b"", KINDS["dense"], np.array([1.0, 2.0], np.float32)).problem(response)
    assert found.startswith(problem)
    assert bool(found) is bool(problem)


def test_scores_are_in_the_order_of_the_documents_and_missing_weights_are_0() -> None:
    [texts] = draw_requests(ModelTable("r", Path(), "rerank"), 1)
    assert len(texts) == len(set(texts)) == 5, "a query and documents"
    results = [{"index": 1, "relevance_score": 0.5}, {"index": 0, "relevance_score": -1.0}]
    assert KINDS["rerank"].figures({"results": results}).tolist() == [-1.0, 0.5]
    weights = KINDS["sparse"].figures([[{"index": 7, "value": 0.5}]])
    assert (weights[7], weights.sum()) == (0.5, 0.5)


def test_a_summary_counts_what_has_ended_in_its_span() -> None:
    callers = Callers(Server("http://127.0.0.1:1", 1), [], 1)
    callers.calls += [Called(9.9, 1.0), Called(10.0, 0.1), Called(11.0, 0.3), Called(12.0, 9.0)]
    callers.calls += [Called(10.5, 0.1, "refused: 503"), Called(10.6, 0.1, "wrong figures"), Called(12.5, 0.1, "late")]
    summary = callers.between(10.0, 12.0)
    assert (summary.num_right, summary.num_refused, summary.failures) == (2, 1, ["wrong figures"])
    assert [summary.per_s, summary.p50_ms, summary.p99_ms] == pytest.approx([1.0, 200.0, 300.0])
    assert callers.between(20.0, 21.0).p99_ms == float("inf")


def test_a_trial_says_what_failed_and_how_much_longer_the_others_waited(tmp_path: Path) -> None:
    def stretch(num_done: int, p99_ms: float, failures: list[str]) -> Stretch:
        callers = Callers(Server("http://127.0.0.1:1", 1), [], 1)
        callers.calls += [Called(1.0, p99_ms / 1000), *(Called(1.0, 1.0, failure) for failure in failures)]
        return Stretch(num_done, {"a": callers.between(0.0, 2.0), "b": callers.between(0.0, 2.0)})

    names = [ModelTable(name, Path()) for name in "ab"]
    trial = Trial(
        canaries=[Canaries(table, [], []) for table in names],
        victim="b",
        num_clients=1,
        pause_s=0.0,
        settle_s=0.0,
        stretch_s=1.0,
        num_slices=1,
        folder=tmp_path,
    )
    stretches = {"quiet": [stretch(0, 10.0, [])], "killed": [stretch(3, 20.0, ["wrong", "refused: 429"])]}
    failed, p99, of_victim = judge_trial(trial, "killed", stretches, 0.0)
    assert (failed.ours, failed.is_met, failed.details["failures"]) == (2, False, ["wrong"])
    assert "killed (3 times)" in failed.work
    assert (p99.ours, p99.theirs, p99.ratio, p99.is_met) == (20.0, 10.0, 0.5, False)
    assert of_victim.ours == 2


def test_the_mirrored_model_has_other_signs_where_its_vectors_are_to_have_them(tmp_path: Path) -> None:
    name = "encoder.layer.5.output.LayerNorm.weight"
    original, mirrored = (
        load_file(folder / "model.safetensors") for folder in (Path(bundled_model()), save_mirrored(tmp_path / "model"))
    )
    assert np.array_equal(mirrored[name], original[name] * signs())
    assert (signs() < 0).sum() == 128
    assert [key for key in original if not np.array_equal(original[key], mirrored[key])] == [
        name.replace("weight", "bias"),
        name,
    ]
