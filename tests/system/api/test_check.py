"""`vecd check` as people run it: on the bundled model, and on models that something is wrong with."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from tests.support.serving import clean_environment, eventually
from tests.support.texts import make_texts
from vecd.launch.check import command as check
from vecd.launch.check.machine import read_machine
from vecd.launch.check.report import Report
from vecd.launch.config.plan import make_plan
from vecd.launch.config.settings import load_settings
from vecd.shm.card import ModelError
from vecd.workers.check.order import Order

_HIDDEN, _LAYERS, _INNER, _POSITIONS = 8, 1, 16, 64


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As a server's. Returns the folder for temporary files, in which nothing may stay."""
    (tmp_path / "tmp").mkdir()
    for name in [name for name in os.environ if name.startswith("VECD_")]:
        monkeypatch.delenv(name)
    for name, value in clean_environment(tmp_path, {"HF_HOME": str(tmp_path / "hub")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VECD_DRAIN_GRACE")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tmp"


def test_the_bundled_model(environment: Path) -> None:
    """Chosen, and compared with the reference model and with sentence-transformers, on texts of one's own."""
    texts = environment.parent / "texts.txt"
    texts.write_text("\n".join(make_texts(20)).replace("\x00", ""))
    command = [sys.executable, "-m", "vecd", "check", "--json", "--quick", "--texts", str(texts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["is_servable"]
    assert (report["model"]["dim"], report["model"]["max_tokens"], report["model"]["pooling"]) == (384, 256, ["mean"])
    path = report["path"]
    assert (path["path"], path["dtype"]) in (("lean", "float32"), ("fused", "bfloat16")), "by the processor"
    assert path["not_compared"] == []
    reference_model, sentence_transformers = path["agreements"]
    assert reference_model["against"] == "the reference model in float32"
    assert sentence_transformers["against"].startswith("sentence-transformers")
    for parity in (reference_model, sentence_transformers):
        assert parity["is_within_bounds"]
        assert parity["longest_tokens"] == 256
        assert sum(row["num_texts"] for row in parity["by_length"]) == parity["num_texts"] > 15
    assert any("longer than 256 tokens" in warning for warning in report["warnings"])
    assert 50 < path["shared_mb"] < 2000
    settings = {setting["name"]: setting["value"] for setting in report["advice"]["settings"]}
    assert settings.keys() == {"workers", "dtype", "gateways", "max_batch_tokens"}
    assert settings["dtype"] == path["dtype"]
    assert "Traceback" not in done.stderr
    assert list(environment.iterdir()) == []


# --- its processes, with the dummy engine -----------------------------------------------------------------------


def order(seconds: float, **changes: Any) -> dict[str, Any]:
    plan = make_plan(load_settings(["--engine", "weightless", "--device", "cpu"]))
    made = Order(plan.workers[0], ["false"], [], [], 1, "float32", 256, 10_000, [2], seconds)
    return asdict(replace(made, **changes))


def found_by(kind: str, order: dict[str, Any], timeout_s: float = 60) -> dict[str, Any]:
    return dict(check.run(kind, order, timeout_s, lambda stage: None))


def test_speed_in_turns(environment: Path) -> None:
    report = Report("1.0", read_machine())
    for name, value in found_by("check", order(0.1)).items():
        report.add(name, value)
    measured = report.measurements
    assert report.path is not None
    assert measured is not None
    assert report.path.path == "dummy"
    assert {speed.text_tokens for speed in measured.speeds} == {24, 256}
    assert {speed.batch_tokens for speed in measured.speeds} >= {2048, 4096, 8192}  # it is fast enough for all of them
    for speed in measured.speeds:
        assert 0 < speed.lowest <= speed.tokens_per_s <= speed.highest
        assert 0 < speed.private_mb < 500
        assert 0 < speed.core_share <= 1.1
    assert [scaling.num_workers for scaling in measured.scaling] == [1, 2]
    assert {speed.dtype for speed in measured.speeds} | measured.not_measured.keys() == {"float32", "bfloat16", "int8"}
    assert list(environment.iterdir()) == []


def test_a_worker_that_is_killed(environment: Path) -> None:
    """Its death ends the measurement with a sentence; what was found before is there."""
    found: dict[str, Any] = {}
    others = psutil.Process().children()  # servers of other tests

    def kill_worker() -> None:
        eventually(lambda: bool(workers()))
        workers()[0].kill()

    def workers() -> list[psutil.Process]:
        return [worker for child in psutil.Process().children() if child not in others for worker in child.children()]

    killer = threading.Thread(target=kill_worker)
    killer.start()
    with pytest.raises(ModelError, match="a worker was killed by SIGKILL"):
        found.update(check.run("check", order(500), 60, lambda stage: None))
    killer.join()
    assert found.keys() == {"path"}


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("time.sleep(300)", "no answer within 1 s from the process that was busy with: loading"),
        ("os.kill(os.getpid(), 19)", "no answer within 1 s from the process that was busy with: loading"),
        (
            "os.kill(os.getpid(), 9)",
            "the process was killed by SIGKILL, as the kernel does when memory runs out, while",
        ),
        ("sys.exit('the last words')", r"ended with exit code 1, while busy with: loading \(the last words\)"),
        ('os.write(fd, b\'{"error": "no such layer"}\\n\')', "^no such layer$"),
        ("os.write(fd, b'{\"fou')", "ended with exit code 0, while busy with: loading"),
    ],
)
def test_a_process_that_does_not_answer_or_dies(
    do: str, says: str, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = 'import os, sys, time; fd = int(sys.argv[1]); os.write(fd, b\'{"stage": "loading"}\\n\'); '
    monkeypatch.setattr(check, "self_command", lambda kind: [sys.executable, "-c", code + do])
    others = psutil.Process().children()  # servers of other tests
    with pytest.raises(ModelError, match=says):
        found_by("check", {}, timeout_s=1)
    assert psutil.Process().children() == others
    assert list(environment.iterdir()) == []


def test_weights_that_are_not_finite(model: Path, environment: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = tiny_weights(30_522)
    weights["encoder.layer.0.output.dense.bias"][3] = np.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert check.main([str(model), "--quick", "--json"]) == 3
    [problem] = json.loads(capfd.readouterr().out)["problems"]
    assert "encoder.layer.0.output.dense.bias: weights are not finite" in problem["what"]
    assert "fetch them again" in problem["suggestion"]


# --- broken models ----------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path, minilm_folder: Path) -> Path:
    """A tiny BERT with random weights and the bundled model's tokenizer."""
    folder = tmp_path / "tiny"
    (folder / "1_Pooling").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json"):
        (folder / name).write_bytes((minilm_folder / name).read_bytes())
    edit(folder / "1_Pooling/config.json", word_embedding_dimension=_HIDDEN)
    config = json.loads((minilm_folder / "config.json").read_text())
    sizes = {
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": _INNER,
        "max_position_embeddings": _POSITIONS,
    }
    (folder / "config.json").write_text(json.dumps({**config, **sizes}))
    save_file(tiny_weights(int(config["vocab_size"])), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_weights(vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    layer = "encoder.layer.0."
    square = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    shapes = {
        "embeddings.word_embeddings.weight": (vocab_size, _HIDDEN),
        "embeddings.position_embeddings.weight": (_POSITIONS, _HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, _HIDDEN),
        **{f"{layer}{name}.weight": (_HIDDEN, _HIDDEN) for name in square},
        **{f"{layer}{name}.bias": (_HIDDEN,) for name in square},
        f"{layer}intermediate.dense.weight": (_INNER, _HIDDEN),
        f"{layer}intermediate.dense.bias": (_INNER,),
        f"{layer}output.dense.weight": (_HIDDEN, _INNER),
        f"{layer}output.dense.bias": (_HIDDEN,),
    }
    for norm in ("embeddings.LayerNorm", f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"):
        shapes |= {f"{norm}.weight": (_HIDDEN,), f"{norm}.bias": (_HIDDEN,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"\xff" + path.read_bytes()[9:])


def make_decoder(model: Path) -> None:
    (model / "modules.json").unlink()
    edit(model / "config.json", architectures=["BertLMHeadModel"])


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "model.safetensors: file missing", "copy the weights"),
    "no config": (lambda m: (m / "config.json").unlink(), "config.json: file missing", "copy the file"),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "tokenizer.json: file missing", "copy tokenizer.json"),
    "no tokenizer in it": (
        lambda m: (m / "tokenizer.json").write_text("{}"),
        "not a tokenizer",
        "tokenizer.json",
    ),
    "another's tokenizer": (
        lambda m: edit(m / "config.json", vocab_size=100),
        "of different models",
        "from the same model",
    ),
    "cut off": (cut, "model.safetensors: is cut off", "fetch it again"),
    "damaged": (damage, "model.safetensors: is not a safetensors file", "fetch it again"),
    "unknown architecture": (
        lambda m: edit(m / "config.json", model_type="nosuch"),
        "no architecture 'nosuch'",
        "newer",
    ),
    "remote code": (lambda m: edit(m / "config.json", auto_map={"AutoModel": "x--y.Z"}), "auto_map", "never runs code"),
    "unknown pooling": (
        lambda m: edit(m / "1_Pooling/config.json", pooling_mode="vibes"),
        "pooling_mode 'vibes' is unknown",
        "correct 1_Pooling",
    ),
    "a decoder": (make_decoder, "BertLMHeadModel generates text", "trained for embeddings"),
}


@pytest.mark.parametrize(("break_it", "says", "hint"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_model(
    break_it: Callable[[Path], object], says: str, hint: str, model: Path, environment: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    break_it(model)
    assert check.main([str(model), "--quick", "--json"]) == 3
    out, err = capfd.readouterr()
    report = json.loads(out)
    [problem] = report["problems"]
    assert not report["is_servable"]
    assert says in problem["what"]
    assert hint in problem["suggestion"]
    assert report["advice"] is None
    assert "Traceback" not in err
    assert list(environment.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [("./nowhere", "nowhere: no such folder"), ("org/name", "not in the hub's cache, and the hub cannot be reached")],
)
def test_a_model_that_is_not_there(name: str, says: str, environment: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check.main([name, "--quick"]) == 3
    out, err = capfd.readouterr()
    problem = out[out.index("problem: ") :]
    assert says in " ".join(problem.split())
    assert "do this: check the" in problem
    assert "Traceback" not in err


def test_a_report_that_nobody_takes(
    environment: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone, open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", gone)
        assert check.main(["./nowhere"]) == 3
        monkeypatch.setattr(sys, "stdout", full)
        assert check.main(["./nowhere"]) == 70
    assert "vecd check: the report cannot be written: No space left on device\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seconds", "0"], "--seconds: 0 given"),
        (["--texts", "nowhere.txt"], "--texts: nowhere.txt cannot be read"),
        (["--engine", "weightless"], "--engine: dummy given, which has no model to check"),
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


# --- several models -------------------------------------------------------------------------------------------------


def test_all_models_of_a_server(environment: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("vecd.toml").write_text("[models.one]\n[models.wrong]\nmax-tokens = 9999\n")
    assert check.main(["--config", "vecd.toml", "--quick"]) == 2
    assert "takes one model, or --all, and these are given: one, wrong" in capfd.readouterr().err
    arguments = ["gone=./nowhere", "--config", "vecd.toml", "--quick", "--all"]
    assert check.main([*arguments, "--json"]) == 3
    found = json.loads(capfd.readouterr().out)
    assert not found["is_servable"]
    assert {name: report["is_servable"] for name, report in found["models"].items()} == {
        "gone": False, "one": True, "wrong": False,
    }  # fmt: skip
    assert found["models"]["one"]["path"]["agreements"]
    assert "9999 given, the model takes at most 256" in found["models"]["wrong"]["problems"][0]["what"]
    assert check.main(["one=", "--all", "--quick"]) == 2
    assert check.main(["--all", "--quick"]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("# all-MiniLM-L6-v2\n\nMachine\n")
    assert printed.splitlines()[-1].startswith("The model can be served, with ")
