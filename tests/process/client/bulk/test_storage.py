"""`vecd.client.bulk.storage` in processes of its own, and against a server behind real sockets, by fsspec's own client.

WebHDFS is a file system and no object store, so a file is written under another name and renamed.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.webhdfs import WebHdfs
from vecd.client.bulk import storage
from vecd.client.bulk.errors import EmbedError, RunEnded

pytest.importorskip("requests")
WAIT_S = 60


@pytest.fixture
def hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebHdfs]:
    monkeypatch.setattr(storage, "_PAUSES_S", (0.0, 0.0))
    (tmp_path / "hdfs").mkdir()
    with WebHdfs(tmp_path / "hdfs") as server:
        yield server


@pytest.fixture
def place(hdfs: WebHdfs) -> str:
    return f"webhdfs://{hdfs.address}"


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_what_uses_no_store_does_not_import_fsspec() -> None:
    program = (
        "import sys, vecd.client.bulk.command\n"
        "from vecd.client.bulk import storage\n"
        "storage.is_remote('a'), storage.expand(sys.argv[1])\n"
        "assert storage.exists(sys.argv[1]) and not storage.exists('/no/such::file')\n"
        "sys.exit('fsspec' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, __file__], check=True, timeout=WAIT_S)


def test_there_and_back_over_http(hdfs: WebHdfs, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_PART_BYTES", 1 << 16)
    source, url = tmp_path / "source", f"{place}/out/new/a.npy"
    source.write_bytes(os.urandom(300_000))
    assert not storage.exists(url)
    storage.store(source, url)
    assert storage.exists(url)
    assert storage.expand(f"{place}/out") == storage.expand(f"{place}/out/**/*.npy") == [url]
    storage.fetch(url, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert files_in(hdfs.folder) == ["out/new/a.npy"]


def test_an_older_file_is_replaced_where_renames_do_not(hdfs: WebHdfs, place: str, tmp_path: Path) -> None:
    """HDFS answers such a rename with 200 and false."""
    source, url = tmp_path / "source", f"{place}/out/a.npy"
    for content in (b"first", b"second, and longer", b"third"):
        source.write_bytes(content)
        storage.store(source, url)
        assert (hdfs.folder / "out" / "a.npy").read_bytes() == content
    assert files_in(hdfs.folder) == ["out/a.npy"]


def test_a_rename_that_does_nothing_is_an_error(
    hdfs: WebHdfs, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, do = tmp_path / "source", hdfs.do
    source.write_bytes(b"whole")

    def decline(operation: str, name: str, query: dict[str, str], body: bytes) -> bytes:
        return b'{"boolean": false}' if operation == "RENAME" else do(operation, name, query, body)

    monkeypatch.setattr(hdfs, "do", decline)
    with pytest.raises(RunEnded, match=r"out/a\.npy: OSError: \.a\.npy\..*\.part was not renamed"):
        storage.store(source, f"{place}/out/a.npy")
    assert files_in(hdfs.folder) == []


def test_a_store_that_denies(hdfs: WebHdfs, place: str, tmp_path: Path) -> None:
    (hdfs.folder / "a.txt").write_text("a")
    hdfs.fail = lambda operation, path: 403
    denied = r"^webhdfs://127\.0\.0\.1:\d+/a\.txt: access is denied \(PermissionError: Permission denied: /a\.txt\)$"
    with pytest.raises(EmbedError, match=denied):
        storage.expand(f"{place}/a.txt")
    with pytest.raises(RunEnded, match=denied):
        storage.fetch(f"{place}/a.txt", tmp_path / "a")
    with pytest.raises(RunEnded, match="access is denied"):
        storage.store(tmp_path / "hdfs" / "a.txt", f"{place}/b.txt")


@pytest.mark.parametrize("operation", ["CREATE", "APPEND", "RENAME"])
def test_a_store_that_dies_in_the_middle_of_a_put(operation: str, hdfs: WebHdfs, place: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"whole")
    hdfs.fail = lambda called, path: 0 if called == operation else None
    with pytest.raises(RunEnded, match=r"\(tried 3 times\)$"):
        storage.store(source, f"{place}/out/a.npy")
    assert hdfs.operations.count(operation) >= 3
    assert not storage.exists(f"{place}/out/a.npy")
    assert files_in(hdfs.folder) == []


@pytest.mark.parametrize("operation", ["GETFILESTATUS", "OPEN", "CREATE"])
def test_a_store_that_says_nothing_is_given_up(
    operation: str, hdfs: WebHdfs, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "STALL_S", 0.5)
    source, released = tmp_path / "source", threading.Event()
    source.write_bytes(b"whole")
    (hdfs.folder / "a.txt").write_text("a")
    hdfs.fail = lambda called, path: 0 if called == operation and released.wait(WAIT_S) else None
    store = partial(storage.store, source, f"{place}/b.txt")
    copy = store if operation == "CREATE" else partial(storage.fetch, f"{place}/a.txt", tmp_path / "a")
    try:
        with pytest.raises(RunEnded, match=r"no byte moved for 0\.5 s, given up$"):
            copy()
        assert files_in(hdfs.folder) == ["a.txt"]
        assert not (tmp_path / "a").exists()
    finally:
        released.set()


def test_a_process_that_is_killed_in_the_middle_of_a_put_leaves_no_file_of_the_final_name(
    hdfs: WebHdfs, place: str, tmp_path: Path
) -> None:
    source, appended, released = tmp_path / "source", threading.Event(), threading.Event()
    source.write_bytes(bytes(24 << 20))

    def hang(operation: str, path: str) -> int | None:
        if operation == "APPEND" and hdfs.operations.count("APPEND") > 3:  # behind the first piece of data
            appended.set()
            released.wait(WAIT_S)
        return None

    hdfs.fail = hang
    program = (
        "import sys, pathlib\nfrom vecd.client.bulk.storage import store\nstore(pathlib.Path(sys.argv[1]), sys.argv[2])"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(source), f"{place}/a.npy"])
    try:
        assert appended.wait(WAIT_S)
        process.send_signal(signal.SIGKILL)
        assert process.wait(WAIT_S) == -signal.SIGKILL
    finally:
        process.kill()
        released.set()
    [draft] = files_in(hdfs.folder)
    assert draft.startswith(".a.npy.")
    assert draft.endswith(".part")
    with pytest.raises(EmbedError, match="no file is there"):
        storage.expand(f"{place}/")
