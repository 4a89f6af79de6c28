"""The lean binary has all that vecd depends on, but for torch and transformers."""

import tomllib
from pathlib import Path

from tools.binary.lean_requirements import requirements

PYPROJECT = (Path(__file__).parents[3] / "pyproject.toml").read_text()


def test_two_dependencies_are_left_out() -> None:
    found = set(requirements(PYPROJECT, ["binary", "cli"]))
    missing = set(tomllib.loads(PYPROJECT)["project"]["dependencies"]) - found
    assert sorted(one.partition(">")[0] for one in missing) == ["torch", "transformers"]
    assert {"pyinstaller>=6.0", "rich>=13.7"} <= found
    assert "pyinstaller>=6.0" not in requirements(PYPROJECT, ["cli"])
