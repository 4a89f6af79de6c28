"""Settings are read in an empty folder, without the environment's."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("VECD_")]:
        monkeypatch.delenv(name)
