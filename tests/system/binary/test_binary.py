"""The binary of `make binary` serves where there is no Python, no environment, and nothing of it can be written to.

It runs in a file system of its own that has glibc, zlib and nothing else, from a read-only folder with blanks in its
name. That takes root's rights, or user namespaces. `make test-binary` builds it first, and alone runs this.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.support.serving import Server, eventually, running_server

pytestmark = pytest.mark.skipif(not os.environ.get("VECD_BINARY"), reason="builds the binary first: make test-binary")

BINARY = Path(__file__).parents[3] / "dist" / "vecd"
FOLDER = "opt/a folder with blanks/vecd"
OF_SYSTEM = re.compile(r"(ld-linux.*|lib(z|c|m|dl|pthread|rt|util|resolv|anl|nss_\w+))\.so\.\d")
TEXTS = ["Hello, world", "Ünïcödé 日本 🙂", "", "a longer text " * 60]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
FLAGS = ("--dtype", "float32", "--workers", "1")

# Of what follows the first two words, some are left out. The mounts are gone with the process; no variable reaches it.
IN_ROOM = f"""
set -e
room=$1 num_left_out=$2
shift 2; shift "$num_left_out"
mount --rbind /proc "$room/proc"
mount --rbind /dev "$room/dev"
mount --bind "$room/opt" "$room/opt"
mount -o remount,ro,bind "$room/opt"
exec env -i "$(command -v chroot)" "$room" "/{FOLDER}/vecd" "$@"
"""


def in_room(room: Path, num_left_out: int = 0) -> list[str]:
    """The command that runs the binary there; its arguments follow."""
    namespaces = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
    return ["unshare", *namespaces, "sh", "-c", IN_ROOM, "sh", str(room), str(num_left_out)]


def run(room: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*in_room(room), *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Path:
    """The root of a file system with a copy of the binary, libc, a model, and folders to write to."""
    if not (BINARY / "vecd").exists():
        pytest.skip("there is no dist/vecd: make binary")
    namespaces = "-m" if os.geteuid() == 0 else "-Urm"
    if subprocess.run(["unshare", namespaces, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system of its own can be made here: unshare --mount is not allowed")
    root = tmp_path_factory.mktemp("room")
    for name in ("proc", "dev", "tmp", "cache", str(Path(FOLDER).parent)):
        (root / name).mkdir(parents=True)
    for folder in (Path("/lib64"), *Path("/lib").glob("*-linux-gnu"), Path("/lib")):
        for path in [path for path in folder.glob("*.so.*") if OF_SYSTEM.fullmatch(path.name)]:
            (root / folder.relative_to("/")).mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, root / path.relative_to("/"))
    shutil.copytree(minilm_folder, root / "opt" / "slow-model", ignore=shutil.ignore_patterns("tokenizer.json"))
    (root / "opt" / "slow-model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    subprocess.run(["cp", "-a", str(BINARY), str(root / FOLDER)], check=True)
    return root


@pytest.fixture(scope="module")
def binary(room: Path) -> Iterator[Server]:
    """It serves, and leaves no temporary file."""
    num_of_python = 3  # the fixture's command goes on with `python -m supervisor`
    cache = {"VECD_CACHE_DIR": str(room / "cache")}  # for the fixture, which searches it; not for the server
    with running_server(
        *FLAGS, "--cache-dir", "/cache", env=cache, command=in_room(room, num_of_python)
    ) as server:  # fmt: skip
        yield server
    assert list((room / "tmp").iterdir()) == []


def test_it_embeds_to_the_same_bits_as_an_installed_one(binary: Server) -> None:
    with running_server(*FLAGS) as installed:
        expected = np.array(installed.embed(TEXTS), np.float32)
    assert np.array_equal(np.array(binary.embed(TEXTS), np.float32), expected)


def test_nothing_is_loaded_from_outside_but_libc(binary: Server) -> None:
    for process in binary.processes():
        assert process.environ().keys() <= {"LD_LIBRARY_PATH"} | our_variables(process), process
        mapped = {re.sub(r" \(deleted\)$", "", line.path) for line in process.memory_maps(grouped=False)}
        libraries = [Path(path) for path in mapped if ".so" in path or "python" in path]
        assert libraries
        assert [p for p in libraries if FOLDER not in str(p) and not OF_SYSTEM.fullmatch(p.name)] == [], process


def our_variables(process: psutil.Process) -> set[str]:
    """What the launcher and the supervisor set for children: no name of somebody else's."""
    ours = re.compile(r"_PYI_\w+|(OMP|OPENBLAS|MKL)_NUM_THREADS|TOKENIZERS_\w+|HF_HUB_OFFLINE|TRANSFORMERS_VERBOSITY"
                      r"|PYTORCH_\w+|TORCHINDUCTOR_CACHE_DIR|LC_CTYPE")  # fmt: skip
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
    psutil.Process(worker.ppid()).kill()
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
    flags = ("/opt/slow-model", "--workers", "1", "--engine", "weightless", "--cache-dir", "/cache")
    with running_server(*flags, env=cache, command=in_room(room, 3)) as server:
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
