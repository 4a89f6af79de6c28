"""The wheel, installed beside supervisord's package and run with a hostile PYTHONPATH: every command works.

supervisord's package is called `supervisor`, and a user may have a `workers.py` or a `gateway/` of their own.
"""

import ast
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.serving import clean_environment, running_server
from tools.size import PRODUCT

ROOT = Path(__file__).parents[3]
_TIMEOUT_S = 300
_HOSTILE = ("client", "gateway", "launch", "shm", "supervisor", "tests", "workers")
_NOT_OF_A_WHEEL = (".*", "build", "dist", "*.egg-info", "tests", "docs", "benchmarks")
_BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and a package of supervisord's name; what the wheel requires comes from
    this one, and so does what builds it."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source, venv = folder / "source", folder / "venv"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_OF_A_WHEEL))
    subprocess.run([sys.executable, "-c", _BUILD, folder], cwd=source, check=True, timeout=_TIMEOUT_S)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=_TIMEOUT_S)
    [wheel], [packages] = folder.glob("vecd-*.whl"), (venv / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", f"{venv}/bin/python", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True, timeout=_TIMEOUT_S)
    (packages / "supervisor").mkdir()
    (packages / "supervisor" / "__init__.py").write_text("raise ImportError('the wrong package')\n")
    # As a site, because its own .pth files may name a torch elsewhere.
    (packages / "required.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return venv


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hostile")
    for name in _HOSTILE:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('the wrong package')\n")
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def server(environment: Path, hostile: dict[str, str]) -> Iterator[str]:
    flags = ("--engine", "lean", "--dtype", "float32", "--workers", "1")
    with running_server(*flags, env=hostile, program=[str(environment / "bin" / "vecd")]) as running:
        yield running.url


@pytest.fixture
def run(environment: Path, hostile: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    def run_program(program: str, *arguments: str) -> str:
        (tmp_path / "tmp").mkdir(exist_ok=True)
        done = subprocess.run(
            [str(environment / "bin" / program), *arguments],
            cwd=tmp_path,
            env=clean_environment(tmp_path, hostile),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_program


def test_no_module_imports_what_may_be_another_s() -> None:
    """But by its full name, in `vecd`."""
    sources = [path for folder in PRODUCT for path in ([ROOT / folder, *(ROOT / folder).rglob("*.py")])]
    for path in [path for path in sources if path.suffix == ".py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [name for name in names if name.partition(".")[0] in _HOSTILE], path


def test_it_serves(run: Callable[..., str], server: str) -> None:
    assert run("vecd", "--version").startswith("vecd ")
    response = httpx.post(f"{server}/v1/embeddings", json={"input": ["Hello, world"]}, timeout=60)
    assert response.status_code == 200
    assert len(response.json()["data"][0]["embedding"]) == 384


def test_commands_that_ask_a_server(run: Callable[..., str], server: str, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    run("vecd", "embed", "texts.txt", "-o", "vectors.npy", "--url", server)
    assert np.isfinite(np.load(tmp_path / "vectors.npy")).all()
    assert run("vecd", "bench", "--url", server, "--clients", "2", "--warmup", "0", "--duration", "1")
    assert run("vecd", "check", "--fleet", server, server.replace("127.0.0.1", "localhost"))


@pytest.mark.full
def test_it_checks(run: Callable[..., str]) -> None:
    assert run("vecd", "check", "--quick", "--json")
