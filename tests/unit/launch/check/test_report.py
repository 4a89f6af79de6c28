"""The report of `vecd check` as text: every part, and as much of it as there is."""

from typing import Any

from vecd.launch.check.command import disagreement
from vecd.launch.check.report import Problem, new_report, render, render_all

_ROW = {"num_texts": 9, "longest_tokens": 16, "min_cosine": 0.99991, "max_abs_diff": 2e-3}
_AGREEMENT = {"against": "the reference model in float32", "is_within_bounds": True, "by_length": [_ROW], **_ROW}
_MODEL = {
    "name": "org/model", "dim": 256, "pooling": ("mean", "max"), "steps": ("Dense 768 → 256, tanh", "Normalize"),
    "is_normalized": True, "prompts": {"query": "query: ", "document": ""}, "matryoshka_dims": (64, 128),
    "num_parameters": 22_713_216, "weights_dtypes": ("float32", "float16"), "capabilities": ("dense",), "labels": (),
}  # fmt: skip
_PATH = {
    "path": "packed", "dtype": "bfloat16", "reasons": ["packed: the first reason", "bfloat16: the second"],
    "refused": ["fused bfloat16 is not used: " + "a very long reason " * 12],
    "probes": {"probes": 15, "longest_probe_tokens": 256, "max_abs_diff": 2e-3, "min_cosine": 0.9991},
    "is_remembered": False, "choosing_s": 8.6, "load_s": 1.9, "shared_mb": 264, "agreements": [_AGREEMENT],
    "not_compared": ["not compared with sentence-transformers, which is not installed"],
}  # fmt: skip
_SPEED = {
    "dtype": "bfloat16", "path": "packed", "text_tokens": 24, "batch_tokens": 2048, "tokens_per_s": 21_234.5,
    "texts_per_s": 885.0, "lowest": 20_000, "highest": 22_000, "private_mb": 41, "core_share": 1.0,
}  # fmt: skip
_MEASURED = {"speeds": [_SPEED], "not_measured": {"int8": "this processor does not compute it natively"}}


def report_of(*problems: Problem, **parts: Any) -> dict[str, Any]:
    return {**new_report("1.0", *problems), **parts}


_WHOLE = report_of(model=_MODEL, path=_PATH, measurements=_MEASURED)


def test_a_whole_report() -> None:
    text = render(_WHOLE)
    for part in (
        "dim               256",
        "pooling           mean; max",
        "query 'query: '; document ''",
        "matryoshka dims   64; 128",
        "num parameters    22,713,216",
        "float32; float16",
        "choosing s        8.6",
        "0.99991000",
        "agrees, by the bounds for bfloat16",
        "which is not installed",
        "21,234",
        "20,000 to 22,000",
        "int8: not measured: this processor",
    ):
        assert part in text, part
    assert text.endswith("This model can be served.")
    assert max(map(len, text.splitlines())) <= 118
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_what_there_is_of_a_broken_one() -> None:
    report = report_of(Problem("/x: no such folder", "check the path"), warnings=["careful"])
    assert render(report).splitlines() == ["warning: careful", "problem: /x: no such folder", "do this: check the path"]


def test_a_disagreement_is_not_to_be_overlooked() -> None:
    path = {**_PATH, "agreements": [{**_AGREEMENT, "is_within_bounds": False}]}
    assert "DISAGREES, by the bounds for bfloat16" in render({**_WHOLE, "path": path})


def test_several_models_end_in_a_table():
    right = report_of(model=_MODEL, path=_PATH)
    warned = report_of(model={**_MODEL, "capabilities": ("rerank",)}, path=_PATH, warnings=["w"])
    wrong = report_of(Problem("the file " + "long " * 40 + "is missing", "find it"))
    lines = render_all({"a": right, "org/b": warned}).splitlines()
    assert [line.split() for line in lines[2:4]] == [
        ["a", "dense", "packed,", "bfloat16", "264", "MB", "right"],
        ["org/b", "rerank", "packed,", "bfloat16", "264", "MB", "right,", "warnings:", "1"],
    ]
    assert lines[-1] == "All models can be served."
    lines = render_all({"a": right, "c": wrong}).splitlines()
    assert lines[3].split()[:5] == ["c", "-", "-", "-", "problem:"]
    assert lines[-1] == "1 of 2 models cannot be served: c"
    assert all(len(line) <= 118 for line in lines)


def test_a_disagreement_of_vectors_has_a_cosine_and_one_of_scores_an_order() -> None:
    of_vectors = {**_AGREEMENT, "min_cosine": 0.5, "max_abs_diff": 0.25}
    assert ": smallest cosine 0.50000, largest difference 2.5e-01" in disagreement("vectors", of_vectors).what
    of_scores = {**of_vectors, "min_cosine": None, "same_order": 0.75}
    assert ": 75.0% in the same order, largest difference 2.5e-01" in disagreement("scores", of_scores).what
