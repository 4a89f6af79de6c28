"""The rooms of workers/: which may import torch, and which may import which. Function-level and type-only imports count
for the order of rooms; only imports at module level load torch."""

import ast
from collections.abc import Iterator
from pathlib import Path

import vecd.workers

ROOT = Path(vecd.workers.__file__).parent
ROOMS = ("families", "engines", "process", "check")
"""Lowest first. A file imports only from its own room, from rooms before it, and from the files beside the rooms."""


def imports(tree: ast.AST, nodes: list[ast.stmt] | None = None) -> Iterator[str]:
    for node in ast.walk(tree) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_only_two_rooms_import_torch_at_module_level() -> None:
    found = set()
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        if any(name.split(".")[0] == "torch" for name in imports(tree, tree.body)):
            found.add(path.relative_to(ROOT).parent.as_posix())
    assert found == {"engines/torch", "check"}


def test_rooms_import_only_from_rooms_below() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0]
        floor = ROOMS.index(room) if room in ROOMS else -1
        for name in imports(ast.parse(path.read_text())):
            parts = name.split(".")
            target = parts[2] if parts[:2] == ["vecd", "workers"] and len(parts) > 2 else ""
            if target in ROOMS and ROOMS.index(target) > floor:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []
