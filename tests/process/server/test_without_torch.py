"""An installation without torch and transformers: what it serves, and what it says of the rest."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.checkpoints import Checkpoints, worker_config
from tests.support.exports import export_of
from tests.support.score_checkpoints import logits_of, save_classifier
from tests.support.serving import clean_environment, running_server
from tests.support.soak.form import only_long
from vecd.workers.config import REFERENCE_FILE
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.references import digest_of, write_reference
from vecd.workers.engines.selection import compute_reference

# Every process that Python starts imports a module of this name, if it finds one.
_HIDING = """
import sys
from importlib.machinery import PathFinder

HIDDEN = ("torch", "transformers", "sentence_transformers")

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname in HIDDEN else PathFinder.find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, *args, **kwargs):
        found = PathFinder.find_distributions(*args, **kwargs)
        return (one for one in found if one.metadata["Name"].lower().replace("-", "_") not in HIDDEN)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp)


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that find neither torch nor transformers."""
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding/sitecustomize.py").write_text(_HIDING)
    path = os.pathsep.join([str(tmp_path / "hiding"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "VECD_CACHE_DIR": str(tmp_path / "cache")}


def _run(env: dict[str, str], tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vecd", *arguments]
    environment = clean_environment(tmp_path, env)
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_neither_package_is_found(without_torch: dict[str, str], tmp_path: Path) -> None:
    program = (
        "import importlib.metadata, vecd.workers.installed as installed\nassert not installed.has_torch()\n"
        "for name in ('torch', 'transformers'):\n"
        "    try: importlib.metadata.version(name)\n"
        "    except importlib.metadata.PackageNotFoundError: print('missing')"
    )
    environment = clean_environment(tmp_path, without_torch)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["missing", "missing"]


def test_the_bundled_model_is_served(without_torch: dict[str, str]) -> None:
    with running_server("--workers", "1", env=without_torch) as server:
        [vector] = server.embed(["Hello, world"])
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
        [worker] = server.info()["workers"]
        assert (worker["path"], worker["dtype"]) == ("lean", "float32")
        assert worker["agreement"]["max_abs_diff"] < 1e-6
        assert "cannot be imported" not in server.stderr
        assert "warning" not in server.stderr.lower()


def test_the_bundled_model_is_served_in_int8(without_torch: dict[str, str]) -> None:
    """Or in float32, with the reason, where int8 is measured as slower."""
    with running_server("--workers", "1", "--dtype", "int8", env=without_torch) as server:
        [vector] = server.embed(["Hello, world"])
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
        [worker] = server.info()["workers"]
        is_refused = "lean int8 is not used: it is" in server.stderr
        assert (worker["path"], worker["dtype"]) == ("lean", "float32" if is_refused else "int8")
        assert worker["agreement"]["min_cosine"] > 0.99
        assert "cannot be imported" not in server.stderr


def test_an_unknown_model_is_refused_in_a_line(
    checkpoint: Checkpoints, without_torch: dict[str, str], tmp_path: Path
) -> None:
    done = _run(without_torch, tmp_path, "serve", str(checkpoint("bert")), "--port", "0")
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert "vecd check --remember" in last
    assert "--unverified" in last
    assert "Traceback" not in done.stderr


def test_an_unknown_model_is_served_unverified(
    checkpoint: Checkpoints, without_torch: dict[str, str], tmp_path: Path
) -> None:
    with running_server(str(checkpoint("bert")), "--workers", "1", "--unverified", env=without_torch) as server:
        assert len(server.embed(["w3 w4"])[0]) == 32
        [worker] = server.info()["workers"]
        assert (worker["path"], worker["agreement"]) == ("lean", None)
        assert "lean, float32, not compared with the reference model" in server.stderr
        assert "the vectors are not compared with the reference model's" in server.stderr
    # Not remembered: otherwise the next start would need no flag.
    assert _run(without_torch, tmp_path, "serve", str(checkpoint("bert")), "--port", "0").returncode == 3


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (("--dtype", "bfloat16"), 2),
        (("--device", "cuda"), 2),
        (("--engine", "fused"), 2),
        (("--engine", "padded"), 2),
        (("gpt2",), 3),
        (("tokenizer",), 3),
    ],
)
def test_what_needs_torch_is_refused_in_a_line(
    flags: tuple[str, ...],
    status: int,
    checkpoint: Checkpoints,
    minilm_folder: Path,
    without_torch: dict[str, str],
    tmp_path: Path,
) -> None:
    if flags == ("gpt2",):
        flags = (str(checkpoint("gpt2")),)
    elif flags == ("tokenizer",):
        folder = tmp_path / "slow"
        folder.mkdir()
        for path in minilm_folder.iterdir():
            if path.name != "tokenizer.json":
                (folder / path.name).symlink_to(path)
        flags = (str(folder),)
    done = _run(without_torch, tmp_path, "serve", *flags, "--port", "0")
    assert done.returncode == status, done.stderr
    [line] = done.stderr.splitlines()
    assert "needs torch and transformers (not installed" in line


def test_check_says_what_it_needs(without_torch: dict[str, str], tmp_path: Path) -> None:
    done = _run(without_torch, tmp_path, "check", "--quick")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "needs torch" in line


def test_an_export_is_compared_with_the_vectors_of_its_model(
    checkpoint: Checkpoints, without_torch: dict[str, str], tmp_path: Path
) -> None:
    exported = export_of(checkpoint("bert"), tmp_path / "exported")
    done = _run(without_torch, tmp_path, "serve", str(exported), "--port", "0")
    assert done.returncode == 3
    assert "or serve it uncompared with --unverified" in done.stderr.splitlines()[-1]
    plain = Path(shutil.copytree(checkpoint("bert"), tmp_path / "plain"))
    for folder, flag in (exported, "--unverified"), (plain, "--remember"):
        done = _run({"VECD_CACHE_DIR": str(tmp_path / "other")}, tmp_path, "check", str(folder), "--quick", flag)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("vecd serve needs --unverified" in done.stdout) == (folder is exported)
    shutil.copy(plain / REFERENCE_FILE, exported)
    vectors = {}
    for folder in exported, plain:
        with running_server(str(folder), "--workers", "1", env=without_torch) as server:
            [worker] = server.info()["workers"]
            vectors[worker["path"]] = np.array(server.embed(["w3 w4 w5", "w7", "w9 w9 w9 w9"]))
            assert worker["agreement"]["max_abs_diff"] < 1e-5
    np.testing.assert_allclose(vectors["export"], vectors["lean"], atol=1e-6, rtol=0)


@only_long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # also the stored one: no float32 vectors are computed yet
def test_a_model_with_remembered_vectors_is_served(
    dtype: str,
    checkpoint: Checkpoints,
    without_torch: dict[str, str],
    tmp_path: Path,
) -> None:
    """`vecd check --remember` where torch is, then the folder is all that a server without torch needs."""
    folder = Path(shutil.copytree(checkpoint("bert", stored=dtype), tmp_path / "model"))
    env = {"VECD_CACHE_DIR": str(tmp_path / "elsewhere")}
    done = _run(env, tmp_path, "check", str(folder), "--quick", "--remember", "--dtype", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    written = f"reference vectors: written to {folder / REFERENCE_FILE}"
    assert "".join(written.split()) in "".join(done.stdout.split()), "long lines are wrapped"
    assert (folder / REFERENCE_FILE).stat().st_mode & 0o777 == 0o644
    with running_server(str(folder), "--workers", "1", env=without_torch) as server:
        [worker] = server.info()["workers"]
        assert (worker["path"], worker["agreement"]["max_abs_diff"] < 1e-5) == ("lean", True)


def test_a_cross_encoder_with_remembered_scores_is_served(without_torch: dict[str, str], tmp_path: Path) -> None:
    """With the scores of transformers' class, also of a pair's second part."""
    folder = save_classifier(tmp_path / "model", "bert")
    batch = PackedBatch(
        np.array([6, 7], dtype=np.int32),
        np.array([2, 8, 3, 9, 10, 3, 2, 8, 3, 11, 12, 13, 3], dtype=np.int32),
        borders=np.array([3, 3], dtype=np.int32),
    )
    done = _run(without_torch, tmp_path, "serve", str(folder), "--port", "0")
    assert done.returncode == 3
    assert "vecd check --remember" in done.stderr.splitlines()[-1]
    config = worker_config(folder)
    write_reference(compute_reference(config), digest_of(config.card), folder / REFERENCE_FILE)
    with running_server(str(folder), "--workers", "1", env=without_torch) as server:
        [worker] = server.info()["workers"]
        assert (worker["path"], worker["dtype"], worker["agreement"]["max_abs_diff"] < 1e-5) == (
            "lean",
            "float32",
            True,
        )
        asked = {"query": "w8", "texts": ["w9 w10", "w11 w12 w13"], "raw_scores": True}
        response = httpx.post(f"{server.url}/rerank", json=asked)
        response.raise_for_status()
        found = {row["index"]: row["score"] for row in response.json()}
        np.testing.assert_allclose([found[0], found[1]], logits_of(folder, batch)[:, 0], atol=1e-5, rtol=0)
