"""The install that the Makefile makes: which Python it takes, and what `import vecd` finds beside a checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_vecd_is_found_in_the_folder_that_one_cloned_into(tmp_path: Path) -> None:
    """By an editable install of a checkout called vecd, in an environment that has pip's build packages alone."""
    checkout, target = tmp_path / "vecd", tmp_path / "installed"
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "docs")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=skipped)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", target, "--editable", checkout], check=True, timeout=200)
    # As the interpreter reads the .pth files of site-packages: behind the current folder.
    code = f"import site; site.addsitedir({str(target)!r}); import vecd; vecd.Client; print(vecd.__file__)"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    packages = [path for path in sys.path if path.endswith("site-packages")]
    paths = f"import sys; sys.path += {packages!r}; "  # what vecd requires, without this checkout's own .pth file
    command = [sys.executable, "-S", "-c", paths + code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == checkout / "vecd" / "__init__.py"


def python_of(folder: Path, version: str) -> Path:
    """A stand-in for a Python of this version, which makes environments that have nothing but a Python."""
    path = folder / f"python{version}"
    numbers = version.replace(".", ", ")
    path.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -c ]; then exec {sys.executable} -c "import sys; sys.version_info = ({numbers}); $2"; fi\n'
        'if [ "$2" = venv ]; then\n'
        f'mkdir -p "$3/bin"; printf "#!/bin/sh\\n" > "$3/bin/python"; chmod +x "$3/bin/python"\n'
        f'cp "$3/bin/python" "$3/bin/python{version}"; cp "$3/bin/python" "$3/bin/vecd"; fi\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(checkout: Path, python: Path) -> "subprocess.CompletedProcess[str]":
    command = ["make", "serve", f"PYTHON={python}"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False)


def test_a_python_that_is_too_old_is_named_before_anything_is_made(checkout: Path) -> None:
    old = python_of(checkout, "3.10")
    done = make(checkout, old)
    assert done.returncode == 2
    expected = f"vecd needs Python 3.11 or newer, and {old} is 3.10; name another one: make serve PYTHON=python3.12"
    assert done.stderr.splitlines()[0] == expected
    assert not (checkout / ".venv").exists()


def test_an_environment_of_another_python_is_made_anew(checkout: Path) -> None:
    bin_folder = checkout / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("python", "python3.9"):
        (bin_folder / name).write_text("#!/bin/sh\nexit 1\n")
        (bin_folder / name).chmod(0o755)
    done = make(checkout, python_of(checkout, "3.12"))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in bin_folder.iterdir()) == ["python", "python3.12", "vecd"]
    (bin_folder / "mine").touch()
    (checkout / ".venv" / ".serve").unlink()
    assert make(checkout, python_of(checkout, "3.12")).returncode == 0
    assert (bin_folder / "mine").exists(), "one of the same Python is kept"
