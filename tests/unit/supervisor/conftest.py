"""A supervisor whose children, files and time are fakes, in an empty folder."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.supervision import VIRTUAL_TIME
from tests.support.supervisor_bench import Models, configure, supervising


@pytest.fixture
def anyio_backend() -> Any:
    return VIRTUAL_TIME


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Models:
    """What the configuration holds whenever it is read; a test changes it."""
    configured: Models = {"a": {}, "b": {}}
    configure(monkeypatch, configured)
    return configured


@pytest.fixture
def bench(minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    return partial(supervising, minilm_folder, tmp_path)
