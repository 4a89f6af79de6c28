"""One request at a time to a server, and the processes behind it: for figures that are not about load.

Owns the HTTP calls to vecd and the reading of its processes' /proc. Called by `benchmarks.compare`, `.sampling`,
`.memory` and `.lives`.
"""

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.servers import Server, ServerFailure

_TIMEOUT_S = 60.0
_BYTES_PER_KB = 1024  # proc(5) says kB and means this


def embed(server: Server, texts: Sequence[str]) -> None:
    """Returns when every vector is there. Raises ServerFailure when that is not the answer."""
    body = orjson.dumps({"input": list(texts), "encoding_format": "base64"})
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/embeddings", body, headers)
    num_vectors = len(_answer(request)["data"])
    if num_vectors != len(texts):
        raise ServerFailure(f"vecd answered {len(texts)} texts with {num_vectors} vectors")


def info(server: Server) -> dict[str, Any]:
    """What vecd says of itself. Raises ServerFailure."""
    fields: dict[str, Any] = _answer(urllib.request.Request(f"{server.url}/info"))
    return fields


def batches_of_workers(server: Server) -> list[int]:
    """How many batches each worker has served in its present life, as `/info` says."""
    return [worker["batches"] for worker in sorted(info(server)["workers"], key=lambda worker: worker["worker"])]


def worker_pid(server: Server, worker: int) -> int:
    """Of the process that is `worker` now. Raises ServerFailure when there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended since the listing
            continue
        state, _, _, session, *_ = rest.split()
        if name == f"vecd-worker-{worker}" and int(session) == server.session and state != "Z":
            return int(folder.name)
    raise ServerFailure(f"vecd has no worker {worker}")


def private_mb(pid: int) -> float:
    """Millions of bytes that this process alone has in memory: Private_Clean + Private_Dirty of its smaps_rollup."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+) kB$", rollup, re.MULTILINE)
    return sum(map(int, found)) * _BYTES_PER_KB / 1e6


def process_mb(pid: int) -> float:
    """Millions of bytes of one process that shares nothing worth counting: Pss of its smaps_rollup."""
    return _rollup_kb(Path(f"/proc/{pid}")) * _BYTES_PER_KB / 1e6


def session_mb(server: Server) -> float:
    """Millions of bytes of all the server's processes: Pss of their smaps_rollup, in which shared pages count once."""
    return sum(_pss_kb(folder, server.session) for folder in Path("/proc").glob("[0-9]*")) * _BYTES_PER_KB / 1e6


def _pss_kb(folder: Path, session: int) -> int:
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        if int(fields[3]) != session:
            return 0
        return _rollup_kb(folder)
    except OSError:  # it has ended since the listing
        return 0


def _rollup_kb(folder: Path) -> int:
    """Raises OSError when the process has ended."""
    found = re.search(r"^Pss:\s+(\d+) kB$", (folder / "smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def _answer(request: urllib.request.Request) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return orjson.loads(answer.read())
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise ServerFailure(f"vecd did not answer: {error}") from error
