"""A model that comes with vocab.txt alone is served like the one with tokenizer.json.

Without weights: the made-up vectors are of the token ids, which is all that could differ.
"""

import shutil
from pathlib import Path

import pytest

from tests.support.serving import eventually, running_server
from tests.support.shared_servers import DUMMY, shared_server

TEXTS = ["A text of some words.", "Ünïcödé 日本 🙂", "", "[SEP] in the middle [MASK]"]


@pytest.fixture
def slow_model(minilm_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "slow-model"
    shutil.copytree(minilm_folder, folder, ignore=shutil.ignore_patterns("tokenizer.json", "*.safetensors"))
    (folder / "model.safetensors").symlink_to(minilm_folder / "model.safetensors")
    return folder


def test_the_tokens_are_the_fast_one_s_though_nothing_can_be_cached_and_a_gateway_is_restarted(slow_model, tmp_path):
    expected = shared_server(*DUMMY).embed(TEXTS)
    (tmp_path / "file").touch()
    with running_server(str(slow_model), *DUMMY, "--cache-dir", str(tmp_path / "file" / "cache")) as server:
        assert server.stderr.count("vecd: converting the tokenizer of slow-model (once)\n") == 1
        assert server.embed(TEXTS) == expected
        first = server.gateway()
        first.kill()
        eventually(lambda: not first.is_running())
        assert server.embed(TEXTS) == expected
