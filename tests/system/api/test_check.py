"""`vecd check` as people run it: on the bundled model, and on models that something is wrong with."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.checkpoints import Checkpoints, change_weights
from tests.support.every_kind import folders
from tests.support.serving import bundled_model, clean_environment, eventually
from vecd.base import programs
from vecd.base.files import dump
from vecd.launch.check import command as check
from vecd.launch.config import tokens
from vecd.launch.config.plan import make_plan
from vecd.launch.config.settings import load_settings
from vecd.model.card import ModelError
from vecd.shm.job import run_job
from vecd.workers.check.order import Order

pytestmark = pytest.mark.timeout(600)  # one run checks fifteen models


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    """As a server's. Returns the folder for temporary files, in which nothing may stay."""
    with server_environment(tmp_path) as temporary:
        yield temporary


@contextmanager
def server_environment(folder: Path) -> Iterator[Path]:
    (folder / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("VECD_")]:
            patch.delenv(name)
        for name, value in clean_environment(folder, {"HF_HOME": str(folder / "hub")}).items():
            patch.setenv(name, value)
        patch.delenv("VECD_DRAIN_GRACE")
        patch.chdir(folder)
        yield folder / "tmp"


# --- its processes, with the dummy engine -----------------------------------------------------------------------


def order(seconds: float, **changes: Any) -> dict[str, Any]:
    plan = make_plan(load_settings(["--engine", "dummy", "--device", "cpu"]))
    made = Order(plan.workers[0], [], [], 1, "float32", 256, 10_000, seconds)
    dumped: dict[str, Any] = dump(replace(made, **changes))
    return dumped


def found_by(kind: str, order: dict[str, Any], timeout_s: float = 60) -> dict[str, Any]:
    return dict(run_job(kind, timeout_s=timeout_s, **order))


def test_speed_in_turns(environment: Path) -> None:
    found = found_by("check", order(0.1))
    speeds, not_measured = found["measurements"]["speeds"], found["measurements"]["not_measured"]
    assert found["path"]["path"] == "dummy"
    assert {speed["text_tokens"] for speed in speeds} == {24, 256}
    assert {speed["batch_tokens"] for speed in speeds} >= {2048, 4096, 8192}  # it is fast enough for all of them
    for speed in speeds:
        assert 0 < speed["lowest"] <= speed["tokens_per_s"] <= speed["highest"]
        assert 0 < speed["private_mb"] < 500
        assert 0 < speed["core_share"] <= 1.1
    assert {speed["dtype"] for speed in speeds} | not_measured.keys() == {"float32", "bfloat16", "int8"}
    assert list(environment.iterdir()) == []


def test_a_worker_that_is_killed(environment: Path) -> None:
    """Its death ends the measurement with a sentence; what was found before is there."""
    found: dict[str, Any] = {}
    others = psutil.Process().children()  # servers of other tests

    def kill_worker() -> None:
        eventually(lambda: bool(workers()), 60)
        workers()[0].kill()

    def workers() -> list[psutil.Process]:
        return [worker for child in psutil.Process().children() if child not in others for worker in child.children()]

    killer = threading.Thread(target=kill_worker)
    killer.start()
    with pytest.raises(ModelError, match="a worker was killed by SIGKILL"):
        found.update(run_job("check", timeout_s=60, **order(500)))
    killer.join()
    assert found.keys() == {"path"}


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("time.sleep(300)", "^the process gave no answer within 2 s, while busy with: loading$"),
        ("os.kill(os.getpid(), 19)", "^the process gave no answer within 2 s, while busy with: loading$"),
        (
            "os.kill(os.getpid(), 9)",
            "the process was killed by SIGKILL, as the kernel does when memory runs out, while",
        ),
        ("sys.exit('the last words')", r"ended with exit code 1, while busy with: loading \(the last words\)"),
        ("channel.send(ChildFailed('no such layer'))", "^no such layer$"),
        ("channel.close()", "ended with exit code 0, while busy with: loading"),
    ],
)
def test_a_process_that_does_not_answer_or_dies(
    do: str, says: str, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys, time; from vecd.shm.control import *; channel = Channel.from_fd(int(sys.argv[1])); "
    code += "channel.send(Progress('loading')); "
    monkeypatch.setattr(programs, "self_command", lambda kind: [sys.executable, "-c", code + do])
    others = psutil.Process().children()  # servers of other tests
    with pytest.raises(ModelError, match=says):
        found_by("check", {}, timeout_s=2 if "no answer" in says else 60)
    assert set(psutil.Process().children()) <= set(others)
    assert list(environment.iterdir()) == []


def test_a_process_that_does_not_tokenize_is_named_with_the_model(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = make_plan(load_settings(["--engine", "dummy", "--device", "cpu"])).gateway.card
    monkeypatch.setattr(programs, "self_command", lambda kind: [sys.executable, "-c", "import time; time.sleep(300)"])
    says = f"^{card.folder}: the process that tokenizes texts gave no answer within 1 s, while busy with: starting$"
    with pytest.raises(ModelError, match=says):
        tokens.tokenize(card, 16, ["a text"], 1, lambda stage: None)


# --- broken models ----------------------------------------------------------------------------------------------


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"\xff" + path.read_bytes()[9:])


def overflow(model: Path) -> None:
    def spoil(weights: dict[str, Any]) -> None:
        weights["encoder.layer.0.output.dense.bias"][3] = np.nan

    change_weights(model, spoil)


def make_decoder(model: Path) -> None:
    (model / "modules.json").unlink()
    edit(model / "config.json", architectures=["BertLMHeadModel"])


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no-weights": (lambda m: (m / "model.safetensors").unlink(), "model.safetensors: file missing", "copy the weights"),
    "no-config": (lambda m: (m / "config.json").unlink(), "config.json: file missing", "copy the file"),
    "no-tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "tokenizer.json: file missing", "copy tokenizer.json"),
    "no-tokenizer-in-it": (
        lambda m: (m / "tokenizer.json").write_text("{}"),
        "not a tokenizer",
        "tokenizer.json",
    ),
    "anothers-tokenizer": (
        lambda m: shutil.copy(bundled_model() / "tokenizer.json", m),
        "of different models",
        "from the same model",
    ),
    "cut-off": (cut, "model.safetensors: is cut off", "fetch it again"),
    "damaged": (damage, "model.safetensors: is not a safetensors file", "fetch it again"),
    "unknown-architecture": (
        lambda m: edit(m / "config.json", model_type="nosuch"),
        "no architecture 'nosuch'",
        "newer",
    ),
    "remote-code": (lambda m: edit(m / "config.json", auto_map={"AutoModel": "x--y.Z"}), "auto_map", "never runs code"),
    "unknown-pooling": (
        lambda m: edit(m / "1_Pooling/config.json", pooling_mode="vibes"),
        "pooling_mode 'vibes' is unknown",
        "correct 1_Pooling",
    ),
    "a-decoder": (make_decoder, "BertLMHeadModel generates text", "trained for embeddings"),
    "not-finite": (overflow, "encoder.layer.0.output.dense.bias: weights are not finite", "fetch them again"),
}


WANTED = {
    "wrong": ("9999 given, the model takes at most 256", "change the setting"),
    "gone": ("nowhere: no such folder", "check the path"),
    "absent": ("not in the hub's cache, and the hub cannot be reached", "check the name"),
    **{name: (says, hint) for name, (_, says, hint) in BROKEN.items()},
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of many models in one run: of the bundled one, of one of several kinds of vectors, and of broken ones."""
    folder, tiny = tmp_path_factory.mktemp("check"), Checkpoints(tmp_path_factory.mktemp)("bert")
    with server_environment(folder) as temporary:
        Path("vecd.toml").write_text("[models.bundled]\n[models.wrong]\nmax-tokens = 9999\n")
        models = ["gone=./nowhere", "absent=org/name", f"m3={folders()['m3']}"]
        for name, (break_it, *_) in BROKEN.items():
            break_it(Path(shutil.copytree(tiny, name)))
            models.append(f"{name}=./{name}")
        command = [
            sys.executable,
            "-m",
            "vecd",
            "check",
            *models,
            "--config",
            "vecd.toml",
            "--quick",
            "--all",
            "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert list(temporary.iterdir()) == []
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert not found["is_servable"]
    assert found["models"].keys() == WANTED.keys() | {"bundled", "m3"}
    return found["models"]


@pytest.mark.parametrize("name", WANTED)
def test_a_model_that_something_is_wrong_with_has_its_problem_and_what_to_do(
    reports: dict[str, Any], name: str
) -> None:
    says, hint = WANTED[name]
    [problem] = reports[name]["problems"]
    assert not reports[name]["is_servable"]
    assert says in problem["what"]
    assert hint in problem["suggestion"]


# --- right ones -------------------------------------------------------------------------------------------------


def assert_agrees(report: dict[str, Any]) -> None:
    """With the reference model and with sentence-transformers."""
    assert report["is_servable"]
    assert report["path"]["not_compared"] == []
    of_reference, of_library = report["path"]["agreements"]
    assert of_reference["against"] == "the reference model in float32"
    assert of_library["against"].startswith("sentence-transformers ")
    for parity in (of_reference, of_library):
        assert parity["is_within_bounds"]
        assert parity["min_cosine"] is not None
        assert sum(row["num_texts"] for row in parity["by_length"]) == parity["num_texts"] > 15


def test_the_bundled_model(reports: dict[str, Any]) -> None:
    report = reports["bundled"]
    assert_agrees(report)
    assert (report["model"]["dim"], report["model"]["max_tokens"], report["model"]["pooling"]) == (384, 256, ["mean"])
    path = report["path"]
    assert (path["path"], path["dtype"]) in (("lean", "float32"), ("fused", "bfloat16")), "by the processor"
    assert [parity["longest_tokens"] for parity in path["agreements"]] == [256, 256]
    assert 50 < path["shared_mb"] < 2000


def test_a_model_of_several_kinds_of_vectors(reports: dict[str, Any]) -> None:
    assert_agrees(reports["m3"])
    assert reports["m3"]["path"]["outputs"] == "vectors"
    steps = [step for steps in reports["m3"]["model"]["heads"].values() for step in steps]
    assert any("(sparse_linear.safetensors)" in step for step in steps), steps


# --- usage ------------------------------------------------------------------------------------------------------


def test_a_report_that_nobody_takes(
    environment: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone, open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", gone)
        assert check.main(["./nowhere"]) == 3
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit, match="70"):
            check.main(["./nowhere"])
    assert "vecd check: the report cannot be written: No space left on device\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seconds", "0"], "--seconds: must be a number of seconds above 0 and at most 600 (given: '0')"),
        (["--texts", "nowhere.txt"], "--texts: nowhere.txt cannot be read"),
        (["--engine", "dummy"], "--engine: dummy given, which has no model to check"),
        (["--dtype", "int4"], "--dtype: "),
        (["--nonsense"], "--nonsense"),
        (["--max-tokens", "1000"], "--max-tokens: 1000 given, the model takes at most 256"),
    ],
)
def test_bad_usage(arguments: list[str], says: str, environment: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check.main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert says in err
    assert all(line.startswith("vecd check: ") for line in err.splitlines())


# --- tables of models ---------------------------------------------------------------------------------------------


def test_a_table_has_a_line_for_each_model_in_a_file(environment: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also for those that cannot be served. It has none for another table of the configuration."""
    names, config = environment.parent / "names.txt", environment.parent / "vecd.toml"
    config.write_text(f'[models.tiny]\nsource = "{folders()["cls"]}"\n[models.other]\nsource = "./nowhere"\n')
    names.write_text("# two of ours\ntiny  # a tiny checkpoint\nall-minilms\n")
    assert check.main(["--table", str(names), "--config", str(config), "--dtype", "float32", "--quick"]) == 3
    head, rule, tiny, unknown = capfd.readouterr().out.splitlines()
    assert rule.count("|") == head.count("|") == tiny.count("|") == unknown.count("|")
    assert tiny.startswith("| tiny | dense | **lean float32** 1.000000 |  | ")
    assert tiny.endswith(" MB |  | a tiny checkpoint |")
    assert "not served: all-minilms: no such folder" in unknown
    assert "did you mean all-minilm?" in unknown


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--table", "missing.txt"], "--table: missing.txt: cannot be read: "),
        (["--table", os.devnull], f"--table: {os.devnull}: names no model"),
        (["--table", os.devnull, "--json"], "--json: given with --table, which prints Markdown"),
    ],
)
def test_a_table_that_cannot_be_made(
    flags: list[str], says: str, environment: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert check.main(flags) == 2
    assert f"vecd check: {says}" in capfd.readouterr().err


def test_the_models_that_have_a_name(environment: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--known"]) == 0
    assert "BAAI/bge-m3" in capfd.readouterr().out
    assert check.main(["--known", "--json"]) == 0
    by_name = {model["names"][0]: model for model in json.loads(capfd.readouterr().out)}
    assert by_name["embeddinggemma"]["matryoshka_dims"] == [128, 256, 512, 768]
