"""`vecd embed --output-dir`: many inputs with an output each."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.bulk_server import AT_ONCE, BulkServer, vectors_of
from tests.support.serving import eventually
from vecd.client.embed import outputs
from vecd.client.embed.command import main
from vecd.client.embed.options import EmbedError
from vecd.client.embed.storage import exists, shown

IDENTITY = f"{'a' * 32};dtype=float32"


@pytest.fixture(autouse=True)
def one_identity(server: BulkServer) -> None:
    server.nodes = [(IDENTITY, "made-up")]


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
        return main(self.arguments(server, *flags), AT_ONCE)

    def check(self, *names: str) -> None:
        """These outputs are complete, and nothing else is there."""
        found = {path.name for path in self.out.iterdir()} - {outputs.NAME}
        assert found == {f"{name}.npy" for name in names}
        for name in names:
            np.testing.assert_array_equal(np.load(self.out / f"{name}.npy"), vectors_of(self.lines[name]))


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return Data(tmp_path)


def test_each_input_has_an_output_and_none_is_made_twice(data, server, capsys):
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


def test_a_bad_input_does_not_stop_the_others_but_a_lost_server_does(data, server, tmp_path, capsys):
    (data.inputs / "b.txt").write_bytes(b"\xff\xfeo\0n\0e\0")
    manifest = tmp_path / "manifest"
    manifest.write_text(f"{data.inputs}/gone.txt\n" + "".join(f"{data.inputs}/{name}.txt\n" for name in "abcd"))
    server.fail = lambda texts: (401, "no") if "d 20" in texts else None
    assert data.embed(server, "--manifest", str(manifest)) == 1
    told = capsys.readouterr().err
    assert f"{server.url} answers 401: no" in told
    assert f"failed: {data.inputs}/b.txt: is UTF-16, make it UTF-8\n" in told
    assert "2 of 5 outputs complete: 2 made, 0 were there, 1 failed, 2 left\n" in told
    server.fail = lambda texts: None
    server.bodies.clear()
    assert data.embed(server, "--manifest", str(manifest)) == 1
    assert "d 0" not in server.texts, "it goes on behind the last commit"
    told = capsys.readouterr().err
    assert f"failed: {data.inputs}/gone.txt: cannot be read: No such file or directory\n" in told
    assert "3 of 5 outputs complete: 1 made, 2 were there, 2 failed\n" in told
    data.check("a", "c", "d")


def start(data: Data, server: BulkServer) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "vecd", "embed", *data.arguments(server)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def slow_at(server: BulkServer, text: str) -> None:
    """Requests with it wait for the test's end."""
    server.fail = lambda texts: (503, "later") if text in texts else None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_goes_on(data, server, number):
    slow_at(server, "b 30")
    with start(data, server) as first:
        journal = data.out / "b.npy.journal"
        eventually(lambda: journal.exists() and b'"row": 24' in journal.read_bytes())
        first.send_signal(number)
        _, told = first.communicate(timeout=20)
        assert first.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert "1 of 4 outputs complete: 1 made, 0 were there, 0 failed, 3 left\n" in told
    server.fail = lambda texts: None
    server.bodies.clear()
    assert data.embed(server) == 0
    assert {"a 0", "b 0"}.isdisjoint(server.texts)
    data.check("a", "b", "c", "d")


def test_two_runs_over_one_folder(data, server, capsys):
    """The second one leaves alone what the first one makes, and exits with 1 as long as that is not complete."""
    slow_at(server, "a 30")
    with start(data, server) as first:
        eventually((data.out / "a.npy.journal").exists)
        assert data.embed(server) == 1
        assert "3 of 4 outputs complete: 3 made, 0 were there, 0 failed, 1 being made by another run" in (
            capsys.readouterr().err
        )
        server.fail = lambda texts: None
        first.communicate(timeout=30)
        assert first.returncode == 0
    data.check("a", "b", "c", "d")


def test_what_a_killed_run_has_left_is_made_by_another(data, server):
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
    """Objects by URL, in place of `vecd.client.embed.storage`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.objects: dict[str, bytes] = {}
        for name in ("exists", "fetch", "store"):
            monkeypatch.setattr(outputs, name, getattr(self, name))

    def exists(self, url: str) -> bool:
        return url in self.objects

    def fetch(self, url: str, target: Path) -> None:
        if url not in self.objects:
            raise EmbedError(f"{shown(url)}: there is no such object")
        target.write_bytes(self.objects[url])

    def store(self, source: Path, url: str) -> None:
        self.objects[url] = source.read_bytes()


def test_no_secret_is_shown_or_written(data, server, tmp_path, monkeypatch, capsys):
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


def test_nothing_is_stored_beside_outputs_of_another_model_that_came_meanwhile(
    data, server, tmp_path, monkeypatch, capsys
):
    store, folder = Store(monkeypatch), "sftp://h/out"

    def fail(texts: list[str]) -> None:
        if "a 0" in texts:
            store.objects[f"{folder}/{outputs.NAME}"] = b'{"identity":"another"}'

    server.fail = fail
    flags = ("--output-dir", folder, "--work-dir", str(tmp_path / "work"), "--url", server.url)
    assert main([str(data.inputs), *flags], AT_ONCE) == 1
    assert f"{folder} has outputs of another, and this run is of {IDENTITY}" in capsys.readouterr().err
    assert list(store.objects) == [f"{folder}/{outputs.NAME}"]


def test_an_output_that_another_run_completes_between_two_looks(data, server, monkeypatch, capsys):
    """At the first look the other had its journal yet, when the journal is looked for no more."""
    assert data.embed(server) == 0
    looks: list[str] = []

    def look(path: str) -> bool:
        looks.append(path)
        return len(looks) > 5 and exists(path)

    monkeypatch.setattr(outputs, "exists", look)
    for name in "bcd":
        (data.out / f"{name}.npy").unlink()
    assert data.embed(server) == 0
    assert "4 of 4 outputs complete: 3 made, 1 were there, 0 failed" in capsys.readouterr().err
    data.check("a", "b", "c", "d")


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_a_folder_without_hard_links_has_its_identity_too(data, server, monkeypatch, number):
    def link(*_: object) -> None:
        raise OSError(number, "no hard links")

    monkeypatch.setattr("os.link", link)
    assert data.embed(server) == 0
    assert (data.out / outputs.NAME).read_bytes() == b'{"identity":"%s"}\n' % IDENTITY.encode()
