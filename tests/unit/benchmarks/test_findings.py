import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import BertConfig

from benchmarks import findings
from benchmarks.classes import Record, shown
from benchmarks.findings import Finding, Journal
from benchmarks.linear import model_flop
from benchmarks.machine import processor_class
from benchmarks.targets import at_least, at_most

RATE = Finding(
    section="mixed",
    work="mixed",
    dtype="float32",
    unit="tokens/s",
    ours=12345.678,
    peer="onnxruntime float32",
    theirs=11111.111,
    ratio=1.1111111,
    target=at_least(1.05),
    others_cores=0.01,
)
MEMORY = Finding(
    section="memory", work="memory", dtype="bfloat16", unit="MB", ours=91.0, target=at_most(90), others_cores=0.5
)


def test_a_target_is_for_the_ratio_and_without_a_peer_for_the_figure() -> None:
    assert RATE.is_met is True
    assert replace(RATE, ratio=1.04).is_met is False
    assert MEMORY.is_met is False
    assert replace(MEMORY, ours=90.0).is_met is True
    assert replace(MEMORY, target=None).is_met is None


def test_every_finding_is_a_line_of_the_days_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "describe_machine", lambda: {"class": "AVX2"})
    journal = Journal(tmp_path / "results", "minilm", {"rounds": 5})
    journal.add(RATE)
    journal.add(MEMORY)
    [file] = (tmp_path / "results").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-engine\.jsonl", file.name)
    first, second = map(orjson.loads, file.read_bytes().splitlines())
    assert (first["vecd"], first["peer_figure"], first["ratio"], first["is_met"]) == (12346.0, 11111.0, 1.1111, True)
    assert (first["section"], first["model"], first["class"]) == ("mixed", "minilm", "AVX2")
    assert first["session"] == second["session"]
    assert (second["peer"], second["ratio"], second["experiment"]) == (None, None, {"rounds": 5})


def test_flops_are_those_of_the_products() -> None:
    config = BertConfig(hidden_size=4, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2)
    one_token = 3 * (2 * (4 * 4 * 4 + 2 * 4 * 8) + 4 * 4)
    assert model_flop(config, [1]) == one_token
    assert model_flop(config, [1, 1]) == 2 * one_token
    assert model_flop(config, [2]) > 2 * one_token


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"}, "AMX"),
        ({"avx2", "avx512f", "avx512_bf16", "avx512_vnni"}, "AVX512-BF16"),
        ({"avx2", "avx512f", "avx512_vnni"}, "AVX-512"),
        ({"avx", "avx2", "avx_vnni"}, "AVX2"),
        ({"asimd"}, platform.machine()),
    ],
)
def test_a_processors_class_is_the_best_of_its_instructions(flags: set[str], expected: str) -> None:
    assert processor_class(flags) == expected


def make_record(session: str, **others: Any) -> Record:
    machine = {"cpu": "a processor", "cores": 2, "commit": "abc1234", "packages": {"onnxruntime": "1.31.1"}}
    record = {
        "session": session,
        "model": "minilm",
        "class": "AVX2",
        "section": "equal",
        "work": "1 text of 12 tokens",
        "dtype": "float32",
        "unit": "ms",
        "vecd": 5.0,
        "peer": "onnxruntime float32",
        "peer_figure": 5.5,
        "ratio": 1.1,
        "interval": [1.08, 1.12],
        "target": "≥ 0.97",
        "is_met": True,
        "others_cores": 0.0,
        "experiment": {"rounds": 9, "turn_s": 0.5},
        "machine": machine,
    }
    return record | others


def sessions(records: list[Record]) -> set[str]:
    return {record["session"] for record in shown(records)}


@pytest.mark.parametrize("other", [{"class": "AVX-512"}, {"section": "mixed"}, {"model": "b"}, {"dtype": "bfloat16"}])
def test_a_run_does_not_replace_one_of_another_class_section_model_or_format(other: dict[str, str]) -> None:
    assert sessions([make_record("1"), make_record("2", **other), make_record("3", **other)]) == {"1", "3"}


NONE: dict[str, Any] = {"ratio": None, "interval": None, "section": "deaths"}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([{"ratio": 2.0, "interval": [1.99, 2.01]}, {"ratio": 1.0, "interval": [0.96, 1.05]}], "2"),  # the latest
        ([{"interval": [1.0, 1.1]}, {"ratio": 9.0, "interval": [5.0, 12.0]}], "1"),  # the quiet one
        ([{"interval": [1.0, 1.5]}, {"interval": [1.0, 1.3]}, {"interval": [1.0, 1.9]}], "2"),  # the quietest
        ([{"interval": [1.0, 1.9]}, {"interval": None}], "1"),  # too few rounds for an interval are not quiet
        ([NONE, NONE], "2"),
    ],
)
def test_the_latest_quiet_run_is_shown_however_fast_vecd_was(runs: list[dict[str, Any]], expected: str) -> None:
    assert sessions([make_record(str(number), **run) for number, run in enumerate(runs, 1)]) == {expected}
