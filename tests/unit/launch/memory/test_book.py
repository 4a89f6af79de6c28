"""What is remembered of a model's memory."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vecd.launch.config.plan import Plan
from vecd.launch.memory.book import MemoryBook
from vecd.launch.memory.footprint import Footprint

Planned = Callable[..., Plan]

FOUND = Footprint(200 << 20, 20 << 20, 2)


def test_a_footprint_is_remembered_for_the_next_start(planned: Planned, tmp_path: Path) -> None:
    plan = planned("--workers", "2")
    book = MemoryBook(None, tmp_path)
    assert book.recall(plan) is None
    book.remember(plan, FOUND)
    assert MemoryBook(None, tmp_path).expect(plan) == FOUND
    assert [path.suffix for path in (tmp_path / "memory").iterdir()] == [".json"]


def test_it_holds_for_one_configuration_and_one_set_of_files(planned: Planned, tmp_path: Path) -> None:
    plan = planned("--workers", "2")
    MemoryBook(None, tmp_path).remember(plan, FOUND)
    others = [
        planned("--workers", "3"),
        planned("--workers", "2", "--dtype", "float32"),
        planned("--workers", "2", "--max-batch-tokens", "100"),
        replace(plan, model_files=frozenset({("/model.safetensors", 1, 2, 3)})),
    ]
    for other in others:
        assert MemoryBook(None, tmp_path).recall(other) is None
    assert MemoryBook(None, tmp_path, is_only_model=False).recall(plan) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"shared": 1}',
        '{"shared": "1", "per_worker": 1}',
        '{"shared": true, "per_worker": 1}',
        '{"shared": -1, "per_worker": 1}',
        '{"shared": 0, "per_worker": 1}',
        '{"shared": 1.5, "per_worker": 1}',
        '{"shared": NaN, "per_worker": 1}',
        '{"shared": 1e400, "per_worker": 1}',
        json.dumps({"shared": 10**30, "per_worker": 1}),
        "[" * 100_000,
        "\udcff",
        '{"shared": 1, "per_worker": 1}' + " " * 10_000 + "x",
    ],
)
def test_a_file_with_anything_else_is_ignored(content: str, planned: Planned, tmp_path: Path) -> None:
    plan = planned()
    book = MemoryBook(None, tmp_path)
    book.remember(plan, FOUND)
    [file] = (tmp_path / "memory").iterdir()
    file.write_bytes(content.encode(errors="surrogateescape"))
    found = MemoryBook(None, tmp_path).recall(plan)
    assert found is None or content.startswith('{"shared": 1, "per_worker": 1}')
    assert MemoryBook(None, tmp_path).expect(plan).total > 0


def test_a_folder_that_cannot_be_written_is_no_error(
    planned: Planned, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "memory").write_text("a file")
    plan, book = planned(), MemoryBook(None, tmp_path)
    assert book.recall(plan) is None
    book.remember(plan, FOUND)
    assert book.expect(plan) == FOUND, "until the server ends"
    assert "cannot be remembered" in caplog.text
