"""A small WebHDFS server for fsspec's own client of it: real sockets, files in a folder, and failures as a test tells.

The client has no time limits of its own, and writes a file in pieces that are visible at once: what `vecd embed` must
withstand. Source: https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

import orjson

from tests.support.http_stub import Answer, StubServer

PREFIX = "/webhdfs/v1"
Fail: TypeAlias = Callable[[str, str], int | None]
"""For the operation and the path: the status to answer with, 0 to close the connection, or None."""


class WebHdfs(StubServer):
    def __init__(self, folder: Path, fail: Fail = lambda operation, path: None) -> None:
        super().__init__()
        self.folder, self.fail = folder, fail
        self.operations: list[str] = []

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer | None:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        operation, name = query["op"], unquote(parts.path.removeprefix(PREFIX))
        self.operations.append(operation)
        status = self.fail(operation, name)
        if status is not None:
            denied = _error("AccessControlException", f"Permission denied: {name}")
            return (status, denied, {}) if status else None
        if operation in ("CREATE", "APPEND") and "data" not in query:  # data goes to another server
            return 307, b"", {"Location": f"{self.url}{path}&data=true"}
        try:
            return 200, self.do(operation, name.strip("/"), query, body), {}
        except FileNotFoundError:
            return 404, _error("FileNotFoundException", f"File does not exist: {name}"), {}

    def do(self, operation: str, name: str, query: dict[str, str], body: bytes) -> bytes:
        """The body of the response. Raises FileNotFoundError."""
        path = self.folder / name
        if operation == "GETFILESTATUS":
            return orjson.dumps({"FileStatus": _status(path, "")})
        if operation == "LISTSTATUS":
            found = [_status(each, each.name) for each in path.iterdir()] if path.is_dir() else [_status(path, "")]
            return orjson.dumps({"FileStatuses": {"FileStatus": found}})
        if operation == "OPEN":
            start = int(query.get("offset", 0))
            return path.read_bytes()[start : start + int(query.get("length", 1 << 40))]
        if operation == "CREATE":
            path.write_bytes(b"")
        elif operation == "APPEND":
            path.write_bytes(path.read_bytes() + body)
        elif operation == "MKDIRS":
            path.mkdir(parents=True, exist_ok=True)
        elif operation == "RENAME":
            target = self.folder / query["destination"].strip("/")
            if target.exists():
                return b'{"boolean": false}'
            path.rename(target)
        elif operation == "DELETE":
            path.unlink()
        return b'{"boolean": true}'


def _status(path: Path, name: str) -> dict[str, Any]:
    kind = "DIRECTORY" if path.is_dir() else "FILE"
    return {"pathSuffix": name, "type": kind, "length": 0 if path.is_dir() else path.stat().st_size}


def _error(exception: str, message: str) -> bytes:
    return orjson.dumps({"RemoteException": {"exception": exception, "message": message}})
