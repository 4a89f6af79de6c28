"""A stand-in of the Hugging Face hub on the loopback interface, whose repositories are folders.

Owns the three routes that a download of a snapshot needs. Source of the routes: what huggingface_hub requests.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.http_stub import Answer, StubServer

_COMMIT = "0" * 39 + "1"


class Hub(StubServer):
    def __init__(self, by_id: Mapping[str, Path] | None = None, /, **repositories: Path) -> None:
        """`by_id`: folders, by their whole ids. `repositories`: those by their names in the organisation `org`."""
        super().__init__()
        self.repositories = {**(by_id or {}), **{f"org/{name}": folder for name, folder in repositories.items()}}
        self.fetched: list[str] = []
        """The paths of the files whose content was asked for, in the order of the requests."""

    def environment(self, home: Path) -> dict[str, str]:
        """The variables with which a process asks this hub, and keeps its cache in `home`."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        path = urlsplit(path).path
        status, content, found = self._find(path)
        if method == "GET" and "etag" in found:
            self.fetched.append(path.partition(f"/{_COMMIT}/")[2])
        return status, content, found

    def _find(self, path: str) -> Answer:
        for name, folder in self.repositories.items():
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
