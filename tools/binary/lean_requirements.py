"""Prints the requirements of vecd without torch and transformers, one a line; arguments are the extras that count.

Called by `make binary-lean` and deploy/Dockerfile, because pip has no way to leave out a dependency.
"""

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

_LEFT_OUT = {"torch", "transformers"}


def requirements(pyproject: str, extras: Sequence[str]) -> list[str]:
    """Of the text of a pyproject.toml."""
    project = tomllib.loads(pyproject)["project"]
    found = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    return [one for one in found if re.split(r"[^\w.-]", one)[0] not in _LEFT_OUT]


if __name__ == "__main__":
    print("\n".join(requirements((Path(__file__).parents[2] / "pyproject.toml").read_text(), sys.argv[1:])))
