"""`vecd embed` from and to a store behind real sockets: inputs, manifest and outputs are URLs of WebHDFS."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.bulk_server import BulkServer, vectors_of
from tests.support.webhdfs import WebHdfs
from vecd.client.bulk import storage
from vecd.client.bulk.command import main

pytest.importorskip("requests")
TEXTS = {"a": ["one", "two"], "deep/b": ["three"], "deep/c": ["four", "five", "six"]}


@pytest.fixture
def hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebHdfs]:
    monkeypatch.setattr(storage, "_PAUSES_S", (0.0, 0.0))
    for name, lines in TEXTS.items():
        path = tmp_path / "hdfs" / "in" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
    with WebHdfs(tmp_path / "hdfs") as server:
        yield server


@pytest.fixture
def server() -> Iterator[BulkServer]:
    with BulkServer() as server:
        yield server


def embed(hdfs: WebHdfs, server: BulkServer, work: Path, *flags: str, source: str = "in") -> int:
    place = f"webhdfs://{hdfs.address}"
    words = [f"{place}/{source}"] if source else ["--manifest", f"{place}/manifest.txt"]
    out = ("--output-dir", f"{place}/out", "--output-format", "npy", "--work-dir", str(work))
    return main([*words, *out, "--url", server.url, "--quiet", *flags])


def check(hdfs: WebHdfs, names: list[str]) -> None:
    """These outputs are there, whole, and no other file with a name of one."""
    folder = hdfs.folder / "out"
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.npy*"))
    assert found == [f"{name}.npy" for name in names]
    for name in names:
        np.testing.assert_array_equal(np.load(folder / f"{name}.npy"), vectors_of(TEXTS[name]))


def test_a_folder_of_a_store_becomes_one_in_it(hdfs: WebHdfs, server: BulkServer, tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert embed(hdfs, server, work, "--shard", "1/3") == 0
    check(hdfs, ["deep/b"])
    assert embed(hdfs, server, work) == 0
    check(hdfs, list(TEXTS))
    assert [path for path in work.rglob("*") if path.is_file()] == []
    num_texts = len(server.texts)
    assert embed(hdfs, server, work) == 0
    assert len(server.texts) == num_texts == 6, "what is complete is not computed again"


def test_a_manifest_in_a_store(hdfs: WebHdfs, server: BulkServer, tmp_path: Path) -> None:
    place = f"webhdfs://{hdfs.address}"
    (hdfs.folder / "manifest.txt").write_text(f"{place}/in/a.txt\n{place}/in/deep/c.txt\tdeep/c.npy\n")
    assert embed(hdfs, server, tmp_path / "work", source="") == 0
    check(hdfs, ["a", "deep/c"])


@pytest.mark.parametrize(("operation", "status"), [("APPEND", 0), ("RENAME", 0), ("CREATE", 403)])
def test_an_output_that_cannot_be_stored_is_made_by_the_next_run(
    operation: str, status: int, hdfs: WebHdfs, server: BulkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hdfs.fail = lambda called, path: status if called == operation and "b.npy" in path else None
    assert embed(hdfs, server, tmp_path / "work") == 1
    told = [line for line in capsys.readouterr().err.splitlines() if "b.npy" in line]
    assert len(told) == 1
    assert ("access is denied" if status else "tried 3 times") in told[0]
    check(hdfs, ["a", "deep/c"])
    hdfs.fail = lambda called, path: None
    assert embed(hdfs, server, tmp_path / "work") == 0
    check(hdfs, list(TEXTS))


@pytest.mark.parametrize(
    ("operation", "place", "code"),
    [("LISTSTATUS", "/in", 2), ("GETFILESTATUS", "/in", 2), ("GETFILESTATUS", "/out", 1)],
)
def test_a_store_that_denies_is_one_line_and_nothing_is_begun(
    operation: str,
    place: str,
    code: int,
    hdfs: WebHdfs,
    server: BulkServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hdfs.fail = lambda called, path: 403 if called == operation and path.startswith(place) else None
    assert embed(hdfs, server, tmp_path / "work") == code
    [line] = capsys.readouterr().err.splitlines()
    assert f"access is denied (PermissionError: Permission denied: {place}" in line
    assert server.bodies == []
    assert not (hdfs.folder / "out").exists()
