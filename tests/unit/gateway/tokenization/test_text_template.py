"""Texts in the chat template of a model have the tokens of the whole text."""

import re
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings

from tests.support import tiny_tokenizers
from tests.support.described import Collected
from tests.support.tokenizing import WORDS, common_end, ids_of, texts_of, tokenize
from vecd.gateway.errors import BadRequest, InputTooLong
from vecd.gateway.request import LateChunking, Overflow, Role, Source, TokenIds, Tokenizing
from vecd.gateway.tokenization.late_chunks import find_chunks
from vecd.gateway.tokenization.text_tokens import exhaust
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import ModelError
from vecd.model.steps import TextTemplate, TokenHead

END = "<|im_end|>\n<|im_start|>assistant\n"
QWEN = TextTemplate(
    (("<|im_start|>user\n", END), ("<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n", END))
)
GEMMA = TextTemplate((("<bos>user\n", "<eos>\n"), ("<bos>user\n{instruction}\n\n", "<eos>\n")), strips=True)
BERT = TextTemplate(
    (("[CLS]", "[SEP]"), ("[CLS] task:", "[SEP] {instruction} [SEP]")), strips_prompt=True, adds_special_tokens=True
)
KINDS = {
    "qwen": (tiny_tokenizers.qwen, QWEN),
    "gemma": (tiny_tokenizers.gemma, GEMMA),
    "bert": (tiny_tokenizers.bert, BERT),
}
texts = texts_of([*WORDS, "{instruction}", "<bos>", "[SEP]", "x:"])


@pytest.fixture
def make(card_of, make_tokenizer) -> Callable[..., Tokenizer]:
    def make_one(
        kind: str = "qwen", max_tokens: int = 512, template: TextTemplate | None = None, **options: Any
    ) -> Tokenizer:
        make_library, usual = KINDS[kind]
        changes = {"text_template": template or usual, "tokens": options.pop("tokens", None)}
        return make_tokenizer(card_of(make_library(), **changes), max_tokens, **options)

    return make_one


def whole_ids(library: tokenizers.Tokenizer, template: TextTemplate, text: str, prompt: str = "") -> list[int]:
    before, after = template.variants[bool(prompt)]
    prompt = prompt.strip() if template.strips_prompt else prompt
    before, after = (part.replace("{instruction}", prompt) for part in (before, after))
    text = before + (text.strip() if template.strips else text) + after
    found: list[int] = library.encode(text, add_special_tokens=template.adds_special_tokens).ids
    return found


@pytest.mark.parametrize("prompt", ["", " Find\n"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_the_whole_text_s_and_the_end_is_kept(kind, prompt, make):
    make_library, template = KINDS[kind]
    library, ours = make_library(), make(kind, 64)
    end = common_end(lambda text: whole_ids(library, template, text, prompt))

    @settings(max_examples=25)
    @given(texts)
    @example("fox " * 100)
    @example("\n \nfox\n\n")
    @example("")
    def check(text: str) -> None:
        expected = whole_ids(library, template, text, prompt)
        is_long = len(expected) > 64
        if is_long:
            expected = [*expected[: 64 - len(end)], *end]
        [item] = tokenize(ours, [text], Tokenizing(prompt=prompt))
        assert (ids_of(item), item.is_truncated) == (expected, is_long)

    check()


def test_queries_have_a_prompt_and_a_limit_of_their_own(make):
    head = TokenHead((), query_prompt="Find", query_tokens=70)
    ours = make("qwen", 512, tokens=head)
    library = tiny_tokenizers.qwen()
    query, document = tokenize(ours, ["a b c d", "e f g h"], Tokenizing(num_queries=1, max_document_tokens=3))
    assert ids_of(query) == whole_ids(library, QWEN, "a b c d", "Find")
    assert document.num_tokens == len(whole_ids(library, QWEN, "")) + 3
    end = common_end(lambda text: whole_ids(library, QWEN, text, "Find"))
    [query] = tokenize(ours, ["1" * 100], Tokenizing(role=Role.QUERY))
    assert ids_of(query) == [*whole_ids(library, QWEN, "1" * 100, "Find")[: 70 - len(end)], *end]


def test_every_overflow_keeps_the_template(make):
    library, num_own = tiny_tokenizers.qwen(), 10
    limit = len(whole_ids(library, QWEN, "")) + num_own
    text = "1" * num_own + "2" * num_own
    ours = make("qwen", limit)
    [item] = tokenize(ours, [text], Tokenizing(overflow=Overflow.TRUNCATE_LEFT))
    assert ids_of(item) == whole_ids(library, QWEN, "2" * num_own)
    [item] = tokenize(ours, [text], Tokenizing(overflow=Overflow.CHUNK))
    expected = [whole_ids(library, QWEN, part * num_own) for part in "12"]
    assert [array("i", chunk.token_ids).tolist() for chunk in item.chunks] == expected
    with pytest.raises(InputTooLong, match=f"{limit + num_own} tokens"):
        tokenize(ours, [text], Tokenizing(overflow=Overflow.ERROR))


def test_a_text_without_special_tokens_is_not_put_into_the_template(make):
    """As those that a chat template has made already."""
    [item] = tokenize(make(), ["a fox"], Tokenizing(prompt="", add_special_tokens=False))
    assert ids_of(item) == tiny_tokenizers.qwen().encode("a fox", add_special_tokens=False).ids


def test_ids_in_the_template_are_the_model_s(make):
    library = tiny_tokenizers.qwen()
    for prompt in ("", "Find"):
        ids: TokenIds = whole_ids(library, QWEN, "a fox", prompt)
        [item] = tokenize(make(), [ids])
        assert (ids_of(item), item.source) == (ids, Source.MODEL)


def test_a_prompt_for_which_there_is_no_place_is_refused(make):
    ours = make("qwen", 64, TextTemplate(QWEN.variants[:1]))
    assert tokenize(ours, ["a"], Tokenizing(prompt=""))
    with pytest.raises(BadRequest, match="no place for a prompt"):
        tokenize(ours, ["a"], Tokenizing(prompt="Find"))


@pytest.mark.parametrize("how", [Tokenizing(prompt="Find " * 50), Tokenizing(prompt="Find", max_tokens=30)])
def test_a_limit_that_leaves_nothing_for_a_text_is_refused(how, make):
    with pytest.raises(BadRequest, match=r"The prompt in the chat template has \d+ tokens|has to have room for"):
        tokenize(make("qwen", 64), ["a"], how)


@pytest.mark.parametrize(
    ("template", "options", "why"),
    [
        (TextTemplate((("<|im_start|>", " [/INST]<|im_end|>"),)), {}, "it has ' [/INST]<|im_end|>' behind a text"),
        (TextTemplate((QWEN.variants[0], ("", "."))), {}, "it has '.' behind a text"),
        (QWEN, {"literal_special_tokens": True}, "--literal-special-tokens recognizes none"),
    ],
)
def test_a_template_that_cannot_be_served_is_refused(template, options, why, make):
    says = "sentence_bert_config.json: modality_config has 'message', by which texts are rendered by the chat template"
    with pytest.raises(ModelError, match=f"{re.escape(says)}: it .*") as refused:
        make("qwen", 64, template, **options)
    assert why in str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_described_with_the_template(kind, make):
    make_library, template = KINDS[kind]
    ours, collected = make(kind), Collected()
    text = "\n\té fox \n"
    num_tokens = exhaust(ours.api.describe_steps([text], "", True, collected))
    [tokens] = collected.lists
    assert [token.id for token in tokens] == whole_ids(make_library(), template, text)
    assert num_tokens == len(tokens)
    own = [token for token in tokens if not token.is_special]
    rendered = template.variants[0][0] + (text.strip() if template.strips else text)
    assert rendered.encode()[own[0].start : own[-1].stop].decode().strip() == rendered.strip()


@pytest.mark.parametrize("kind", KINDS)
def test_late_chunks_are_those_of_the_text(kind, make):
    ours, text = make(kind), " \n\na fox b fox\n"
    [item] = ours.tokenize_now([text], Tokenizing(wants_offsets=True)) or []
    num_prefix, _ = ours.num_added(ids_of(item))
    whole = find_chunks(text, item, LateChunking(([(0, len(text))],)), 0, num_prefix)
    assert whole.rows.tolist() == [[0, item.num_tokens]]
    fox = text.index("fox")
    ranges = [(0, fox), (fox, fox + 3), (fox + 3, len(text))]
    halves = find_chunks(text, item, LateChunking((ranges,)), 0, num_prefix)
    assert halves.rows[0, 0] == 0
    assert halves.rows[-1, 1] == item.num_tokens
    [start, stop] = halves.rows[1]
    assert "fo" in KINDS[kind][0]().decode(ids_of(item)[start:stop]).replace(" ", "")
