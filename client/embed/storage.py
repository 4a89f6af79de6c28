"""Files of `vecd embed` in object stores and other file systems that fsspec reads and writes.

Owns what a path of a place is, its listing, the copies from and to it, their time limits and repeats, and what is said
of its errors. Imports fsspec when such a path is used, not before. Never writes a password or a query string into a
message, and never leaves half an object under its final name.
"""

import errno
import glob
import inspect
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeAlias, TypeVar

from vecd.base.programs import not_installed
from vecd.client.embed.options import EmbedError, RunEnded

STALL_S = 120.0
"""A call of a store that moves no byte and lists no folder for this long is given up."""
PAUSES_S = (1.0, 4.0)
"""Before the second and the third try of what may succeed by itself."""
PART_BYTES = 8 << 20
"""Of an object that is stored in parts: each is progress."""
_MAX_DETAIL_CHARS = 200

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "tos"}
"""Where an object appears when the last of it has arrived. Elsewhere it is written under another name, and renamed."""
_FATAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, ImportError)
_FATAL_ERRNOS = {
    errno.EDQUOT, errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOSYS, errno.EPERM, errno.EROFS,
}  # fmt: skip
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*(?:::[a-z0-9]+)*)://")
_MAGIC = re.compile(r"[*?[]")
_NO_INPUTS = (".part", ".journal", ".journal.new", ".rejected.jsonl")

_T = TypeVar("_T")
_Moved: TypeAlias = Callable[[], None]
"""To be called at each sign of progress."""


def is_remote(path: str) -> bool:
    return _SCHEME.match(path) is not None


def join(folder: str, name: str) -> str:
    if not is_remote(folder):
        return os.path.join(folder, name)
    return folder + name if folder.endswith("/") else f"{folder}/{name}"


def base_name(path: str) -> str:
    """The last part of a path or URL. A query or fragment of http(s) is none of it."""
    if path.startswith(("http://", "https://")):
        path = path.partition("?")[0].partition("#")[0]
    return os.path.basename(path)


def shown(url: str) -> str:
    """`url` as it may be printed: without a password, and with "…" for a query and a fragment of http(s)."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    place, slash, path = rest.partition("/")
    user, at, host = place.rpartition("@")
    if scheme in ("http", "https"):
        path = path.partition("#")[0]
    path, question, _ = path.partition("?")
    return f"{scheme}://{user.partition(':')[0]}{at}{host}{slash}{path}{'?…' if question else ''}"


# --- listing --------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    path: str
    """Absolute, or a URL."""
    name: str
    """Below the folder that was named, or that a glob begins with; "" for a file that was named itself."""


def expand(path: str) -> list[Found]:
    """The files that a file, a folder or a glob names, sorted.

    A folder stands for all files below it; links to folders are not followed. What is hidden, `_SUCCESS`, of an
    unfinished run, or a list of rejected rows, is left out. A URL of http(s) is a single file, as HTTP lists nothing.

    Raises EmbedError when there is no file, or the store denies it; RunEnded when the store fails in a way that may
    pass, or stalls.
    """
    try:
        if is_remote(path):
            if base_of(path).endswith("://") and is_glob(path) and _scheme(path) in _OBJECT_STORES:
                raise EmbedError(f"{shown(path)}: a glob cannot stand for a bucket")
            base, names = _attempt(path, partial(_list_remote, path), final=EmbedError)
        else:
            base, names = _list_local(path)
    except OSError as error:
        raise EmbedError(f"{error.filename or path}: cannot be read: {error.strerror}") from error
    found = sorted(Found(join(base, name) if name else base, name) for name in names if not name or _is_input(name))
    if not found:
        raise EmbedError(f"{shown(path)}: no file is there")
    return found


def is_glob(path: str) -> bool:
    if path.startswith(("http://", "https://")):  # HTTP lists nothing, and a query begins with such a sign
        return False
    return _MAGIC.search(path) is not None and (is_remote(path) or not os.path.lexists(path))


def base_of(path: str) -> str:
    """The folder below which sub-folders are kept: the one that is named, or what comes before a glob's first sign."""
    if is_glob(path):
        path = _MAGIC.split(path, maxsplit=1)[0]
        path = path[: path.rfind("/") + 1] or "."
    return path if is_remote(path) else os.path.abspath(path)


def _list_local(path: str) -> tuple[str, Iterable[str]]:
    """The folder and the names below it, or a file and [""]."""

    def fail(error: OSError) -> None:  # os.walk would leave the folder out in silence
        raise error

    base = base_of(path)
    if is_glob(path):
        below = (each for each in glob.glob(os.path.abspath(path), recursive=True) if not os.path.isdir(each))
    elif os.path.isdir(path):
        walked = os.walk(base, onerror=fail)
        below = (os.path.join(folder, name) for folder, _, names in walked for name in names)
    else:
        os.stat(path)
        return base, [""]
    return base, [os.path.relpath(each, base) for each in below]


def _list_remote(url: str, fs: Any, path: str, moved: _Moved) -> tuple[str, Iterable[str]]:
    """As `_list_local`."""
    head = base_of(url)
    pattern = url[len(head) :]
    with suppress(*[FileNotFoundError] if pattern else []):
        if fs.info(path)["type"] != "directory":  # also a file whose name has the character of a glob
            return url, [""]
    root = fs._strip_protocol(head).rstrip("/")
    depth = pattern.count("/") + 1 if pattern and "**" not in pattern else None
    names: Iterable[str] = (name[len(root) :].lstrip("/") for name in _files(fs, root, depth, moved))
    if pattern:
        from fsspec.utils import glob_translate

        names = filter(re.compile(glob_translate(pattern)).match, names)
    # With the path that `fs` has of the folder, the URL keeps what that path lacks: a host, a user, an account.
    return head if head.endswith("://") else head.rstrip("/"), list(names)


def _files(fs: Any, folder: str, depth: int | None, moved: _Moved) -> Iterator[str]:
    """The files down to `depth` folders. fsspec's own `walk` leaves a folder that it may not read out in silence."""
    for info in fs.ls(folder, detail=True):
        name = info["name"]
        if name.rstrip("/") == folder.rstrip("/"):  # an empty object that marks a folder
            continue
        if info["type"] != "directory":
            yield name
        elif depth is None or depth > 1:
            yield from _files(fs, name.rstrip("/"), depth and depth - 1, moved)
    moved()


def _is_input(below: str) -> bool:
    parts = PurePosixPath(below).parts
    return not (
        any(part.startswith(".") and part != ".." for part in parts)
        or below.endswith(("/", *_NO_INPUTS))
        or parts[-1] == "_SUCCESS"
    )


# --- files ----------------------------------------------------------------------------------------------------


def exists(url: str) -> bool:
    """Whether there is a file. False for a folder. Raises RunEnded when the store does not say, EmbedError."""
    if not is_remote(url):
        return os.path.isfile(url)

    def ask(fs: Any, path: str, moved: _Moved) -> bool:
        try:
            return bool(fs.info(path)["type"] != "directory")  # fs.exists() takes every error for "no"
        except FileNotFoundError:
            return False

    return _attempt(url, ask)


def fetch(url: str, target: Path) -> None:
    """Copy a file of a store to `target`, which appears when it is whole.

    Raises RunEnded when that is impossible or stalls, EmbedError when a package is missing. Side effects: writes
    `target.part` meanwhile.
    """
    part = target.with_name(target.name + ".part")

    def copy(fs: Any, path: str, moved: _Moved) -> None:
        num_bytes = fs.info(path).get("size")
        fs.get_file(path, str(part), callback=_callback(moved))
        if num_bytes is not None and part.stat().st_size < num_bytes:
            raise OSError(f"only {part.stat().st_size:,} of {num_bytes:,} bytes arrived")
        part.replace(target)

    try:
        _attempt(url, copy, part)
    finally:
        part.unlink(missing_ok=True)


def store(source: Path, url: str) -> None:
    """Copy the file `source` to a store, where it appears whole, or not at all. An older one is replaced.

    Raises RunEnded when that is impossible or stalls, EmbedError when a package is missing, OSError when there is no
    `source`. Side effects: creates the folders of a file system; never a bucket.
    """
    source.stat()

    def copy(fs: Any, path: str, moved: _Moved) -> None:
        if _scheme(url) in _OBJECT_STORES:
            parts = {"chunksize": PART_BYTES} if "chunksize" in inspect.signature(fs.put_file).parameters else {}
            fs.put_file(str(source), path, callback=_callback(moved), **parts)
        else:
            _write_and_rename(fs, source, path, moved)

    if _scheme(url) in ("http", "https"):
        raise EmbedError(f"{shown(url)}: HTTP has no folder to write to; object stores are s3://, gs:// or abfs://")
    _attempt(url, copy)


def _write_and_rename(fs: Any, source: Path, path: str, moved: _Moved) -> None:
    folder, _, name = path.rpartition("/")
    draft = f"{folder}/.{name}.{uuid.uuid4().hex}.part"  # hidden, and of this run alone: another may store the same
    if folder:
        fs.makedirs(folder, exist_ok=True)
    try:
        with source.open("rb") as read, fs.open(draft, "wb") as written:
            while data := read.read(PART_BYTES):
                written.write(data)
                moved()
        num_bytes = fs.info(draft)["size"]
        if num_bytes != source.stat().st_size:
            raise OSError(f"only {num_bytes:,} of {source.stat().st_size:,} bytes were stored")
        _rename(fs, draft, path, num_bytes)
    except BaseException:
        with suppress(Exception):
            fs.rm_file(draft)
        raise


def _rename(fs: Any, draft: str, path: str, num_bytes: int) -> None:
    """Where a store does not rename onto a file, that is removed first. Raises OSError or the store's own error."""
    try:
        fs.mv(draft, path)
    except Exception:
        if _num_bytes(fs, path) is None:
            raise
    # HDFS declines with a result, which fsspec does not look at; SFTP with an error.
    if _num_bytes(fs, draft) is not None and _num_bytes(fs, path) is not None:
        fs.rm_file(path)
        fs.mv(draft, path)
    if _num_bytes(fs, draft) is not None or _num_bytes(fs, path) != num_bytes:
        raise OSError(f"{draft.rpartition('/')[2]} was not renamed")


def _num_bytes(fs: Any, path: str) -> int | None:
    fs.invalidate_cache()
    try:
        return int(fs.info(path)["size"])
    except FileNotFoundError:
        return None


# --- calls of fsspec ------------------------------------------------------------------------------------------


def _scheme(url: str) -> str:
    return url.partition("://")[0].lower()


def _open(url: str) -> tuple[Any, str]:
    """The file system of `url`, and the path in it. Raises EmbedError when a package is missing, or none fits."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise EmbedError(f"{shown(url)}: fsspec is {not_installed('vecd[fs]')}") from error
    if "::" in url:
        raise EmbedError(f"{shown(url)}: chained URLs (::) are not supported")
    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:  # fsspec names the package that is missing
        raise EmbedError(f"{shown(url)}: {_first_line(error, url)}") from error
    fs.invalidate_cache()  # a listing of before does not have what other runs have stored since
    return fs, path


def _callback(moved: _Moved) -> Any:
    from fsspec.callbacks import Callback

    return Callback(hooks={"moved": lambda *_, **__: moved()})


def _attempt(
    url: str,
    work: Callable[[Any, str, _Moved], _T],
    growing: Path | None = None,
    final: type[EmbedError | RunEnded] = RunEnded,
) -> _T:
    """The result of `work` with the file system of `url` and the path in it, which is repeated after an error that may
    pass. `growing` is a file that it writes.

    Raises RunEnded with one line, `final` for an error that will not pass, EmbedError as `work` and `_open` do.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return _watch(url, lambda moved: work(*_open(url), moved), growing)
        except (EmbedError, RunEnded):
            raise
        except Exception as error:
            if (is_final := _is_final(error)) or pause_s is None:
                raise (final if is_final else RunEnded)(f"{shown(url)}: {_describe(error, url)}") from error
            time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def _watch(url: str, work: Callable[[_Moved], _T], growing: Path | None) -> _T:
    """Call `work` in a thread. Raises RunEnded when it makes no progress: no store is trusted to have time limits."""
    moved_at, size = time.monotonic(), -1

    def moved() -> None:
        nonlocal moved_at
        moved_at = time.monotonic()

    result = in_daemon(lambda: work(moved), "storage")
    while not wait([result], timeout=min(1.0, STALL_S / 4)).done:
        with suppress(OSError):
            if growing is not None and (now := growing.stat().st_size) != size:
                size = now
                moved()
        if time.monotonic() - moved_at > STALL_S:
            raise RunEnded(f"{shown(url)}: no byte moved for {STALL_S:g} s, given up")
    return result.result()


def in_daemon(work: Callable[[], _T], name: str) -> "Future[_T]":
    """What `work` returns or raises in a thread for which a process that ends does not wait."""
    result: Future[_T] = Future()
    result.set_running_or_notify_cancel()

    def call() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return result


def _is_final(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in (408, 425, 429)
    return isinstance(error, (*_FATAL, TypeError, ValueError)) or (
        isinstance(error, OSError) and error.errno in _FATAL_ERRNOS
    )


def _status(error: Exception) -> int | None:
    found = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((value for value in found if isinstance(value, int) and 100 <= value < 600), None)


def _describe(error: Exception, url: str) -> str:
    detail = _first_line(error, url)
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return f"access is denied ({detail})"
    if isinstance(error, FileNotFoundError) or _status(error) == 404:
        return f"not found ({detail})"
    return detail if _is_final(error) else f"{detail} (tried {len(PAUSES_S) + 1} times)"


def _first_line(error: Exception, url: str) -> str:
    """The beginning of what `error` says, without what is secret in `url` or another URL."""
    text = next(iter(str(error).strip().splitlines()), "")
    place, _, query = url.partition("://")[2].partition("?")
    password = place.partition("/")[0].rpartition("@")[0].partition(":")[2]
    for secret in filter(None, (query, password)):
        text = text.replace(secret, "…")
    text = re.sub(r"//[^/\s@]*@", "//…@", text)
    text = re.sub(r"\?[^\s'\")]+", "?…", text)
    text = text if len(text) <= _MAX_DETAIL_CHARS else text[:_MAX_DETAIL_CHARS] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
