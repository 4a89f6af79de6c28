"""Prints the requirements of the lean binary, one a line: those of vecd without torch and transformers.

Called by `make binary-lean`, because pip has no way to leave out a dependency.
"""

import re
import tomllib
from pathlib import Path

_LEFT_OUT = {"torch", "transformers"}
_EXTRAS = ("binary", "cli", "otel")


def requirements(pyproject: str) -> list[str]:
    """Of the text of a pyproject.toml."""
    project = tomllib.loads(pyproject)["project"]
    found = [*project["dependencies"], *(one for extra in _EXTRAS for one in project["optional-dependencies"][extra])]
    return [one for one in found if re.split(r"[^\w.-]", one)[0] not in _LEFT_OUT]


if __name__ == "__main__":
    print("\n".join(requirements((Path(__file__).parents[2] / "pyproject.toml").read_text())))
