"""A block of docs/clients.md: leaves the vectors of its texts in `vectors`, or the places and scores of its documents
in `ranked`."""

from typing import Any

from serve import rows, serve


def run(code: str) -> list[list[float]]:
    return rows(_names_of(code)["vectors"])


def rank(code: str) -> list[tuple[int, float]]:
    return [(int(place), float(score)) for place, score in _names_of(code)["ranked"]]


def _names_of(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, "docs/clients.md", "exec"), names)
    return names


serve(run, rank)
