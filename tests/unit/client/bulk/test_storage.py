"""Files of stores: through fsspec's own file systems in memory and on the disk, and one that fails as a test says.

`BrokenStore` is a fake: it stands for stores that deny, stall or die. tests/process/client/bulk/test_storage.py has a
server behind real sockets.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from vecd.client.bulk import storage
from vecd.client.bulk.errors import EmbedError, RunEnded

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402


class BrokenStore(MemoryFileSystem):  # type: ignore[misc]
    """Memory, with `fail` called first in each operation of a name in `on`."""

    protocol = "broken"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fail: Callable[[], None] = staticmethod(lambda: None)
    on: tuple[str, ...] = ()
    calls: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("broken://"))

    def _meet(self, name: str) -> None:
        type(self).calls.append(name)
        if name in self.on:
            type(self).fail()

    def info(self, path, **kwargs):
        self._meet("info")
        return super().info(path, **kwargs)

    def ls(self, path, detail=True, **kwargs):
        self._meet(f"ls {path}")
        self._meet("ls")
        return super().ls(path, detail, **kwargs)

    def get_file(self, rpath, lpath, **kwargs):
        Path(lpath).write_bytes(b"half")
        self._meet("get")
        return super().get_file(rpath, lpath, **kwargs)

    def mv(self, path1, path2, **kwargs):
        self._meet("mv")
        return super().mv(path1, path2, **kwargs)

    def _open(self, path, mode="rb", **kwargs):
        file = super()._open(path, mode, **kwargs)
        if "w" in mode and "write" in self.on:
            file.write(b"half")
            type(self).fail()
        return file


@pytest.fixture(autouse=True)
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage, "_PAUSES_S", (0.0, 0.0))
    fsspec.register_implementation("broken", BrokenStore, clobber=True)
    for each in (MemoryFileSystem, BrokenStore):
        each.store.clear()
        each.pseudo_dirs[:] = [""]
    BrokenStore.calls = []
    yield
    BrokenStore.on = ()
    MemoryFileSystem.store.clear()


def breaks(monkeypatch: pytest.MonkeyPatch, on: str, error: Exception, times: int = 1000) -> None:
    left = [times]

    def fail() -> None:
        if left[0]:
            left[0] -= 1
            raise error

    monkeypatch.setattr(BrokenStore, "on", (on,))
    monkeypatch.setattr(BrokenStore, "fail", staticmethod(fail))


def fill(fs: Any, *paths: str) -> None:
    for path in paths:
        fs.pipe_file(path, path.encode())


NAMES = ("/in/a.txt", "/in/b.jsonl", "/in/deep/c.txt", "/in/deep/er/d.txt", "/other.txt")
LEFT_OUT = ("/in/.hidden.txt", "/in/.cache/x.txt", "/in/_SUCCESS", "/in/a.npy.part", "/in/a.npy.journal",
            "/in/a.npy.journal.new", "/in/a.npy.rejected.jsonl")  # fmt: skip


# --- paths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://b/k", True), ("memory://a", True), ("file:///a", True), ("simplecache::s3://b/k", True),
        ("a.txt", False), ("/a/b", False), ("-", False), ("unix:/run/x", False), ("./s3:/b", False), ("://", False),
        ("a b://c", False),
    ],
)  # fmt: skip
def test_what_is_a_url(path: str, expected: bool) -> None:
    assert storage.is_remote(path) is expected


def test_join() -> None:
    assert storage.join("s3://b/k", "x/y.npy") == "s3://b/k/x/y.npy"
    assert storage.join("s3://b/k/", "y.npy") == "s3://b/k/y.npy"
    assert storage.join("memory://", "y.npy") == "memory://y.npy"
    assert storage.join("/a/", "y.npy") == "/a/y.npy"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("sftp://me:secret@host:22/a/b.txt", "sftp://me@host:22/a/b.txt"),
        ("https://h/a.txt?sig=secret&x=1", "https://h/a.txt?…"),
        ("https://h/a.txt#secret", "https://h/a.txt"),
        ("https://h/a.txt?sig=secret#secret", "https://h/a.txt?…"),
        ("s3://bucket/a#1.txt", "s3://bucket/a#1.txt"),
        ("s3://bucket/a@b.txt", "s3://bucket/a@b.txt"),
        ("a.txt", "a.txt"),
    ],
)
def test_what_is_shown_of_a_url_has_no_secret(url: str, expected: str) -> None:
    assert storage.shown(url) == expected


# --- listing --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["plain", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same files in a folder, behind file:// and in memory. The prefix of their names."""
    if request.param == "memory":
        fill(MemoryFileSystem(), *NAMES, *LEFT_OUT)
        return "memory://"
    for name in (*NAMES, *LEFT_OUT):
        path = tmp_path / name[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return f"{tmp_path}/" if request.param == "plain" else f"file://{tmp_path}/"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("in/a.txt", ["in/a.txt"]),
        ("in", ["in/a.txt", "in/b.jsonl", "in/deep/c.txt", "in/deep/er/d.txt"]),
        ("in/", ["in/a.txt", "in/b.jsonl", "in/deep/c.txt", "in/deep/er/d.txt"]),
        ("in/*", ["in/a.txt", "in/b.jsonl"]),
        ("in/*.txt", ["in/a.txt"]),
        ("in/[ab].*", ["in/a.txt", "in/b.jsonl"]),
        ("in/*/c.t?t", ["in/deep/c.txt"]),
        ("in/**/*.txt", ["in/a.txt", "in/deep/c.txt", "in/deep/er/d.txt"]),
        ("*/a.txt", ["in/a.txt"]),
        ("in/a.npy.part", ["in/a.npy.part"]),
    ],
)
def test_expand(place: str, pattern: str, expected: list[str]) -> None:
    assert storage.expand(place + pattern) == [place + name for name in expected]


@pytest.mark.parametrize("pattern", ["in/missing.txt", "in/*.csv", "nothing/here", "nothing/*"])
def test_nothing_there_is_an_error_that_names_the_path(place: str, pattern: str) -> None:
    with pytest.raises(EmbedError) as raised:
        storage.expand(place + pattern)
    assert pattern in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_without_inputs_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".hidden").touch()
    with pytest.raises(EmbedError, match="no file is there"):
        storage.expand(str(tmp_path))


def test_a_name_with_the_characters_of_a_glob_is_taken_literally(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").touch()
    assert storage.expand(f"{tmp_path}/a[1].txt") == [f"{tmp_path}/a[1].txt"]
    assert storage.expand(f"file://{tmp_path}/a[1].txt") == [f"file://{tmp_path}/a[1].txt"]


def test_a_folder_below_that_may_not_be_listed_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(BrokenStore(), *NAMES)
    breaks(monkeypatch, "ls /in/deep/er", PermissionError("Forbidden"))
    for pattern in ("in", "in/**"):
        with pytest.raises(EmbedError, match=r"broken://in.*: access is denied \(PermissionError: Forbidden\)"):
            storage.expand(f"broken://{pattern}")


def test_a_listing_that_fails_for_now_is_not_taken_for_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(BrokenStore(), *NAMES)
    breaks(monkeypatch, "ls", HttpError(503, "SlowDown"))
    with pytest.raises(RunEnded, match=r"SlowDown \(tried 3 times\)"):
        storage.expand("broken://in")


# --- copies ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/out/new" if request.param == "file" else "memory://out/new"


def test_there_and_back(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_PART_BYTES", 1000)
    source, url, target = tmp_path / "source", f"{folder}/a.npy", tmp_path / "target"
    assert not storage.exists(url)
    for content in (bytes(range(256)) * 40, b"", b"replaced"):
        source.write_bytes(content)
        storage.store(source, url)
        assert storage.exists(url)
        storage.fetch(url, target)
        assert target.read_bytes() == content
    assert storage.expand(folder) == [url]
    assert not storage.exists(folder), "a folder is no file"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["source", "target"]
    fs, path = fsspec.core.url_to_fs(folder)
    assert fs.ls(path, detail=False) == [f"{path}/a.npy"], "no draft is left"


def test_a_listing_of_before_does_not_hide_what_was_stored_since(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = []
    monkeypatch.setattr(BrokenStore, "invalidate_cache", lambda self, path=None: forgotten.append(path))
    assert not storage.exists("broken://a")
    assert forgotten == [None]


@pytest.mark.parametrize("on", ["write", "mv"])
def test_a_store_that_dies_in_the_middle_has_no_object(
    on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"whole")
    breaks(monkeypatch, on, ConnectionResetError(104, "Connection reset by peer"))
    with pytest.raises(RunEnded, match=r"broken://out/a\.npy: .*reset by peer \(tried 3 times\)"):
        storage.store(source, "broken://out/a.npy")
    BrokenStore.on = ()
    assert BrokenStore().find("/out") == []


def test_the_object_of_before_stays_when_the_next_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"next")
    fill(BrokenStore(), "/a")
    breaks(monkeypatch, "write", OSError("gone"))
    with pytest.raises(RunEnded):
        storage.store(source, "broken://a")
    BrokenStore.on = ()
    assert BrokenStore().cat_file("/a") == b"/a"


def test_what_was_fetched_half_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(BrokenStore(), "/a")
    breaks(monkeypatch, "get", ConnectionResetError(104, "Connection reset by peer"))
    with pytest.raises(RunEnded, match="reset by peer"):
        storage.fetch("broken://a", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_is_cut_short_in_silence_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(BrokenStore(), "/a-long-name")
    monkeypatch.setattr(BrokenStore, "get_file", lambda self, path, target, **_: Path(target).write_bytes(b"half"))
    with pytest.raises(RunEnded, match="only 4 of 12 bytes arrived"):
        storage.fetch("broken://a-long-name", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# --- errors ---------------------------------------------------------------------------------------------------


def test_what_passes_by_itself_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(BrokenStore(), "/a")
    breaks(monkeypatch, "get", OSError("busy"), times=2)
    storage.fetch("broken://a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"/a"
    assert BrokenStore.calls.count("get") == 3


class HttpError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@pytest.mark.parametrize(
    ("error", "message", "num_calls"),
    [
        (PermissionError("Access Denied"), r"access is denied \(PermissionError: Access Denied\)", 1),
        (FileNotFoundError("a"), r"not found \(FileNotFoundError: a\)", 1),
        (HttpError(403, "Forbidden"), r"access is denied \(HttpError: Forbidden\)", 1),
        (HttpError(404, "gone"), "not found", 1),
        (HttpError(400, "bad"), "HttpError: bad$", 1),
        (HttpError(503, "SlowDown"), r"SlowDown \(tried 3 times\)", 3),
        (HttpError(429, "SlowDown"), r"SlowDown \(tried 3 times\)", 3),
        (OSError(28, "No space left on device"), "No space left on device$", 1),
        (ConnectionResetError(104, "reset"), r"reset \(tried 3 times\)", 3),
    ],
)
def test_errors_are_one_line(
    error: Exception, message: str, num_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(BrokenStore(), "/a")
    breaks(monkeypatch, "get", error)
    with pytest.raises(RunEnded, match=rf"^broken://a: .*{message}"):
        storage.fetch("broken://a", tmp_path / "a")
    assert BrokenStore.calls.count("get") == num_calls


def test_a_store_that_denies_does_not_say_that_nothing_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, "info", PermissionError("Forbidden"))
    with pytest.raises(RunEnded, match="access is denied"):
        storage.exists("broken://a")


@pytest.mark.parametrize("on", ["get", "write", "ls", "info"])
def test_a_stall_ends(on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "STALL_S", 0.2)
    source, released = tmp_path / "source", threading.Event()
    source.write_bytes(b"whole")
    fill(BrokenStore(), "/in/a")
    monkeypatch.setattr(BrokenStore, "on", (on,))
    monkeypatch.setattr(BrokenStore, "fail", staticmethod(lambda: released.wait(30) and None))
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: storage.fetch("broken://in/a", tmp_path / "a"),
        "write": lambda: storage.store(source, "broken://in/b"),
        "ls": lambda: storage.expand("broken://in"),
        "info": lambda: storage.exists("broken://in/a"),
    }
    try:
        with pytest.raises((RunEnded, EmbedError), match=r"^broken://in.*: no byte moved for 0\.2 s, given up$"):
            calls[on]()
        assert "/in/b" not in BrokenStore.store
        assert [path.name for path in tmp_path.iterdir()] == ["source"]
    finally:
        released.set()


def test_progress_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: each step is shorter than the limit, all together are longer."""
    now, looked = [0.0], threading.Event()

    def monotonic() -> float:
        looked.set()
        return now[0]

    monkeypatch.setattr(storage, "STALL_S", 0.4)
    monkeypatch.setattr(storage, "time", SimpleNamespace(monotonic=monotonic))
    fill(BrokenStore(), "/a")

    def slow(self: object, path: str, target: str, callback: Any) -> None:
        for _ in range(8):
            now[0] += 0.3
            callback.relative_update(1)
            looked.clear()
            assert looked.wait(30)
        Path(target).write_bytes(b"/a")

    monkeypatch.setattr(BrokenStore, "get_file", slow)
    storage.fetch("broken://a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"/a"


def test_messages_have_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "broken://me:pass-word@host/a.txt?signature=hush"
    said = "403 for broken://me:pass-word@host/a.txt?signature=hush, and GET /a.txt?other=hush-too\nTraceback"
    breaks(monkeypatch, "info", HttpError(403, said))
    with pytest.raises(RunEnded) as raised:
        storage.fetch(url, tmp_path / "a")
    assert str(raised.value).startswith("broken://me@host/a.txt?…: access is denied (HttpError: 403 for ")
    for secret in ("pass-word", "hush", "Traceback"):
        assert secret not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/a", r"^gs://bucket/a: gs:// needs a package that is not installed: pip install gcsfs$"),
        ("nosuch://a", r"^nosuch://a: ValueError: Protocol not known: nosuch"),
        ("simplecache::memory://a", r"chained URLs \(::\) are not supported"),
    ],
)
def test_a_protocol_that_cannot_be_used(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(EmbedError, match=message):
        storage.expand(url)
    with pytest.raises(EmbedError, match=message):
        storage.fetch(url, tmp_path / "a")
    with pytest.raises(EmbedError, match=message):
        storage.store(Path(__file__), url)


def test_a_glob_of_buckets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_open", lambda url: (None, url))
    with pytest.raises(EmbedError, match="a glob cannot stand for a bucket"):
        storage.expand("s3://buck*/a.txt")


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(EmbedError, match=r"fsspec is not installed: pip install 'vecd\[fs\]'"):
        storage.exists("s3://bucket/a")


def test_http_is_not_written_to() -> None:
    with pytest.raises(EmbedError, match=r"^https://host/a\?…: HTTP has no folder to write to"):
        storage.store(Path(__file__), "https://host/a?sig=1")
