"""The report of `vecd check` as text: every part, and as much of it as there is."""

from typing import Any

from vecd.launch.check.command import disagreement
from vecd.launch.check.report import Problem, new_report, render

_ROW = {"num_texts": 9, "longest_tokens": 16, "min_cosine": 0.99991, "max_abs_diff": 2e-3}
_OF_SCORES = {"num_texts": 12_000, "longest_tokens": 64, "min_cosine": None, "max_abs_diff": 1e-7}
_AGREEMENT = {
    "against": "the reference model in float32", "relative_diff": None, "is_within_bounds": True,
    "by_length": [_ROW, _OF_SCORES],
}  # fmt: skip
_MODEL = {
    "name": "org/model", "dim": 256, "pooling": ("mean", "max"), "steps": ("Dense 768 → 256, tanh", "Normalize"),
    "is_normalized": True, "prompts": {"query": "query: ", "document": ""}, "matryoshka_dims": (64, 128),
    "num_parameters": 22_713_216, "weights_dtypes": ("float32", "float16"), "capabilities": ("dense",),
    "labels": tuple("abcdefghij"), "token_dim": 0,
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


def test_a_whole_report() -> None:
    """By the names of its JSON, with a table where facts are alike."""
    text = render(report_of(model=_MODEL, path=_PATH, measurements=_MEASURED))
    for part in (
        "model\n  name                  org/model\n",
        "  pooling               mean; max\n",
        "  prompts\n    query                 'query: '\n  matryoshka_dims       64; 128\n",
        "  num_parameters        22,713,216\n",
        "    longest_probe_tokens  256\n",
        "  labels                a; b; c; d; e; f; g; h; and 2 more\n",
        "  is_remembered         False\n  choosing_s            8.6\n",
        """  agreements
    against               the reference model in float32
    is_within_bounds      True
    by_length
      num_texts  longest_tokens  min_cosine  max_abs_diff
      9                      16     0.99991         0.002
      12,000                 64                     1e-07
  not_compared          not compared with sentence-transformers, which is not installed
measurements
  speeds
    dtype       path  text_tokens""",
        " 21,234 ",
        "  not_measured\n    int8                  this processor does not compute it natively\n",
    ):
        assert part in text, part
    assert "token_dim" not in text, "a fact that the model does not have"
    assert text.endswith("\nThis model can be served.")
    assert max(map(len, text.splitlines())) <= 118


def test_what_there_is_of_a_broken_one() -> None:
    report = report_of(Problem("/x: no such folder", "check the path"), warnings=["careful"])
    assert render(report).splitlines() == ["warning: careful", "problem: /x: no such folder", "do this: check the path"]


def test_a_disagreement_of_vectors_has_a_cosine_and_one_of_scores_an_order() -> None:
    of_vectors = {**_AGREEMENT, **_ROW, "min_cosine": 0.5, "max_abs_diff": 0.25}
    assert ": smallest cosine 0.50000, largest difference 2.5e-01" in disagreement("vectors", of_vectors).what
    of_scores = {**of_vectors, "min_cosine": None, "same_order": 0.75}
    assert ": 75.0% in the same order, largest difference 2.5e-01" in disagreement("scores", of_scores).what
