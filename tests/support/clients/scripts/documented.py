"""A block of docs/clients.md: leaves the vectors of its texts in `vectors`."""

from typing import Any

from serve import rows, serve


def run(code: str) -> list[list[float]]:
    names: dict[str, Any] = {}
    exec(compile(code, "docs/clients.md", "exec"), names)
    return rows(names["vectors"])


serve(run)
