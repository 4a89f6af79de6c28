"""The table of results says what was measured, and nothing else."""

import json

import pytest

from tests.support.soak import report

RECORD = {
    "at": "2026-01-02T03:04:05+00:00",
    "machine": "a processor, 2 cores",
    "test": "tests/system/soak/test_workers.py::test_killed",
    "outcome": "passed",
    "results": [{"trial": "workers killed", "form": "long", "requests": 12345, "p99_ms": 12.5, "by_kind": {"a": 1}}],
}
PAGE = f"# Page\n\n{report.BEGIN}\nold\n{report.END}\n\nmore\n"


def test_the_table_is_between_its_marks_and_filled_anew(tmp_path):
    results, page = tmp_path / "soak.jsonl", tmp_path / "page.md"
    other = {**RECORD, "test": "tests/system/hostile/test_x.py::test_y", "results": []}
    results.write_text("".join(json.dumps(record) + "\n" for record in (RECORD, other)))
    page.write_text(PAGE)
    for _ in range(2):
        report.main(str(results), str(page))
        text = page.read_text()
        assert text.startswith("# Page\n\n")
        assert text.endswith("\n\nmore\n")
        assert "old" not in text
        measured = "requests 12,345, p99 12.5 ms, by kind (a: 1)"
        assert f"| workers killed | passed | {measured} | 2026-01-02 03:04 |" in text
        assert "| `tests/system/hostile/test_x.py` | 1 passed | | |" in text
        assert "a processor, 2 cores" in text


def test_of_a_trial_that_was_repeated_the_last_one_counts():
    again = {**RECORD, "outcome": "failed"}
    assert [line for line in report.rows([RECORD, again]) if "workers killed" in line] == [
        "| workers killed | failed | requests 12,345, p99 12.5 ms, by kind (a: 1) | 2026-01-02 03:04 |"
    ]


def test_a_page_without_marks_is_left_alone():
    with pytest.raises(ValueError, match="lacks"):
        report.fill("# Page\n", [RECORD])


def test_the_machine_has_cores_and_memory():
    assert " cores, " in report.describe_machine()
