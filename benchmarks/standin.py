"""ONNX Runtime exactly as text-embeddings-inference uses it, in a process of its own, to stand in for that server.

Owns that process and the lines between it and the benchmark. One session with a thread for each core and all graph
optimizations, and padded batches of up to 8 texts: TEI's settings (backends/ort/src/lib.rs, version 1.9.3). It is
spared what a server does besides: HTTP, the tokenizer, waiting for a batch to fill. Run as
`python -m benchmarks.standin FILE`, which imports nothing but numpy and onnxruntime; started by `benchmarks.clients`,
`benchmarks.lives` and `benchmarks.memory`.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BATCH_SIZE = 8
_STOP_TIMEOUT_S = 10.0


class StandIn:
    """A running process, usable as a context manager, at whose end the process is gone."""

    def __init__(self, export: Path) -> None:
        """Return once it has embedded its first text. Raises RuntimeError when it ends instead."""
        from benchmarks.servers import clean_environment

        started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.standin", str(export)],
            cwd=Path(__file__).parents[1],
            env=clean_environment() | {"ORT_DISABLE_TELEMETRY": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._receive()
        self.start_s = time.perf_counter() - started
        """Seconds from exec to the first vector."""

    def __enter__(self) -> "StandIn":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends with its input
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()

    def texts_per_s(self, num_tokens: int, seconds: float) -> float:
        """Embed full batches of texts of `num_tokens` each for at least `seconds`. Raises RuntimeError."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_tokens} {seconds}\n")
        self._process.stdin.flush()
        return float(self._receive())

    def memory_mb(self) -> float:
        """Millions of bytes (PSS)."""
        from benchmarks.requests import process_mb

        return process_mb(self._process.pid)

    def _receive(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"ONNX Runtime's process has ended with {self._process.wait()}")
        return line


def main(export: str) -> None:
    """Serve the lines of stdin, each with a number of tokens and seconds, until it ends."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(export, options, providers=["CPUExecutionProvider"])
    _embed(session, 1, 12)
    print("ready", flush=True)
    for line in sys.stdin:
        num_tokens, seconds = line.split()
        _embed(session, BATCH_SIZE, int(num_tokens))  # not counted: the first of its size
        started = time.perf_counter()
        num_texts = 0
        while (elapsed_s := time.perf_counter() - started) < float(seconds) or not num_texts:
            _embed(session, BATCH_SIZE, int(num_tokens))
            num_texts += BATCH_SIZE
        print(num_texts / elapsed_s, flush=True)


def _embed(session: Any, num_texts: int, num_tokens: int) -> None:
    import numpy as np

    token_ids = np.tile(np.arange(1, num_tokens + 1), (num_texts, 1))
    session.run(None, {"token_ids": token_ids, "mask": np.ones_like(token_ids)})


if __name__ == "__main__":
    main(sys.argv[1])
