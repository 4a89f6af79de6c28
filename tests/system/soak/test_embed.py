"""`vecd embed`, killed half-way, has every row once, in its place, and right."""

from pathlib import Path

import pytest

from tests.support.serving import exact_server
from tests.support.soak.embedding import kill_at_random_and_compare, kill_twice_and_compare
from tests.support.soak.form import LONG, only_long


@pytest.mark.skipif(not LONG, reason="in short, tests/system/api/test_embed.py has the same: with VECD_SOAK=1")
@pytest.mark.timeout(3000)
def test_killed_twice_every_row_is_there_once(tmp_path: Path) -> None:
    with exact_server() as server:
        kill_twice_and_compare(server, tmp_path)


@only_long
@pytest.mark.timeout(3000)
def test_a_kill_loses_little_work_and_no_row(tmp_path: Path) -> None:
    with exact_server("--workers", "2") as server:
        kill_at_random_and_compare(server, tmp_path, num_lines=20_000, num_kills=10)
