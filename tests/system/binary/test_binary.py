"""The binary of `make binary` serves where there is no Python, no environment, and nothing of it can be written to.

It runs in a file system of its own, from a read-only folder with blanks in its name (`tests/support/binary.py`).
`make test-binary` builds it first, and alone runs this.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.support.binary import DIST, FOLDER, foreign_libraries, in_room, make_room, run
from tests.support.serving import Server, eventually, running_server

pytestmark = pytest.mark.skipif(not os.environ.get("VECD_BINARY"), reason="builds the binary first: make test-binary")

BINARY = DIST / "vecd"
TEXTS = ["Hello, world", "Ünïcödé 日本 🙂", "", "a longer text " * 60]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
FLAGS = ("--dtype", "float32", "--workers", "1")


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    """The root of a file system with a copy of the binary, libc, a model, and folders to write to."""
    root = make_room(tmp_path_factory.mktemp("room"), BINARY)
    shutil.copytree(minilm_folder, root / "opt" / "slow-model", ignore=shutil.ignore_patterns("tokenizer.json"))
    (root / "opt" / "slow-model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return root


@pytest.fixture(scope="module")
def binary(room: Path) -> Iterator[Server]:
    """It serves, and leaves no temporary file."""
    cache = {"VECD_CACHE_DIR": str(room / "cache")}  # for the fixture, which searches it; not for the server
    with running_server(*FLAGS, "--cache-dir", "/cache", env=cache, program=in_room(room)) as server:
        yield server
    assert list((room / "tmp").iterdir()) == []


def test_it_embeds_to_the_same_bits_as_an_installed_one(binary: Server) -> None:
    with running_server(*FLAGS) as installed:
        expected = np.array(installed.embed(TEXTS), np.float32)
    assert np.array_equal(np.array(binary.embed(TEXTS), np.float32), expected)


def test_nothing_is_loaded_from_outside_but_libc(binary: Server) -> None:
    for process in binary.processes():
        assert process.environ().keys() <= {"LD_LIBRARY_PATH"} | our_variables(process), process
        assert foreign_libraries(process) == [], process


def our_variables(process: psutil.Process) -> set[str]:
    """What the launcher and the supervisor set for children: no name of somebody else's."""
    ours = re.compile(r"_PYI_\w+|(OMP|OPENBLAS|MKL)_NUM_THREADS|TOKENIZERS_\w+|HF_HUB_OFFLINE|TRANSFORMERS_VERBOSITY"
                      r"|PYTORCH_\w+|TORCHINDUCTOR_CACHE_DIR|GOMP_SPINCOUNT|LC_CTYPE")  # fmt: skip
    return {name for name in process.environ() if ours.fullmatch(name)}


def test_a_killed_worker_is_replaced(binary: Server) -> None:
    before = binary.embed(TEXTS)
    [worker] = binary.workers()
    worker.kill()
    eventually(lambda: not worker.is_running())
    assert binary.embed(TEXTS) == before
    [another] = binary.workers()
    assert another.pid != worker.pid


def test_a_killed_fork_server_is_replaced(binary: Server) -> None:
    [worker] = binary.workers()
    binary.fork_server().kill()
    eventually(lambda: not worker.is_running())
    binary.embed(TEXTS)


def test_it_reloads(binary: Server) -> None:
    before = binary.embed(TEXTS)
    num_reloads = binary.stderr.count("reloaded: ")
    os.kill(binary.pid, signal.SIGHUP)
    eventually(lambda: binary.stderr.count("reloaded: ") > num_reloads, timeout_s=60)
    assert binary.embed(TEXTS) == before


def test_its_reload_command_finds_it(binary: Server, room: Path) -> None:
    before = binary.embed(TEXTS)
    done = run(room, "reload", "--port", binary.url.rpartition(":")[2])
    assert done.returncode == 0, done.stderr
    assert binary.embed(TEXTS) == before
    assert run(room, "reload", "--port", "1").returncode == 3


def test_its_pages_and_data_are_there(binary: Server) -> None:
    for path in ("/docs", "/openapi.json", "/metrics"):
        assert httpx.get(binary.url + path).status_code == 200, path
    # ids of cl100k_base, whose vocabulary is a file
    assert httpx.post(f"{binary.url}/v1/embeddings", json={"input": [[9906, 11, 1917]]}).status_code == 200


def test_it_measures_a_server(binary: Server, room: Path) -> None:
    done = run(room, "bench", "--url", binary.url, "--requests", "20", "--clients", "2", "--warmup", "0.1")
    assert done.returncode == 0, done.stderr
    assert "req/s" in done.stdout, done.stdout


def test_it_converts_a_tokenizer_and_renders_conversations(room: Path, binary: Server) -> None:
    """Each in a process of its own, the former with transformers."""
    cache = {"VECD_CACHE_DIR": str(room / "cache")}
    flags = ("/opt/slow-model", "--workers", "1", "--engine", "dummy", "--cache-dir", "/cache")
    with running_server(*flags, env=cache, program=in_room(room)) as server:
        assert server.stderr.count("vecd: converting the tokenizer of slow-model (once)\n") == 1
        count = [httpx.post(f"{s.url}/tokenize", json={"inputs": TEXTS}).json() for s in (server, binary)]
        chat = [{"role": "user", "content": "Hello"}]
        of_chat, of_text = (
            httpx.post(f"{server.url}/pooling", json=body)
            for body in ({"messages": chat}, {"input": "user: Hello", "add_special_tokens": False})
        )
    assert of_chat.status_code == 200, of_chat.text
    assert of_chat.json()["data"] == of_text.json()["data"]
    assert count[0] == count[1]


def test_commands_that_need_no_server(room: Path) -> None:
    assert run(room, "--version").stdout == f"vecd {version('vecd')}\n"
    key = run(room, "key", "somebody")
    assert key.returncode == 0, key.stderr
    assert "somebody" in key.stdout
    for command in ("serve", "bench"):
        shown = run(room, command, "--help")
        assert shown.returncode == 0, shown.stderr
        assert f"usage: vecd {command}" in shown.stdout


def test_it_is_no_python(room: Path) -> None:
    done = run(room, "-P", "-m", "code")
    assert done.returncode == 2
    assert done.stderr == "vecd: 'code' is no module of this program\n"
    assert run(room, "-c", "print(1)").returncode == 2


def test_licenses_are_in_it(room: Path) -> None:
    lib = room / FOLDER / "lib"
    named = (lib / "LICENSES.md").read_text()
    for folder in lib.glob("*.dist-info"):
        name = re.search(r"^Name: (.*)$", (folder / "METADATA").read_text(), re.MULTILINE)
        assert name is not None
        assert f"| {name[1]} |" in named
    for library in lib.glob("lib*.so*"):
        assert f"| {library.name} |" in named
    assert json.dumps(str(BINARY.parents[1]))[1:-1] not in named
