"""A peer, or vecd's engine, with all cores in a process of its own: what somebody has who needs no server.

Owns that process and the lines between it and the benchmark. It sleeps on a pipe while it has no turn. Run as
`python -m benchmarks.inprocess PEER MODEL`; started by `benchmarks.alone` and
`benchmarks.after_load`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine import ENVIRONMENT
from benchmarks.machine import num_cores
from benchmarks.servers import clean_environment

PEERS = ("onnxruntime", "openvino", "sentence-transformers")
OURS = "vecd"
"""vecd's own engine, without a server."""
DTYPE = "float32"
_STOP_TIMEOUT_S = 10.0


class InProcess:
    """A running process, usable as a context manager, at whose end the process is gone."""

    def __init__(self, name: str, model: Path) -> None:
        """Return once it has loaded the model. Raises RuntimeError when it ends instead; it has said why on stderr."""
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.inprocess", name, str(model)],
            cwd=Path(__file__).parents[1],
            env=clean_environment() | ENVIRONMENT | {"OMP_NUM_THREADS": str(num_cores())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._receive()

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends with its input
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()

    @property
    def session(self) -> int:
        return self._process.pid

    def choose(self, num_tokens: int) -> str:
        """Its fastest variant for one text of so many tokens, which embeds it from now on. Raises RuntimeError."""
        return str(self._ask({"choose": num_tokens})["variant"])

    def turn(self, num_tokens: int, warmup_s: float, turn_s: float) -> list[float]:
        """Seconds of each pass, at least one, after those of the warm-up. Raises RuntimeError."""
        asked = {"num_tokens": num_tokens, "warmup_s": warmup_s, "turn_s": turn_s}
        return [float(seconds) for seconds in self._ask(asked)["seconds"]]

    def _ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self.name}'s process has ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main(name: str, model: str) -> None:
    """Answer the lines of stdin until it ends."""
    import numpy as np
    import torch

    from benchmarks.exports import NotExportable
    from benchmarks.ours import AllCores
    from benchmarks.peers import Peer, Peers
    from benchmarks.turns import fastest, passes_of_turn
    from benchmarks.workload import is_large
    from vecd.model.card import read_card

    torch.set_num_threads(num_cores())
    card = read_card(Path(model))
    variants: Sequence[Peer]
    if name == OURS:
        variants = [AllCores(card, DTYPE)]
    else:
        peers = Peers(Path(model), has_memory_for_all=not is_large(card), num_threads=num_cores())
        try:
            variants = peers.load(name, DTYPE)
        except NotExportable as error:
            sys.exit(str(error))
    chosen = variants[0]

    def embed(num_tokens: int, variant: Peer) -> None:
        token_ids = np.arange(1000, 1000 + num_tokens, dtype=np.int64)[None]
        variant.embed(token_ids, np.ones_like(token_ids))

    _tell({"ready": time.time()})
    for line in sys.stdin:
        asked = json.loads(line)
        if num_tokens := asked.get("choose"):
            chosen = variants[fastest({index: partial(embed, num_tokens, one) for index, one in enumerate(variants)})]
            _tell({"variant": chosen.variant})
        else:
            run = partial(embed, asked["num_tokens"], chosen)
            _tell({"seconds": passes_of_turn(run, asked["turn_s"], asked["warmup_s"])})


def _tell(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
