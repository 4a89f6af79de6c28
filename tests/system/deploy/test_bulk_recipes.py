"""The recipes of deploy/bulk run as they stand: the Slurm script, the Indexed Job's command, the Spark program.

No Slurm and no cluster: a loop sets the variables that they set, and the command that they start is real, with a real
server of the dummy engine. Spark itself runs where pyspark is installed.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from tests.support.serving import RunningServer, Server
from tests.support.shared_servers import DUMMY, shared_server
from tests.system.deploy.test_containers import image_variables, pod

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "deploy" / "bulk"
OWN_SERVER = ("--", *DUMMY)
NUM_SHARDS = 2
TIMEOUT_S = 120
TEXTS = {f"part-{n}": [f"text {n}.{m}" for m in range(20 + n)] for n in range(3)} | {"deep/er": ["one", "", "three"]}
"""By name of an input, its lines. An empty one is a bad row."""


@pytest.fixture(scope="module")
def server() -> RunningServer:
    return shared_server(*DUMMY)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with the inputs, and a manifest of them."""
    for name, lines in TEXTS.items():
        path = tmp_path / "in" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
    inputs = sorted(str(path) for path in (tmp_path / "in").rglob("*.txt"))
    (tmp_path / "manifest.txt").write_text("".join(f"{path}\n" for path in inputs))
    return tmp_path


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """For PATH: `vecd` of this environment, and a `scontrol` that notes down its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    write_program(folder / "vecd", f'exec {shlex.quote(sys.executable)} -m vecd "$@"')
    write_program(folder / "scontrol", f'echo "$@" >> {shlex.quote(str(tmp_path / "scontrol"))}')
    return folder


def write_program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def run_slurm(
    programs: Path, index: int, *words: str, num_tasks: int = NUM_SHARDS, **variables: str
) -> "subprocess.CompletedProcess[str]":
    told = {
        "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": str(index), "SLURM_ARRAY_TASK_COUNT": str(num_tasks),
        **variables,
    }  # fmt: skip
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **told}
    return subprocess.run(
        [RECIPES / "slurm.sh", *words], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def check_vectors(folder: Path, server: Server) -> None:
    """One .npy of each input, with the vectors that the server answers directly, and nothing unfinished."""
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    unfinished = [name for name in found if name.endswith((".part", ".journal"))]
    assert unfinished == []
    outputs = {path.stem: np.load(path) for path in folder.rglob("*.npy")}
    assert outputs.keys() == {Path(name).name for name in TEXTS}
    for name, lines in TEXTS.items():
        vectors, has_text = outputs[Path(name).name], np.array([bool(line) for line in lines])
        body = {"input": [line for line in lines if line], "encoding_format": "bytes"}
        direct = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=30).raise_for_status()
        np.testing.assert_array_equal(vectors[has_text].ravel(), np.frombuffer(direct.content, np.float32))
        assert np.isnan(vectors[~has_text]).all()


# --- Slurm ------------------------------------------------------------------------------------------------------


def test_the_slurm_script_is_a_script_with_directives_that_begin_at_0() -> None:
    script = RECIPES / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True, timeout=10)
    assert os.access(script, os.X_OK)
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", script.read_text(), re.MULTILINE))
    assert "requeue" in directives
    assert re.fullmatch(r"0-\d+", directives["array"]), "task I of N is shard I/N only in an array from 0"
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, script], check=True, timeout=60)


def test_tasks_of_the_array_embed_every_input_once(data: Path, programs: Path, server: Server) -> None:
    words = (str(data / "manifest.txt"), str(data / "out"))
    for index, on in enumerate((OWN_SERVER, ("--url", server.url))):
        done = run_slurm(programs, index, *words, *on)
        assert done.returncode == 0, done.stderr
    check_vectors(data / "out", server)
    times = {path: path.stat().st_mtime_ns for path in (data / "out").rglob("*.npy")}
    assert run_slurm(programs, 0, *words, num_tasks=1, NUM_SHARDS="1").returncode == 0
    assert {path: path.stat().st_mtime_ns for path in (data / "out").rglob("*.npy")} == times, "complete: skipped"
    assert not (data / "scontrol").exists()


def test_one_task_alone_keeps_its_shard(data: Path, programs: Path, server: Server) -> None:
    """As by `sbatch --array=1`, where Slurm's own count is 1."""
    words = (str(data / "manifest.txt"), str(data / "out"), "--url", server.url)
    assert run_slurm(programs, 1, *words, num_tasks=1).returncode == 2
    assert run_slurm(programs, 1, *words, num_tasks=1, NUM_SHARDS="2").returncode == 0
    assert len(list((data / "out").rglob("*.npy"))) == len(TEXTS) / 2


@pytest.mark.parametrize(
    ("status", "num_restarts", "is_repeated"),
    [(0, 0, False), (1, 0, True), (1, 4, True), (1, 5, False), (2, 0, False), (143, 0, False)],
)
def test_a_task_with_inputs_left_is_repeated(
    status: int, num_restarts: int, is_repeated: bool, tmp_path: Path, programs: Path
) -> None:
    write_program(programs / "vecd", f"exit {status}")
    done = run_slurm(programs, 3, "manifest", "out", SLURM_RESTART_COUNT=str(num_restarts))
    assert done.returncode == status
    log = tmp_path / "scontrol"
    assert (log.read_text() if log.exists() else "") == ("requeue 77_3\n" if is_repeated else "")


# --- Kubernetes -------------------------------------------------------------------------------------------------


def job() -> Any:
    return yaml.safe_load((RECIPES / "indexed-job.yaml").read_text())


def test_the_job_is_as_kubernetes_defines_it() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(job(), "1.37", strict=True)


def test_the_job_is_indexed_by_shards_and_repeats_what_a_repeat_can_mend() -> None:
    spec = job()["spec"]
    [container] = spec["template"]["spec"]["containers"]
    assert spec["completionMode"] == "Indexed"
    assert f"--shard=$(JOB_COMPLETION_INDEX)/{spec['completions']}" in container["args"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy requires it"
    assert spec["backoffLimitPerIndex"] > 0
    ignored, final = spec["podFailurePolicy"]["rules"]
    assert (ignored["action"], ignored["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert final["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}


def test_its_pods_have_the_rights_and_places_of_the_deployment_s() -> None:
    ours, theirs = job()["spec"]["template"]["spec"], pod()
    [container], [served] = ours["containers"], theirs["containers"]
    assert container["image"] == served["image"]
    assert container["securityContext"] == served["securityContext"]
    assert theirs["securityContext"].items() <= ours["securityContext"].items()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in ours["volumes"]}
    assert {"/cache", "/tmp"} <= {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_job_s_command_embeds_every_input_once(data: Path, server: Server) -> None:
    """With the variables of the image, whose own address must not be the server's."""
    [container] = job()["spec"]["template"]["spec"]["containers"]
    variables = {name: value for name, value in image_variables().items() if name.startswith("VECD_")}
    variables |= {each["name"]: each["value"] for each in container["env"]}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables, "VECD_CACHE_DIR": str(data / "cache")}
    for index, on in enumerate((DUMMY, ("--url", server.url))):
        words = [
            word.replace("/data/vectors", str(data / "out"))
            .replace("/data/", f"{data}/")
            .replace("$(JOB_COMPLETION_INDEX)/40", f"{index}/{NUM_SHARDS}")
            for word in container["args"]
        ]
        command = [sys.executable, "-m", "vecd", *(words if on == DUMMY else words[: words.index("--")]), *on]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr
    check_vectors(data / "out", server)


# --- Spark ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
def test_spark_embeds_every_row_once_and_goes_on_behind_the_groups_that_are_complete(
    tmp_path: Path, server: Server
) -> None:
    pytest.importorskip("pyspark")
    parquet = pytest.importorskip("pyarrow.parquet")
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for n in range(3):
        (source / f"{n}.jsonl").write_text("".join(f'{{"id": {m}, "text": "text {m}"}}\n' for m in range(n, 60, 3)))
    (source / "3.jsonl").write_text('{"id": 60, "text": " "}\n{"id": 61}\n')
    command = [
        sys.executable, str(RECIPES / "spark.py"), str(source), str(out), "--format", "json", "--schema",
        "id long, text string", "--files-per-group", "2", *OWN_SERVER,
    ]  # fmt: skip
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1", "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path),
    }  # fmt: skip
    for groups in (["000000", "000001"], ["000001"]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
        assert re.findall(r"group=(\d+): complete", done.stdout) == groups
        files = sorted(out.glob("group=*/*.parquet"))
        rows = [row for file in files for row in parquet.ParquetFile(file).read().to_pylist()]
        assert sorted(row["id"] for row in rows) == list(range(62))
        assert sorted(row["id"] for row in rows if row["embedding"] is None) == [60, 61]
        with_text = [row for row in rows if row["embedding"] is not None]
        body = {"input": [row["text"] for row in with_text], "encoding_format": "bytes"}
        direct = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=30).raise_for_status()
        vectors = np.array([row["embedding"] for row in with_text], np.float32)
        np.testing.assert_array_equal(vectors.ravel(), np.frombuffer(direct.content, np.float32))
        (out / "group=000001" / "_SUCCESS").unlink()  # as if the driver had died there
