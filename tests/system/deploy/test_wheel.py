"""The wheel, installed beside supervisord's package and run with a hostile PYTHONPATH: every command works.

supervisord's package is called `supervisor`, and a user may have a `workers.py` or a `gateway/` of their own.
"""

import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.serving import clean_environment, running_server

ROOT = Path(__file__).parents[3]
_TIMEOUT_S = 300
_HOSTILE = ("client", "gateway", "launch", "shm", "supervisor", "tests")


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A virtual environment with the wheel and supervisord; what they require comes from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=_TIMEOUT_S)
    try:
        subprocess.run([*pip, "download", "--no-deps", "-d", str(folder), *setuptools, "supervisor>=4.2"],
                       check=True, timeout=_TIMEOUT_S, capture_output=True)  # fmt: skip
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs a package index for supervisord and setuptools: {error.stderr[-200:]!r}")
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(source)], check=True, timeout=_TIMEOUT_S)
    wheels = [str(path) for pattern in ("vecd-*.whl", "supervisor-*") for path in folder.glob(pattern)]
    install = [*pip, "--python", str(venv / "bin" / "python"), "install", "--no-deps"]
    subprocess.run([*install, *wheels], check=True, timeout=_TIMEOUT_S)
    [packages] = (venv / "lib").glob("python*/site-packages")
    # As a site, because its own .pth files may name a torch elsewhere.
    (packages / "required.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return venv


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hostile")
    for name in _HOSTILE:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('the wrong package')\n")
    (folder / "workers.py").write_text("raise ImportError('the wrong module')\n")
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def server(environment: Path, hostile: dict[str, str]) -> Iterator[str]:
    with running_server(env=hostile, program=[str(environment / "bin" / "vecd")]) as running:
        yield running.url


def run(environment: Path, hostile: dict[str, str], folder: Path, *arguments: str) -> str:
    (folder / "tmp").mkdir(exist_ok=True)
    done = subprocess.run(
        [str(environment / "bin" / "vecd"), *arguments], cwd=folder, env=clean_environment(folder, hostile),
        capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_the_wheel_that_runs(environment: Path, hostile: dict[str, str], tmp_path: Path) -> None:
    code = "import vecd, supervisor; print(supervisor.__path__, vecd.__file__)"
    command = [str(environment / "bin" / "python"), "-c", code]
    done = subprocess.run(command, cwd=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count(str(environment)) == 2
    assert run(environment, hostile, tmp_path, "--version").startswith("vecd ")


def test_it_serves(server: str) -> None:
    response = httpx.post(f"{server}/v1/embeddings", json={"input": ["Hello, world"]}, timeout=60)
    assert response.status_code == 200
    assert len(response.json()["data"][0]["embedding"]) == 384


def test_it_embeds_a_file(environment: Path, hostile: dict[str, str], server: str, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    run(environment, hostile, tmp_path, "embed", "texts.txt", "-o", "vectors.npy", "--url", server)
    assert np.isfinite(np.load(tmp_path / "vectors.npy")).all()


def test_it_benches(environment: Path, hostile: dict[str, str], server: str, tmp_path: Path) -> None:
    flags = ["--url", server, "--clients", "2", "--warmup", "0", "--duration", "1"]
    assert run(environment, hostile, tmp_path, "bench", *flags)


def test_it_checks(environment: Path, hostile: dict[str, str], tmp_path: Path) -> None:
    assert run(environment, hostile, tmp_path, "check", "--quick", "--json")
