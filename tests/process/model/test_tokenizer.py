"""Converting is a process of its own, done once; where nothing can be written it is done at every start."""

import importlib.metadata
import json
import os
from pathlib import Path

import pytest

from vecd.model import tokenizer
from vecd.model.card import ModelCard, ModelError, read_card
from vecd.model.tokenizer import with_tokenizer
from vecd.shm.arena import close_copy, original_of

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", *"abcdefghijklmnopqrstuvwxyz"]
CONFIG = {"model_type": "bert", "hidden_size": 32, "vocab_size": 100, "max_position_embeddings": 64}


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").touch()
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return read_card(folder)


@pytest.fixture
def never_again(monkeypatch: pytest.MonkeyPatch):
    def forbid() -> None:
        monkeypatch.setattr(tokenizer, "convert", lambda card: pytest.fail("converted again"))

    return forbid


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that starts no process."""

    def convert(card: ModelCard) -> int:
        words = Path(card.folder, "vocab.txt").read_text().split()
        fd = os.memfd_create("quick")
        os.write(fd, json.dumps({"model": {"vocab": {word: index for index, word in enumerate(words)}}}).encode())
        return fd

    monkeypatch.setattr(tokenizer, "convert", convert)


def vocabulary(card: ModelCard) -> dict[str, int]:
    return json.loads(Path(card.tokenizer_file).read_text())["model"]["vocab"]


def close(card: ModelCard) -> None:
    close_copy(card.tokenizer_file)


def test_a_model_with_a_fast_tokenizer_is_left_alone(card, tmp_path, never_again):
    never_again()
    Path(card.folder, "tokenizer.json").write_text("{}")
    held = with_tokenizer(read_card(Path(card.folder)), "m", tmp_path / "cache")
    assert original_of(held.tokenizer_file) == f"{card.folder}/tokenizer.json"
    assert not (tmp_path / "cache").exists()
    # What is written into it, or put in its place later, is another's.
    Path(card.folder, "tokenizer.json").write_text("of another model")
    assert Path(held.tokenizer_file).read_text() == "{}"
    Path(card.folder, "new").write_text("of another model")
    Path(card.folder, "new").rename(Path(card.folder, "tokenizer.json"))
    assert Path(held.tokenizer_file).read_text() == "{}"
    close_copy(held.tokenizer_file)
    assert not Path(held.tokenizer_file).exists()


def test_it_is_converted_once(card, tmp_path, never_again, capfd):
    first = with_tokenizer(card, "some/model", tmp_path / "cache")
    assert capfd.readouterr() == ("", "vecd: converting the tokenizer of some/model (once)\n")
    assert vocabulary(first)["hello"] == 5
    [cached] = (tmp_path / "cache" / "tokenizers").glob("*/*")
    assert cached.name == "tokenizer.json"

    never_again()
    second = with_tokenizer(card, "some/model", tmp_path / "cache")
    assert vocabulary(second) == vocabulary(first)
    assert capfd.readouterr() == ("", "")
    cached.unlink()
    assert vocabulary(second)["hello"] == 5, "the cache may be emptied while the server runs"
    close(first)
    close(second)


def test_another_content_is_converted_anew(card, tmp_path, quick):
    close(with_tokenizer(card, "m", tmp_path))
    Path(card.folder, "vocab.txt").write_text("\n".join([*WORDS, "more"]) + "\n")
    changed = with_tokenizer(card, "m", tmp_path)
    assert vocabulary(changed)["more"] == len(WORDS)
    assert len(list((tmp_path / "tokenizers").glob("*/*"))) == 2
    close(changed)


def test_a_cache_that_cannot_be_written(card, tmp_path, quick, capfd):
    (tmp_path / "file").touch()
    converted = with_tokenizer(card, "m", tmp_path / "file" / "cache")
    assert vocabulary(converted)["hello"] == 5
    assert vocabulary(converted)["hello"] == 5, "a second gateway reads it, too"
    said = capfd.readouterr().err.splitlines()
    assert said[1].startswith("vecd: the converted tokenizer is not cached for the next start: ")
    assert len(said) == 2
    close(converted)


def test_a_full_disk_leaves_nothing_half_written(card, tmp_path, quick, monkeypatch, capfd):
    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    converted = with_tokenizer(card, "m", tmp_path / "cache")
    assert list((tmp_path / "cache" / "tokenizers").glob("*/*")) == []
    assert "No space left" in capfd.readouterr().err
    close(converted)


def test_what_cannot_be_converted_is_refused_in_a_line_and_not_remembered(card, tmp_path):
    Path(card.folder, "vocab.txt").rename(Path(card.folder, "spiece.model"))
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelError) as refusal:
        with_tokenizer(card, "m", tmp_path / "cache")
    assert str(refusal.value) == (
        f"{card.weights_folder}: BertTokenizer takes no vocabulary from spiece.model; no tokenizer.json"
    )
    assert not (tmp_path / "cache").exists()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_the_key_is_of_contents_and_versions(card, monkeypatch):
    folder = Path(card.weights_folder)
    key = tokenizer.key_of(folder)
    assert key == tokenizer.key_of(folder)
    (folder / "model.safetensors").write_text("other weights")
    assert key == tokenizer.key_of(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    with_config = tokenizer.key_of(folder)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    assert len({key, with_config, tokenizer.key_of(folder)}) == 3
