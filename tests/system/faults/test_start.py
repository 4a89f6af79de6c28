"""A server that cannot start says why in one line, with the right exit code, and leaves nothing."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.support.serving import clean_environment, running_server, vecd
from tests.support.soak.form import only_long

TIMEOUT_S = 120


def fail_to_start(folder, *flags: str, env: dict[str, str] | None = None) -> tuple[int, str]:
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
def model(minilm_folder, tmp_path):
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


def remove(*names):
    return lambda model: [(model / name).unlink() for name in names]


def write(name, content):
    def do(model):
        (model / name).unlink(missing_ok=True)
        (model / name).write_text(content)

    return do


def edit_config(**changes):
    def do(model):
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return do


def cut_off(model):
    path = model / "model.safetensors"
    content = path.read_bytes()[:5_000_000]
    path.unlink()
    path.write_bytes(content)


def only_pickle(model):
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80")


BROKEN = {
    "no config": (remove("config.json"), "config.json: file missing"),
    "no weights": (remove("model.safetensors"), "model.safetensors: file missing"),
    "no tokenizer": (remove("tokenizer.json", "vocab.txt"), "tokenizer.json: file missing"),
    "no pooling": (remove("1_Pooling/config.json"), "1_Pooling/config.json: file missing"),
    "broken config": (write("config.json", "{"), "config.json: cannot be read"),
    "broken tokenizer": (write("tokenizer.json", "{}"), "tokenizer.json: not a tokenizer"),
    "broken weights": (write("model.safetensors", "junk"), "model.safetensors: is not a safetensors file: it has 4"),
    "weights cut off": (
        cut_off,
        "model.safetensors: is cut off, or has something behind its tensors",
    ),
    "weights of another size": (
        edit_config(intermediate_size=1000),
        "is [1536] in the weights and [1000] in config.json",
    ),
    "weights of fewer layers": (edit_config(num_hidden_layers=7), "the weights lack encoder.layer.6"),
    "a vocabulary of no use": (
        lambda model: [remove("tokenizer.json", "vocab.txt")(model), write("spiece.model", "")(model)],
        "BertTokenizer takes no vocabulary from spiece.model",
    ),
    "remote code": (edit_config(auto_map={"AutoModel": "x--y.Z"}), "auto_map"),
    "unknown architecture": (edit_config(model_type="nosuch"), "nosuch"),
    "pickle": (only_pickle, "pytorch_model.bin: is not a pickle of weights: IndexError"),
}


LATE = {"weights of another size", "weights of fewer layers"}
"""Found out only when torch has been loaded, as broken weights are."""


@pytest.mark.parametrize(
    ("break_it", "says"),
    [pytest.param(*case, id=name, marks=[only_long] if name in LATE else []) for name, case in BROKEN.items()],
)
def test_a_broken_model(model, tmp_path, break_it, says):
    break_it(model)
    code, stderr = fail_to_start(tmp_path, str(model))
    assert code == 3, stderr
    last = stderr.strip().splitlines()[-1]
    assert says in last
    assert str(model) in last or "model_type" in last


def test_a_missing_folder(tmp_path):
    remedy = "check the path; a model of the hub is named owner/name, without a leading ./ or /"
    assert fail_to_start(tmp_path, "./nowhere") == (3, f"vecd: {tmp_path / 'nowhere'}: no such folder; {remedy}\n")


def test_a_file_is_no_hub_id(tmp_path):
    (tmp_path / "bge-m3-q8.gguf").write_bytes(b"GGUF")
    code, stderr = fail_to_start(tmp_path, "bge-m3-q8.gguf")
    assert (code, stderr.count("\n")) == (3, 1)
    assert "bge-m3-q8.gguf: is in the GGUF format, which vecd does not serve; take the model that it was" in stderr


def test_a_hub_model_that_is_not_cached(tmp_path):
    code, stderr = fail_to_start(tmp_path, "org/name", env={"HF_HOME": str(tmp_path / "hub")})
    assert code == 3
    assert "org/name: no such folder, not in the hub's cache, and the hub cannot be reached" in stderr


def test_a_bad_configuration_lists_everything(tmp_path):
    code, stderr = fail_to_start(tmp_path, "--workers", "none", "--dtype", "int4", env={"VECD_MAX_INPUTS": "0"})
    assert code == 2
    assert len(stderr.splitlines()) == 3


def test_more_tokens_than_the_model_takes(tmp_path):
    code, stderr = fail_to_start(tmp_path, "--max-tokens", "1000")
    assert (code, stderr) == (2, "vecd: --max-tokens: 1000 given, the model takes at most 256\n")


@pytest.mark.parametrize("after_s", [0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0])
def test_ctrl_c_before_the_server_is_ready(tmp_path, after_s):
    """In its first second, from the first line of its own on; a terminal sends the signal to children, too."""
    (tmp_path / "tmp").mkdir()
    code = "import sys; from vecd.__main__ import main; print(flush=True); sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--port", "0", "--engine", "dummy", "--workers", "1"],
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


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, stderr = fail_to_start(tmp_path, "--port", str(port))
    assert (code, stderr) == (3, f"vecd: cannot listen on 127.0.0.1:{port}: Address already in use\n")


def test_a_unix_socket_in_use_is_not_taken(tmp_path):
    path = tmp_path / "sock"
    with running_server("--engine", "weightless", "--workers", "1", "--uds", str(path)):
        code, stderr = fail_to_start(tmp_path, "--uds", str(path))
        assert code == 3
        assert "Address already in use" in stderr
    assert not path.exists(), "removed when its server ends"


def test_a_unix_socket_left_behind_is_replaced(tmp_path):
    path = tmp_path / "sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with running_server("--engine", "weightless", "--workers", "1", "--uds", str(path)):
        pass


def test_a_hub_model_in_the_cache_is_served_offline(minilm_folder, tmp_path):
    repo = tmp_path / "hub" / "hub" / "models--org--name"
    commit = "0" * 40
    (repo / "snapshots").mkdir(parents=True)
    (repo / "snapshots" / commit).symlink_to(minilm_folder)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    env = {"HF_HOME": str(tmp_path / "hub")}
    with running_server("org/name", "--engine", "weightless", "--workers", "1", env=env) as server:
        assert server.info()["model"]["id"] == "org/name"
