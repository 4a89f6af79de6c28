"""What processes import, and what they must not, because it takes seconds."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import vecd.workers
from tests.support.checkpoints import Checkpoints, worker_config
from vecd.base.files import dump
from vecd.shm.control import LOAD_TOKENS_PER_S
from vecd.workers.config import modules_to_preload
from vecd.workers.load import load_engine


@pytest.mark.parametrize(
    ("modules", "left_out"),
    [
        ("vecd.model.card", {"torch", "numpy"}),
        ("vecd.workers.config", {"torch", "numpy"}),  # the supervisor asks it what to preload
        ("vecd.workers.process.fork_server, vecd.workers.dummy", {"torch"}),
    ],
)
def test_what_is_not_imported(modules: str, left_out: set[str]) -> None:
    code = f"import sys, {modules}; sys.exit(bool({left_out} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_remembered_fused_engine_needs_no_transformers(checkpoint: Checkpoints, tmp_path: Path) -> None:
    config = worker_config(checkpoint("bert"), engine="fused", cache_dir=tmp_path)
    assert load_engine(config, lambda stage: None).facts[LOAD_TOKENS_PER_S] > 0
    code = (
        "import json, sys\n"
        "from vecd.base.files import load; from vecd.workers.config import WorkerConfig\n"
        "from vecd.workers.load import load_engine\n"
        "engine = load_engine(load(WorkerConfig, json.load(sys.stdin)), print)\n"
        "assert engine.facts['path'] == 'fused'\n"
        f"assert engine.facts['{LOAD_TOKENS_PER_S}'] > 0\n"
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], input=json.dumps(dump(config)).encode(), check=True, timeout=60)


def test_only_two_rooms_import_torch_when_they_are_imported() -> None:
    root, found = Path(vecd.workers.__file__).parent, set()
    for path in root.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "torch" for name in names):
                found.add(path.relative_to(root).parent.as_posix())
    assert found == {"torch", "check"}


@pytest.mark.parametrize("engine", ["auto", "packed"])
@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "deberta-v2", "modernbert", "qwen3", "gemma3_text"])
def test_every_module_to_preload_exists(model_type: str, engine: str) -> None:
    for module in modules_to_preload(model_type, engine):
        assert importlib.util.find_spec(module) is not None, module


def test_transformers_is_preloaded_for_the_packed_path_of_a_family_that_is_not_fused() -> None:
    assert "transformers" not in modules_to_preload("electra", "auto")
    assert "transformers" not in modules_to_preload("modernbert", "auto")
    assert "transformers.models.modernbert.modeling_modernbert" in modules_to_preload("modernbert", "packed")
    assert "transformers.models.albert.modeling_albert" in modules_to_preload("albert", "auto")
