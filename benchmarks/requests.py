"""One request at a time to a server, and the processes behind it: for figures that are not about load.

Owns the HTTP calls to vecd and the reading of its processes' /proc. Called by `benchmarks.compare`, `.sampling`,
`.memory`, `.lives` and the sections of `benchmarks.cores`.
"""

import contextlib
import http.client
import re
import socket
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.servers import Server, ServerFailure
from vecd.base.target import Target

_TIMEOUT_S = 60.0
SUCCESS = b"HTTP/1.1 200"
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_BYTES_PER_KB = 1024  # proc(5) says kB and means this


def embed(server: Server, texts: Sequence[str]) -> None:
    """Returns when every vector is there. Raises ServerFailure when that is not the answer."""
    body = orjson.dumps({"input": list(texts), "encoding_format": "base64"})
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/embeddings", body, headers)
    num_vectors = len(_answer(request)["data"])
    if num_vectors != len(texts):
        raise ServerFailure(f"vecd answered {len(texts)} texts with {num_vectors} vectors")


def info(server: Server, model: str = "") -> dict[str, Any]:
    """What vecd says of itself and of `model`; "": of its first one. Raises ServerFailure."""
    path = f"/m/{model}/info" if model else "/info"
    fields: dict[str, Any] = _answer(urllib.request.Request(f"{server.admin_url or server.url}{path}"))
    return fields


def command(server: Server, model: str, verb: str) -> None:
    """Have `model` loaded or unloaded: `verb` of `/admin/models/NAME/VERB`. Raises ServerFailure for any error."""
    request = urllib.request.Request(f"{server.admin_url}/admin/models/{model}/{verb}", b"", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
            pass
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise ServerFailure(f"{verb} of {model}: {error}") from error


class Exchange:
    """One connection, kept alive, for a client that is alone: it costs the client about 10 µs a request."""

    def __init__(self, target: Target) -> None:
        self._socket = socket.create_connection((target.host, target.port), _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __call__(self, request: bytes) -> None:
        """Send a rendered request and return when all of its response is there. Raises ServerFailure unless that is a
        success."""
        if not (response := self.response(request)).startswith(SUCCESS):
            raise ServerFailure(f"vecd answered {response[:200]!r}")

    def response(self, request: bytes) -> bytes:
        """All of the response to a rendered request, whatever its status. Raises ServerFailure when the connection is
        closed before its end, and OSError."""
        self._socket.sendall(request)
        response = b""
        while (length := response_length(response)) is None or len(response) < length:
            if not (chunk := self._socket.recv(1 << 18)):
                raise ServerFailure("vecd has closed the connection")
            response += chunk
        return response

    def abort(self) -> None:
        """End the connection under a thread that waits for a response, which then raises ServerFailure."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def response_length(start: bytes | bytearray) -> int | None:
    """Bytes of a response in all, head and body, as its head says; None while that is not there yet."""
    end = start.find(b"\r\n\r\n")
    if end < 0:
        return None
    found = _CONTENT_LENGTH.search(start, 0, end + 2)
    return end + 4 + (int(found[1]) if found else 0)


def metrics(server: Server) -> Counter[str]:
    """What `/metrics` says: the samples of each name, summed over their labels. Raises ServerFailure."""
    try:
        with urllib.request.urlopen(f"{server.admin_url or server.url}/metrics", timeout=_TIMEOUT_S) as answer:
            return read_metrics(answer.read().decode())
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise ServerFailure(f"vecd gives no metrics: {error}") from error


def read_metrics(text: str) -> Counter[str]:
    """Samples of the Prometheus text format, summed by name; 0 for a name that is missing."""
    sums: Counter[str] = Counter()
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            sums[series.partition("{")[0]] += float(value)  # type: ignore[assignment]  # typeshed counts in integers
    return sums


def gateway_pid(server: Server) -> int:
    """Of the only gateway. Raises ServerFailure when there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            session = (folder / "stat").read_text().rpartition(")")[2].split()[3]
        except OSError:  # it has ended since the listing
            continue
        if b"gateway" in arguments and int(session) == server.session:
            return int(folder.name)
    raise ServerFailure("vecd has no gateway")


def batches_of_workers(server: Server) -> list[int]:
    """How many batches each worker has served in its present life, as `/info` says."""
    return [worker["batches"] for worker in sorted(info(server)["workers"], key=lambda worker: worker["worker"])]


def worker_pid(server: Server, worker: int) -> int:
    """Of the process that is `worker` now. Raises ServerFailure when there is none."""
    for pid in pids_named(server, f"vecd-worker-{worker}"):
        return pid
    raise ServerFailure(f"vecd has no worker {worker}")


def worker_pids(server: Server, model: str) -> set[int]:
    """Of the workers that `model` has now, as its `/info` says. Raises ServerFailure."""
    return {worker["pid"] for worker in info(server, model)["workers"]}


def fork_server_pids(server: Server) -> set[int]:
    """Of the children of the supervisor that are fork servers now."""
    return set(pids_named(server, "vecd-forkserver", parent=server.session))


def pids_named(server: Server, wanted: str, parent: int | None = None) -> Iterator[int]:
    """Of the server's processes that have this name now, and this parent where one is given."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended since the listing
            continue
        state, ppid, _, session, *_ = rest.split()
        if parent is not None and int(ppid) != parent:
            continue
        if name == wanted and int(session) == server.session and state != "Z":
            yield int(folder.name)


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
