"""Short trials for every run of the tests, long ones when VECD_SOAK is set, and how both report their figures."""

import json
import os
from typing import TypeVar

import pytest

T = TypeVar("T")

LONG = bool(os.environ.get("VECD_SOAK"))


only_long = pytest.mark.skipif(not LONG, reason="takes long, and is in make soak only")
"""For tests whose subject others look at in every run, more briefly."""


def pick(*, short: T, long: T) -> T:
    """What this run's form takes."""
    return long if LONG else short


def record(trial: str, **figures: object) -> None:
    """Print the figures of a trial, which `conftest` keeps with its outcome. Units stand in their names."""
    form = "long" if LONG else "short"
    print("RESULT " + json.dumps({"trial": trial, "form": form, **figures}), flush=True)
