"""`python -m tools.trace_request`: the files of the product that one embedding request enters, in order.

Starts a server with the dummy engine, whose processes load `tools/tracing/sitecustomize.py`, and sends short requests
over one connection. A file counts that every traced request has entered: what a timer runs meanwhile is in some only.
"""

import http.client
import mmap
import os
import tempfile
import time
from pathlib import Path

from tests.support.serving import running_server
from tools.size import is_product

ROOT = Path(__file__).resolve().parents[1]
_BODY = b'{"input": "a short text", "model": "m"}'
_NUM_WARM_UPS, _NUM_TRACED = 5, 10
_AFTERWARDS_S = 0.03
"""How long the gateway may take after the last byte of a response."""


def trace() -> list[str]:
    """Paths from the root of the repository."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "round").write_bytes(b"\0")
        with (folder / "round").open("r+b") as file, mmap.mmap(file.fileno(), 1) as current:
            environment = {"PYTHONPATH": str(ROOT / "tools/tracing"), "TRACE_FOLDER": name, "TRACE_ROOT": str(ROOT)}
            with running_server("--engine", "dummy", env=environment) as server:
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
                for number in range(-_NUM_WARM_UPS, _NUM_TRACED):
                    current[0] = max(0, number + 1)
                    _ask(connection)
                    time.sleep(_AFTERWARDS_S)
                    current[0] = 0
                connection.close()
        entries = [line.split(" ", 1) for line in (folder / "entered").read_text().splitlines()]
    rounds: list[list[str]] = [[] for _ in range(_NUM_TRACED)]
    for each, path in entries:
        rounds[int(each) - 1].append(os.path.relpath(os.path.realpath(path), ROOT))
    in_all = set.intersection(*map(set, rounds))
    return [path for path in dict.fromkeys(rounds[0]) if path in in_all and is_product(path)]


def _ask(connection: http.client.HTTPConnection) -> None:
    connection.request("POST", "/v1/embeddings", _BODY, {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"the server answered {response.status}: {response.read().decode()}")
    response.read()


def main() -> None:
    files = trace()
    print(*files, sep="\n")
    print(f"{len(files)} files, {sum(path.startswith('gateway/') for path in files)} of them in gateway/")


if __name__ == "__main__":
    main()
