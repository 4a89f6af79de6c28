"""`vecd.Client` against the openai client: what a call costs the program that makes it.

Owns the load, the turns and the table. The server has the dummy engine and a model of 1,024 dimensions, so its part is
small, and the same for both but for the encoding that each client asks for: bytes, and base64. Both end with a float32
matrix. Run as `python -m benchmarks.client`; it needs the package openai.

A figure is the median of the rounds. A ratio is taken within each round, theirs by ours, and has its 90 % interval.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

import vecd
from benchmarks.cpu import Neighbours
from benchmarks.servers import announcing, bundled_model
from benchmarks.turns import alternate, median_interval, paired_ratios

DIM, NUM_TEXTS = 1024, 128
TARGET = 3.0
"""Theirs by ours: processor time of the client in a call."""
_TURN_S = 0.5
_WEIGHTS = "model.safetensors"

Embed = Callable[[], NDArray[np.float32]]


class Turn(NamedTuple):
    """Milliseconds of one call."""

    wall_ms: float
    cpu_ms: float
    """Of this process, which is the client."""


def make_model(folder: Path) -> Path:
    """The bundled model with wider vectors, and a file without its weights: the dummy engine reads none."""
    shutil.copytree(bundled_model(), folder, ignore=shutil.ignore_patterns(_WEIGHTS))
    save_file({"none": np.zeros(1, np.float32)}, folder / _WEIGHTS)
    for path, name in ((folder / "config.json", "hidden_size"), (folder / "1_Pooling/config.json", None)):
        config = json.loads(path.read_text())
        config |= {key: DIM for key in config if key in (name, "word_embedding_dimension", "embedding_dimension")}
        path.write_text(json.dumps(config))
    return folder


def turn(embed: Embed, turn_s: float = _TURN_S) -> Turn:
    embed()  # not counted: it brings code back into the caches
    num_calls, started, started_cpu = 0, time.perf_counter(), time.process_time()
    while not num_calls or time.perf_counter() - started < turn_s:
        embed()
        num_calls += 1
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    return Turn(1000 * wall_s / num_calls, 1000 * cpu_s / num_calls)


def peak_of(embed: Embed) -> float:
    """The most memory of Python and numpy during a call, by the size of the matrix."""
    matrix = embed()
    tracemalloc.start()
    try:
        embed()
        return tracemalloc.get_traced_memory()[1] / matrix.nbytes
    finally:
        tracemalloc.stop()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.client", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    num_rounds = parser.parse_args(arguments).rounds
    import openai

    texts = [f"this is text number {number} of a request" for number in range(NUM_TEXTS)]
    with tempfile.TemporaryDirectory(prefix="vecd-bench-") as folder:
        model = make_model(Path(folder) / "model")
        # On a port: the openai client has unix sockets only through a transport of one's own.
        with (
            announcing("--engine", "dummy", "--workers", "1", model=str(model)) as server,
            vecd.Client(server.url) as ours,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as theirs,
        ):

            def embed_theirs() -> NDArray[np.float32]:
                data: Any = theirs.embeddings.create(model="any", input=texts).data
                return np.array([item.embedding for item in data], np.float32)

            contenders: dict[str, Embed] = {"vecd": lambda: ours.embed(texts), "openai": embed_theirs}
            assert (contenders["vecd"]() == contenders["openai"]()).all(), "two clients of one server differ"
            neighbours = Neighbours()
            turns = alternate({name: partial(turn, embed) for name, embed in contenders.items()}, num_rounds)
            busy_cores = neighbours.cores()
            peaks = {name: peak_of(embed) for name, embed in contenders.items()}
    print(f"{NUM_TEXTS} texts, {DIM} dimensions, float32; {num_rounds} rounds")
    print(f"All but the client, the server too, used {busy_cores:.1f} cores.")
    print("| client | wall, ms | client's CPU, ms | peak memory / matrix |\n| --- | --- | --- | --- |")
    for name, found in turns.items():
        wall_ms, cpu_ms = (statistics.median(each[i] for each in found) for i in (0, 1))
        print(f"| {name} | {wall_ms:.2f} | {cpu_ms:.2f} | {peaks[name]:.2f} |")
    for number, what in enumerate(Turn._fields):
        ratios = paired_ratios([each[number] for each in turns["openai"]], [each[number] for each in turns["vecd"]])
        print(f"openai / vecd, {what}: {statistics.median(ratios):.2f}, 90 % {_interval(ratios)}")
    print(f"target: at least {TARGET:.0f} in cpu_ms")
    return 0


def _interval(ratios: list[float]) -> str:
    found = median_interval(ratios)
    return "too few rounds" if found is None else f"{found[0]:.2f} to {found[1]:.2f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
