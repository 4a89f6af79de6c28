"""`--gateways auto`: the number that short texts need at the measured speed of the workers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vecd.launch.config import plan as plan_module
from vecd.launch.config.num_gateways import choose_num_gateways, needed_gateways
from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import load_settings
from vecd.launch.processes.summary import summary
from vecd.workers.short_texts import recall_texts_per_s, remember_texts_per_s


@pytest.mark.parametrize(
    ("texts_per_s", "num"), [(0.0, 1), (400.0, 1), (2000.0, 1), (2100.0, 2), (16_000.0, 8), (1e9, 64)]
)
def test_each_gateway_has_work_for_six_tenths_of_a_core(texts_per_s: float, num: int) -> None:
    assert needed_gateways(texts_per_s) == num


@pytest.mark.parametrize(
    ("texts_per_s", "num_cores", "num"),
    [(None, 64, 1), (9000.0, 64, 5), (9000.0, 6, 3), (9000.0, 2, 1), (9000.0, 1, 1), (1e6, 200, 64)],
)
def test_half_of_the_cores_are_left_to_the_workers(texts_per_s: float | None, num_cores: int, num: int) -> None:
    assert choose_num_gateways(texts_per_s, num_cores)[0] == num


@pytest.fixture
def planned_on(
    planned: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, str], Plan]:
    def plan(num_cores: int, *flags: str) -> Plan:
        monkeypatch.setattr(plan_module, "usable_cores", lambda: num_cores)
        return planned("--device", "cpu", "--cache-dir", str(tmp_path), "--gateways", "auto", *flags)

    return plan


def test_what_was_measured_decides_at_the_next_start(planned_on: Callable[..., Plan]) -> None:
    first = planned_on(16)
    assert first.gateway.num_gateways == first.gateway.arena.num_gateways == 1
    assert "at the next start" in first.why_gateways
    remember_texts_per_s(first.workers[0], 500.0)
    next_one = planned_on(16)
    assert len(next_one.workers) == 16
    assert next_one.gateway.num_gateways == 4, "16 workers with 500 texts/s each"
    assert {worker.arena.num_gateways for worker in next_one.workers} == {4}
    assert next_one.gateway.batch_timeout_s == 4 * first.gateway.batch_timeout_s
    assert planned_on(16, "--threads-per-worker", "4").gateway.num_gateways == 4, "4 workers with 4 threads each"
    assert planned_on(16, "--workers", "4").gateway.num_gateways == 1
    assert planned_on(16, "--engine", "fused").gateway.num_gateways == 1, "another engine, whose speed is not known"
    assert planned_on(4).gateway.num_gateways == 1
    lines, fields = summary(next_one, "http://127.0.0.1:8000", "", {}, 100, 1.0)
    assert fields["gateways"] == 4
    assert any("4 gateways (for 8,000 short texts/s of the workers)" in line for line in lines)


def test_a_reload_keeps_the_gateways_that_run(planned_on: Callable[..., Plan], tmp_path: Path) -> None:
    first = planned_on(16)
    remember_texts_per_s(first.workers[0], 500.0)
    again = make_plan(first.settings, num_gateways=1)
    assert (again.gateway.num_gateways, again.workers[0].arena) == (1, first.workers[0].arena)
    again.close()


@pytest.mark.parametrize(
    "content", ["", "[", "{}", '{"texts_per_s": null}', '{"texts_per_s": 0}', '{"texts_per_s": NaN}']
)
def test_a_file_that_says_nothing_is_no_problem(content: str, planned_on: Callable[..., Plan], tmp_path: Path) -> None:
    plan = planned_on(16)
    remember_texts_per_s(plan.workers[0], 500.0)
    assert recall_texts_per_s(plan.workers[0]) == 500.0
    [file] = (tmp_path / "short-texts").iterdir()
    file.write_text(content)
    assert recall_texts_per_s(plan.workers[0]) is None
    assert planned_on(16).gateway.num_gateways == 1


def test_the_flag_takes_a_number_or_auto(minilm_folder: Path) -> None:
    assert load_settings([str(minilm_folder)]).gateways == 1
    assert load_settings([str(minilm_folder), "--gateways", "3"]).gateways == 3
    assert load_settings([str(minilm_folder), "--gateways", "auto"]).gateways == "auto"
