"""One request at a time to a server, and the processes behind it: for figures that are not about load.

Owns the HTTP call and the reading of a worker's /proc. Called by `benchmarks.memory` and `benchmarks.lives`.
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


def batches_of_workers(server: Server) -> list[int]:
    """How many batches each worker has served in its present life, as `/info` says."""
    workers = _answer(urllib.request.Request(f"{server.url}/info"))["workers"]
    return [worker["batches"] for worker in sorted(workers, key=lambda worker: worker["worker"])]


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


def _answer(request: urllib.request.Request) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return orjson.loads(answer.read())
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise ServerFailure(f"vecd did not answer: {error}") from error
