"""A line of Markdown for each model that was checked, and the file that names them."""

from typing import Any

from vecd.launch.check.report import Problem, new_report
from vecd.launch.check.table import known_as_text, markdown_head, markdown_row, read_names
from vecd.model.known import known_models

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_MODEL = {"folder": "/models/tiny", "capabilities": ("dense", "sparse")}
_SPEED = {"dtype": "bfloat16", "path": "packed", "tokens_per_s": 21_234.5, "private_mb": 41}
_OTHERS = [
    {**_SPEED, "tokens_per_s": 9.0, "private_mb": 50},
    {**_SPEED, "dtype": "float32", "path": "lean", "tokens_per_s": 99_999.0, "private_mb": 900},
]
_MEASURED = {"speeds": [_SPEED, *_OTHERS], "agreements": {"float32": {"min_cosine": 1.0, "max_abs_diff": 1e-7}}}


def report_of(*problems: Problem, **parts: Any) -> dict[str, Any]:
    return {**new_report("1.0", *problems), **parts}


def path_of(**changes: Any) -> dict[str, Any]:
    agreement = {"min_cosine": 0.9991, "max_abs_diff": 2e-3}
    probes = {"min_cosine": 0.9995, "max_abs_diff": 1e-3}
    made = {"path": "packed", "dtype": "bfloat16", "shared_mb": 1200, "agreements": [agreement], "probes": probes}
    return {**made, **changes}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_names_of_a_file() -> None:
    text = "# all of them\n\nbge-m3\n  a/b=./tiny  # a tiny checkpoint # of ours\n./with#sign\t#\n"
    assert read_names(text) == {"bge-m3": "", "a/b=./tiny": "a tiny checkpoint # of ours", "./with#sign": ""}


def test_a_model_that_is_served() -> None:
    """With the worst figure of its engine, the speed and memory of that, and the other formats' engines."""
    line = markdown_row("org/tiny", report_of(model=_MODEL, path=path_of(), measurements=_MEASURED), "tiny")
    engines = "**packed bfloat16** 0.999100, lean float32 1.000000"
    assert cells(line) == ["org/tiny", "dense, sparse", engines, "21,234", "1,250 MB", "", "tiny"]
    assert len(cells(line)) == len(cells(markdown_head().splitlines()[0]))


def test_scores_have_a_difference_and_a_quick_check_no_speed() -> None:
    of_scores = {"min_cosine": None, "max_abs_diff": 3e-6}
    path = path_of(agreements=[of_scores], probes={"max_abs_diff": 1e-6}, path="lean", dtype="float32")
    model = {**_MODEL, "folder": f"/hub/models--a--b/snapshots/{_COMMIT}", "capabilities": ("rerank",)}
    line = markdown_row("b", report_of(model=model, path=path), "")
    assert cells(line) == ["b", "rerank", "**lean float32** ±3e-06", "", "1,200 MB", _COMMIT[:12], "published weights"]


def test_nothing_that_was_compared_has_no_figure() -> None:
    line = markdown_row("b", report_of(model=_MODEL, path=path_of(agreements=[], probes={}, path="static")), "")
    assert cells(line)[2] == "**static bfloat16**"
    assert cells(line)[-1] == "a folder"


def test_a_model_that_is_not_served() -> None:
    """Its reason is one line, whose bars separate no columns."""
    line = markdown_row("b", report_of(Problem("b: a | b is wrong", "correct it")), "")
    assert line == "| b |  | not served: b: a \\| b is wrong |  |  |  |  |"


def test_the_known_models() -> None:
    first, *lines = known_as_text(known_models()).splitlines()
    assert first.split() == ["name", "id", "on", "the", "hub", "kind", "shorter", "vectors", "notes"]
    [line] = [line for line in lines if line.startswith("nomic-embed-text ")]
    assert "nomic-ai/nomic-embed-text-v1.5" in line
    assert "64, 128, 256, 512, 768" in line
    assert any(line.split()[:3] == ["qwen3-embedding", "Qwen/Qwen3-Embedding-0.6B", "dense"] for line in lines)
