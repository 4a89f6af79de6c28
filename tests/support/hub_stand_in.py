"""A stand-in of the Hugging Face hub on the loopback interface, whose repositories are folders.

Owns the three routes that a download of a snapshot needs. Source of the routes: what huggingface_hub requests.
"""

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_COMMIT = "0" * 39 + "1"


class Hub:
    def __init__(self, repositories: dict[str, Path]) -> None:
        """`repositories`: the folder of each, by id."""
        self.repositories = repositories
        self.fetched: list[str] = []
        """The paths of the files whose content was asked for, in the order of the requests."""
        self.url = ""

    def environment(self, home: Path) -> dict[str, str]:
        """The variables with which a process asks this hub, and keeps its cache in `home`."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}


@contextmanager
def running_hub(**repositories: Path) -> Generator[Hub]:
    """Repositories of the organisation `org`, by name."""
    hub = Hub({f"org/{name}": folder for name, folder in repositories.items()})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, content, headers = _answer(hub, urlsplit(self.path).path)
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)
                if "etag" in headers:
                    hub.fetched.append(urlsplit(self.path).path.partition(f"/{_COMMIT}/")[2])

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _answer(hub: Hub, path: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, content and headers."""
    for name, folder in hub.repositories.items():
        files = sorted(each for each in folder.rglob("*") if each.is_file())
        names = [each.relative_to(folder).as_posix() for each in files]
        if path.startswith(f"/api/models/{name}/revision/"):
            siblings = [{"rfilename": each} for each in names]
            return 200, json.dumps({"id": name, "sha": _COMMIT, "siblings": siblings}).encode(), {}
        if path.startswith(f"/api/models/{name}/tree/"):
            entries = [
                {"type": "file", "oid": _digest(each), "size": each.stat().st_size, "path": shown}
                for each, shown in zip(files, names, strict=True)
            ]
            return 200, json.dumps(entries).encode(), {}
        wanted = unquote(path.removeprefix(f"/{name}/resolve/{_COMMIT}/"))
        if wanted in names:
            headers = {"etag": f'"{_digest(folder / wanted)}"', "x-repo-commit": _COMMIT}
            return 200, (folder / wanted).read_bytes(), headers
    return 404, b"", {"x-error-code": "RepoNotFound"}


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
