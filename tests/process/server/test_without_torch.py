"""An installation without torch and transformers: what it serves, and what it says of the rest."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.checkpoints import Checkpoints, worker_config
from tests.support.exports import export_of
from tests.support.score_checkpoints import logits_of, save_classifier
from tests.support.serving import Server, clean_environment, running_server
from tests.support.soak.form import only_long
from vecd.workers.batch import PackedBatch
from vecd.workers.config import REFERENCE_FILE
from vecd.workers.parity import digest_of, recall_reference, write_reference
from vecd.workers.select import compute_reference

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


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes that find neither torch nor transformers."""
    folder = tmp_path_factory.mktemp("hiding")
    (folder / "sitecustomize.py").write_text(_HIDING)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "VECD_CACHE_DIR": str(folder / "cache")}


def _run(env: dict[str, str], tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vecd", *arguments]
    environment = clean_environment(tmp_path, env)
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@dataclass(frozen=True)
class Served:
    server: Server
    folders: dict[str, Path]

    def worker(self, model: str) -> dict[str, Any]:
        [worker] = httpx.get(f"{self.server.url}/m/{model}/info", timeout=30).json()["workers"]
        return worker


@pytest.fixture(scope="module")
def served(
    checkpoint: Checkpoints,
    minilm_folder: Path,
    without_torch: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """Models whose vectors are known: the bundled one, an export and a cross-encoder that are refused until the
    reference model's are beside them; and one that is served without."""
    folder = tmp_path_factory.mktemp("served")
    plain = Path(shutil.copytree(checkpoint("bert"), folder / "plain"))
    exported = export_of(checkpoint("bert"), folder / "exported")
    ranking = save_classifier(folder / "ranking", "bert")
    for refused in exported, ranking:
        done = _run(without_torch, folder, "serve", str(refused), "--port", "0")
        assert done.returncode == 3
        last = done.stderr.splitlines()[-1]
        assert ("vecd check --remember" if refused is ranking else "or serve it uncompared with --unverified") in last
    for each in plain, ranking:
        config = worker_config(each)
        write_reference(compute_reference(config), digest_of(config.card), each / REFERENCE_FILE)
    shutil.copy(plain / REFERENCE_FILE, exported)
    tables = {
        "bundled": (minilm_folder, ""),
        "int8": (minilm_folder, 'dtype = "int8"'),
        "unknown": (checkpoint("bert"), "unverified = true"),
        "plain": (plain, ""),
        "exported": (exported, ""),
        "ranking": (ranking, ""),
    }
    path = folder / "vecd.toml"
    path.write_text("".join(f'[models.{name}]\nsource = "{of}"\n{more}\n' for name, (of, more) in tables.items()))
    with running_server("--workers", "1", "--config", str(path), env=without_torch) as server:
        yield Served(server, {name: of for name, (of, _) in tables.items()})


def test_the_bundled_model_is_served(served):
    [vector] = served.server.embed(["Hello, world"], model="bundled")
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    worker = served.worker("bundled")
    assert (worker["path"], worker["dtype"]) == ("lean", "float32")
    assert worker["agreement"]["max_abs_diff"] < 1e-6
    assert "cannot be imported" not in served.server.stderr
    warnings = [line for line in served.server.stderr.splitlines() if line.startswith("vecd: warning: ")]
    assert [line for line in warnings if not line.startswith("vecd: warning: unknown: ")] == []


def test_the_bundled_model_is_served_in_int8(served):
    """Or in float32, with the reason, where int8 is measured as slower."""
    [vector] = served.server.embed(["Hello, world"], model="int8")
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    worker = served.worker("int8")
    is_refused = "lean int8 is not used: it is" in served.server.stderr
    assert (worker["path"], worker["dtype"]) == ("lean", "float32" if is_refused else "int8")
    assert worker["agreement"]["min_cosine"] > 0.99


def test_an_unknown_model_is_served_unverified(served, without_torch, tmp_path):
    assert len(served.server.embed(["w3 w4"], model="unknown")[0]) == 32
    worker = served.worker("unknown")
    assert (worker["path"], worker["agreement"]) == ("lean", None)
    assert "unknown: --unverified: the vectors are not compared with the reference model's" in served.server.stderr
    # Not remembered: otherwise the next start would need no flag.
    done = _run(without_torch, tmp_path, "serve", str(served.folders["unknown"]), "--port", "0")
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert "vecd check --remember" in last
    assert "--unverified" in last
    assert "Traceback" not in done.stderr


def test_an_export_is_compared_with_the_vectors_of_its_model(served):
    vectors = {}
    for model in "exported", "plain":
        worker = served.worker(model)
        vectors[worker["path"]] = np.array(served.server.embed(["w3 w4 w5", "w7", "w9 w9 w9 w9"], model=model))
        assert worker["agreement"]["max_abs_diff"] < 1e-5
    np.testing.assert_allclose(vectors["export"], vectors["lean"], atol=1e-6, rtol=0)


@pytest.mark.full
def test_the_vectors_of_a_model_are_written_beside_it_and_an_export_has_none(checkpoint, tmp_path):
    exported = export_of(checkpoint("bert"), tmp_path / "exported")
    plain = Path(shutil.copytree(checkpoint("bert"), tmp_path / "plain"))
    for folder, flag in (exported, "--unverified"), (plain, "--remember"):
        done = _run({"VECD_CACHE_DIR": str(tmp_path / "other")}, tmp_path, "check", str(folder), "--quick", flag)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("vecd serve needs --unverified" in done.stdout) == (folder is exported)
    assert recall_reference(worker_config(plain)) is not None


def test_a_cross_encoder_with_remembered_scores_is_served(served):
    """With the scores of transformers' class, also of a pair's second part."""
    batch = PackedBatch(
        np.array([6, 7], dtype=np.int32),
        np.array([2, 8, 3, 9, 10, 3, 2, 8, 3, 11, 12, 13, 3], dtype=np.int32),
        borders=np.array([3, 3], dtype=np.int32),
    )
    worker = served.worker("ranking")
    assert (worker["path"], worker["dtype"]) == ("lean", "float32")
    assert worker["agreement"]["max_abs_diff"] < 1e-5
    asked = {"query": "w8", "texts": ["w9 w10", "w11 w12 w13"], "raw_scores": True}
    response = httpx.post(f"{served.server.url}/m/ranking/rerank", json=asked).raise_for_status()
    found = {row["index"]: row["score"] for row in response.json()}
    expected = logits_of(served.folders["ranking"], batch)[:, 0]
    np.testing.assert_allclose([found[0], found[1]], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("check", "--quick"), 2),
        (("serve", "--dtype", "bfloat16"), 2),
        (("serve", "gpt2"), 3),
        (("serve", "tokenizer"), 3),
    ],
)
def test_what_needs_torch_is_refused_in_a_line(arguments, status, checkpoint, minilm_folder, without_torch, tmp_path):
    if "gpt2" in arguments:
        arguments = ("serve", str(checkpoint("gpt2")))
    elif "tokenizer" in arguments:
        folder = tmp_path / "slow"
        folder.mkdir()
        for path in minilm_folder.iterdir():
            if path.name != "tokenizer.json":
                (folder / path.name).symlink_to(path)
        arguments = ("serve", str(folder))
    done = _run({**without_torch, "VECD_PORT": "0"}, tmp_path, *arguments)
    assert done.returncode == status, done.stderr
    [line] = done.stderr.splitlines()
    assert "needs torch" in line


@only_long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # also the stored one: no float32 vectors are computed yet
def test_a_model_with_remembered_vectors_is_served(dtype, checkpoint, without_torch, tmp_path):
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
