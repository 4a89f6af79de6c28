"""No class of the product has the name of another: one word, one meaning.

What `import vecd` has is apart: its names are chosen for programs that know no other part of vecd.
"""

import ast
from collections import Counter
from pathlib import Path

import vecd

ROOT = Path(__file__).parents[2]
ROOMS = ("client", "gateway", "launch", "shm", "workers")


def test_every_public_class_name_is_there_once() -> None:
    files = [ROOT / "supervisor.py", *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
    names = Counter(
        node.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if not (path.parent.name == "sdk" and node.name in vecd.__all__)
    )
    assert len(names) > 100
    assert [name for name, num in names.items() if num > 1] == []
