import asyncio
from dataclasses import replace

import numpy as np
import pytest
import tokenizers

from gateway.errors import BadRequest
from gateway.tokenizer import Tokenizer
from shm.card import ModelError, read_card


@pytest.fixture(scope="module")
def card(minilm_folder):
    return read_card(minilm_folder)


def ids(tokenized) -> list[list[int]]:
    return [np.frombuffer(item.token_ids, dtype="<i4").tolist() for item in tokenized]


def tokenize(tokenizer: Tokenizer, texts: list[str]):
    return asyncio.run(tokenizer.tokenize_texts(texts))


def test_it_is_the_models_own_tokenizer(card, minilm_folder):
    own = tokenizers.Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    own.no_padding()
    texts = ["Hello, world", "", "naïve café"]
    tokenized = tokenize(Tokenizer(card, 256, "auto"), texts)
    assert ids(tokenized) == [own.encode(text).ids for text in texts]
    assert [item.num_tokens for item in tokenized] == [len(own.encode(text).ids) for text in texts]


def test_long_texts_take_a_thread_and_give_the_same(card):
    tokenizer = Tokenizer(card, 256, "auto")
    short = [f"text number {i}" for i in range(300)]
    assert tokenize(tokenizer, short) == [tokenize(tokenizer, [text])[0] for text in short]


def test_overlong_texts_are_cut_on_the_right_and_told(card):
    [long, short] = tokenize(Tokenizer(card, 8, "auto"), ["one two three four five six seven", "one"])
    assert ids([long]) == [[101, 2028, 2048, 2093, 2176, 2274, 2416, 102]]
    assert (long.num_tokens, long.is_truncated, short.is_truncated) == (8, True, False)


def test_a_text_of_megabytes_is_cut_before_it_is_tokenized(card):
    tokenizer = Tokenizer(card, 8, "auto")
    kept, dropped = "a " * 1000, "b " * 5_000_000  # 8 tokens × 250 characters are looked at
    assert ids(tokenize(tokenizer, [kept + dropped])) == ids(tokenize(tokenizer, [kept]))


def test_the_models_prompt_comes_first(card):
    with_prompt = Tokenizer(replace(card, prompt="query: "), 256, "auto")
    plain = Tokenizer(card, 256, "auto")
    assert ids(tokenize(with_prompt, ["a"])) == ids(tokenize(plain, ["query: a"]))


def test_a_model_that_lowercases(card, minilm_folder, tmp_path):
    cased = tokenizers.Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    cased.normalizer = None
    cased.save(str(tmp_path / "tokenizer.json"))
    path = str(tmp_path / "tokenizer.json")
    lowering = Tokenizer(replace(card, tokenizer_file=path, lowercase=True), 256, "auto")
    assert ids(tokenize(lowering, ["HELLO"])) == ids(tokenize(Tokenizer(card, 256, "auto"), ["hello"]))
    not_lowering = Tokenizer(replace(card, tokenizer_file=path), 256, "auto")
    assert ids(tokenize(not_lowering, ["HELLO"])) != ids(tokenize(lowering, ["HELLO"]))


def test_framed_ids_are_the_models_own(card):
    tokenized = Tokenizer(card, 256, "auto").check_token_ids([[101, 7592, 102], [101, 102]])
    assert ids(tokenized) == [[101, 7592, 102], [101, 102]]


@pytest.mark.parametrize(
    ("policy", "given", "says"),
    [
        ("auto", [15339, 1917], "check_embedding_ctx_length=False"),
        ("auto", [101], "not framed"),
        ("auto", [101, 7592], "not framed"),
        ("reject", [101, 7592, 102], "--token-ids reject"),
        ("auto", [101, 30522, 102], "0 to 30521"),
        ("model", [-1], "0 to 30521"),
    ],
)
def test_ids_that_are_refused(card, policy, given, says):
    with pytest.raises(BadRequest, match=says) as caught:
        Tokenizer(card, 256, policy).check_token_ids([given])
    assert caught.value.param == "input"


def test_any_ids_can_be_taken_as_the_models(card):
    assert ids(Tokenizer(card, 256, "model").check_token_ids([[15339, 1917]])) == [[15339, 1917]]


def test_overlong_ids_keep_their_frame(card):
    [item] = Tokenizer(card, 4, "auto").check_token_ids([[101, 5, 6, 7, 8, 102]])
    assert (ids([item]), item.is_truncated) == ([[101, 5, 6, 102]], True)


def test_a_broken_file_is_one_line_that_names_it(card, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(replace(card, tokenizer_file=str(tmp_path / "tokenizer.json")), 256, "auto")
