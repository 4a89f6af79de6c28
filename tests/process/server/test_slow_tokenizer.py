"""A model that comes with vocab.txt alone is served like the one with tokenizer.json.

Without weights: the made-up vectors are of the token ids, which is all that could differ.
"""

import shutil
from pathlib import Path

import pytest

from tests.support.serving import eventually, running_server

TEXTS = ["A text of some words.", "Ünïcödé 日本 🙂", "", "[SEP] in the middle [MASK]"]
WEIGHTLESS = ("--workers", "1", "--engine", "weightless", "--cache-dir")


@pytest.fixture
def slow_model(minilm_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "slow-model"
    shutil.copytree(minilm_folder, folder, ignore=shutil.ignore_patterns("tokenizer.json", "*.safetensors"))
    (folder / "model.safetensors").symlink_to(minilm_folder / "model.safetensors")
    return folder


def test_the_tokens_are_the_fast_one_s_and_the_second_start_converts_nothing(slow_model, minilm_folder, tmp_path):
    cache = str(tmp_path / "cache")
    with running_server(str(minilm_folder), *WEIGHTLESS, cache) as server:
        expected = server.embed(TEXTS)
        assert not (tmp_path / "cache" / "tokenizers").exists()
    with running_server(str(slow_model), *WEIGHTLESS, cache) as server:
        assert server.stderr.count("vecd: converting the tokenizer of slow-model (once)\n") == 1
        assert server.embed(TEXTS) == expected
    with running_server(str(slow_model), *WEIGHTLESS, cache) as server:
        assert "converting" not in server.stderr
        assert server.embed(TEXTS) == expected
    assert len(list((tmp_path / "cache" / "tokenizers").glob("*/*"))) == 1


def test_without_a_cache_a_gateway_that_is_restarted_finds_it_again(slow_model, tmp_path):
    (tmp_path / "file").touch()
    with running_server(str(slow_model), *WEIGHTLESS, str(tmp_path / "file" / "cache")) as server:
        before = server.embed(TEXTS)
        first = server.gateway()
        first.kill()
        eventually(lambda: not first.is_running())
        assert server.embed(TEXTS) == before
