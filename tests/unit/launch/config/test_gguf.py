"""A model in a file of GGUF is made into safetensors once, with its settings and its tokenizer, and then read as any
other."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModel

from tests.support import tiny_tokenizers
from tests.support.checkpoints import assert_same_vectors, random_batch, sequences_of
from tests.support.gguf_files import as_stored, save_gguf, save_plain, tokens_of
from tests.support.llm_checkpoints import save_causal
from vecd.launch.config import made_weights
from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import load_settings
from vecd.model.card import ModelError
from vecd.model.files import ModelSettings
from vecd.workers.load import load_engine
from vecd.workers.parity import vectors_of
from vecd.workers.torch.gguf_tokenizer import tokenizer_of
from vecd.workers.torch.making import make_all


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A making that starts no process."""
    monkeypatch.setattr(made_weights, "make", lambda title, orders: make_all(orders))


def plan_of(model: object, cache: Path, *flags: str) -> Plan:
    flags = ("--device", "cpu", "--dtype", "float32", "--cache-dir", str(cache), *flags)
    return make_plan(load_settings([str(model), *flags]))


def refusal(model: Path, *flags: str) -> str:
    with pytest.raises(ModelError) as error:
        plan_of(model, model.parent.parent / "cache", *flags)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


TEXTS = ["Hello world", "naïve café 中文 foo-bar", "1234.5 o'clock;\n\n isn't  it", "[SEP] x <|im_end|> 🙂 ﬁ", ""]
FAMILIES = [
    ("bert", "F32", "cls"), ("bert", "Q8_0", "mean"), ("xlm-roberta", "F16", "cls"), ("nomic_bert", "BF16", "mean"),
    ("qwen2", "F16", "lasttoken"), ("qwen3", "Q8_0", "lasttoken"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "form", "pooling"), FAMILIES)
def test_it_is_the_model_that_it_was_converted_from(
    family: str, form: str, pooling: str, folder: Path, tmp_path: Path
) -> None:
    plain = save_plain(tmp_path / "plain", family)
    path = save_gguf(plain, folder / f"model-{form}.gguf", form, pooling=pooling)
    tokenizer = Tokenizer.from_file(str(plain / "tokenizer.json"))
    if family == "xlm-roberta":
        assert "its tokenizer is ('t5', 'default'), which vecd reads from a tokenizer.json beside it" in refusal(path)
        tokenizer.save(str(folder / "tokenizer.json"))
    plan = plan_of(path, tmp_path / "cache")
    found = Tokenizer.from_file(plan.card.tokenizer_file)
    assert [found.encode(text).ids for text in TEXTS] == [tokenizer.encode(text).ids for text in TEXTS]
    # Without the id that XLM-R's class takes for padding.
    batch = random_batch([5, 1, 30, 12], 98)
    batch.token_ids[:] += 2
    rows = []
    model = AutoModel.from_pretrained(as_stored(plain, form), dtype=torch.float32).eval()
    with torch.inference_mode():
        for ids in sequences_of(batch):
            hidden = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0]
            pooled = {"cls": hidden[0], "mean": hidden.mean(0), "lasttoken": hidden[-1]}[pooling]
            rows.append((pooled / pooled.norm()).numpy())
    engine = load_engine(plan.workers[0], lambda stage: None)
    assert_same_vectors(vectors_of(engine, batch, plan.card.row_dim), np.stack(rows))
    assert engine.facts["agreement"]["max_abs_diff"] < 1e-5


def test_its_tokens_end_as_the_file_says(folder: Path, tmp_path: Path) -> None:
    path = save_gguf(save_plain(tmp_path / "plain", "qwen3"), folder / "q8_0.gguf", adds_end=True)
    tokenizer = Tokenizer.from_file(plan_of(path, tmp_path / "cache").card.tokenizer_file)
    assert tokenizer.encode("Hello").tokens[-1] == "<|endoftext|>"
    assert tokenizer.encode("a", "b").ids.count(0) == 2


def test_what_ends_a_text_is_not_guessed(folder: Path, tmp_path: Path) -> None:
    plain = save_plain(tmp_path / "plain", "qwen3")
    path = save_gguf(plain, folder / "q8_0.gguf", pooling="lasttoken", adds_end=None)
    assert refusal(path).startswith(f"{path}: tokenizer.ggml.add_eos_token is missing: what ends a text is told by")
    (folder / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    plan_of(path, tmp_path / "cache").close()


WORDS = "Hello WORLD, naïve Café ÅÄ 中文漢字 が 한국어 ПРИВЕТ ΑΒΓ [SEP] [MASK]<own> [PAD303] [unused1] #a ##a ﬁ\x00"


@pytest.mark.parametrize("is_lower", [True, False])
@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize("more", [[], ["<S>", "<T>"], ["[unused1]"]])
def test_words_are_cut_as_by_the_models_own_tokenizer(is_lower: bool, strips: bool, more: list[str]) -> None:
    content = json.loads(tiny_tokenizers.bert().to_str())
    content["normalizer"] |= {"lowercase": is_lower, "strip_accents": strips and is_lower}
    vocab = content["model"]["vocab"]
    letters = [*([] if is_lower else "HWC"), *([] if strips or not is_lower else "ïéåä")]
    for token in (*letters, *(f"##{letter}" for letter in letters), *more):
        vocab.setdefault(token, len(vocab))
    own = Tokenizer.from_str(json.dumps(content))
    own.add_tokens([AddedToken("<own>", normalized=False)])
    tokens, types = tokens_of(own, own.get_vocab_size() + 6)
    values = {"model": "bert", "tokens": tokens, "token_type": types}
    made = tokenizer_of(ModelSettings(Path("file"), {f"tokenizer.ggml.{name}": each for name, each in values.items()}))
    made_tokenizer = Tokenizer.from_str(json.dumps(made))
    for second in (None, "b"):
        assert made_tokenizer.encode(WORDS, second).ids == own.encode(WORDS, second).ids


def test_what_the_folder_has_itself_goes_before(folder: Path, tmp_path: Path) -> None:
    plain = save_plain(tmp_path / "plain", "bert")
    save_gguf(plain, folder / "model.gguf", pooling="cls")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "max"}')
    assert plan_of(folder, tmp_path / "cache").card.pooling == ("max",)


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_output_layer_of_its_own_is_not_the_table_of_words(is_tied: bool, folder: Path, tmp_path: Path) -> None:
    plain = save_causal(tmp_path / "plain", tie_word_embeddings=is_tied)
    path = save_gguf(plain, folder / "model.gguf", pooling=None)
    (folder / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    made = Path(plan_of(path, tmp_path / "cache").card.weight_files[0])
    found, expected = load_file(made), load_file(plain / "model.safetensors")
    assert json.loads(made.with_name("config.json").read_text())["tie_word_embeddings"] is is_tied
    assert len(found) == len(expected)
    assert is_tied or torch.equal(found["lm_head.weight"], expected["lm_head.weight"])


def test_without_a_pooling_it_is_as_any_plain_model(folder: Path, tmp_path: Path) -> None:
    save_gguf(save_plain(tmp_path / "plain", "qwen3"), folder / "model.gguf", pooling=None)
    card = plan_of(folder, tmp_path / "cache").card
    assert (card.pooling, card.assumes_pooling) == (("lasttoken",), True)


def test_it_is_made_once(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_gguf(save_plain(tmp_path / "plain", "bert"), folder / "model.gguf")
    capfd.readouterr()
    first = plan_of(folder, tmp_path / "cache")
    assert capfd.readouterr().err == "vecd: converting the GGUF weights of model to safetensors (once)\n"
    assert plan_of(folder, tmp_path / "cache").card == first.card
    assert capfd.readouterr().err == ""
    [made] = (tmp_path / "cache/converted").glob("*.json")
    made.write_text("{")
    again = plan_of(folder, tmp_path / "cache")
    assert again.card == first.card
    assert "converting" in capfd.readouterr().err, "its settings were damaged"
    assert not again.model_has_changed()
    (folder / "model.gguf").write_bytes((folder / "model.gguf").read_bytes() + b"\0")
    assert again.model_has_changed()


def test_of_several_files_the_most_exact_one_is_taken(folder: Path, tmp_path: Path) -> None:
    plain = save_plain(tmp_path / "plain", "bert")
    (folder / "bge-q4_k_m.gguf").write_bytes(b"GGUF")
    assert refusal(folder) == f"{folder}: is in the GGUF format, and has no file in F32, F16, BF16 or Q8_0"
    for form, pooling in (("Q8_0", "mean"), ("F16", "cls"), ("F32", "lasttoken")):
        save_gguf(plain, folder / f"bge-{form.lower()}.gguf", form, pooling=pooling)
        assert plan_of(folder, tmp_path / "cache").card.pooling == (pooling,)


def test_beside_safetensors_it_has_to_be_named(tmp_path: Path) -> None:
    plain = save_plain(tmp_path / "model", "bert")
    save_gguf(plain, plain / "model.gguf", pooling="cls")
    assert plan_of(plain, tmp_path / "cache").card.pooling == ("mean",)
    assert plan_of(plain, tmp_path / "cache", "--file", "model.gguf").card.pooling == ("cls",)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general__architecture": "falcon"}, "a model of architecture 'falcon'; known in GGUF: bert, "),
    "reranker": ({"qwen3__pooling_type": 4}, "pooling_type is 4; known: 1 (mean), 2 (cls), 3 (lasttoken). 4 is a rer"),
    "pooling": ({"qwen3__pooling_type": [1]}, "pooling_type is [1]; known: 1 (mean), 2 (cls), 3 (lasttoken)."),
    "rope": ({"qwen3__rope__scaling__type": "yarn"}, "rope.scaling.type 'yarn' is not supported in GGUF"),
    "causal": ({"qwen3__attention__causal": False}, "attention.causal or attention.sliding_window is not supported"),
    "no layers": ({"qwen3__block_count": 0}, "qwen3.block_count is missing or not a positive whole number"),
    "text for a number": ({"qwen3__rope__freq_base": "much"}, "qwen3.rope.freq_base is 'much', and must be a number"),
    "splitting": ({"tokenizer__ggml__pre": "mine"}, "its tokenizer is ('gpt2', 'mine'), which vecd reads from a"),
    "tokens": ({"tokenizer__ggml__tokens": ["a"]}, "tokenizer.ggml is not a vocabulary: ValueError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_is_not_known_is_refused_by_name(name: str, folder: Path, tmp_path: Path) -> None:
    values, why = REFUSED[name]
    path = save_gguf(save_plain(tmp_path / "plain", "qwen3"), folder / "model.gguf", **values)
    assert refusal(path).startswith(f"{path}: {why}")


@pytest.mark.parametrize(
    "lie", [{"embedding_length": 32}, {"block_count": 2}, {"block_count": 4}, {"attention__head_count": 5}]
)
def test_metadata_of_other_sizes_than_the_tensors_is_refused(lie: dict[str, int], folder: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {f"qwen3__{name}": value for name, value in lie.items()}
    save_gguf(save_plain(tmp_path / "plain", "qwen3"), folder / "model.gguf", **values)
    plan = plan_of(folder, tmp_path / "cache")
    with pytest.raises(ModelError) as error:
        load_engine(plan.workers[0], lambda stage: None)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(folder))


def test_other_formats_are_refused_by_their_name(folder: Path, tmp_path: Path) -> None:
    path = save_gguf(save_plain(tmp_path / "plain", "bert"), folder / "model.gguf", "Q4_0")
    why = "has the format Q4_0; vecd serves F32, F16, BF16 and Q8_0"
    assert refusal(path).endswith(f".weight' {why}")


def test_a_file_that_lies_about_its_length_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    path = save_gguf(save_plain(tmp_path / "plain", "bert"), folder / "model.gguf")
    content = path.read_bytes()
    words = content.index(b"tokenizer.ggml.tokens")
    place = words + len(b"tokenizer.ggml.tokens") + 8
    rows = content.index(b"token_types.weight") + len(b"token_types.weight") + 4
    changes: list[Callable[[bytes], bytes]] = [
        lambda whole: b"",
        lambda whole: whole[:4],
        lambda whole: b"GGUF" + struct.pack("<I", 1) + whole[8:],
        lambda whole: whole[:8] + struct.pack("<Q", 2**63) + whole[16:],
        lambda whole: whole[:16] + struct.pack("<Q", 2**63) + whole[24:],
        lambda whole: whole[:place] + struct.pack("<Q", 2**60) + whole[place + 8 :],
        lambda whole: whole[: len(whole) // 4],
        lambda whole: whole[:-100],
        lambda whole: whole[:rows] + struct.pack("<Q", 0) + whole[rows + 8 :],
        lambda whole: whole[: rows - 4] + struct.pack("<I", 2**32 - 1) + whole[rows:],
        lambda whole: whole.replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"),
    ]
    for change in changes:
        path.write_bytes(change(content))
        assert str(path) in refusal(path)


def test_no_change_of_a_byte_does_more_than_refuse_it(folder: Path, tmp_path: Path) -> None:
    path = save_gguf(save_plain(tmp_path / "plain", "bert"), folder / "model.gguf")
    content, random = path.read_bytes(), np.random.default_rng(0)
    refusals: list[str] = []
    for place in random.integers(0, 6000, 60):
        path.write_bytes(content[:place] + bytes([int(random.integers(256))]) + content[place + 1 :])
        try:
            plan_of(path, tmp_path / f"cache{place}").close()
        except ModelError as error:
            refusals.append(str(error))
    assert 0 < len(refusals) < 60
    assert not [each for each in refusals if "\n" in each]
