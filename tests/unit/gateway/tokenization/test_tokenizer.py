import asyncio
import threading
import zlib
from array import array
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from tests.support import tiny_tokenizers
from tests.support.described import Collected
from tests.support.tokenizing import library_calls, tokenize
from vecd.gateway.errors import BadRequest, InputTooLong
from vecd.gateway.request import Overflow, Role, Source, Token, TokenIds, TokenizedInput, Tokenizing
from vecd.gateway.tokenization import cl100k
from vecd.gateway.tokenization.id_policy import IdPolicy, SequenceTemplate
from vecd.gateway.tokenization.text_tokens import exhaust
from vecd.gateway.tokenization.tokenizer import PLAIN, Tokenizer
from vecd.model.card import ModelError, read_card


@pytest.fixture(scope="module")
def card(minilm_folder):
    return read_card(minilm_folder)


def ids(tokenized) -> list[list[int]]:
    return [np.frombuffer(item.token_ids, dtype="<i4").tolist() for item in tokenized]


def tokenize_in_runs(tokenizer: Tokenizer, inputs, how: Tokenizing = PLAIN) -> list[list[TokenizedInput]]:
    async def main() -> list[list[TokenizedInput]]:
        return [run async for run in tokenizer.tokenize(inputs, how)]

    return asyncio.run(main())


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


def test_long_words_of_a_run_are_tokenized_in_turns(card):
    """They cannot be cut: each is a call by itself, and others may come between."""
    tokenizer = Tokenizer(card, 256, "auto")
    texts = ["x" * 50_000] * 4 + ["short", "texts"]
    tokenized: list[TokenizedInput] = []

    def whole() -> Generator[None, None, None]:
        tokenized.extend((yield from tokenizer.take_run(texts, range(len(texts)), Tokenizing())))

    with library_calls(tokenizer) as calls:
        assert all(num_calls <= index + 1 for index, num_calls in enumerate(len(calls) for _ in whole()))
    assert [call.args[0] for call in calls] == [["short", "texts"], *[["x" * 50_000]] * 4]
    assert ids(tokenized) == [[101, 100, 102]] * 4 + [[101, 2460, 102], [101, 6981, 102]]


def test_a_long_text_that_cannot_be_cut_is_a_run_of_its_own(card, monkeypatch):
    monkeypatch.setattr("vecd.gateway.tokenization.text_tokens.cut_pattern", lambda tokenizer: None)
    tokenizer = Tokenizer(card, 256, "auto")
    runs = tokenize_in_runs(tokenizer, ["a", "b " * 100_000, "c", "d"])
    assert [len(run) for run in runs] == [1, 1, 2]
    assert ids(runs[1]) == [[101, *[1038] * 254, 102]]


def test_a_shortened_list_of_ids_gives_the_same(card):
    """See `vecd.gateway.api.large_json`: extremes and the last 16 stand for all behind the first `max_tokens`."""
    tokenizer = Tokenizer(card, 4, "auto")
    whole = [101, *range(1000, 2000), 102]
    shortened = [*whole[:4], 1003, 1984, *whole[-16:]]
    assert tokenize(tokenizer, [shortened]) == tokenize(tokenizer, [whole])


@pytest.mark.parametrize("single", ["[CLS] $A [SEP] $A", "[CLS] $A [SEP] $A [SEP]"])
def test_a_template_that_has_the_text_twice_is_refused(card_of, single):
    library = tiny_tokenizers.bert()
    library.post_processor = processors.TemplateProcessing(
        single=single, pair="$A $B", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    with pytest.raises(ModelError, match="post_processor does more than putting special tokens before and behind"):
        Tokenizer(card_of(library), 64, "auto")


def test_special_tokens_in_a_text_may_be_characters(card):
    tokenizer = Tokenizer(card, 256, "auto", literal_special_tokens=True)
    [item, spaced, long] = tokenize(tokenizer, ["[SEP] hi [CLS]", "[ sep ] hi [ cls ]", "[MASK] " * 50_000])
    assert ids([item]) == ids([spaced])
    assert ids([item])[0].count(101) == ids([item])[0].count(102) == 1  # the model's own frame
    assert 103 not in ids([long])[0]
    assert (long.num_tokens, long.is_truncated) == (256, True)


def test_a_model_that_lowercases(card, minilm_folder, tmp_path):
    cased = tokenizers.Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    cased.normalizer = None
    cased.save(str(tmp_path / "tokenizer.json"))
    path = str(tmp_path / "tokenizer.json")
    lowering = Tokenizer(replace(card, tokenizer_file=path, lowercase=True), 256, "auto")
    assert ids(tokenize(lowering, ["HELLO"])) == ids(tokenize(Tokenizer(card, 256, "auto"), ["hello"]))
    not_lowering = Tokenizer(replace(card, tokenizer_file=path), 256, "auto")
    assert ids(tokenize(not_lowering, ["HELLO"])) != ids(tokenize(lowering, ["HELLO"]))


@pytest.mark.parametrize(
    ("policy", "given", "says"),
    [
        ("reject", [101, 7592, 102], "--token-ids reject"),
        ("auto", [101, 30522, 102], "0 to 30521"),
        ("model", [-1], "0 to 30521"),
        ("auto", [15339, 100277], "0 to 100276.* not framed by this model's special tokens"),
        ("auto", [15339, -1], "0 to 100276"),
        ("auto", [15339, 100256], "no token of cl100k_base's vocabulary: 100256 and"),
        ("auto", [15339, 101, 1917], "no text in cl100k_base's vocabulary"),
        ("cl100k", [101, 100277, 102], "0 to 100276$"),
        ("cl100k", [2**63], "0 to 100276$"),
    ],
)
def test_ids_that_are_refused(card, policy, given, says):
    for kind in (list, partial(array, "i")):
        if max(given) >= 2**31 and kind is not list:
            continue
        with pytest.raises(BadRequest, match=says) as caught:
            tokenize(Tokenizer(card, 256, policy), [[101, 102], kind(given)] if policy == "auto" else [kind(given)])
        assert caught.value.param == "input"
        assert not any(str(token_id) in caught.value.message for token_id in given if token_id in (15339, 1917, 7592))


# --- ids of cl100k_base ----------------------------------------------------------------------------------------

CL100K = {
    "hello world": [15339, 1917],
    "It's 1234.5 o'clock;  two  spaces\n\n\tand lines": [
        2181, 596, 220, 4513, 19, 13, 20, 297, 63510, 26, 220, 1403, 220, 12908, 271, 53577, 5238,
    ],
    "naïve café, привет мир": [3458, 38672, 588, 53050, 11, 12561, 28089, 8341, 11562, 78746],
    "日本語のテキスト 中文": [9080, 22656, 45918, 252, 16144, 57933, 62903, 71634, 73958, 17161],
    "😀👨\u200d👩\u200d👧": [76460, 222, 9468, 239, 101, 378, 235, 9468, 239, 102, 378, 235, 9468, 239, 100],
    "<|endoftext|> a": [100257, 264],
}  # fmt: skip
"""As tiktoken encodes them."""


@pytest.mark.parametrize("policy", ["auto", "cl100k"])
@pytest.mark.parametrize("overflow", Overflow)
def test_ids_of_cl100k_are_their_text(card, policy, overflow):
    tokenizer = Tokenizer(replace(card, prompt="query: "), 256, policy)
    for prompt in (None, "", "passage: "):
        how = Tokenizing(prompt=prompt, overflow=overflow)
        tokenized = tokenize(tokenizer, list(CL100K.values()), how)
        assert tokenized == [
            item._replace(source=Source.CL100K) for item in tokenize(tokenizer, list(CL100K), how)
        ]  # fmt: skip
        assert tokenize(tokenizer, [array("i", ids) for ids in CL100K.values()], how) == tokenized


def test_lists_of_both_vocabularies_keep_their_places(card):
    tokenizer = Tokenizer(card, 256, "auto")
    given = [[15339, 1917], [101, 7592, 102], [15339, 1917], [101, 102]] * 500
    tokenized = tokenize(tokenizer, given)
    assert ids(tokenized) == [[101, 7592, 2088, 102], [101, 7592, 102], [101, 7592, 2088, 102], [101, 102]] * 500
    assert [item.source for item in tokenized] == [Source.CL100K, Source.MODEL] * 1000


@pytest.mark.parametrize("frame", ["[CLS] $A [SEP]", None])
def test_ids_are_the_models_where_callers_have_them_from_it(card, tmp_path, frame):
    """Framed or not, and of a model that frames nothing, too."""
    path = str(tmp_path / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(card.tokenizer_file)
    if frame is None:
        library.post_processor = None
    library.save(path)
    tokenizer = Tokenizer(replace(card, tokenizer_file=path), 4, "auto")
    how = Tokenizing(are_ids_of_model=True)
    for given in ([15339, 1917], [101, 7592, 102]):
        for kind in (list, partial(array, "i")):
            [item] = tokenize(tokenizer, [kind(given)], how)
            assert (ids([item]), item.source) == ([given], Source.MODEL)
    with pytest.raises(BadRequest, match="outside the model's vocabulary, 0 to 30521"):
        tokenize(tokenizer, [[91_700]], how)
    [cut] = tokenize(tokenizer, [[1, 2, 3, 4, 5]], how)
    assert (ids([cut]), cut.is_truncated) == ([[1, 2, 3, 4]], True)


@pytest.mark.parametrize("policy", ["cl100k", "reject", "model"])
def test_what_the_server_was_told_of_ids_goes_first(card, policy):
    tokenizer, how = Tokenizer(card, 256, policy), Tokenizing(are_ids_of_model=True)
    for given in ([[15339, 1917]], [[101, 7592, 102]]):
        if policy == "reject" or (policy == "cl100k" and given[0][0] == 101):
            with pytest.raises(BadRequest):
                tokenize(tokenizer, given, how)
        else:
            assert tokenize(tokenizer, given, how) == tokenize(tokenizer, given)


@pytest.mark.parametrize("overflow", [Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT, Overflow.CHUNK])
def test_many_ids_of_cl100k_are_tokenized_as_their_text(card, overflow):
    tokenizer = Tokenizer(card, 64, "auto")
    how = Tokenizing(overflow=overflow)
    num = 1000
    [item] = tokenize(tokenizer, [array("i", CL100K["hello world"] * num)], how)
    [expected] = tokenize(tokenizer, ["hello world" * num], how)
    assert item == expected._replace(source=Source.CL100K)
    assert bool(item.chunks) == (overflow is Overflow.CHUNK)


@pytest.mark.parametrize(
    ("prefix", "suffix", "is_telling"),
    [
        ([101], [102], True),  # BERT: in cl100k_base bytes that no text begins with
        ([0], [2], True),  # XLM-R: ! and #
        ([1], [2], True),  # Mistral
        ([], [151643], True),  # Qwen 3
        ([128000], [], True),  # Llama 3
        ([], [], False),
        ([], [1], False),  # T5: "
        ([2], [1], False),  # Gemma: # and "
    ],
)
def test_by_which_frames_vocabularies_are_told_apart(prefix, suffix, is_telling):
    policy = IdPolicy("auto", 200_000, SequenceTemplate(prefix, suffix))
    own = [*prefix, 1000, 1001, *suffix]
    if is_telling:
        assert policy.source_of(own, 0) is Source.MODEL
        assert policy.source_of([15339, 1917], 0) is Source.CL100K
        return
    for given in (own, [15339, 1917]):
        with pytest.raises(BadRequest, match=r"input\[7\].*check_embedding_ctx_length=False.*--token-ids cl100k"):
            policy.source_of(given, 7)


def test_the_table_is_read_in_a_thread(card, monkeypatch):
    tokenizer = Tokenizer(card, 256, "auto")
    cl100k.load.cache_clear()
    readers: list[threading.Thread] = []

    def noted(content: bytes) -> bytes:
        readers.append(threading.current_thread())
        return zlib.decompress(content)

    monkeypatch.setattr(cl100k, "zlib", SimpleNamespace(decompress=noted))
    given: list[TokenIds] = [[15339, 1917]]
    framed: list[TokenIds] = [[101, 102]]
    assert tokenizer.tokenize_now(framed) is not None
    assert tokenizer.tokenize_now(given) is None
    assert not readers
    [[item]] = tokenize_in_runs(tokenizer, given)
    assert [thread is threading.main_thread() for thread in readers] == [False]
    assert tokenizer.tokenize_now(given) == [item]


def test_few_ids_that_are_a_long_text_are_not_tokenized_on_the_loop(card):
    tokenizer = Tokenizer(card, 256, "auto")
    [longest] = np.flatnonzero(cl100k.load().lengths == 128)
    for token_id, num, is_inline in ((15339, 390, True), (int(longest), 15, True), (int(longest), 16, False)):
        given: list[TokenIds] = [[token_id] * num]
        assert (tokenizer.tokenize_now(given) is not None) is is_inline


# --- limits, prompts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", Overflow)
@pytest.mark.parametrize("policy", ["auto", "model"])
def test_the_models_own_ids_overflow_as_texts_do(card, overflow, policy):
    tokenizer, how = Tokenizer(card, 5, policy), Tokenizing(overflow=overflow)
    whole = [101, *range(1000, 1008), 102]
    expected = {
        Overflow.TRUNCATE: [[101, 1000, 1001, 1002, 102]],
        Overflow.TRUNCATE_LEFT: [[101, 1005, 1006, 1007, 102]],
        Overflow.CHUNK: [[101, 1000, 1001, 1002, 102], [101, 1003, 1004, 1005, 102], [101, 1006, 1007, 102]],
    }
    for given in (whole, array("i", whole)):
        assert ids(tokenize(tokenizer, [whole[-5:]] if policy == "model" else [[101, 102]]))
        if overflow is Overflow.ERROR:
            with pytest.raises(InputTooLong, match="length is 5 tokens, however you requested 10 tokens"):
                tokenize(tokenizer, [given], how)
            continue
        [item] = tokenize(tokenizer, [given], how)
        assert ids(item.chunks or [item]) == expected[overflow]
        assert item.source is Source.MODEL
        assert item.num_tokens == sum(map(len, expected[overflow]))
        assert [chunk.weight for chunk in item.chunks] == ([3, 3, 2] if overflow is Overflow.CHUNK else [])
        assert item.is_truncated == (overflow is not Overflow.CHUNK)


@pytest.mark.parametrize("are_ids", [False, True])
def test_an_input_is_split_up_to_a_limit(card, are_ids):
    def given(num_own: int) -> list[Any]:
        return [[101, *[1037] * num_own, 102]] if are_ids else ["a " * num_own]

    how = Tokenizing(overflow=Overflow.CHUNK)
    tokenizer = Tokenizer(card, 8, "auto", max_embed_len=20)
    [item] = tokenize(tokenizer, given(18), how)
    assert [chunk.num_tokens for chunk in item.chunks] == [8, 8, 8]
    with pytest.raises(InputTooLong, match="length is 20 tokens, however you requested 21 tokens") as caught:
        tokenize(tokenizer, given(19), how)
    assert caught.value.param == "input"
    [item] = tokenize(tokenizer, given(100), Tokenizing(overflow=Overflow.TRUNCATE))
    assert item.num_tokens == 8
    with pytest.raises(InputTooLong, match="length is 20 tokens, however you requested 27 tokens"):
        tokenize(tokenizer, ["a " * 20], how._replace(prompt="b b b b b "))


def test_ids_without_a_frame_are_cut_without_one(card):
    given = [list(range(1000, 1007))]
    for overflow, expected in (
        (Overflow.TRUNCATE, [[1000, 1001, 1002]]),
        (Overflow.TRUNCATE_LEFT, [[1004, 1005, 1006]]),
        (Overflow.CHUNK, [[1000, 1001, 1002], [1003, 1004, 1005], [1006]]),
    ):
        [item] = tokenize(Tokenizer(card, 3, "model"), given, Tokenizing(overflow=overflow))
        assert ids(item.chunks or [item]) == expected


@pytest.mark.parametrize("policy", ["auto", "model", "cl100k"])
@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("overflow", Overflow)
def test_what_goes_on_behind_what_is_looked_at(card, policy, is_text, overflow):
    """It is truncated where that is asked for, and refused otherwise; never dropped unseen."""
    tokenizer, how = Tokenizer(card, 8, policy), Tokenizing(overflow=overflow)
    assert (tokenizer.max_chars, tokenizer.max_ids) == (8000, 8000)
    many: Any
    few: Any
    if is_text:
        many, few, what = "a " * 4000 + "!", " " * 8000 + "!", "characters"
    elif policy == "cl100k":
        many, few, what = array("i", [64] * 8001), array("i", [220] * 8001), "token ids"  # "aaa…" and blanks
    else:
        many = few = array("i", [101, *[1037] * 8000, 102])
        what = "token ids"
    for given in (many, few):
        if overflow is Overflow.TRUNCATE:
            [item] = tokenize(tokenizer, [given], how)
            assert item.is_truncated
            continue
        with pytest.raises(BadRequest) as caught:
            tokenize(tokenizer, [given], how)
        if overflow is Overflow.ERROR and given is many and (is_text or policy != "cl100k"):
            assert f"requested at least {4002 if is_text else 8001} tokens" in caught.value.message
        else:
            assert f"'input[0]' has more than 8000 {what}" in caught.value.message
        assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (Tokenizing(prompt="x" * 4097), "The prompt has 4097 characters, at most 4096"),
        (Tokenizing(prompt="a b c d e f"), r"The prompt has 6 tokens, and an input may have 8 in all, of which 2 are"),
        (Tokenizing(prompt="a b c d ", overflow=Overflow.CHUNK), "The prompt has 4 tokens, .* at most 3 may be"),
        (Tokenizing(max_tokens=2), "at least 3 tokens, 2 special tokens among them; the limit is 2"),
        (Tokenizing(max_tokens=4, overflow=Overflow.CHUNK), "split .* at least 5 tokens"),
        (Tokenizing(max_tokens=0, add_special_tokens=False), "at least 1 tokens, 0 special"),
    ],
)
def test_what_leaves_no_room_for_a_text_is_refused(card, how, says):
    tokenizer = Tokenizer(card, 8, "auto")
    with pytest.raises(BadRequest, match=says) as caught:
        tokenize(tokenizer, ["one two three four five six seven"], how)
    assert caught.value.param is None


def test_a_prompt_counts_for_admission_and_for_where_it_is_done(card):
    tokenizer = Tokenizer(card, 256, "auto")
    plain = Tokenizing()
    assert tokenizer.estimate_tokens(["a"] * 10, plain) == 20
    assert tokenizer.estimate_tokens(["a"] * 10, Tokenizing(prompt="x" * 300)) == 1020
    assert tokenizer.estimate_tokens(["a"] * 10, Tokenizing(prompt="x" * 3000)) == 2560
    assert tokenizer.estimate_tokens(["x" * 30_000], plain) == 256
    assert tokenizer.estimate_tokens(["x" * 30_000], Tokenizing(overflow=Overflow.CHUNK)) > 10_000
    assert tokenizer.tokenize_now(["a"], Tokenizing(prompt="x" + " " * 1900)) is not None
    assert tokenizer.tokenize_now(["a"], Tokenizing(prompt="x" + " " * 2000)) is None


def test_no_prompt_is_put_before_the_models_own_ids(card):
    tokenizer = Tokenizer(replace(card, prompt="query: "), 256, "auto")
    given = [[101, 7592, 102]]
    assert ids(tokenize(tokenizer, given)) == ids(tokenize(tokenizer, given, Tokenizing(prompt=""))) == given
    with pytest.raises(BadRequest, match="no prompt can be put before it") as caught:
        tokenize(tokenizer, given, Tokenizing(prompt="query: "))
    assert caught.value.param == "input"


def test_without_special_tokens(card):
    tokenizer = Tokenizer(card, 256, "auto")
    bare = Tokenizing(add_special_tokens=False)
    assert ids(tokenize(tokenizer, ["hello world"], bare)) == [[7592, 2088]]
    for empty in ("", " ", "\x00"):
        with pytest.raises(BadRequest, match=r"'input\[1\]' has no tokens"):
            tokenize(tokenizer, ["a", empty], bare)
    assert ids(tokenize(tokenizer, [""], bare._replace(prompt="a"))) == [[1037]]


def test_a_prompt_that_leaves_no_room_for_a_texts_end_is_refused(card):
    tokenizer = Tokenizer(replace(card, prompt="one two three "), 5, "auto")
    with pytest.raises(BadRequest, match="The prompt has 3 tokens, and an input may have 5 in all"):
        tokenize(tokenizer, ["four"], Tokenizing(overflow=Overflow.TRUNCATE_LEFT))


def test_too_many_chunks_are_refused(card, monkeypatch):
    monkeypatch.setattr("vecd.gateway.tokenization.frames.MAX_CHUNKS", 100)
    tokenizer, how = Tokenizer(card, 8, "auto"), Tokenizing(overflow=Overflow.CHUNK)
    assert len(tokenize(tokenizer, ["a " * 600], how)[0].chunks) == 100
    with pytest.raises(BadRequest, match="split into 101 chunks or more, at most 100") as caught:
        tokenize(tokenizer, ["a " * 601], how)
    assert caught.value.param == "input"
    with pytest.raises(BadRequest, match="at most 100"):
        tokenize_in_runs(tokenizer, ["a " * 300] * 100, how)


# --- describe, decode ------------------------------------------------------------------------------------------


def describe(tokenizer: Tokenizer, texts: list[str], prompt: str, add_special_tokens: bool) -> list[list[Token]]:
    collected = Collected()
    num_tokens = exhaust(tokenizer.api.describe_steps(texts, prompt, add_special_tokens, collected))
    assert num_tokens == sum(map(len, collected.lists))
    return collected.lists


def decode(tokenizer: Tokenizer, lists: list[TokenIds], skip_special_tokens: bool) -> list[str]:
    texts: list[str] = exhaust(tokenizer.api.decode_steps(lists, skip_special_tokens))
    return texts


def test_ids_are_decoded(card):
    tokenizer = Tokenizer(card, 8, "reject")
    given: list[TokenIds] = [[101, 7592, 2088, 102], array("i", [7592]), []]
    assert decode(tokenizer, given, True) == ["hello world", "hello", ""]
    assert decode(tokenizer, given, False) == ["[CLS] hello world [SEP]", "hello", ""]


@pytest.mark.parametrize("bad", [-1, 30522, 2**40])
def test_ids_outside_the_vocabulary_are_not_decoded(card, bad):
    with pytest.raises(BadRequest, match="List 1 has a token id outside the model's vocabulary, 0 to 30521"):
        decode(Tokenizer(card, 8, "auto"), [[1], [2, bad]], True)


def test_what_is_asked_of_the_tokenizer_is_bounded(card, monkeypatch):
    tokenizer = Tokenizer(card, 8, "auto")
    with pytest.raises(BadRequest, match="Text 1 has more than 8000 characters"):
        describe(tokenizer, ["a", "a" * 8001], "", True)
    with pytest.raises(BadRequest, match="The texts have 265053 characters, prompts included, at most 262144"):
        describe(tokenizer, ["a" * 1001] * 53, "a" * 4000, True)
    with pytest.raises(BadRequest, match="The lists have 250001 token ids, at most 250000") as caught:
        decode(tokenizer, [[1] * 250_000, [1]], True)
    assert caught.value.param == "input"


@pytest.mark.parametrize("text", ["a " * 20_000, "中" * 20_000])
def test_tokens_are_described_some_at_a_time(card, text):
    """However large the text: an answer is written as they come, and each turn of it is short."""
    collected = Collected()
    exhaust(Tokenizer(card, 128, "auto").api.describe_steps([text, "", "a"], "", True, collected))
    assert max(collected.nums) == 1000
    assert [len(tokens) for tokens in collected.lists] == [20_002, 2, 3]
    assert {token.stop for token in collected.lists[0][1:-1]} <= set(range(len(text.encode()) + 1))


def test_a_broken_file_is_one_line_that_names_it(card, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(replace(card, tokenizer_file=str(tmp_path / "tokenizer.json")), 256, "auto")


@pytest.mark.parametrize("num_documents", [2, 400])
def test_queries_come_before_documents_and_have_limits_of_their_own(card, num_documents):
    """As a request has them that ranks by the vectors of tokens. Many documents take several runs."""
    tokenizer = Tokenizer(card, 64, "auto")
    how = Tokenizing(role=Role.DOCUMENT, num_queries=2, max_query_tokens=3, max_document_tokens=5)
    query, document = "one two three four five six", "seven eight nine ten eleven twelve"
    tokenized = tokenize(tokenizer, [query, query, *[document] * num_documents], how)
    [of_query, of_document] = ids(
        [tokenize(tokenizer, [text], Tokenizing(max_tokens=most))[0] for text, most in ((query, 5), (document, 7))]
    )
    assert ids(tokenized) == [of_query] * 2 + [of_document] * num_documents
    assert all(item.is_truncated for item in tokenized)


@pytest.mark.parametrize(
    ("texts", "param", "says"),
    [
        (["a", "b", "c d e f g h i"], "input", "is 8 tokens, however you requested 9 tokens"),
        (["a b c d e f g", "b", "c"], "query", "is 8 tokens, however you requested 9 tokens"),
    ],
)
def test_a_text_to_rank_that_may_not_be_cut_is_named(card, texts, param, says):
    tokenizer = Tokenizer(card, 8, "auto")
    with pytest.raises(InputTooLong, match=says) as caught:
        tokenize(tokenizer, texts, Tokenizing(overflow=Overflow.ERROR, num_queries=1))
    assert caught.value.param == param
    assert caught.value.message.endswith(" It is 'input[1]'." if param == "input" else " It is the query.")


def test_limits_of_their_own_cut_texts_to_rank_where_longer_ones_are_errors(card):
    tokenizer = Tokenizer(card, 8, "auto")
    how = Tokenizing(overflow=Overflow.ERROR, num_queries=1, max_query_tokens=3)
    texts = ["a b c d e f g", "c d e f g h i"]
    tokenized = tokenize(tokenizer, texts, how._replace(max_document_tokens=4))
    assert [(item.num_tokens, item.is_truncated) for item in tokenized] == [(5, True), (6, True)]
    with pytest.raises(InputTooLong, match="is 8 tokens"):  # a limit of the request that is no less than the model's
        tokenize(tokenizer, texts, how._replace(max_document_tokens=7))
