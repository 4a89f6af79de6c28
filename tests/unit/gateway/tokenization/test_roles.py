"""Queries and documents of models for late interaction are as PyLate and sentence-transformers make them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tokenizers

from tests.support import tiny_tokenizers, tokenizing
from tests.support.tokenizing import ids_of
from vecd.gateway.errors import InputTooLong
from vecd.gateway.request import Overflow, Role, TokenizedInput, Tokenizing
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.steps import TokenHead

MASK, QUERY_MARKER, DOCUMENT_MARKER = 4, 100, 101
HEAD = TokenHead(
    (),
    query_marker=QUERY_MARKER,
    document_marker=DOCUMENT_MARKER,
    query_tokens=16,
    expansion_id=MASK,
    document_tokens=24,
)
QUERY, DOCUMENT = Tokenizing(role=Role.QUERY), Tokenizing(role=Role.DOCUMENT)


@pytest.fixture
def make(card_of, make_tokenizer) -> Callable[..., Tokenizer]:
    def make_one(
        head: TokenHead | None, library: tokenizers.Tokenizer | None = None, max_tokens: int = 64
    ) -> Tokenizer:
        return make_tokenizer(card_of(library or tiny_tokenizers.bert(), tokens=head), max_tokens)

    return make_one


def tokenize(tokenizer: Tokenizer, text: str | list[int], how: Tokenizing) -> TokenizedInput:
    [item] = tokenizing.tokenize(tokenizer, [text], how)
    return item


def pylate(text: str, length: int, marker: int, *, is_padded: bool) -> list[int]:
    """Tokenized to one less than the length, then the marker behind the first token."""
    library = tiny_tokenizers.bert()
    library.enable_truncation(length - 1)
    if is_padded:
        library.enable_padding(length=length - 1, pad_id=MASK)
    found = library.encode(text).ids
    return [found[0], marker, *found[1:]]


@pytest.mark.parametrize("num_words", [0, 1, 12, 13, 14, 300])
def test_a_query_is_pylate_s(make, num_words):
    text = "a " * num_words
    item = tokenize(make(HEAD), text, QUERY)
    assert ids_of(item) == pylate(text, 16, QUERY_MARKER, is_padded=True)
    assert (item.num_tokens, item.is_truncated) == (16, num_words > 13)
    assert item.border == (num_words + 3 if num_words < 13 else 0)


@pytest.mark.parametrize("role", [Role.DOCUMENT, None])
@pytest.mark.parametrize("num_words", [0, 20, 21, 22, 3000])
def test_a_document_is_pylate_s(make, num_words, role):
    text = "a " * num_words
    item = tokenize(make(HEAD), text, Tokenizing(role=role))
    assert ids_of(item) == pylate(text, 24, DOCUMENT_MARKER, is_padded=False)
    assert (item.is_truncated, item.border) == (num_words > 21, 0)


def test_an_expansion_that_is_attended_has_no_border(make):
    item = tokenize(make(replace(HEAD, attends_to_expansion=True)), "a b", QUERY)
    assert ids_of(item) == pylate("a b", 16, QUERY_MARKER, is_padded=True)
    assert item.border == 0


def test_without_an_expansion_a_query_is_as_long_as_it_is(make):
    ours = make(replace(HEAD, expansion_id=None))
    assert ids_of(tokenize(ours, "a b", QUERY)) == pylate("a b", 16, QUERY_MARKER, is_padded=False)
    assert tokenize(ours, "a " * 50, QUERY).num_tokens == 16


@pytest.mark.parametrize(("limit", "num_tokens"), [(0, 64), (20, 20), (10, 16)])
def test_a_longer_query_passes_where_the_expansion_is_the_least(make, limit, num_tokens):
    """Strategy "min" of sentence-transformers; its limit is never below the expansion's length."""
    ours = make(replace(HEAD, max_query_tokens=limit))
    item = tokenize(ours, "a " * 100, QUERY)
    assert (item.num_tokens, item.border, item.is_truncated) == (num_tokens, 0, True)
    item = tokenize(ours, "a", QUERY)
    assert (item.num_tokens, item.border) == (16, 4)


def test_prompts_by_role_unless_the_request_has_one(make):
    ours = make(replace(HEAD, query_prompt="fox: ", document_prompt="dog: ", query_marker=None, document_marker=None))
    library = tiny_tokenizers.bert()
    assert ids_of(tokenize(ours, "a", DOCUMENT)) == library.encode("dog: a").ids
    num = len(library.encode("fox: a").ids)
    assert ids_of(tokenize(ours, "a", QUERY)) == [*library.encode("fox: a").ids, *[MASK] * (16 - num)]
    assert ids_of(tokenize(ours, "a", DOCUMENT._replace(prompt="cat "))) == library.encode("cat a").ids


def test_limits_of_the_role_are_those_of_errors_and_chunks(make):
    ours = make(replace(HEAD, document_tokens=64), max_tokens=128)
    with pytest.raises(InputTooLong, match="is 64 tokens, however you requested 73 tokens"):
        tokenize(ours, "a " * 70, DOCUMENT._replace(overflow=Overflow.ERROR))
    item = tokenize(ours, "a " * 70, DOCUMENT._replace(overflow=Overflow.CHUNK))
    assert [chunk.num_tokens for chunk in item.chunks] == [64, 12]
    assert all(np.frombuffer(chunk.token_ids, "<i4")[1] == DOCUMENT_MARKER for chunk in item.chunks)
    assert tokenize(ours, "a " * 70, QUERY._replace(overflow=Overflow.CHUNK)).chunks == ()


def test_a_model_without_forms_of_its_own_has_no_roles(make):
    ours = make(TokenHead(()))
    assert tokenize(ours, "a b", QUERY) == tokenize(make(None), "a b", QUERY)


def test_the_model_s_own_ids_are_taken_as_they_are(make):
    item = tokenize(make(HEAD), [2, 50, 3], QUERY)
    assert (ids_of(item), item.border) == ([2, 50, 3], 0)


def test_estimates_count_the_expansion(make):
    ours = make(HEAD)
    assert ours.estimate_tokens(["a"], QUERY) == 16
    assert ours.estimate_tokens(["a" * 300], DOCUMENT) == 24
    assert make(None).estimate_tokens(["a"], QUERY) == 2


def test_documents_may_have_nothing_of_their_own(make):
    ours = make(TokenHead((), query_prompt="q: "))
    [query, document] = ours.tokenize_now(["fox", "fox"], Tokenizing(num_queries=1, max_document_tokens=9)) or []
    library = tiny_tokenizers.bert()
    assert [ids_of(query), ids_of(document)] == [library.encode(text).ids for text in ("q: fox", "fox")]
