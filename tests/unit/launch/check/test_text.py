"""The report as text: every part, and as much of it as there is."""

import json
import tomllib
from dataclasses import replace
from typing import Any

from vecd.launch.check.command import _disagreement
from vecd.launch.check.report import (
    Advice,
    Comparison,
    Machine,
    Measurements,
    Model,
    Path,
    Problem,
    Report,
    Setting,
    Speed,
)
from vecd.launch.check.text import WIDTH, command, render, render_all, toml

_ROW = {"num_texts": 9, "longest_tokens": 16, "min_cosine": 0.99991, "max_abs_diff": 2e-3}
_AGREEMENT = Comparison("the reference model in float32", 9, 16, 0.99991, 2e-3, True, (_ROW,))
_MACHINE = Machine("Imagined 9000", 64, 4, 2, 3.5, ("avx2", "amx_bf16"), 16_000, 8_000, 12_000, (), "6.1", "3.11")
_MODEL = Model(
    name="org/model",
    folder="/models/model",
    model_type="bert",
    architecture="BertModel",
    dim=256,
    hidden_size=384,
    max_tokens=512,
    pooling=("mean", "max"),
    steps=("Dense 768 → 256, tanh", "Normalize"),
    is_normalized=True,
    prompts={"query": "query: ", "document": ""},
    default_prompt="query: ",
    is_matryoshka=True,
    matryoshka_dims=(64, 128),
    vocab_size=30_522,
    num_parameters=22_713_216,
    weights_bytes=90_868_376,
    weights_dtypes=("float32", "float16"),
    tokenizer="tokenizer.json",
)
_PATH = Path(
    path="packed",
    dtype="bfloat16",
    device="cpu",
    attention="SDPA",
    reasons=("packed: the first reason", "bfloat16: the second"),
    refused=("fused bfloat16 is not used: " + "a very long reason " * 12,),
    probes={"probes": 15, "longest_probe_tokens": 256, "max_abs_diff": 2e-3, "min_cosine": 0.9991},
    is_remembered=False,
    choosing_s=8.6,
    load_s=1.9,
    shared_mb=264,
    agreements=(_AGREEMENT,),
    not_compared=("not compared with sentence-transformers, which is not installed",),
)
_SPEED = Speed("bfloat16", "packed", 24, 2048, 21_234.5, 20_000, 22_000, 41)
_MEASURED = Measurements(
    speeds=(
        _SPEED,
        Speed("float32", "packed", 24, 2048, 6000, 5900, 6100, 61),
    ),
    scaling=(replace(_SPEED, tokens_per_s=21_000), replace(_SPEED, tokens_per_s=40_000, num_workers=2)),
    not_measured={"int8": "this processor does not compute it natively"},
    num_rounds=5,
    turn_s=0.5,
)
_ADVICE = Advice(
    (Setting("model", 'org/a "b"', ""), Setting("workers", 2, "two cores"), Setting("dtype", "bfloat16", "fast")),
    ("a note",),
)
_WHOLE = Report("1.0", _MACHINE, _MODEL, _PATH, _MEASURED, _ADVICE)


def test_a_whole_report() -> None:
    text = render(_WHOLE)
    for part in (
        "4 to use (2 physical), of 64; the cgroup's quota is 3.5",
        "AVX2, AMX-BF16",
        "the cgroup's limit is 12,000 MB",
        "256, from 384 a token",
        "mean + max",
        "query 'query: ' (default), document ''",
        "yes: 64, 128",
        "90.9 MB, 22,713,216 parameters in float32, float16",
        "packed, bfloat16, on cpu",
        "selected in 8.6 s",
        "0.99991000",
        "agrees, by the bounds for bfloat16",
        "which is not installed",
        "21,234",
        "(20,000 to 22,000)",
        "int8      not measured: this processor",
        "2 workers 40,000 (1.90 times one)",
        "--workers 2",
        "note: a note",
    ):
        assert part in text, part
    assert text.endswith("This model can be served.")
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_what_there_is_of_a_broken_one() -> None:
    report = Report("1.0", _MACHINE, problems=[Problem("/x: no such folder", "check the path")], warnings=["careful"])
    text = render(report)
    assert "Model" not in text
    assert text.splitlines()[-3:] == [
        "warning: careful",
        "problem: /x: no such folder",
        "do this: check the path",
    ]


def test_a_disagreement_is_not_to_be_overlooked() -> None:
    path = replace(_PATH, agreements=(replace(_AGREEMENT, is_within_bounds=False),))
    assert "DISAGREES, by the bounds for bfloat16" in render(replace(_WHOLE, path=path))


def test_what_is_recommended_can_be_pasted() -> None:
    assert command(_ADVICE) == """vecd serve 'org/a "b"' --workers 2 --dtype bfloat16"""
    assert tomllib.loads("\n".join(toml(_ADVICE))) == {"model": 'org/a "b"', "workers": 2, "dtype": "bfloat16"}


def test_the_whole_as_json() -> None:
    fields = json.loads(json.dumps(_WHOLE.to_json()))
    assert fields["is_servable"] is True
    assert fields["model"]["dim"] == 256
    assert fields["measurements"]["speeds"][0]["tokens_per_s"] == 21_234.5
    assert fields["advice"]["settings"][1] == {"name": "workers", "value": 2, "reason": "two cores"}


def test_scores_have_an_order_where_vectors_have_a_cosine() -> None:
    row: dict[str, Any] = {
        "num_texts": 9,
        "longest_tokens": 16,
        "min_cosine": None,
        "same_order": 0.975,
        "max_abs_diff": 2e-3,
    }
    found = Comparison("the reference model", 9, 16, None, 2e-3, True, (row,), relative_diff=0.01, same_order=0.975)
    probes: dict[str, Any] = {"probes": 15, "longest_probe_tokens": 256, "max_abs_diff": 2e-3, "same_order": 0.99}
    path = replace(_PATH, agreements=(found,), probes=probes, ranks_in_order=False, outputs="scores")
    labels = tuple(f"topic {index}" for index in range(28))
    heads: dict[str, tuple[str, ...]] = {"score": ("Dense 32 → 28, identity (classifier)",)}
    model = replace(_MODEL, capabilities=("rerank", "classify"), labels=labels, heads=heads)
    text = render(replace(_WHOLE, path=path, model=model))
    for part in ("in the same order", "97.5%", "99.0% in the same order", "plain pair      in the WRONG order",
                 "28: topic 0, topic 1", "topic 7 and 20 more", "head: score     Dense 32 → 28", "pairs/s",
                 "kind            rerank, classify"):  # fmt: skip
        assert part in text
    for part in ("dimensions", "pooling", "Matryoshka"):
        assert part not in text


def test_several_models_end_in_a_table():
    right = Report("1", _MACHINE, _MODEL, _PATH)
    warned = Report("1", _MACHINE, replace(_MODEL, capabilities=("rerank",)), _PATH, warnings=["w"])
    wrong = Report("1", _MACHINE, problems=[Problem("the file " + "long " * 40 + "is missing", "find it")])
    mb = f"{_PATH.shared_mb:,} MB"
    lines = render_all({"a": right, "org/b": warned}).splitlines()
    assert [line.split() for line in lines[2:4]] == [
        ["a", "dense", "packed,", "bfloat16,", "on", "cpu", *mb.split(), "right"],
        ["org/b", "rerank", "packed,", "bfloat16,", "on", "cpu", *mb.split(), "right,", "1", "warning"],
    ]
    assert lines[-1] == f"All 2 models can be served, with {2 * _PATH.shared_mb:,} MB for all workers together."
    lines = render_all({"a": right, "c": wrong}).splitlines()
    assert lines[3].split()[:5] == ["c", "-", "-", "-", "problem:"]
    assert lines[-1] == "1 of 2 models cannot be served: c"
    assert all(len(line) <= WIDTH for line in lines)


def test_a_disagreement_of_vectors_has_a_cosine_and_one_of_scores_an_order() -> None:
    of_vectors = Comparison("the reference model in float32", 3, 9, 0.5, 0.25, False, [])
    assert ": smallest cosine 0.50000, largest difference 2.5e-01" in _disagreement("vectors", of_vectors).what
    of_scores = replace(of_vectors, min_cosine=None, same_order=0.75)
    assert ": 75.0% in the same order, largest difference 2.5e-01" in _disagreement("scores", of_scores).what
