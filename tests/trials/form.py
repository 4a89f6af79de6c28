"""Short trials for every run of the tests, long ones when VECD_SOAK is set, and how both report their figures."""

import json
import os
from typing import TypeVar

T = TypeVar("T")

LONG = bool(os.environ.get("VECD_SOAK"))


def pick(*, short: T, long: T) -> T:
    """What this run's form takes."""
    return long if LONG else short


def record(trial: str, **figures: object) -> None:
    """Print the figures of a trial, which `conftest` keeps with its outcome. Units stand in their names."""
    form = "long" if LONG else "short"
    print("RESULT " + json.dumps({"trial": trial, "form": form, **figures}), flush=True)
