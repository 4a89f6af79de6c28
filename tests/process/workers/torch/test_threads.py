"""Leased cores in torch, in a process of its own: one that has computed with several threads must not fork."""

import json
import subprocess
import sys

import pytest

from tests.support.checkpoints import Checkpoints, skip_without, worker_config
from vecd.base.files import dump

_PROGRAM = """
import json, sys
import numpy as np
import torch
from vecd.base.files import load
from vecd.workers.config import WorkerConfig
from vecd.workers.batch import PackedBatch
from vecd.workers.parity import vectors_of
from vecd.workers.select import build
torch.set_num_threads(1)
engine = build(load(WorkerConfig, json.load(sys.stdin)), *sys.argv[1:3])
engine.use_threads(1)
lengths = np.array([5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59], dtype=np.int32)
batch = PackedBatch(lengths, np.random.default_rng(0).integers(0, 120, lengths.sum(), dtype=np.int32))
expected = vectors_of(engine, batch, 32)
print(*engine.allow_leases(3, may_copy_weights=False))
for leased in (1, 2, 3, 4, 0):
    used = engine.lease(leased)
    difference = np.abs(vectors_of(engine, batch, 32) - expected).max()
    print(used, torch.get_num_threads(), difference)
"""


@pytest.mark.parametrize("path", ["fused", pytest.param("packed", marks=pytest.mark.full)])
def test_leased_batches_have_the_vectors_of_one_thread(path: str, checkpoint: Checkpoints) -> None:
    if path == "fused":
        skip_without("float32")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, path, "float32"],
        input=json.dumps(dump(worker_config(checkpoint("bert")))),
        capture_output=True,
        text=True,
        check=True,
    )
    choices, *lines = done.stdout.splitlines()
    assert choices == "1 2 3"
    found = [line.split() for line in lines]
    assert [used for used, _, _ in found] == [actual for _, actual, _ in found] == ["1", "2", "3", "3", "1"]
    assert max(float(difference) for _, _, difference in found) <= 1e-6
