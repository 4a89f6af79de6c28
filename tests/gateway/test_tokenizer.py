import asyncio
from array import array
from collections.abc import Generator
from dataclasses import replace

import numpy as np
import pytest
import tokenizers

from gateway.errors import BadRequest
from gateway.request import TokenizedInput
from gateway.tokenizer import Tokenizer
from shm.card import ModelError, read_card


@pytest.fixture(scope="module")
def card(minilm_folder):
    return read_card(minilm_folder)


def ids(tokenized) -> list[list[int]]:
    return [np.frombuffer(item.token_ids, dtype="<i4").tolist() for item in tokenized]


def tokenize(tokenizer: Tokenizer, inputs) -> list[TokenizedInput]:
    """At once if that is possible, and in any case in runs, which give the same."""
    runs = tokenize_in_runs(tokenizer, inputs)
    together = [item for run in runs for item in run]
    assert tokenizer.tokenize_now(inputs) in (None, together)
    return together


def tokenize_in_runs(tokenizer: Tokenizer, inputs) -> list[list[TokenizedInput]]:
    async def main() -> list[list[TokenizedInput]]:
        return [run async for run in tokenizer.tokenize(inputs)]

    return asyncio.run(main())


def test_it_is_the_models_own_tokenizer(card, minilm_folder):
    own = tokenizers.Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    own.no_padding()
    texts = ["Hello, world", "", "naïve café"]
    tokenized = tokenize(Tokenizer(card, 256, "auto"), texts)
    assert ids(tokenized) == [own.encode(text).ids for text in texts]
    assert [item.num_tokens for item in tokenized] == [len(own.encode(text).ids) for text in texts]


def test_many_texts_come_in_runs_and_are_the_same(card):
    tokenizer = Tokenizer(card, 256, "auto")
    texts = [f"text number {i}" for i in range(1000)]
    runs = tokenize_in_runs(tokenizer, texts)
    assert len(runs) > 1
    assert tokenizer.tokenize_now(texts) is None
    assert [item for run in runs for item in run] == [tokenize(tokenizer, [text])[0] for text in texts]


def test_of_a_long_text_what_is_tokenized_counts_in_a_run(card):
    runs = tokenize_in_runs(Tokenizer(card, 256, "auto"), ["b " * 100_000] * 20)
    assert [len(run) for run in runs] == [15, 5]


def test_long_words_of_a_run_are_tokenized_in_turns(card, monkeypatch):
    """They cannot be cut: each is a call by itself, and others may come between."""
    tokenizer = Tokenizer(card, 256, "auto")
    texts = ["x" * 50_000] * 4 + ["short", "texts"]
    num_chars: list[int] = []
    plain = tokenizer._plain_ids

    def counted(part: list[str]) -> list[list[int]]:
        num_chars.append(sum(map(len, part)))
        return plain(part)

    monkeypatch.setattr(tokenizer, "_plain_ids", counted)
    steps = tokenizer._take_run(texts, range(len(texts)))
    tokenized: list[TokenizedInput] = []

    def whole() -> Generator[None, None, None]:
        tokenized.extend((yield from steps))

    assert all(num_calls <= index + 1 for index, num_calls in enumerate(len(num_chars) for _ in whole()))
    assert num_chars == [50_000] * 4 + [10]
    assert ids(tokenized) == [[101, 100, 102]] * 4 + [[101, 2460, 102], [101, 6981, 102]]


def test_a_long_text_that_cannot_be_cut_is_a_run_of_its_own(card, monkeypatch):
    monkeypatch.setattr("gateway.tokenizer.cut_pattern", lambda tokenizer: None)
    tokenizer = Tokenizer(card, 256, "auto")
    runs = tokenize_in_runs(tokenizer, ["a", "b " * 100_000, "c", "d"])
    assert [len(run) for run in runs] == [1, 1, 2]
    assert ids(runs[1]) == [[101, *[1038] * 254, 102]]


def test_many_ids_come_in_runs_and_are_the_same(card):
    tokenizer = Tokenizer(card, 256, "model")
    id_lists = [[n] * 250 for n in range(300)]
    runs = tokenize_in_runs(tokenizer, id_lists)
    assert len(runs) > 1
    assert ids(item for run in runs for item in run) == id_lists


def test_arrays_are_as_good_as_lists(card):
    tokenizer = Tokenizer(card, 4, "auto")
    for given in ([101, 102], [101, 5, 102], [101, 5, 6, 7, 8, 102]):
        assert tokenize(tokenizer, [array("i", given)]) == tokenize(tokenizer, [given])


def test_a_shortened_list_of_ids_gives_the_same(card):
    """See `gateway.json_pieces`: extremes and the last 16 stand for what lies behind the first `max_tokens`."""
    tokenizer = Tokenizer(card, 4, "auto")
    whole = [101, *range(1000, 2000), 102]
    shortened = [*whole[:4], 1003, 1984, *whole[-16:]]
    assert tokenize(tokenizer, [shortened]) == tokenize(tokenizer, [whole])


@pytest.mark.parametrize(("num_words", "is_truncated"), [(5, False), (6, False), (7, True), (8, True), (100, True)])
def test_only_what_is_longer_is_truncated(card, num_words, is_truncated):
    [item] = tokenize(Tokenizer(card, 8, "auto"), ["a " * num_words])
    assert (item.num_tokens, item.is_truncated) == (min(8, num_words + 2), is_truncated)


def test_a_bad_list_is_refused_when_its_turn_comes(card):
    tokenizer = Tokenizer(card, 256, "model")
    with pytest.raises(BadRequest, match=r"input\[299\]"):
        tokenize_in_runs(tokenizer, [*[[1] * 250] * 299, [-1]])


def test_overlong_texts_are_cut_on_the_right_and_told(card):
    [long, short] = tokenize(Tokenizer(card, 8, "auto"), ["one two three four five six seven", "one"])
    assert ids([long]) == [[101, 2028, 2048, 2093, 2176, 2274, 2416, 102]]
    assert (long.num_tokens, long.is_truncated, short.is_truncated) == (8, True, False)


def test_a_text_of_megabytes_is_cut_before_it_is_tokenized(card):
    tokenizer = Tokenizer(card, 8, "auto")
    kept, dropped = "a " * 1000, "b " * 5_000_000  # 8 tokens × 250 characters are looked at
    assert ids(tokenize(tokenizer, [kept + dropped])) == ids(tokenize(tokenizer, [kept]))


def test_a_text_of_megabytes_and_a_prompt(card):
    tokenizer = Tokenizer(replace(card, prompt="query: "), 256, "auto")
    [item] = tokenize(tokenizer, ["中文" * 500_000])
    assert ids([item])[0][:5] == [101, 23032, 1024, 1746, 1861]
    assert (item.num_tokens, item.is_truncated) == (256, True)


def test_special_tokens_in_a_text_are_the_models_own(card, minilm_folder):
    """As sentence-transformers takes them."""
    own = tokenizers.Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    own.no_padding()
    [item] = tokenize(Tokenizer(card, 256, "auto"), ["[SEP] hi [CLS]"])
    assert ids([item]) == [own.encode("[SEP] hi [CLS]").ids] == [[101, 102, 7632, 101, 102]]


def test_special_tokens_in_a_text_may_be_characters(card):
    tokenizer = Tokenizer(card, 256, "auto", literal_special_tokens=True)
    [item, spaced, long] = tokenize(tokenizer, ["[SEP] hi [CLS]", "[ sep ] hi [ cls ]", "[MASK] " * 50_000])
    assert ids([item]) == ids([spaced])
    assert ids([item])[0].count(101) == ids([item])[0].count(102) == 1  # the model's own frame
    assert 103 not in ids([long])[0]
    assert (long.num_tokens, long.is_truncated) == (256, True)


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
    tokenized = tokenize(Tokenizer(card, 256, "auto"), [[101, 7592, 102], [101, 102]])
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
        tokenize(Tokenizer(card, 256, policy), [given])
    assert caught.value.param == "input"


def test_any_ids_can_be_taken_as_the_models(card):
    assert ids(tokenize(Tokenizer(card, 256, "model"), [[15339, 1917]])) == [[15339, 1917]]


def test_overlong_ids_keep_their_frame(card):
    [item] = tokenize(Tokenizer(card, 4, "auto"), [[101, 5, 6, 7, 8, 102]])
    assert (ids([item]), item.is_truncated) == ([[101, 5, 6, 102]], True)


def test_a_broken_file_is_one_line_that_names_it(card, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(replace(card, tokenizer_file=str(tmp_path / "tokenizer.json")), 256, "auto")
