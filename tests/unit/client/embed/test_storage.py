"""Files of stores: through fsspec's own file systems in memory and on the disk.

Methods of the one in memory are replaced by such that deny, stall or die. tests/process/client/embed/test_remote.py has
a server behind real sockets.
"""

import io
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vecd.client.embed import storage
from vecd.client.embed.options import EmbedError, RunEnded

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem  # noqa: E402


@pytest.fixture(autouse=True)
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage, "PAUSES_S", (0.0, 0.0))
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()


def breaks(
    patch: pytest.MonkeyPatch, method: str, fail: Exception | Callable[[], object], times: int = 1000
) -> list[str]:
    """The next calls of a method of the store in memory fail; a copy has got as far as half. Returns their paths."""
    do, calls = getattr(MemoryFileSystem, method), list[str]()

    def broken(self: object, path: str, *arguments: Any, **options: Any) -> Any:
        calls.append(path)
        if len(calls) > times:
            return do(self, path, *arguments, **options)
        if method == "open":
            do(self, path, *arguments, **options).write(b"half")
        elif method == "get_file":
            Path(arguments[0]).write_bytes(b"half")
        if isinstance(fail, Exception):
            raise fail
        fail()
        return do(self, path, *arguments, **options)

    patch.setattr(MemoryFileSystem, method, broken)
    return calls


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
        ("/a/b", False), ("unix:/run/x", False), ("./s3:/b", False), ("://", False), ("a b://c", False),
    ],
)  # fmt: skip
def test_what_is_a_url(path: str, expected: bool) -> None:
    assert storage.is_remote(path) is expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("sftp://me:secret@host:22/a/b.txt", "sftp://me@host:22/a/b.txt"),
        ("https://h/a.txt?sig=secret&x=1", "https://h/a.txt?…"),
        ("https://h/a.txt?sig=secret#secret", "https://h/a.txt?…"),
        ("s3://bucket/a#1.txt", "s3://bucket/a#1.txt"),
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
        ("in/*", ["in/a.txt", "in/b.jsonl"]),
        ("in/**/*.txt", ["in/a.txt", "in/deep/c.txt", "in/deep/er/d.txt"]),
        ("*/a.txt", ["in/a.txt"]),
        ("in/a.npy.part", ["in/a.npy.part"]),
    ],
)
def test_expand(place: str, pattern: str, expected: list[str]) -> None:
    assert [found.path for found in storage.expand(place + pattern)] == [place + name for name in expected]


@pytest.mark.parametrize("pattern", ["in/missing.txt", "in/*.csv", "nothing/here", "nothing/*"])
def test_nothing_there_is_an_error_that_names_the_path(place: str, pattern: str) -> None:
    with pytest.raises(EmbedError) as raised:
        storage.expand(place + pattern)
    assert pattern in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_name_with_the_characters_of_a_glob_is_taken_literally(scheme: str, tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").touch()
    assert storage.expand(f"{scheme}{tmp_path}/a[1].txt") == [(f"{scheme}{tmp_path}/a[1].txt", "")]


def test_a_folder_below_that_may_not_be_listed_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(MemoryFileSystem(), *NAMES)
    ls = MemoryFileSystem.ls

    def forbid(self: object, path: str, *arguments: Any, **options: Any) -> Any:
        if path == "/in/deep/er":
            raise PermissionError("Forbidden")
        return ls(self, path, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "ls", forbid)
    for pattern in ("in", "in/**"):
        with pytest.raises(EmbedError, match=r"memory://in.*: access is denied \(PermissionError: Forbidden\)"):
            storage.expand(f"memory://{pattern}")


def test_a_listing_that_fails_for_now_is_not_taken_for_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(MemoryFileSystem(), *NAMES)
    breaks(monkeypatch, "ls", HttpError(503, "SlowDown"))
    with pytest.raises(RunEnded, match=r"SlowDown \(tried 3 times\)"):
        storage.expand("memory://in")


# --- copies ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/out/new" if request.param == "file" else "memory://out/new"


def test_there_and_back(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PART_BYTES", 1000)
    source, url, target = tmp_path / "source", f"{folder}/a.npy", tmp_path / "target"
    assert not storage.exists(url)
    for content in (bytes(range(256)) * 40, b"", b"replaced"):
        source.write_bytes(content)
        storage.store(source, url)
        assert storage.exists(url)
        storage.fetch(url, target)
        assert target.read_bytes() == content
    assert storage.expand(folder) == [(url, "a.npy")]
    assert not storage.exists(folder), "a folder is no file"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["source", "target"]
    fs, path = fsspec.core.url_to_fs(folder)
    assert fs.ls(path, detail=False) == [f"{path}/a.npy"], "no draft is left"


def test_a_listing_of_before_does_not_hide_what_was_stored_since(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = []
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda self, path=None: forgotten.append(path))
    assert not storage.exists("memory://a")
    assert forgotten == [None]


@pytest.mark.parametrize("method", ["open", "mv"])
def test_a_store_that_dies_in_the_middle_has_no_object(method: str, tmp_path: Path, monkeypatch: Any) -> None:
    source, fs = tmp_path / "source", MemoryFileSystem()
    source.write_bytes(b"next")
    if method == "open":
        fill(fs, "/out/a")
    with monkeypatch.context() as patch:
        breaks(patch, method, ConnectionResetError(104, "Connection reset by peer"))
        with pytest.raises(RunEnded, match=r"^memory://out/a: .*reset by peer \(tried 3 times\)"):
            storage.store(source, "memory://out/a")
    found = {path: fs.cat_file(path) for path in fs.find("/out")}
    assert found == ({"/out/a": b"/out/a"} if method == "open" else {}), "the one of before stays"


def test_a_rename_that_does_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"whole")
    monkeypatch.setattr(MemoryFileSystem, "mv", lambda self, path1, path2, **_: None)
    with pytest.raises(RunEnded, match=r"out/a\.npy: OSError: \.a\.npy\..*\.part was not renamed"):
        storage.store(source, "memory://out/a.npy")
    assert MemoryFileSystem().find("/out") == []


def test_a_copy_that_is_cut_short_in_silence_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(MemoryFileSystem(), "/a-long-name")
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda self, path, target, **_: Path(target).write_bytes(b"half"))
    with pytest.raises(RunEnded, match="only 4 of 12 bytes arrived"):
        storage.fetch("memory://a-long-name", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    source = tmp_path / "source"
    source.write_bytes(b"of 12 bytes.")

    def keep_half(self: Any, path: str, _: str) -> io.BytesIO:
        self.store[path] = MemoryFile(self, path, b"half")
        return io.BytesIO()

    monkeypatch.setattr(MemoryFileSystem, "open", keep_half)
    with pytest.raises(RunEnded, match="only 4 of 12 bytes were stored"):
        storage.store(source, "memory://a")


# --- errors ---------------------------------------------------------------------------------------------------


def test_what_passes_by_itself_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(MemoryFileSystem(), "/a")
    calls = breaks(monkeypatch, "get_file", OSError("busy"), times=2)
    storage.fetch("memory://a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"/a"
    assert len(calls) == 3


class HttpError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@pytest.mark.parametrize(
    ("error", "message", "num_calls"),
    [
        (PermissionError("Access Denied"), r"access is denied \(PermissionError: Access Denied\)", 1),
        (HttpError(400, "bad"), "HttpError: bad$", 1),
        (HttpError(429, "SlowDown"), r"SlowDown \(tried 3 times\)", 3),
        (ConnectionResetError(104, "reset"), r"reset \(tried 3 times\)", 3),
    ],
)
def test_errors_are_one_line(
    error: Exception, message: str, num_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(MemoryFileSystem(), "/a")
    calls = breaks(monkeypatch, "get_file", error)
    with pytest.raises(RunEnded, match=rf"^memory://a: .*{message}"):
        storage.fetch("memory://a", tmp_path / "a")
    assert len(calls) == num_calls
    assert list(tmp_path.iterdir()) == [], "what was fetched half is no file"


def test_a_store_that_denies_does_not_say_that_nothing_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch, "info", PermissionError("Forbidden"))
    with pytest.raises(RunEnded, match="access is denied"):
        storage.exists("memory://a")


@pytest.mark.parametrize("method", ["get_file", "open", "ls", "info"])
def test_a_stall_ends(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "STALL_S", 0.2)
    source, released = tmp_path / "source", threading.Event()
    source.write_bytes(b"whole")
    fill(MemoryFileSystem(), "/in/a")

    def hang() -> None:
        released.wait(30)
        raise OSError("late")

    breaks(monkeypatch, method, hang)
    calls: dict[str, Callable[[], object]] = {
        "get_file": lambda: storage.fetch("memory://in/a", tmp_path / "a"),
        "open": lambda: storage.store(source, "memory://in/b"),
        "ls": lambda: storage.expand("memory://in"),
        "info": lambda: storage.exists("memory://in/a"),
    }
    try:
        with pytest.raises((RunEnded, EmbedError), match=r"^memory://in.*: no byte moved for 0\.2 s, given up$"):
            calls[method]()
        assert "/in/b" not in MemoryFileSystem.store
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
    fill(MemoryFileSystem(), "/a")

    def slow(self: object, path: str, target: str, callback: Any) -> None:
        for _ in range(8):
            now[0] += 0.3
            callback.relative_update(1)
            looked.clear()
            assert looked.wait(30)
        Path(target).write_bytes(b"/a")

    monkeypatch.setattr(MemoryFileSystem, "get_file", slow)
    storage.fetch("memory://a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"/a"


def test_messages_have_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://me:pass-word@host/a.txt?signature=hush"
    said = "403 for memory://me:pass-word@host/a.txt?signature=hush, and GET /a.txt?other=hush-too\nTraceback"
    breaks(monkeypatch, "info", HttpError(403, said))
    with pytest.raises(RunEnded) as raised:
        storage.fetch(url, tmp_path / "a")
    assert str(raised.value).startswith("memory://me@host/a.txt?…: access is denied (HttpError: 403 for ")
    for secret in ("pass-word", "hush", "Traceback"):
        assert secret not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/a", r"^gs://bucket/a: ImportError: .* install gcsfs"),
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


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(EmbedError, match=r"fsspec is not installed: pip install 'vecd\[fs\]'"):
        storage.exists("s3://bucket/a")


def test_what_stores_do_not_have() -> None:
    with pytest.raises(EmbedError, match="a glob cannot stand for a bucket"):
        storage.expand("s3://buck*/a.txt")
    with pytest.raises(EmbedError, match=r"^https://host/a\?…: HTTP has no folder to write to"):
        storage.store(Path(__file__), "https://host/a?sig=1")
