import argparse
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.loads import GROUPS
from benchmarks.notebook import Notebook
from benchmarks.recipes import SERVERS


def plan_of(*argv: str):
    return compare._make_plan(compare._make_parser().parse_args(argv))


def test_everything_is_measured_unless_something_is_named() -> None:
    plan = plan_of()
    assert (tuple(plan.servers), tuple(plan.groups), plan.num_rounds) == (tuple(SERVERS), GROUPS, 5)
    plan = plan_of("--only", "mosec,vecd", "--workloads", "mixed", "--rounds", "2", "--duration", "3")
    assert (plan.servers, plan.groups, plan.num_rounds, plan.duration_s) == (["vecd", "mosec"], ["mixed"], 2, 3.0)


def test_a_quick_look_is_one_round() -> None:
    plan = plan_of("--quick")
    assert (plan.num_rounds, plan.is_quick) == (1, True)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="ollama"):
        compare._names("vecd,ollama", tuple(SERVERS))


def test_a_page_can_be_written_again_without_measuring(tmp_path: Path, session, make_run) -> None:
    notebook = Notebook(tmp_path / "results", "make bench", session.plan, session.machine)
    for piece in session.measured:
        notebook.add(piece)
    notebook.add(make_run("vecd", "short-1", 123.0))
    page = tmp_path / "benchmarks.md"
    assert compare.main(["--page-from", str(notebook.file), "--page", str(page)]) == 0
    assert "| vecd bfloat16 | 123 |" in page.read_text()


def test_the_command_is_shown_without_folders() -> None:
    shown = compare._describe_command(["--results", "/home/me/results", "--rounds", "3"])
    assert shown == "python -m benchmarks.compare --results results --rounds 3"
