"""A new output touches few files: a throw-away one is added to a copy of the source, which then serves it.

The output is the hidden state of a sequence's first token: one row, as wide as the model's hidden states.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.serving import Server, running_server
from tools.size import PRODUCT

ROOT = Path(__file__).parents[3]
_MAX_FILES = 5
_ENGINES = ("dummy", "lean", "fused")

_EDITS = {
    "shm/output.py": (
        '    TOKENS = 2, True, False, "hidden_size"\n',
        '    FIRST_TOKEN = 9, False, False, "hidden_size"\n    TOKENS = 2, True, False, "hidden_size"\n',
    ),
    "workers/dummy.py": (
        "        case Output.UNNORMALIZED if",
        "        case Output.FIRST_TOKEN:\n"
        "            starts = np.cumsum(batch.lengths) - batch.lengths\n"
        "            return dummy_states(batch, width)[starts]\n"
        "        case Output.UNNORMALIZED if",
    ),
    "model/card.py": (
        "{Output.VECTORS, Output.UNNORMALIZED}",
        "{Output.VECTORS, Output.UNNORMALIZED, Output.FIRST_TOKEN}",
    ),
    "workers/heads.py": (
        "    Output.TOKENS: lambda",
        "    Output.FIRST_TOKEN: lambda parts, hidden, layout: parts.operations.floats(\n"
        "        hidden[parts.operations.places(layout.starts)]\n"
        "    ),\n"
        "    Output.TOKENS: lambda",
    ),
    "gateway/dialects/vllm.py": (
        '"classify": (Output.SCORES,),',
        '"classify": (Output.SCORES,),\n    "first_token": (Output.FIRST_TOKEN,),',
    ),
}
"""By file, what is replaced by what."""


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> Path:
    """A copy of the source in which the new output has been added."""
    copy = tmp_path_factory.mktemp("changed")
    for name in PRODUCT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, copy / name)
    for name, (old, new) in _EDITS.items():
        source = (copy / name).read_text()
        assert source.count(old) == 1, name
        (copy / name).write_text(source.replace(old, new))
    return copy


@pytest.fixture(scope="module")
def server(changed: Path, minilm_folder: Path) -> Iterator[Server]:
    """With a model by each engine."""
    paths = os.pathsep.join(filter(None, (str(changed), os.environ.get("PYTHONPATH"))))
    config = changed / "vecd.toml"
    tables = (f'[models.{engine}]\nsource = "{minilm_folder}"\nengine = "{engine}"\n' for engine in _ENGINES)
    config.write_text("".join(tables))
    flags = ("--workers", "1", "--dtype", "float32", "--config", str(config))
    with running_server(*flags, env={"PYTHONPATH": paths}) as running:
        yield running


def test_a_new_output_touches_few_files() -> None:
    assert len(_EDITS) <= _MAX_FILES


@pytest.mark.full
@pytest.mark.parametrize("engine", _ENGINES)
def test_it_is_served_beside_the_others(server: Server, engine: str) -> None:
    def vectors(task: str, texts: list[str]) -> list:
        body = {"input": texts, "task": task, "use_activation": False}
        response = httpx.post(f"{server.url}/m/{engine}/pooling", json=body, timeout=60)
        assert response.status_code == 200, server.stderr
        data = response.json()["data"]
        return [item["data"] for item in data]

    texts = ["Hello, world", "a", "A longer text than both of the others, to have another length."]
    first, tokens, whole = vectors("first_token", texts), vectors("token_embed", texts), vectors("embed", texts)
    assert [np.shape(vector) for vector in first] == [(384,)] * 3
    for vector, states in zip(first, tokens, strict=True):
        np.testing.assert_allclose(vector, states[0], atol=1e-5)
    assert all(np.abs(np.subtract(a, b)).max() > 1e-3 for a, b in zip(first, whole, strict=True))
