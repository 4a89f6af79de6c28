from dataclasses import replace

import pytest

from benchmarks.loads import CAPACITY, GROUPS, TOKENS_PER_TEXT, WORKLOADS, Plan, make_load
from benchmarks.recipes import SERVERS

PLAN = Plan(servers=list(SERVERS)[:6], groups=GROUPS, num_rounds=5, duration_s=4.0)
BY_NAME = {workload.name: workload for workload in WORKLOADS}


def names(plan: Plan, round_number: int = 1) -> list[str]:
    return [workload.name for workload in plan.workloads(round_number)]


def test_everything_takes_at_most_an_hour_and_a_quick_look_eight_minutes() -> None:
    assert PLAN.estimate_s() <= 3600
    assert replace(PLAN, num_rounds=1, duration_s=1.0, is_quick=True).estimate_s() <= 480


def test_a_group_brings_what_it_is_compared_with() -> None:
    assert names(replace(PLAN, groups=["growth"])) == ["short-256", "short-64", "short-640"]
    assert names(replace(PLAN, groups=["curve"]))[0] == CAPACITY
    assert names(replace(PLAN, groups=["mixed"])) == ["mixed"]


def test_what_takes_long_is_not_measured_in_every_round() -> None:
    assert "curve-0.5" in names(PLAN, 1)
    assert "curve-0.5" not in names(PLAN, 2)
    assert "interactive-bulk" in names(PLAN, 3)
    assert "interactive-bulk" not in names(PLAN, 4)
    assert {"short-1", "short-16", "short-64", "short-256", "short-640", "mixed"} == set(names(PLAN, 5))


def test_bulk_comes_last_because_some_servers_go_on_with_it() -> None:
    assert names(PLAN)[-1] == "interactive-bulk"


def test_the_curve_is_shares_of_the_servers_own_rate() -> None:
    load = make_load(BY_NAME["curve-0.75"], "http://127.0.0.1:1", 5.0, capacity_per_s=400.0)
    assert (load.rate_per_s, load.clients) == (300.0, 0)
    with pytest.raises(ValueError, match="needs a rate"):
        make_load(BY_NAME["curve-0.75"], "http://127.0.0.1:1", 5.0, capacity_per_s=None)


def test_the_bulk_is_two_clients_with_512_texts() -> None:
    load = make_load(BY_NAME["interactive-bulk"], "http://127.0.0.1:1", 1.0, None)
    assert load.bulk is not None
    assert (load.bulk.clients, load.bulk.shape.texts_per_request) == (2, 512)


@pytest.mark.parametrize("name", ["mixed", "short"])
def test_texts_have_about_as_many_tokens_as_is_said(name: str) -> None:
    from pathlib import Path

    from tokenizers import Tokenizer

    from benchmarks.servers import bundled_model
    from vecd.client.bench.texts import draw_texts

    tokenizer = Tokenizer.from_file(str(Path(bundled_model()) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    lengths = {"mixed": BY_NAME["mixed"].lengths, "short": BY_NAME["short-1"].lengths}[name]
    encodings = tokenizer.encode_batch(draw_texts(4096, lengths, seed=0))
    mean = sum(len(encoding.ids) for encoding in encodings) / len(encodings)
    assert mean == pytest.approx(TOKENS_PER_TEXT[name], rel=0.03)
