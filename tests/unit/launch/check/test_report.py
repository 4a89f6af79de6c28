"""The report of `vecd check` as text: every part, and as much of it as there is."""

import json
from dataclasses import replace

from vecd.launch.check.command import disagreement
from vecd.launch.check.report import Comparison, Measurements, Model, Path, Problem, Report, Speed, render, render_all

_ROW = {"num_texts": 9, "longest_tokens": 16, "min_cosine": 0.99991, "max_abs_diff": 2e-3}
_AGREEMENT = Comparison("the reference model in float32", 9, 16, 0.99991, 2e-3, True, (_ROW,))
_MODEL = Model(
    name="org/model", folder="/models/model", model_type="bert", architecture="BertModel", dim=256, hidden_size=384,
    max_tokens=512, pooling=("mean", "max"), steps=("Dense 768 → 256, tanh", "Normalize"), is_normalized=True,
    prompts={"query": "query: ", "document": ""}, default_prompt="query: ", is_matryoshka=True,
    matryoshka_dims=(64, 128), vocab_size=30_522, num_parameters=22_713_216, weights_bytes=90_868_376,
    weights_dtypes=("float32", "float16"), tokenizer="tokenizer.json",
)  # fmt: skip
_PATH = Path(
    path="packed", dtype="bfloat16", device="cpu", attention="SDPA",
    reasons=("packed: the first reason", "bfloat16: the second"),
    refused=("fused bfloat16 is not used: " + "a very long reason " * 12,),
    probes={"probes": 15, "longest_probe_tokens": 256, "max_abs_diff": 2e-3, "min_cosine": 0.9991},
    is_remembered=False, choosing_s=8.6, load_s=1.9, shared_mb=264, agreements=(_AGREEMENT,),
    not_compared=("not compared with sentence-transformers, which is not installed",),
)  # fmt: skip
_MEASURED = Measurements(
    speeds=(
        Speed("bfloat16", "packed", 24, 2048, 21_234.5, 20_000, 22_000, 41),
        Speed("float32", "packed", 24, 2048, 6000, 5900, 6100, 61),
    ),
    not_measured={"int8": "this processor does not compute it natively"},
    num_rounds=5,
    turn_s=0.5,
)
_WHOLE = Report("1.0", _MODEL, _PATH, _MEASURED)


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
    report = Report("1.0", problems=[Problem("/x: no such folder", "check the path")], warnings=["careful"])
    assert render(report).splitlines() == ["warning: careful", "problem: /x: no such folder", "do this: check the path"]


def test_a_disagreement_is_not_to_be_overlooked() -> None:
    path = replace(_PATH, agreements=(replace(_AGREEMENT, is_within_bounds=False),))
    assert "DISAGREES, by the bounds for bfloat16" in render(replace(_WHOLE, path=path))


def test_the_whole_as_json() -> None:
    fields = json.loads(json.dumps(_WHOLE.to_json()))
    assert fields["is_servable"] is True
    assert fields["model"]["dim"] == 256
    assert fields["measurements"]["speeds"][0]["tokens_per_s"] == 21_234.5


def test_several_models_end_in_a_table():
    right = Report("1", _MODEL, _PATH)
    warned = Report("1", replace(_MODEL, capabilities=("rerank",)), _PATH, warnings=["w"])
    wrong = Report("1", problems=[Problem("the file " + "long " * 40 + "is missing", "find it")])
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
    of_vectors = Comparison("the reference model in float32", 3, 9, 0.5, 0.25, False, [])
    assert ": smallest cosine 0.50000, largest difference 2.5e-01" in disagreement("vectors", of_vectors).what
    of_scores = replace(of_vectors, min_cosine=None, same_order=0.75)
    assert ": 75.0% in the same order, largest difference 2.5e-01" in disagreement("scores", of_scores).what
