"""Plans of the dummy engine, for the pools of the supervisor."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import load_settings


@pytest.fixture
def planned(minilm_folder: Path) -> Iterator[Callable[..., Plan]]:
    """Makes a plan from flags."""
    plans: list[Plan] = []

    def plan(*flags: str) -> Plan:
        plans.append(made := make_plan(load_settings([str(minilm_folder), "--engine", "dummy", *flags])))
        return made

    yield plan
    for made in plans:
        made.close()


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    """A reload sets the level of the root logger."""
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)
