"""No circle of files: imports for types alone and within functions count, too. No class with the name of another."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import vecd

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "launch", "workers", "model", "shm", "client", "vecd/base")


def all_modules() -> dict[str, Path]:
    """Name → file. A package has the name of its folder."""
    found = {"vecd.supervisor": ROOT / "supervisor.py"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[1:] if parts[0] == "vecd" else parts
            found[".".join(("vecd", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


def imports_in(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[str, str | None]]:
    """Each import anywhere in a file: the module that is named, and what is taken from it; None for all of it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            own = module.split(".") if is_package else module.split(".")[:-1]
            base = own[: len(own) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((name, alias.name) for alias in node.names)


def graph_of(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for name, taken in imports_in(path.read_text(), module, is_package=path.name == "__init__.py"):
            submodule = f"{name}.{taken}"
            target = submodule if submodule in modules else name
            if target in modules and target != module:
                graph[module].add(target)
    return graph


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_circle_of_files():
    graph = graph_of(all_modules())
    assert len(graph) > 150
    assert sum(map(len, graph.values())) > 600, "the imports between the files are seen"
    assert circle_in(graph) == []


def test_every_kind_of_import_is_seen():
    source = """
from typing import TYPE_CHECKING
import vecd.a.b
from vecd.a import c, d
from . import e
from .f import g
if TYPE_CHECKING:
    from vecd.h import i
def later():
    from vecd.j import k
"""
    seen = set(imports_in(source, "vecd.a.here"))
    assert seen - {("typing", "TYPE_CHECKING")} == {
        ("vecd.a.b", None), ("vecd.a", "c"), ("vecd.a", "d"), ("vecd.a", "e"), ("vecd.a.f", "g"), ("vecd.h", "i"),
        ("vecd.j", "k"),
    }  # fmt: skip


# --- names ----------------------------------------------------------------------------------------------------------


def test_every_public_class_name_is_there_once() -> None:
    files = [ROOT / "supervisor.py", *(path for room in PACKAGES for path in (ROOT / room).rglob("*.py"))]
    names = Counter(
        node.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if not (path.parent.name == "client" and node.name in vecd.__all__)
    )
    assert len(names) > 100
    assert [name for name, num in names.items() if num > 1] == []
