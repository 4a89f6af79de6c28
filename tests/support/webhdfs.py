"""A small WebHDFS server for fsspec's own client of it: real sockets, files in a folder, and failures as a test tells.

The client has no time limits of its own, and writes a file in pieces that are visible at once: what `vecd embed` must
withstand. Source: https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html
"""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

import orjson

PREFIX = "/webhdfs/v1"
Fail: TypeAlias = Callable[[str, str], int | None]
"""For the operation and the path: the status to answer with, 0 to close the connection, or None."""


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        pass


class WebHdfs:
    """In threads of its own. To be closed by `with`."""

    def __init__(self, folder: Path, fail: Fail = lambda operation, path: None) -> None:
        self.folder, self.fail = folder, fail
        self.operations: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                operation, path = query["op"], unquote(parts.path.removeprefix(PREFIX))
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                server.operations.append(operation)
                status = server.fail(operation, path)
                if status == 0:
                    self.close_connection = True
                elif status is not None:
                    self._answer(status, _error("AccessControlException", f"Permission denied: {path}"))
                elif operation in ("CREATE", "APPEND") and "data" not in query:  # data goes to another server
                    self._answer(307, b"", {"Location": f"{server.url}{self.path}&data=true"})
                else:
                    try:
                        self._answer(200, server.do(operation, path.strip("/"), query, body))
                    except FileNotFoundError:
                        self._answer(404, _error("FileNotFoundException", f"File does not exist: {path}"))

            do_PUT = do_POST = do_DELETE = do_GET

            def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._http = QuietServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.address = f"127.0.0.1:{self._http.server_port}"
        self.url = f"http://{self.address}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

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

    def __enter__(self) -> "WebHdfs":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def _status(path: Path, name: str) -> dict[str, Any]:
    kind = "DIRECTORY" if path.is_dir() else "FILE"
    return {"pathSuffix": name, "type": kind, "length": 0 if path.is_dir() else path.stat().st_size}


def _error(exception: str, message: str) -> bytes:
    return orjson.dumps({"RemoteException": {"exception": exception, "message": message}})
