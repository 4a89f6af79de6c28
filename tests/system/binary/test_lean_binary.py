"""The binary of `make binary-lean`: what it serves without torch, and what it refuses.

It runs as the larger one does in `test_binary.py`. `make test-binary` builds it first, and alone runs this.
"""

import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from backports import zstd

from tests.support.binary import DIST, FOLDER, foreign_libraries, in_room, make_room, run
from tests.support.checkpoints import Checkpoints
from tests.support.serving import Server, running_server

pytestmark = pytest.mark.skipif(not os.environ.get("VECD_BINARY"), reason="builds the binary first: make test-binary")

BINARY = DIST / "lean" / "vecd"
WITHOUT_MODEL = "opt/without-model/vecd"
MAX_BYTES = 285 << 20
MAX_BYTES_WITHOUT_MODEL = 190 << 20
TEXTS = ["Hello, world", "Ünïcödé 日本 🙂", "a longer text " * 60]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    """A file system with the binary, the one in the archive without a model, and models: one that it knows, one that it
    does not know, one of an architecture without a lean engine, one without tokenizer.json."""
    root = make_room(tmp_path_factory.mktemp("room"), BINARY)
    [archive] = BINARY.parent.glob("vecd-lean-*-without-model.tar.zst")
    with zstd.open(archive, "rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
        tar.extractall(root / Path(WITHOUT_MODEL).parent, filter="data")
    checkpoint = Checkpoints(tmp_path_factory.mktemp)
    shutil.copytree(minilm_folder, root / "opt/known")
    shutil.copytree(checkpoint("bert"), root / "opt/unknown")
    shutil.copytree(checkpoint("gpt2"), root / "opt/gpt2")
    shutil.copytree(minilm_folder, root / "opt/slow", ignore=shutil.ignore_patterns("tokenizer.json"))
    return root


@pytest.fixture(scope="module")
def binary(room: Path) -> Iterator[Server]:
    env = {"VECD_CACHE_DIR": str(room / "cache")}  # for the fixture, which searches it; not for the server
    with running_server("--workers", "1", "--cache-dir", "/cache", env=env, program=in_room(room)) as server:
        yield server


def test_it_embeds_as_the_reference_model(binary: Server) -> None:
    with running_server("--engine", "padded", "--dtype", "float32", "--workers", "1") as reference:
        expected = np.array(reference.embed(TEXTS), np.float32)
    np.testing.assert_allclose(np.array(binary.embed(TEXTS), np.float32), expected, atol=1e-5)
    [worker] = binary.info()["workers"]
    assert (worker["path"], worker["dtype"]) == ("lean", "float32")
    assert worker["agreement"]["max_abs_diff"] < 1e-6


def test_nothing_is_loaded_from_outside_but_libc(binary: Server) -> None:
    for process in binary.processes():
        assert foreign_libraries(process) == [], process


def test_it_draws_and_measures_a_server(binary: Server, room: Path) -> None:
    shown = run(room, "top", "--url", binary.url, "--once", "--interval", "0.5")
    assert shown.returncode == 0, shown.stderr
    assert "all-MiniLM-L6-v2" in shown.stdout
    measured = run(room, "bench", "--url", binary.url, "--requests", "20", "--clients", "2", "--warmup", "0.1")
    assert measured.returncode == 0, measured.stderr


def test_its_service_runs_it(room: Path) -> None:
    shown = run(room, "install-service", "--print")
    assert shown.returncode == 0, shown.stderr
    assert f'ExecStart="/{FOLDER}/vecd" serve --config /etc/vecd.toml\n' in shown.stdout


def test_a_model_without_reference_vectors_is_refused_in_a_line(room: Path) -> None:
    done = run(room, "serve", "/opt/unknown", "--port", "0", "--cache-dir", "/cache")
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert "vecd check --remember" in last
    assert "--unverified" in last
    assert "Traceback" not in done.stderr


def test_it_is_served_unverified(room: Path) -> None:
    flags = ("/opt/unknown", "--workers", "1", "--unverified", "--cache-dir", "/cache")
    with running_server(*flags, program=in_room(room)) as server:
        assert len(server.embed("w3 w4")[0]) == 32
        [worker] = server.info()["workers"]
        assert (worker["path"], worker["agreement"]) == ("lean", None)
        assert "the vectors are not compared with the reference model's" in server.stderr


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("serve", "--dtype", "bfloat16"), 2),
        (("serve", "--device", "cuda"), 2),
        (("serve", "--engine", "fused"), 2),
        (("serve", "/opt/gpt2"), 3),
        (("serve", "/opt/slow"), 3),
        (("check", "--quick"), 2),
    ],
)
def test_what_needs_torch_is_refused_in_a_line_without_pip(arguments: tuple[str, ...], status: int, room: Path) -> None:
    done = run(room, *arguments)
    assert done.returncode == status, done.stderr
    [line] = done.stderr.splitlines()
    assert "needs torch and transformers (not in this binary: use an installed vecd)" in line
    assert "pip" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("embed", "/opt/unknown/config.json", "-o", "/tmp/vectors.parquet"),
        ("bench", "--url", "http://127.0.0.1:9", "--plot", "/tmp/plot.png"),
    ],
)
def test_what_needs_another_package_is_refused_without_pip(arguments: tuple[str, ...], room: Path) -> None:
    done = run(room, *arguments)
    assert done.returncode == 2, done.stderr
    assert "not in this binary: use an installed vecd" in done.stderr
    assert "pip" not in done.stderr


def test_the_archive_without_a_model_serves_one_that_is_named(room: Path) -> None:
    refused = run(room, "serve", "--port", "0", folder=WITHOUT_MODEL)
    assert refused.returncode == 2
    assert refused.stderr == (
        "vecd: MODEL: none is named, and the bundled one is not in this binary: use an installed vecd\n"
    )
    program = in_room(room, WITHOUT_MODEL)
    with running_server("/opt/known", "--workers", "1", "--cache-dir", "/cache", program=program) as server:
        assert len(server.embed("Hello, world")[0]) == 384


def test_it_is_small(room: Path) -> None:
    assert not list((room / FOLDER / "lib").glob("torch*")) + list((room / FOLDER / "lib").glob("transformers*"))
    assert disk_usage(room / FOLDER) <= MAX_BYTES
    assert disk_usage(room / WITHOUT_MODEL) <= MAX_BYTES_WITHOUT_MODEL


def disk_usage(folder: Path) -> int:
    """In bytes."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
