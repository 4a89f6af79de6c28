"""No circle of files: imports for types alone and imports within functions count, too."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "launch", "workers", "shm", "client")


def all_modules() -> dict[str, Path]:
    """Name → file. A package has the name of its folder."""
    found = {"vecd.supervisor": ROOT / "supervisor.py"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
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


def circles_in(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module. Source: Tarjan, "Depth-first search and linear graph
    algorithms", SIAM J. Comput. 1 (1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in graph[module]:
            if target not in order:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], order[target])
        if lowest[module] == order[module]:
            component: list[str] = []
            while not component or component[-1] != module:
                component.append(stack.pop())
            if len(component) > 1:
                circles.append(sorted(component))

    for module in graph:
        if module not in order:
            visit(module)
    return circles


def test_no_circle_of_files():
    graph = graph_of(all_modules())
    assert len(graph) > 200
    assert sum(map(len, graph.values())) > 600, "the imports between the files are seen"
    assert circles_in(graph) == []


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


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f", "a"}}
    assert sorted(circles_in(graph)) == [["a", "b", "c"], ["f", "g"]]
