from dataclasses import replace

import pytest
from transformers import BertConfig

from benchmarks.findings import Finding, render_findings, render_line
from benchmarks.linear import model_flop
from benchmarks.targets import CONTESTS, EQUAL_LENGTHS, at_least, at_most, equal_name

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


def test_the_table_has_a_line_for_each_finding() -> None:
    lines = render_findings([RATE, MEMORY]).splitlines()
    peer = "onnxruntime float32 11,111 tokens/s"
    assert lines[2] == f"| mixed, float32 | 12,346 tokens/s | {peer} | 1.11 | ≥ 1.05 | yes |"
    assert lines[3] == "| memory, bfloat16 * | 91 MB | – | – | ≤ 90 | no |"
    assert lines[-1].startswith("1 of 2 were disturbed")


def test_an_interval_stands_beside_its_ratio() -> None:
    assert "ratio 1.11 (1.05–1.20), target" in render_line(replace(RATE, interval=(1.0499, 1.2)))


def test_a_line_says_all_of_one_finding() -> None:
    assert render_line(MEMORY) == "memory, bfloat16 *: 91 MB; –; ratio –, target ≤ 90: no"


def test_flops_are_those_of_the_products() -> None:
    config = BertConfig(hidden_size=4, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2)
    one_token = 3 * (2 * (4 * 4 * 4 + 2 * 4 * 8) + 4 * 4)
    assert model_flop(config, [1]) == one_token
    assert model_flop(config, [1, 1]) == 2 * one_token
    assert model_flop(config, [2]) > 2 * one_token


@pytest.mark.parametrize("dtype", CONTESTS)
def test_targets_name_peers_that_are_measured(dtype: str) -> None:
    contest = CONTESTS[dtype]
    assert {peer for _, peer in contest.ratios} <= set(contest.peers)
    equal = {equal_name(*lengths) for lengths in EQUAL_LENGTHS}
    assert {work for work, _ in contest.ratios} <= {"long", *equal}


def test_what_is_asked_of_mixed_lengths_depends_on_the_processor() -> None:
    contest = CONTESTS["float32"]
    assert contest.target("mixed", "openvino", "AVX2") == at_least(1.05)
    assert contest.target("mixed", "openvino", "AMX") == at_least(1.10)
    assert CONTESTS["bfloat16"].target("mixed", "openvino", "AMX") == at_least(1.25)
    assert contest.target("1 × 12", "onnxruntime", "AVX2") == at_least(0.97)
    assert CONTESTS["int8"].target("mixed", "openvino", "AVX2") is None
