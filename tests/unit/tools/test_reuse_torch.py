"""Which torch an environment gets from the Python that it was made from, played with a Python's packages of files."""

import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from tools.reuse_torch import FOLDER, main

_CONSTRAINTS = "tomli==1.0\ntorch==2.13.0\ntqdm==4.70.1\n"


def install(place: Path, name: str, version: str, *files: str) -> None:
    """As pip leaves it: the files, and what is recorded of them."""
    about = f"{name}-{version}.dist-info"
    for file in (f"{about}/METADATA", *files):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (place / about / "RECORD").write_text("".join(f"{file},,\n" for file in (f"{about}/METADATA", *files)))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this Python has its packages, before all others. Its torch can be imported."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    made = tmp_path / "python" / "site-packages"
    made.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(made))
    return made


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Of the environment."""
    version = f"python{sysconfig.get_python_version()}{sys.abiflags}"
    made = tmp_path / "environment" / "lib" / version / "site-packages"
    made.mkdir(parents=True)
    return made


def reused(tmp_path: Path, packages: Path) -> set[str] | None:
    """The names that the environment finds in its additional folder; None if it has none."""
    (tmp_path / "constraints.txt").write_text(_CONSTRAINTS)
    main(tmp_path / "environment", tmp_path / "constraints.txt")
    folder, pth = tmp_path / "environment" / FOLDER, packages / f"{FOLDER}.pth"
    assert folder.exists() == pth.exists()
    if not pth.exists():
        return None
    assert pth.read_text() == f"{folder}\n"
    return {path.name for path in folder.iterdir() if path.exists()}


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.0+cu130"])
def test_the_pinned_torch_is_used_with_its_libraries_and_nothing_else(
    version: str, place: Path, packages: Path, tmp_path: Path
) -> None:
    install(place, "torch", version, "torch/__init__.py", "torchgen/model.py", "../../bin/torchrun")
    install(place, "nvidia_cublas", "13.1", "nvidia/cu13/lib/libcublas.so")
    install(place, "triton", "3.7.1", "triton/__init__.py")
    install(place, "torchvision", "0.28.0", "torchvision/__init__.py")
    install(place, "pytest_surprise", "1.0", "pytest_surprise.py")
    assert reused(tmp_path, packages) == {
        *(f"torch-{version}.dist-info", "nvidia_cublas-13.1.dist-info", "triton-3.7.1.dist-info"),
        *("torch", "torchgen", "nvidia", "triton"),
    }


@pytest.mark.parametrize("version", ["2.13.0.dev1", "2.13.01"])
def test_another_version_is_not_used(version: str, place: Path, packages: Path, tmp_path: Path) -> None:
    install(place, "torch", version, "torch/__init__.py")
    assert reused(tmp_path, packages) is None


def test_a_torch_that_cannot_be_imported_is_not_used(
    place: Path, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(place, "torch", "2.13.0", "torch/__init__.py")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert reused(tmp_path, packages) is None


def test_an_environment_of_another_python_or_with_a_torch_of_its_own_gets_none(
    place: Path, packages: Path, tmp_path: Path
) -> None:
    install(place, "torch", "2.13.0", "torch/__init__.py")
    (packages / "torch").mkdir()
    assert reused(tmp_path, packages) is None
    packages.parent.rename(packages.parents[1] / "python3.1")
    assert reused(tmp_path, packages) is None
