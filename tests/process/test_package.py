"""The package `vecd`: one name for each module, and nothing of ours at the top of site-packages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {"client", "gateway", "launch", "model", "shm", "supervisor", "workers"}
# One in a string finds a room in the current folder, which PYTHONSAFEPATH takes out of the path.
_IMPORT = re.compile(rf"^\s*(?:from|import)\s+({'|'.join(sorted(ROOMS))})(?:\.|\s+import\b|\s*$)", re.MULTILINE)

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


@pytest.mark.full
def test_no_module_has_two_names_in_the_repositorys_root() -> None:
    command = [sys.executable, "-c", _LOAD_ALL, *ROOMS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", ["benchmarks", "tests", "tools", *sorted(ROOMS - {"supervisor"})])
def test_no_room_is_imported_by_its_folders_name(folder: str) -> None:
    """Nor in the programs of tests, which are strings."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert [path for path in paths if _IMPORT.search(path.read_text(encoding="utf-8"))] == []
