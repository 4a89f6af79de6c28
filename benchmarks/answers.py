"""How long the gateway takes from a slot's rows to the bytes of an answer, for each form of vectors.

Owns the figures of `vecd.gateway.encoding.result` and of the answers' rendering. Needs no server and no model: the
rows are random vectors of length 1. Run by hand, `python -m benchmarks.answers`; prints tables, and a line of JSON for
`docs/log.md`.

Beside each encoding of float32 stands what its library takes for the same floats at once: orjson for the 2-D array,
pybase64 for all rows as one text, numpy for the copy.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from benchmarks.machine import describe_machine
from vecd.gateway.dialects.openai import EMBEDDING, renderer_of
from vecd.gateway.encoding.result import Encoder
from vecd.gateway.http.reader import encode_response
from vecd.gateway.main import keep_freed_memory
from vecd.gateway.request import Dtype, Embedded, EmbedRequest, Encoding, Form
from vecd.model.card import ModelCard
from vecd.model.steps import Step

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


class Case(NamedTuple):
    name: str
    form: Form
    dimensions: int | None = None
    is_normalized: bool = True
    """The model's vectors have length 1 already."""


def cases(dim: int) -> Iterator[Case]:
    for encoding in Encoding:
        yield Case("float32", Form(encoding))
    for encoding in (Encoding.FLOAT, Encoding.BASE64, Encoding.BYTES):
        for dtype in Dtype:
            if dtype is not Dtype.FLOAT32:
                yield Case(dtype.value, Form(encoding, dtype))
        yield Case("float32, big-endian", Form(encoding, is_big_endian=True))
        yield Case("float32, normalized here", Form(encoding), is_normalized=False)
        yield Case("float32, half of the dimensions", Form(encoding), dimensions=dim // 2)


def answer(slot: NDArray[np.float32], case: Case, encoder: Encoder) -> int:
    """From rows to the pieces that are sent; returns their bytes. The rows that are answered are not kept."""
    num_rows = len(slot)
    inputs = ["text"] * num_rows
    request = EmbedRequest(inputs, (case.form,), normalize=True, dimensions=case.dimensions)
    [make] = encoder.makes(request, [])
    for start in range(0, num_rows, _ROWS_PER_BATCH):
        make.put(start, slot[start : start + _ROWS_PER_BATCH], 0)
    embedded = Embedded((make.made,), num_rows, model="m", request_id="r")
    response = renderer_of(case.form, EMBEDDING)(embedded)
    return sum(map(len, encode_response(response, request_id="r", keep_alive=True)))


def encoder_of(dim: int, *, is_normalized: bool) -> Encoder:
    steps = (Step("normalize"),) if is_normalized else ()
    card = ModelCard("/m", "/m", "bert", dim, dim, 512, 30522, ("mean",), steps, lowercase=False, prompt="")
    return Encoder(card)


def milliseconds(work: Callable[[], object]) -> float:
    """The median of the passes, after one that is not counted. Of this thread's own time: a busy machine adds less."""
    passes = []
    for _ in range(_NUM_PASSES + 1):
        start = time.thread_time()
        work()
        passes.append((time.thread_time() - start) * 1000)
    return statistics.median(passes[1:])


def measure(slot: NDArray[np.float32], case: Case) -> dict[str, Any]:
    encoder = encoder_of(slot.shape[1], is_normalized=case.is_normalized)
    result = {
        "case": case.name,
        "encoding": case.form.encoding.value,
        "rows": slot.shape[0],
        "dim": slot.shape[1],
        "ms": round(milliseconds(partial(answer, slot, case, encoder)), 4),
        "bytes": answer(slot, case, encoder),
    }
    if case == Case("float32", case.form):
        result["library_ms"] = round(milliseconds(partial(_LIBRARIES[case.form.encoding], slot)), 4)
    return result


def main() -> None:
    keep_freed_memory()
    results = []
    columns = "| vectors | encoding | rows × floats | slot to answer, ms | its library, ms | MB |"
    print(f"{columns}\n| --- | --- | --- | --- | --- | --- |")
    for num_rows, dim in _SHAPES:
        slot = np.random.default_rng(0).standard_normal((num_rows, dim), dtype=np.float32)
        slot /= np.linalg.norm(slot, axis=1, keepdims=True)
        for case in cases(dim):
            result = measure(slot, case)
            results.append(result)
            times = f"{result['ms']} | {result.get('library_ms', '')}"
            shape = f"{num_rows:,} × {dim:,}"
            print(f"| {case.name} | {result['encoding']} | {shape} | {times} | {int(result['bytes']) / 1e6:.2f} |")
    print(orjson.dumps({"answers": results, "machine": describe_machine()}).decode())


if __name__ == "__main__":
    main()
