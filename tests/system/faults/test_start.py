"""A server that cannot start says why in one line, with the right exit code, and leaves nothing.

What is wrong with a model is in `tests/unit/model` and, of all parts, in `tests/system/api/test_check.py`: here is who
finds it, the supervisor, a process that converts, or a worker.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.serving import clean_environment, vecd
from tests.support.shared_servers import DUMMY
from tests.support.soak.form import only_long, pick

TIMEOUT_S = 120


def fail_to_start(folder: Path, *flags: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    (folder / "tmp").mkdir(exist_ok=True)
    done = subprocess.run(
        vecd("--port", "0", *flags),
        env=clean_environment(folder, env or {}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert os.listdir(folder / "tmp") == []
    return done.returncode, done.stderr


@pytest.fixture
def model(minilm_folder: Path, tmp_path: Path) -> Path:
    """The bundled model's folder, to be broken. Large files are links."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in minilm_folder.iterdir():
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        elif path.stat().st_size > 10_000:
            (folder / path.name).symlink_to(path)
        else:
            shutil.copy(path, folder)
    return folder


def replace(model: Path, name: str, content: bytes, *removed: str) -> None:
    for each in (*removed, name):
        (model / each).unlink(missing_ok=True)
    (model / name).write_bytes(content)


def edit_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda model: (model / "config.json").unlink(), "config.json: file missing"),
    "broken weights": (
        lambda model: replace(model, "model.safetensors", b"junk"),
        "model.safetensors: is not a safetensors file: it has 4",
    ),
    "a vocabulary of no use": (
        lambda model: replace(model, "spiece.model", b"", "tokenizer.json", "vocab.txt"),
        "BertTokenizer takes no vocabulary from spiece.model",
    ),
    "weights of another size": (
        lambda model: edit_config(model, intermediate_size=1000),
        "is [1536] in the weights and [1000] in config.json",
    ),
}
LATE = {"a vocabulary of no use", "weights of another size"}
"""Found out only when torch or transformers has been loaded."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[only_long] * (name in LATE)) for name in BROKEN])
def test_a_broken_model(model: Path, tmp_path: Path, name: str) -> None:
    break_it, says = BROKEN[name]
    break_it(model)
    code, stderr = fail_to_start(tmp_path, str(model))
    assert code == 3, stderr
    last = stderr.strip().splitlines()[-1]
    assert says in last
    assert str(model) in last


def test_a_missing_folder(tmp_path: Path) -> None:
    remedy = "check the path; a model of the hub is named owner/name, without a leading ./ or /"
    assert fail_to_start(tmp_path, "./nowhere") == (3, f"vecd: {tmp_path / 'nowhere'}: no such folder; {remedy}\n")


def test_a_bad_configuration_lists_everything(tmp_path: Path) -> None:
    flags, env = ("--workers", "none", "--dtype", "int4"), {"VECD_MAX_INPUTS": "0"}
    code, stderr = fail_to_start(tmp_path, *flags, env=env)
    assert code == 2
    assert len(stderr.splitlines()) == 3


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, stderr = fail_to_start(tmp_path, "--port", str(port))
    assert (code, stderr) == (3, f"vecd: cannot listen on 127.0.0.1:{port}: Address already in use\n")


@pytest.mark.parametrize("after_s", pick(short=[0.02, 0.2, 0.5], long=[0.02, 0.05, *(n / 10 for n in range(1, 11))]))
def test_ctrl_c_before_the_server_is_ready(tmp_path: Path, after_s: float) -> None:
    """In its first second, from the first line of its own on; a terminal sends the signal to children, too."""
    (tmp_path / "tmp").mkdir()
    code = "import sys; from vecd.__main__ import main; print(flush=True); sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--port", "0", *DUMMY],
        env=clean_environment(tmp_path, {"VECD_DRAIN_GRACE": "60"}),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(after_s)
            os.killpg(process.pid, signal.SIGINT)
            _, stderr = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert "Traceback" not in stderr
    assert "KeyboardInterrupt" not in stderr
    if "is ready" not in stderr:  # a fast machine may be
        assert process.returncode == 130, stderr
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert os.listdir(tmp_path / "tmp") == []
