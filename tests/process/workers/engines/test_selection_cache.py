"""The choice of an engine is remembered for as long as it holds, and no longer."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vecd.shm.control import LOAD_TOKENS_PER_S
from vecd.workers.config import WorkerConfig
from vecd.workers.engines.load import load_engine


@pytest.fixture
def config(checkpoint: Callable[..., Path], worker_config: Callable[..., WorkerConfig], tmp_path: Path) -> WorkerConfig:
    folder = shutil.copytree(checkpoint("bert"), tmp_path / "model")
    return worker_config(folder, engine="fused", cache_folder=str(tmp_path / "cache"))


def test_a_remembered_fused_engine_needs_no_transformers(config: WorkerConfig) -> None:
    assert load_engine(config, lambda stage: None).facts[LOAD_TOKENS_PER_S] > 0
    code = (
        "import json, sys\n"
        "from vecd.workers.config import WorkerConfig; from vecd.workers.engines.load import load_engine\n"
        "engine = load_engine(WorkerConfig.from_json(json.load(sys.stdin)), print)\n"
        "assert engine.facts['path'] == 'fused'\n"
        f"assert engine.facts['{LOAD_TOKENS_PER_S}'] > 0\n"
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], input=json.dumps(config.to_json()).encode(), check=True, timeout=60)
