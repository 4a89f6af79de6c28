"""The package `vecd`: one name for each module, and nothing of ours at the top of site-packages."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {"client", "gateway", "launch", "shm", "supervisor", "workers"}
# Programs of tests are strings. They find a room in the current folder, which PYTHONSAFEPATH takes out of the path.
_IMPORT_IN_TEXT = re.compile(rf"^\s*(?:from|import)\s+({'|'.join(sorted(ROOMS))})(?:\.|\s+import\b|\s*$)", re.MULTILINE)

_LOAD_ALL = """
import importlib, os, pkgutil, sys
import vecd
names = ["vecd"] + [m.name for m in pkgutil.walk_packages(vecd.__path__, "vecd.") if m.name != "vecd.__main__"]
for name in names:
    # It imports Ray, which is in an environment of its own.
    if ".data" not in name and name != "vecd.client.ray.serve":
        importlib.import_module(name)
assert len(names) > 150, names
files = {}
for name, module in list(sys.modules.items()):
    if getattr(module, "__file__", None):
        files.setdefault(os.path.realpath(module.__file__), []).append(name)
twice = {file: names for file, names in files.items() if len(names) > 1 and os.getcwd() in file and ".venv" not in file}
assert not twice, twice
assert not set(sys.modules) & set(sys.argv[1:]), "imported by its folder's name"
"""


def test_no_module_has_two_names_in_the_repositorys_root() -> None:
    command = [sys.executable, "-c", _LOAD_ALL, *ROOMS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", ["benchmarks", "client", "gateway", "launch", "shm", "tests", "tools", "workers"])
def test_no_room_is_imported_by_its_folders_name(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                modules += _IMPORT_IN_TEXT.findall(node.value)
            found += [f"{path}: {module}" for module in modules if module.partition(".")[0] in ROOMS]
    assert not found
