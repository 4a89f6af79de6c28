"""How long the gateway takes from a slot's rows to the bytes of an answer, for each encoding.

Owns the figures of `gateway.encoding` and of the answers' rendering. Needs no server and no model: the rows are random
vectors of length 1. Run by hand, `python -m benchmarks.answers`; prints a table, and a line of JSON for
`docs/log.md`.

Beside each encoding stands what its library takes for the same floats at once: orjson for the 2-D array, pybase64 for
all rows as one text, numpy for the copy.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from benchmarks.machine import describe_machine
from gateway.dialects.openai import render_embeddings
from gateway.encoding import make_collector
from gateway.http1 import encode_response
from gateway.memory import keep_freed_memory
from gateway.request import Encoding

_SHAPES = ((128, 1024), (2048, 384))
_NUM_PASSES = 21
_ROWS_PER_BATCH = 32
"""Rows come as batches finish, and not all at once."""

_LIBRARIES: dict[Encoding, Callable[[NDArray[np.float32]], object]] = {
    Encoding.FLOAT: lambda rows: orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY),
    Encoding.BASE64: lambda rows: pybase64.b64encode(rows.data),
    Encoding.BYTES: lambda rows: rows.copy(),
    Encoding.NPY: lambda rows: rows.copy(),
}


def answer(slot: NDArray[np.float32], encoding: Encoding) -> int:
    """From rows to the pieces that are sent; returns their bytes. The rows that are answered are not kept."""
    collector = make_collector(encoding, *slot.shape)
    for start in range(0, len(slot), _ROWS_PER_BATCH):
        collector.put(start, slot[start : start + _ROWS_PER_BATCH])
    response = render_embeddings(collector, encoding, model="m", num_tokens=len(slot))
    return sum(map(len, encode_response(response, request_id="r", keep_alive=True)))


def milliseconds(work: Callable[[], object]) -> float:
    """The median of the passes, after one that is not counted."""
    passes = []
    for _ in range(_NUM_PASSES + 1):
        start = time.perf_counter()
        work()
        passes.append((time.perf_counter() - start) * 1000)
    return statistics.median(passes[1:])


def measure(slot: NDArray[np.float32], encoding: Encoding) -> dict[str, Any]:
    return {
        "encoding": encoding.value,
        "rows": slot.shape[0],
        "dim": slot.shape[1],
        "ms": round(milliseconds(lambda: answer(slot, encoding)), 4),
        "library_ms": round(milliseconds(lambda: _LIBRARIES[encoding](slot)), 4),
        "bytes": answer(slot, encoding),
    }


def main() -> None:
    keep_freed_memory()
    results = []
    print("| encoding | rows × floats | slot to answer, ms | its library, ms | MB |\n| --- | --- | --- | --- | --- |")
    for num_rows, dim in _SHAPES:
        slot = np.random.default_rng(0).standard_normal((num_rows, dim), dtype=np.float32)
        slot /= np.linalg.norm(slot, axis=1, keepdims=True)
        for encoding in Encoding:
            result = measure(slot, encoding)
            results.append(result)
            times = f"{result['ms']} | {result['library_ms']}"
            print(f"| {encoding.value} | {num_rows:,} × {dim:,} | {times} | {int(result['bytes']) / 1e6:.2f} |")
    print(orjson.dumps({"answers": results, "machine": describe_machine()}).decode())


if __name__ == "__main__":
    main()
