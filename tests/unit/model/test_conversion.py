"""Slow tokenizers' files made into tokenizer.json: the ids are AutoTokenizer's, or the model is refused."""

import importlib.util
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from vecd.model.card import ModelError
from vecd.model.conversion import convert

TEXTS = ["hello world", "  Hello, wörld!  ", "", "日本 🙂", "hello [MASK] <mask> </s> world"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def wordpiece(folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "wor", ",", "!", "日"]
    pieces = [*words, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")


def byte_pairs(folder: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "Ġ w", "he ll", "Ġw o"]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *alphabet, *(merge.replace(" ", "") for merge in merges)]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")


def sentencepiece(folder: Path, name: str = "sentencepiece.bpe.model", kind: str = "unigram") -> None:
    import sentencepiece as library

    model = io.BytesIO()
    lines = (f"hello world, number {index}: naïve café {LETTERS}" for index in range(50))
    library.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=60,
        model_type=kind,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / name).write_bytes(model.getvalue())


def write(name: str, content: Any) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))

    return do


def without(token: str) -> Callable[[Path], None]:
    """Its line is taken out of the vocabulary."""

    def do(folder: Path) -> None:
        vocabulary = folder / "vocab.txt"
        vocabulary.write_text(vocabulary.read_text().replace(f"{token}\n", ""))

    return do


CONVERTED: dict[str, tuple[str, list[Callable[[Path], None]]]] = {
    "WordPiece": ("bert", [wordpiece]),
    "byte-level BPE": ("roberta", [byte_pairs]),
    "sentencepiece, XLM-R": ("xlm-roberta", [sentencepiece]),
    "sentencepiece, byte pairs": ("gemma", [lambda folder: sentencepiece(folder, "tokenizer.model", "bpe")]),
}


def prepare(folder: Path, model_type: str, files: list[Callable[[Path], None]]) -> Path:
    write("config.json", {"model_type": model_type})(folder)
    for make in files:
        make(folder)
    return folder


@pytest.mark.parametrize(("model_type", "files"), CONVERTED.values(), ids=CONVERTED.keys())
def test_the_ids_are_autotokenizer_s(
    tmp_path: Path, model_type: str, files: list[Callable[[Path], None]], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = prepare(tmp_path, model_type, files)
    convert(folder, 1000, tmp_path / "made")
    assert capfd.readouterr() == ("", "")
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "made"))
    expected = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    for text in TEXTS:
        assert made.encode(text).ids == expected(text)["input_ids"], text
    assert len(set(made.encode("hello world").ids)) > 3


@pytest.mark.parametrize("error", [None, ModuleNotFoundError("No module named 'google'")])
def test_a_missing_package_is_named(error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the package around it is missing."""
    folder, find_spec = prepare(tmp_path, "xlm-roberta", [sentencepiece]), importlib.util.find_spec

    def without_protobuf(name: str, package: str | None = None) -> Any:
        if name != "google.protobuf":
            return find_spec(name, package)
        if error is not None:
            raise error
        return None

    monkeypatch.setattr(importlib.util, "find_spec", without_protobuf)
    with pytest.raises(ModelError, match=r"reading it needs protobuf: pip install 'vecd\[convert\]'"):
        convert(folder, 1000, tmp_path / "made")


@pytest.mark.parametrize(
    ("model_type", "files", "why"),
    [
        ("bert", [write("merges.txt", "a b\n")], "BertTokenizer takes no vocabulary from merges.txt"),
        ("roberta", [byte_pairs, lambda f: (f / "merges.txt").unlink()], "can be made of vocab.json: "),
        (
            "bert",
            [wordpiece, write("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["t.T", None]}})],
            "auto_map",
        ),
        (
            "bert",
            [wordpiece, write("tokenizer_config.json", {"tokenizer_class": "BertJapaneseTokenizer"})],
            "no fast form of BertJapaneseTokenizer",
        ),
        # What AutoTokenizer does besides its fast tokenizer is not in the file.
        (
            "bert",
            [wordpiece, without("hello"), write("tokenizer_config.json", {"split_special_tokens": True})],
            "differs from BertTokenizer for",
        ),
        ("bert", [wordpiece, without("[CLS]")], "gives the token id 62"),
        ("bert", [wordpiece, without("[UNK]")], "BertTokenizer cannot tokenize"),
        # MPNet's special tokens are others, and are put behind the end of this vocabulary.
        ("mpnet", [wordpiece], "and the model has 62"),
    ],
)
def test_what_cannot_be_converted(
    tmp_path: Path, model_type: str, files: list[Callable[[Path], None]], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = prepare(tmp_path, model_type, files)
    with pytest.raises(ModelError, match=why) as refusal:
        convert(folder, 62, tmp_path / "made")
    assert str(refusal.value).startswith(str(folder))
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr() == ("", "")


def test_the_bundled_model_s_vocabulary(minilm_folder: Path, tmp_path: Path) -> None:
    own = tokenizers.Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    for name in ("vocab.txt", "config.json", "tokenizer_config.json"):
        shutil.copy(minilm_folder / name, tmp_path)
    convert(tmp_path, 30522, tmp_path / "made")
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "made"))
    own.no_padding()
    own.no_truncation()
    for text in [*TEXTS, "  two spaces before, two between  and two behind  ", "Straße Œuvre; e\u0301 decomposed"]:
        assert made.encode(text).ids == own.encode(text).ids
