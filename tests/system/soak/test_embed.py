"""`vecd embed`, killed twice half-way, has every row once, in its place, and right."""

from pathlib import Path

import pytest

from tests.support.serving import running_server
from tests.support.soak.embedding import kill_twice_and_compare
from tests.support.soak.form import LONG


@pytest.mark.skipif(not LONG, reason="in short, tests/system/api/test_embed.py has the same: with VECD_SOAK=1")
@pytest.mark.timeout(3000)
def test_killed_twice_every_row_is_there_once(tmp_path: Path) -> None:
    with running_server() as server:
        kill_twice_and_compare(server, tmp_path)
