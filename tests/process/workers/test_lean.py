"""The lean engine in processes: after a fork, and without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.checkpoints import Checkpoints, random_batch, worker_config
from vecd.base.files import dump
from vecd.model.card import read_card
from vecd.workers.load import load_engine
from vecd.workers.onnx.engine import LeanEngine
from vecd.workers.parity import vectors_of

LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]


def test_a_forked_process_computes_the_same_bits(checkpoint: Checkpoints) -> None:
    engine, batch = LeanEngine(read_card(checkpoint("mpnet"))), random_batch(LENGTHS)
    expected = vectors_of(engine, batch, 32)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, vectors_of(engine, batch, 32).tobytes())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        found = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    assert found == expected.tobytes()


def test_a_known_model_is_loaded_without_torch_and_threads(checkpoint: Checkpoints, tmp_path: Path) -> None:
    config = worker_config(checkpoint("bert"), cache_dir=tmp_path)
    load_engine(config, lambda stage: None)
    program = (
        "import json, sys\nfrom vecd.base.files import load\nfrom vecd.workers.config import WorkerConfig\n"
        "from vecd.workers.load import load_engine\n"
        "from vecd.base.kernel import num_threads\n"
        "engine = load_engine(load(WorkerConfig, json.load(sys.stdin)), print)\n"
        "print(engine.facts['path'], num_threads(), *{'torch', 'transformers', 'onnx'} & set(sys.modules))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    for folder in ("engines", "references"):  # with the selection, then with the reference vectors alone
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps(dump(config)),
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        assert done.stdout.splitlines()[-1] == "lean 1", folder
        for path in (tmp_path / "engines").iterdir():
            path.unlink()
