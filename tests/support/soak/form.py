"""Short trials for every run of the tests, long ones when VECD_SOAK is set, and how both report their figures."""

import json
import os
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")

LONG = bool(os.environ.get("VECD_SOAK"))
only_long = pytest.mark.skipif(not LONG, reason="takes long, and is in make soak only")
"""For tests whose subject others look at in every run, more briefly."""


def in_full(*cases: object) -> list[ParameterSet]:
    """These cases of a table are tried in `make test FULL=1` alone."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full) for case in cases]


def pick(*, short: T, long: T) -> T:
    """What this run's form takes."""
    return long if LONG else short


ENGINE = pick(short=("--engine", "dummy"), long=("--dtype", "float32"))
"""Flags of a server whose model does not matter to its trial."""


def record(trial: str, **figures: object) -> None:
    """Print the figures of a trial, which `conftest` keeps with its outcome. Units stand in their names."""
    form = "long" if LONG else "short"
    print("RESULT " + json.dumps({"trial": trial, "form": form, **figures}), flush=True)
