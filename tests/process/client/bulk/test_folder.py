"""`vecd embed --output-dir`: many inputs with an output each."""

import errno
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.bulk_server import BulkServer, vectors_of
from tests.support.serving import eventually
from vecd.client.bulk import folder as folder_module
from vecd.client.bulk import folder_identity
from vecd.client.bulk.command import main
from vecd.client.bulk.errors import EmbedError, RunEnded
from vecd.client.bulk.shards import Shard
from vecd.client.bulk.storage import shown

IDENTITY = f"{'a' * 32};dtype=float32"


@pytest.fixture
def server() -> Iterator[BulkServer]:
    with BulkServer() as server:
        server.nodes = [(IDENTITY, "made-up")]
        yield server


class Data:
    """Four inputs of 40 lines, and the folder of their outputs."""

    def __init__(self, folder: Path) -> None:
        self.inputs, self.out = folder / "in", folder / "out"
        self.inputs.mkdir()
        self.lines = {name: [f"{name} {n}" for n in range(40)] for name in "abcd"}
        for name, lines in self.lines.items():
            (self.inputs / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))

    def arguments(self, server: BulkServer, *flags: str) -> list[str]:
        common = ["--output-dir", str(self.out), "--url", server.url, "--batch-texts", "8", "--concurrency", "1"]
        return [*common, *(flags or [str(self.inputs)])]

    def embed(self, server: BulkServer, *flags: str) -> int:
        return main(self.arguments(server, *flags))

    def check(self, *names: str) -> None:
        """These outputs are complete, and nothing else is there."""
        found = {path.name for path in self.out.iterdir()} - {folder_identity.NAME}
        assert found == {f"{name}.npy" for name in names}
        for name in names:
            np.testing.assert_array_equal(np.load(self.out / f"{name}.npy"), vectors_of(self.lines[name]))


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(tmp_path)


def test_each_input_has_an_output_and_none_is_made_twice(
    data: Data, server: BulkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data.embed(server) == 0
    assert "4 of 4 outputs complete: 4 made, 0 were there, 0 failed\n" in capsys.readouterr().err
    data.check("a", "b", "c", "d")
    (data.out / "c.npy").unlink()
    server.bodies.clear()
    assert data.embed(server) == 0
    assert "4 of 4 outputs complete: 1 made, 3 were there, 0 failed\n" in capsys.readouterr().err
    assert sorted(server.texts) == sorted(data.lines["c"])
    server.bodies.clear()
    assert data.embed(server) == 0
    assert not server.bodies
    assert data.embed(server, str(data.inputs), "--restart") == 0
    assert len(server.texts) == 160
    data.check("a", "b", "c", "d")


def test_shards_and_a_manifest(data: Data, server: BulkServer, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest"
    manifest.write_text("".join(f"{data.inputs}/{name}.txt\n" for name in "dcb") + f"{data.inputs}/a.txt\tsub/x\n")
    assert data.embed(server, "--manifest", str(manifest), "--shard", "1/2") == 0
    data.check("b", "d")
    assert data.embed(server, "--manifest", str(manifest), "--shard", "0/2") == 0
    np.testing.assert_array_equal(np.load(data.out / "sub" / "x.npy"), vectors_of(data.lines["a"]))


def test_a_manifest_that_cannot_be_read_begins_nothing(
    data: Data, server: BulkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "manifest"
    manifest.write_bytes(f"{data.inputs}/a.txt\n\n\xff".encode("latin-1"))
    assert data.embed(server, "--manifest", str(manifest)) == 2
    assert f"{manifest}, line 3: not UTF-8" in capsys.readouterr().err
    assert not data.out.exists()
    assert not server.bodies


def test_a_bad_input_does_not_stop_the_others(
    data: Data, server: BulkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data.inputs / "b.txt").write_bytes(b"\xff\xfeo\0n\0e\0")
    manifest = tmp_path / "manifest"
    manifest.write_text(f"{data.inputs}/gone.txt\n" + "".join(f"{data.inputs}/{name}.txt\n" for name in "abcd"))
    assert data.embed(server, "--manifest", str(manifest)) == 1
    told = capsys.readouterr().err
    assert f"failed: {data.inputs}/b.txt: is UTF-16, make it UTF-8\n" in told
    assert f"failed: {data.inputs}/gone.txt: cannot be read: No such file or directory\n" in told
    assert "3 of 5 outputs complete: 3 made, 0 were there, 2 failed\n" in told
    data.check("a", "c", "d")


def test_a_lost_server_ends_the_run(data: Data, server: BulkServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.fail = lambda texts: (401, "no") if "b 20" in texts else None
    assert data.embed(server) == 1
    told = capsys.readouterr().err
    assert f"{server.url} answers 401: no" in told
    assert "1 of 4 outputs complete: 1 made, 0 were there, 0 failed, 3 left" in told
    server.fail = lambda texts: None
    server.bodies.clear()
    assert data.embed(server) == 0
    assert "b 0" not in server.texts, "it goes on behind the last commit"
    data.check("a", "b", "c", "d")


def start(data: Data, server: BulkServer, *flags: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "vecd.client.bulk.command", *data.arguments(server, *flags)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def slow_at(server: BulkServer, *texts: str) -> None:
    """Requests with these wait for the test's end."""

    def fail(found: list[str]) -> tuple[int, str] | None:
        return (503, "later") if set(texts) & set(found) else None

    server.fail = fail


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_goes_on(data: Data, server: BulkServer, number: signal.Signals) -> None:
    slow_at(server, "b 30")
    with start(data, server) as first:
        journal = data.out / "b.npy.journal"
        eventually(lambda: journal.exists() and b'"row": 24' in journal.read_bytes().replace(b'"row":24', b'"row": 24'))
        first.send_signal(number)
        assert first.wait(20) == (-number if number == signal.SIGKILL else 128 + number)
        assert first.stderr is not None
        told = first.stderr.read().decode()
    if number != signal.SIGKILL:
        assert "1 of 4 outputs complete: 1 made, 0 were there, 0 failed, 3 left\n" in told
    server.fail = lambda texts: None
    server.bodies.clear()
    assert data.embed(server) == 0
    assert {"a 0", "b 0"}.isdisjoint(server.texts)
    data.check("a", "b", "c", "d")


def test_two_runs_over_one_folder(data: Data, server: BulkServer, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one leaves alone what the first one makes, and exits with 1 as long as that is not complete."""
    slow_at(server, "a 30")
    with start(data, server) as first:
        eventually((data.out / "a.npy.journal").exists)
        assert data.embed(server) == 1
        assert "3 of 4 outputs complete: 3 made, 0 were there, 0 failed, 1 being made by another run" in (
            capsys.readouterr().err
        )
        server.fail = lambda texts: None
        assert first.wait(30) == 0
        assert first.stderr is not None
        first.stderr.read()
    data.check("a", "b", "c", "d")


def test_what_a_killed_run_has_left_is_made_by_another(data: Data, server: BulkServer) -> None:
    """It had the lock when the other looked first, and none when it looked again."""
    slow_at(server, "a 30")
    with start(data, server) as first:
        eventually((data.out / "a.npy.journal").exists)

        def fail(texts: list[str]) -> tuple[int, str] | None:
            if "d 0" in texts:
                first.kill()
                first.wait()
                server.fail = lambda texts: None
            return (503, "later") if "a 30" in texts else None

        server.fail = fail
        assert data.embed(server) == 0
    data.check("a", "b", "c", "d")


class Store:
    """Objects by URL, in place of `vecd.client.bulk.storage`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_forbidden = False
        for module in (folder_module, folder_identity):
            for name in ("exists", "fetch", "store"):
                monkeypatch.setattr(module, name, getattr(self, name))

    def exists(self, url: str) -> bool:
        return url in self.objects

    def fetch(self, url: str, target: Path) -> None:
        if url not in self.objects:
            raise EmbedError(f"{shown(url)}: there is no such object")
        target.write_bytes(self.objects[url])

    def store(self, source: Path, url: str) -> None:
        content = source.read_bytes()
        if self.is_forbidden and url.endswith(".npy"):
            raise EmbedError(f"{url}: status 403")
        self.objects[url] = content


def test_remote_inputs_and_outputs(
    data: Data, server: BulkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An output that cannot be stored is not computed again, unless its input has changed."""
    store, work, manifest = Store(monkeypatch), tmp_path / "work", tmp_path / "manifest"
    for name in "ab":
        store.objects[f"mem://in/{name}.txt"] = (data.inputs / f"{name}.txt").read_bytes()
    manifest.write_text("mem://in/a.txt\nmem://in/b.txt\nmem://in/gone.txt\n")
    arguments = ["--manifest", str(manifest), "--output-dir", "mem://out", "--work-dir", str(work), "--url", server.url]
    store.is_forbidden = True
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert "failed: mem://in/a.txt: mem://out/a.npy: status 403" in told
    assert "0 of 3 outputs complete: 0 made, 0 were there, 3 failed" in told
    assert not [url for url in store.objects if url.endswith(".npy")]

    store.is_forbidden = False
    store.objects["mem://in/b.txt"] = store.objects["mem://in/b.txt"].replace(b"b 39", b"B 39")
    server.bodies.clear()
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert "failed: mem://in/b.txt: the unfinished run was another one: mem://in/b.txt has changed" in told
    assert not server.texts
    np.testing.assert_array_equal(
        np.load(_written(tmp_path, store.objects["mem://out/a.npy"])), vectors_of(data.lines["a"])
    )
    assert main([*arguments, "--restart"]) == 1
    data.lines["b"][39] = "B 39"
    np.testing.assert_array_equal(
        np.load(_written(tmp_path, store.objects["mem://out/b.npy"])), vectors_of(data.lines["b"])
    )
    assert "mem://out/.vecd-identity.json" in store.objects
    manifest.write_text("mem://in/a.txt\n")
    assert data.embed(server, "--manifest", str(manifest), "--work-dir", str(work)) == 0
    data.check("a")
    assert [path.name for path in work.rglob("*") if path.is_file()] == []


def test_no_secret_is_shown_or_written(
    data: Data, server: BulkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in a message nor in a file; and an input whose URL is signed anew is that of the unfinished run."""
    store, work, manifest = Store(monkeypatch), tmp_path / "work", tmp_path / "manifest"
    content = (data.inputs / "b.txt").read_bytes().replace(b"b 3\n", b"\n")
    for signature in ("hush-1", "hush-2"):
        store.objects[f"https://h/b.txt?s={signature}"] = content
    out = ["--output-dir", "sftp://me:hush@h/out", "--work-dir", str(work), "--url", server.url, "--batch-texts", "8"]
    server.fail = lambda texts: (401, "no") if "b 30" in texts else None
    manifest.write_text("https://h/b.txt?s=hush-1\nsftp://me:hush@h/gone.txt\n")
    assert main(["--manifest", str(manifest), *out, "--concurrency", "1"]) == 1
    left = [path for path in work.rglob("*") if path.is_file() and path.name != "b.txt"]
    assert {path.name for path in left} >= {"b.npy.journal", "b.npy.rejected.jsonl.part"}
    assert not [path for path in left if b"hush" in path.read_bytes() or "hush" in str(path)]

    server.fail = lambda texts: None
    server.bodies.clear()
    manifest.write_text("https://h/b.txt?s=hush-2\nsftp://me:hush@h/gone.txt\n")
    assert main(["--manifest", str(manifest), *out]) == 1
    assert "b 0" not in server.texts, "it goes on behind the last commit"
    told = capsys.readouterr().err
    assert "1 of 2 outputs complete: 1 made, 0 were there, 1 failed" in told
    assert "sftp://me@h/out/b.npy: 1 row could not be embedded" in told
    assert "failed: sftp://me@h/gone.txt: there is no such object" in told
    assert "hush" not in told
    assert b'"file":"https://h/b.txt?\xe2\x80\xa6"' in store.objects["sftp://me:hush@h/out/b.npy.rejected.jsonl"]


def test_an_output_that_another_run_completes_between_two_looks(
    data: Data, server: BulkServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the first look the other had its journal yet, when the journal is looked for no more."""
    assert data.embed(server) == 0
    looks, is_there = [0], folder_module.OutputFolder._is_there

    def look(self: folder_module.OutputFolder, shard: Shard) -> bool:
        looks[0] += 1
        return looks[0] > 5 and is_there(self, shard)

    monkeypatch.setattr(folder_module.OutputFolder, "_is_there", look)
    (data.out / "b.npy").unlink()
    (data.out / "c.npy").unlink()
    (data.out / "d.npy").unlink()
    assert data.embed(server) == 0
    assert "4 of 4 outputs complete: 3 made, 1 were there, 0 failed" in capsys.readouterr().err
    data.check("a", "b", "c", "d")


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_a_folder_without_hard_links_has_its_identity_too(
    data: Data, server: BulkServer, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(*_: object) -> None:
        raise OSError(number, "no hard links")

    monkeypatch.setattr("os.link", link)
    assert data.embed(server) == 0
    assert (data.out / folder_identity.NAME).read_bytes() == b'{"identity":"%s"}\n' % IDENTITY.encode()


def test_a_store_that_does_not_answer_ends_the_run(
    data: Data, server: BulkServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def exists(url: str) -> bool:
        raise RunEnded(f"{url}: no byte moved for 60 s, given up")

    monkeypatch.setattr(folder_module, "exists", exists)
    assert main([str(data.inputs), "--output-dir", "mem://out", "--url", server.url]) == 1
    assert "mem://out/a.npy: no byte moved for 60 s, given up" in capsys.readouterr().err
    assert not server.bodies


def _written(folder: Path, content: bytes) -> Path:
    path = folder / "copy.npy"
    path.write_bytes(content)
    return path
