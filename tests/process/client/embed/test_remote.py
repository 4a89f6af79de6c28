"""`vecd embed` from and to a store behind real sockets: inputs, manifest and outputs are URLs of WebHDFS, by fsspec's
own client. It is a file system and no object store, so a file is written under another name and renamed."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.bulk_server import AT_ONCE, BulkServer, vectors_of
from tests.support.webhdfs import WebHdfs
from vecd.client.embed import storage
from vecd.client.embed.command import main
from vecd.client.embed.options import EmbedError

pytest.importorskip("requests")
WAIT_S = 60
TEXTS = {"a": ["one", "two"], "deep/b": ["three"], "deep/c": ["four", "five", "six"]}


@pytest.fixture
def hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebHdfs]:
    monkeypatch.setattr(storage, "PAUSES_S", (0.0, 0.0))
    for name, lines in TEXTS.items():
        path = tmp_path / "hdfs" / "in" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
    with WebHdfs(tmp_path / "hdfs") as server:
        yield server


def place_of(hdfs: WebHdfs) -> str:
    return f"webhdfs://{hdfs.address}"


def embed(hdfs: WebHdfs, server: BulkServer, work: Path, *flags: str, source: str = "in", out: str = "") -> int:
    words = [f"{place_of(hdfs)}/{source}"] if source else ["--manifest", f"{place_of(hdfs)}/manifest.txt"]
    to = ("--output-dir", out or f"{place_of(hdfs)}/out", "--output-format", "npy", "--work-dir", str(work))
    return main([*words, *to, "--url", server.url, "--quiet", *flags], AT_ONCE)


def check(hdfs: WebHdfs, *names: str) -> None:
    """These outputs are there, whole, and no other file with a name of one."""
    folder = hdfs.folder / "out"
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.npy*"))
    assert found == [f"{name}.npy" for name in names]
    for name in names:
        np.testing.assert_array_equal(np.load(folder / f"{name}.npy"), vectors_of(TEXTS[name]))


def test_a_folder_of_a_store_becomes_one_in_it(hdfs, server, tmp_path):
    work = tmp_path / "work"
    assert embed(hdfs, server, work, "--shard", "1/3") == 0
    check(hdfs, "deep/b")
    assert embed(hdfs, server, work) == 0
    check(hdfs, *TEXTS)
    assert [path for path in work.rglob("*") if path.is_file()] == []
    num_texts = len(server.texts)
    assert embed(hdfs, server, work) == 0
    assert len(server.texts) == num_texts == 6, "what is complete is not computed again"


def test_a_manifest_in_a_store(hdfs, server, tmp_path):
    """Of outputs on this machine."""
    server.nodes = [("a" * 32, "made-up")]
    place, out = place_of(hdfs), tmp_path / "local"
    (hdfs.folder / "manifest.txt").write_text(f"{place}/in/a.txt\n{place}/in/deep/c.txt\tdeep/c.npy\n")
    assert embed(hdfs, server, tmp_path / "work", source="", out=str(out)) == 0
    for name in ("a", "deep/c"):
        np.testing.assert_array_equal(np.load(out / f"{name}.npy"), vectors_of(TEXTS[name]))


@pytest.mark.parametrize(("operation", "status"), [("APPEND", 0), ("RENAME", 0), ("CREATE", 403)])
def test_an_output_that_cannot_be_stored_is_stored_by_the_next_run(operation, status, hdfs, server, tmp_path, capsys):
    """It is not computed again, unless its input has changed."""
    server.nodes = [("a" * 32, "made-up")]
    hdfs.fail = lambda called, path: status if called == operation and ".npy" in path and "/deep/" in path else None
    assert embed(hdfs, server, tmp_path / "work") == 1
    told = [line for line in capsys.readouterr().err.splitlines() if ".npy" in line]
    assert len(told) == 2
    assert all(("access is denied" if status else "tried 3 times") in line for line in told)
    check(hdfs, "a")
    assert (hdfs.folder / "out" / ".vecd-identity.json").exists()

    hdfs.fail = lambda called, path: None
    (hdfs.folder / "in" / "deep" / "c.txt").write_text("four\nfive\nSIX\n")
    server.bodies.clear()
    assert embed(hdfs, server, tmp_path / "work") == 1
    changed = f"failed: {place_of(hdfs)}/in/deep/c.txt: the unfinished run was another one: "
    assert changed in capsys.readouterr().err
    assert not server.texts
    check(hdfs, "a", "deep/b")
    assert embed(hdfs, server, tmp_path / "work", "--restart") == 0
    assert server.texts[-1] == "SIX"


@pytest.mark.parametrize(
    ("operation", "place", "code"),
    [("LISTSTATUS", "/in", 2), ("GETFILESTATUS", "/in", 2), ("GETFILESTATUS", "/out", 1)],
)
def test_a_store_that_denies_is_one_line_and_nothing_is_begun(operation, place, code, hdfs, server, tmp_path, capsys):
    hdfs.fail = lambda called, path: 403 if called == operation and path.startswith(place) else None
    assert embed(hdfs, server, tmp_path / "work") == code
    [line] = capsys.readouterr().err.splitlines()
    assert f"access is denied (PermissionError: Permission denied: {place}" in line
    assert server.bodies == []
    assert not (hdfs.folder / "out").exists()


# --- storage alone ----------------------------------------------------------------------------------------------


def test_what_uses_no_store_does_not_import_fsspec():
    program = (
        "import sys, vecd.client.embed.command\n"
        "from vecd.client.embed import storage\n"
        "storage.is_remote('a'), storage.expand(sys.argv[1])\n"
        "assert storage.exists(sys.argv[1]) and not storage.exists('/no/such::file')\n"
        "sys.exit('fsspec' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, __file__], check=True, timeout=WAIT_S)


def test_an_older_file_is_replaced_where_renames_do_not(hdfs, tmp_path):
    """HDFS answers such a rename with 200 and false."""
    source = tmp_path / "source"
    for content in (b"first", b"second, and longer", b"third"):
        source.write_bytes(content)
        storage.store(source, f"{place_of(hdfs)}/out/a.npy")
        assert [path.read_bytes() for path in (hdfs.folder / "out").iterdir()] == [content]


def test_a_process_that_is_killed_in_the_middle_of_a_put_leaves_no_file_of_the_final_name(hdfs, tmp_path):
    source, appended, released = tmp_path / "source", threading.Event(), threading.Event()
    source.write_bytes(bytes(24 << 20))

    def hang(operation: str, path: str) -> int | None:
        if operation == "APPEND" and hdfs.operations.count("APPEND") > 3:  # behind the first piece of data
            appended.set()
            released.wait(WAIT_S)
        return None

    hdfs.fail = hang
    program = (
        "import sys, pathlib\nfrom vecd.client.embed.storage import store\n"
        "store(pathlib.Path(sys.argv[1]), sys.argv[2])"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(source), f"{place_of(hdfs)}/new/a.npy"])
    try:
        assert appended.wait(WAIT_S)
        process.send_signal(signal.SIGKILL)
        assert process.wait(WAIT_S) == -signal.SIGKILL
    finally:
        process.kill()
        released.set()
    [draft] = [path.name for path in (hdfs.folder / "new").iterdir()]
    assert draft.startswith(".a.npy.")
    assert draft.endswith(".part")
    with pytest.raises(EmbedError, match="no file is there"):
        storage.expand(f"{place_of(hdfs)}/new/")
