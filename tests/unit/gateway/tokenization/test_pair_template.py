"""Pairs in the template of an LLM reranker have the tokens of the whole text."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support import tiny_tokenizers
from tests.support.tokenizing import WORDS, common_end, ids_of, library_calls, texts_of, tokenize
from vecd.gateway.errors import BadRequest, InputTooLong
from vecd.gateway.request import Overflow, Pair, Tokenizing
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.steps import PairTemplate, ScoreHead

QWEN = PairTemplate(
    "<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n<Query>: ",
    "\n<Document>: ",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "Given a web search query",
)
GEMMA = PairTemplate("<bos>A: ", "\nB: ", "\nPredict whether passage B answers query A: {instruction}", "Yes?")
KINDS = {
    "qwen": (tiny_tokenizers.qwen, QWEN, "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    "gemma": (tiny_tokenizers.gemma, GEMMA, None),
    "xlm_roberta": (
        tiny_tokenizers.xlm_roberta,
        PairTemplate("<s>{instruction}<mask> q: ", " d: ", "</s> end</s>"),
        None,
    ),
    "document first": (
        tiny_tokenizers.qwen,
        PairTemplate("Check.\n<Document> ", "\n<Query> ", "{ instruction} ??", "of today", is_document_first=True),
        None,
    ),
    "special tokens behind": (
        tiny_tokenizers.qwen,
        PairTemplate("<|im_start|>d: ", "<|im_end|>q: ", "\n<|im_start|>a\n", is_document_first=True),
        None,
    ),
}
texts = texts_of([*WORDS, "{instruction}", "{document}", "<bos>", "x:"])


@pytest.fixture
def make(card_of, make_tokenizer) -> Callable[..., Tokenizer]:
    def make_one(
        library: tokenizers.Tokenizer, template: PairTemplate, max_tokens: int = 512, **options: Any
    ) -> Tokenizer:
        head = ScoreHead(("LABEL_0",), "sigmoid", "last", pair_template=template)
        return make_tokenizer(card_of(library, score=head), max_tokens, **options)

    return make_one


def whole_ids(library: tokenizers.Tokenizer, template: PairTemplate, pair: Pair, instruction: str = "") -> list[int]:
    instruction = instruction or template.instruction
    before, between, after = (
        part.replace("{instruction}", instruction).replace("{ instruction}", f" {instruction}")
        for part in (template.before, template.between, template.after)
    )
    first, second = (pair.document, pair.query) if template.is_document_first else (pair.query, pair.document)
    text = before + first + between + second + after
    found: list[int] = library.encode(text, add_special_tokens=False).ids
    return found


@pytest.mark.parametrize("max_tokens", [64, 130])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_the_whole_text_s_and_the_end_is_kept(kind, make, max_tokens):
    make_library, template, _ = KINDS[kind]
    library = make_library()
    ours = make(library, template, max_tokens)

    def end_of(query: str) -> list[int]:
        return common_end(lambda document: whole_ids(library, template, Pair(query, document)))

    assert len(end_of("0")) < max_tokens

    @settings(max_examples=15)
    @given(texts, st.lists(texts, min_size=1, max_size=3))
    @example("fox " * 100, ["a", ""])
    @example("fox\n", ["\n\na " * 100, "\n"])
    def check(query: str, documents: list[str]) -> None:
        pairs = [Pair(query, document) for document in documents]
        without = len(whole_ids(library, template, Pair(query, "")))
        if without >= max_tokens - 2:
            if without > max_tokens + 2:  # else tokens that join at a border decide
                with pytest.raises(BadRequest, match="no room is left for a document"):
                    tokenize(ours, pairs)
            return
        items = tokenize(ours, pairs)
        for pair, item in zip(pairs, items, strict=True):
            expected = whole_ids(library, template, pair)
            is_long = len(expected) > max_tokens
            if is_long:
                end = end_of(pair.query)
                expected = [*expected[: max_tokens - len(end)], *end]
            assert (ids_of(item), item.is_truncated, item.border) == (expected, is_long, 0)

    check()


def test_the_common_beginning_is_tokenized_once(make):
    ours = make(tiny_tokenizers.qwen(), QWEN)
    with library_calls(ours) as calls:
        tokenize(ours, [Pair("what is a fox " * 20, f"document {n}") for n in range(500)])
    assert sum(len(text) for call in calls for text in call.args[0]) < 500 * 50


@pytest.mark.parametrize("kind", ["qwen", "gemma"])
def test_special_tokens_of_the_template_are_special_where_those_of_texts_are_not(kind, make):
    make_library, template, _ = KINDS[kind]
    library = make_library()
    special = "<|im_end|>" if kind == "qwen" else "<bos>"
    ours = make(library, template, literal_special_tokens=True)
    [plain, item] = tokenize(ours, [Pair("a fox", "a dog"), Pair(f"a {special} fox", f"a dog{special}")])
    assert ids_of(plain) == whole_ids(library, template, Pair("a fox", "a dog"))
    special_id = library.token_to_id(special)
    assert special_id is not None
    assert ids_of(item).count(special_id) == ids_of(plain).count(special_id)
    decoded = library.decode(ids_of(item), skip_special_tokens=False)
    assert decoded.replace(" ", "").count(special) == ids_of(plain).count(special_id) + 2


def test_the_instruction_of_a_request_takes_the_default_s_place(make):
    library = tiny_tokenizers.qwen()
    ours = make(library, QWEN)
    pair = Pair("a fox {instruction}", "a dog")
    [item] = tokenize(ours, [pair], Tokenizing(instruction="Find {document} {instruction}"))
    text = (
        QWEN.before.replace("{instruction}", "Find {document} {instruction}")
        + "a fox {instruction}\n<Document>: a dog"
        + QWEN.after
    )
    assert ids_of(item) == library.encode(text, add_special_tokens=False).ids
    with pytest.raises(BadRequest, match="instruction has 4097 characters"):
        tokenize(ours, [pair], Tokenizing(instruction="x" * 4097))


@pytest.mark.parametrize("kind", ["qwen", "gemma"])
def test_an_instruction_counts_for_every_text_that_it_is_tokenized_with(make, kind):
    """In Gemma's template it is behind each document, in Qwen's before each query."""
    library, template, _ = KINDS[kind]
    ours = make(library(), template, 8192)
    pairs = [Pair(f"query {index}", "document") for index in range(25)]
    assert ours.tokenize_now(pairs) is not None
    long = Tokenizing(instruction="x " * 2000)

    async def lengths() -> list[int]:
        return [len(run) async for run in ours.tokenize(pairs, long)]

    assert ours.tokenize_now(pairs, long) is None
    assert asyncio.run(lengths()) == [4, 4, 4, 4, 4, 4, 1]


def test_limits_of_the_texts(make):
    library = tiny_tokenizers.qwen()
    ours = make(library, QWEN)
    pair = Pair("a b c d", "e f g h")
    for how, query, document in [
        (Tokenizing(max_document_tokens=2), "a b c d", "e f"),
        (Tokenizing(max_query_tokens=2), "a b", "e f g h"),
        (Tokenizing(max_query_tokens=1, max_document_tokens=3), "a", "e f g"),
    ]:
        [item] = tokenize(ours, [pair], how)
        num_expected = len(whole_ids(library, QWEN, Pair(query, document)))
        assert abs(item.num_tokens - num_expected) <= 1  # the first word of a document has a blank before it, or not
        assert item.is_truncated
    [item] = tokenize(ours, [pair], Tokenizing(max_query_tokens=4, max_document_tokens=8))
    assert (ids_of(item), item.is_truncated) == (whole_ids(library, QWEN, pair), False)


def test_a_pair_that_may_not_be_cut_is_refused_by_its_index(make):
    library = tiny_tokenizers.qwen()
    num_tokens = len(whole_ids(library, QWEN, Pair("a", "b c d")))
    ours = make(library, QWEN, num_tokens)
    how = Tokenizing(overflow=Overflow.ERROR)
    [item] = tokenize(ours, [Pair("a", "b c d")], how)
    assert item.num_tokens == num_tokens
    with pytest.raises(InputTooLong, match=rf"{num_tokens + 3} tokens.*'input\[1\]'"):
        tokenize(ours, [Pair("a", "b c d"), Pair("a", "b c d e f g")], how)


def test_a_document_cut_on_the_left_keeps_its_end_and_the_template(make):
    library = tiny_tokenizers.qwen()
    num_tokens = len(whole_ids(library, QWEN, Pair("a", " c d")))
    ours = make(library, QWEN, num_tokens)
    [item] = tokenize(ours, [Pair("a", "b " * 300 + "c d")], Tokenizing(overflow=Overflow.TRUNCATE_LEFT))
    assert (item.num_tokens, item.is_truncated) == (num_tokens, True)
    assert ids_of(item)[-10:] == whole_ids(library, QWEN, Pair("a", "b c d"))[-10:]
    assert ids_of(item)[:20] == whole_ids(library, QWEN, Pair("a", "b c d"))[:20]


def test_a_document_cut_on_the_left_to_its_own_limit_keeps_its_end(make):
    library = tiny_tokenizers.qwen()
    how = Tokenizing(overflow=Overflow.TRUNCATE_LEFT, max_document_tokens=2)
    [item] = tokenize(make(library, QWEN), [Pair("a", "b " * 9 + "c d")], how)
    assert (ids_of(item), item.is_truncated) == (whole_ids(library, QWEN, Pair("a", " c d")), True)


def test_a_limit_without_room_for_the_template_s_end_is_refused(make):
    ours = make(tiny_tokenizers.qwen(), QWEN)
    with pytest.raises(BadRequest, match="tokens at the end of the model's template"):
        tokenize(ours, [Pair("a", "b")], Tokenizing(max_tokens=8))


def test_texts_beyond_all_reading_are_cut_or_refused(make):
    ours = make(tiny_tokenizers.qwen(), QWEN, 130)
    [item] = tokenize(ours, [Pair("a", "b" * 2_000_001)])
    assert (item.num_tokens, item.is_truncated) == (130, True)
    for pair in (Pair("a", "b" * 2_000_001), Pair("a" * 2_000_001, "b")):
        with pytest.raises(BadRequest):
            tokenize(ours, [pair], Tokenizing(overflow=Overflow.ERROR))
    with pytest.raises(BadRequest, match="no room is left for a document"):
        tokenize(ours, [Pair("a " * 1_000_001, "b")])


@pytest.mark.parametrize("kind", ["document first", "special tokens behind"])
@pytest.mark.parametrize("query", ["x" * 300_000, "a b " * 100_000, "中" * 300_000])
def test_a_long_query_behind_the_document_is_not_read_whole(kind, query, make):
    make_library, template, _ = KINDS[kind]
    ours = make(make_library(), template, 130)
    with library_calls(ours) as calls, pytest.raises(BadRequest, match=r"than 130 tokens|be cut nowhere"):
        tokenize(ours, [Pair(query, "b")])
    assert sum(len(text) for call in calls for text in call.args[0]) < 100_000
    [item] = tokenize(ours, [Pair("a b " * 100_000, "b")], Tokenizing(max_query_tokens=5))
    assert item.is_truncated


def test_estimates_count_the_template(make):
    ours = make(tiny_tokenizers.qwen(), QWEN)
    pair = Pair("a" * 30, "b" * 30)
    actual = tokenize(ours, [pair])[0].num_tokens
    assert 20 + len(QWEN.before + QWEN.between + QWEN.after) // 3 <= ours.estimate_tokens([pair]) <= 2 * actual
